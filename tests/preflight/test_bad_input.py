"""Bad settings, flags, variables and arguments: one line that names the fault, status 2, no files.

Each row of the tables is a mistake at one door: a command, the settings alone, a Python call.
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import yaml

import eval as evaluation
import selfplay
import train
from selfplay.apps.play.__main__ import main as play
from selfplay.config import Config, load_config
from selfplay.config.features import all_described
from selfplay.config.secrets import check_body, check_url, hidden
from selfplay.errors import SettingsError
from selfplay.metrics.run_folder import hold_run
from selfplay.model.hub import FETCHED, NOT_FETCHED
from selfplay.preflight.seats import check_players
from selfplay.warm_start.teachers import check_teachers
from tests.helpers import chat_families
from tests.helpers.processes import HANG_S, own_output
from tests.helpers.run_folders import untrained_run
from tests.helpers.tiny_run import TINY

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder whose `final/` is a small Hugging Face model."""
    return untrained_run(tmp_path_factory.mktemp("good") / "run", TINY)


@pytest.fixture(scope="module")
def broken(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of valid and broken files, in which no case leaves anything."""
    home = tmp_path_factory.mktemp("broken")
    shutil.copytree(run, home / "good")
    shutil.copytree(run, home / "emptied")
    (home / "emptied" / "config.yaml").write_text("")
    for part in ("final/left", "final/right", "warm_start"):
        shutil.copytree(run / "final", home / "two" / part)
    (home / "two" / "config.yaml").write_text(f"{TINY}{TWO}\n")
    (home / "run.yaml").write_text(TINY)
    (home / "dangling").symlink_to("gone")
    (home / "circle").symlink_to("circle")
    hold_run(home / "begun").close()
    (home / "unfinished").mkdir()
    (home / "unfinished" / "config.yaml").write_text("")
    for name, data in FILES.items():
        (home / name).write_bytes(data if isinstance(data, bytes) else data.encode())
    for name, change in MODELS.items():
        shutil.copytree(run / "final", home / name)
        change(home / name)
    shutil.copytree(run / "final", home / "thinks")
    _thinking(home / "thinks")
    return home


class Started(BaseException):
    """Raised where a run would start. No Exception, which would count as one of one's own code."""


@pytest.fixture
def nothing_starts(broken: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, in which a program that passes its checks raises `Started`."""
    monkeypatch.chdir(broken)

    def started(*words: object, **more: object) -> NoReturn:
        raise Started

    # These would start after all checks have passed.
    monkeypatch.setattr("selfplay.api.run.set_up", started)
    monkeypatch.setattr("selfplay.api.evaluation.play_matches", started)
    # The same messages on a machine with a GPU, SGLang and vLLM.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: None if name in ("sglang", "vllm") else find(name),
    )
    return broken


def assert_one_line(stderr: str, program: str, named: str) -> None:
    """Standard error holds one line of the program, with these parts of the message in order."""
    assert stderr.startswith(f"{program}: ") and stderr.count("\n") == 1, stderr
    assert re.search(".*".join(map(re.escape, named.split("…"))), stderr), stderr
    assert len(stderr) < 2000


KUHN = Path(__file__).resolve().parents[2] / "examples/kuhn/kuhn.py"
KUHN_GAME = (f"game.name={KUHN}", "game.options=null", "warm_start.teachers=[blind]")
MEETING = Path(__file__).resolve().parents[2] / "examples/meeting/meeting.py"
FILES: dict[str, str | bytes] = {
    "file": "",
    "empty.yaml": "",
    "binary.yaml": bytes(range(256)),
    "list.yaml": "[1, 2]\n",
    "open.yaml": "game: {size: 2\n",
    "deep.yaml": "game: " + "[" * 1500 + "\n",
    "circle.yaml": "game: &game {size: 2, more: *game}\n",
    "base.yaml": "steps: 1\nbase: nowhere.yaml\n",
    "people.jsonl": "",
}
# A key in an endpoint's address or body: refused, and no message shows it.
KEY = "planted-4711-key"
URLS = (
    *(f"http://user:{KEY}@127.0.0.1:8000/v1", f"https://{KEY}@host/v1"),
    *(f"https://host/v1?api_key={KEY}", f"https://host/v1#{KEY}"),
)
FILES["key.yaml"] = f"rollout: {{partners: ['endpoint:small@{URLS[0]}']}}\n"


def _removed(*patterns: str) -> Callable[[Path], None]:
    return lambda folder: [file.unlink() for p in patterns for file in folder.glob(p)] and None


def _written(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None


def _pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"weight": torch.zeros(2)}, folder / "pytorch_model.bin")


def _numbered(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")


def _cut(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


MODELS: dict[str, Callable[[Path], None]] = {
    "hollow": _removed("*"),
    "weightless": _removed("*.safetensors"),
    "pickled": _pickled,
    "cut": _cut,
    "indexless": _numbered,
    "configless": _removed("config.json"),
    "badconfig": _written("config.json", "{"),
    "unknown": _written("config.json", '{"model_type": "nonesuch"}'),
    "badindex": _written("model.safetensors.index.json", "[]"),
    "mute": _removed("tokenizer*", "vocab*", "merges*", "*.jinja"),
    "wordless": _removed("tokenizer.json", "vocab*", "merges*"),
    "badtokenizer": _written("tokenizer.json", '{"version": 1}'),
}
# What generation_config.json holds, and transformers cannot load.
ENDINGS = (
    *('{"max_new_tokens": 0}', '{"early_stopping": "x"}', '{"cache_implementation": "none"}'),
    '{"compile_config": {"mode": "x"}}',
)
NAMED = {name: name for name in MODELS}
for _num, _text in enumerate(ENDINGS):
    MODELS[f"ends{_num}"] = _written("generation_config.json", _text)
    NAMED[f"ends{_num}"] = f"ends{_num}/generation_config.json cannot be read: "
THINKS, REMEDY = chat_families.REFUSED["gemma 4 thinking"]
THINKING = "model.chat_template.enable_thinking=true"
THINKING_IN_MODEL = "chat_template: {enable_thinking: true}"


def _thinking(folder: Path) -> None:
    chat_families.make_tokenizer(THINKS).save_pretrained(folder)


# Several words are a tuple. Parts of a message are joined by "…".
Row = tuple[str | tuple[str, ...], str]

# A run with two policies, whose names a message lists.
TWO = "policies: {left: {seats: [0]}, right: {seats: [1]}}"
BOTH, NO_SCRATCH = "two/final/left…two/final/right", "model.scratch=null"

# Words behind `train.py`, and what the line must name. `--config run.yaml` stands before key=value.
TRAIN: list[Row] = [
    ("", "--config"),
    ("--confg run.yaml", "nearest is --config"),  # not: --config is required
    ("--config", "--config"),
    ("--config nowhere.yaml", "nowhere.yaml: no such file; --list names the shipped ones"),
    ("--config rum.yaml", "rum.yaml: no such file; nearest is run.yaml"),
    ("--dry-run run.yaml", "must be given as --config run.yaml, got 'run.yaml'"),
    *((f"--config {name}", name) for name in FILES if name.endswith(".yaml") and name[0] != "b"),
    ("--config binary.yaml", "binary.yaml"),
    ("--config base.yaml", "base.yaml:2: base must be a file"),
    ("--help rolout", "nearest is rollout"),
    ("--help policy", "got 'policy'; nearest is policies; sections are game, …methods, …policies"),
    ("\N{EN DASH}config run.yaml", "nearest is --config"),
    ("--config run.yaml --steps=3", "write steps=3"),
    (f"--config {'x' * 300}", f"{'x' * 300}: cannot be read"),
    ("out=file", "out"),
    ("out=.", "out must name a separate folder, got '.'"),
    ("out=begun/final/run", "out must be apart from…begun/final, which the run there writes, got"),
    ("out='fresh/ /run'", "out must not have blanks around a name, got 'fresh/ /run'"),
    ("out=dangling", "dangling"),
    ("out=circle/run", "circle"),
    (f"out={'x' * 300}", "out"),
    *(
        ((f"model.path={n}", NO_SCRATCH), f"model.path must be…{BOTH}")
        for n in ("two", "two/final")
    ),
    ("model.scratch.vocab_size=260", "model.scratch.vocab_size"),
    *(
        (
            (TWO.replace("policies: ", "policies="), f"policies.right.{word}"),
            f"policies.right.{line}",
        )
        for word, line in (
            ("model={path: nowhere, scratch: null}", "model.path must be…got nowhere"),
            ("model={path: mute, scratch: null}", "model.chat_template and the tokenizer of mute"),
            (f"model={{path: thinks, {THINKING_IN_MODEL}}}", f"model.chat_template…{REMEDY}"),
            ("partners=['scripted:nobody']", "partners: unknown scripted player"),
            ("partners=['checkpoint:two/final/rigt']", "partners…nearest is two/final/right"),
            ("algorithm.loss=gone.py:x", "algorithm.loss must be an existing .py file"),
            ("methods={resample: {}}", "methods.resample must be set for the run"),
            ("algorithm.advntage=x", "algorithm.advntage; nearest is policies.right.algorithm.adv"),
        )
    ),
    (
        "policies={left: {seats: [0]}, right: {}}",
        "policies.right must have the name of a role of matching (player) or seats…beside left",
    ),
    (("model.path=two/final/lft", NO_SCRATCH), "nearest is two/final/left"),
    ("warm_start.teachers=[nobody]", "warm_start.teachers"),
    ("rollout={instances: 100000, group_size: 10000}", "rollout.instances"),
    ("rollout.partners=[checkpoint:pickled]", "rollout.partners: checkpoint:pickled"),
    (
        "rollout.partners=[self, checkpoint:god]",
        "got god, which does not exist here; nearest is good",
    ),
    ("game.brief=true", "nearest is game.options.brief"),
    (f"game.name={MEETING}", "unknown key game.options"),
    ("eval.partners=[warm_start]", "eval.every"),
    ("eval={every: 2, partners: ['scripted:honst']}", "is honest"),
    ("eval={every: 2, partners: [warm_start, warm_start]}", "must not repeat a partner"),
    (
        "--config run.yaml rollout.partners=[self, pool*2]",
        "unknown argument 'pool*2]'; quote values that contain blanks",
    ),
    ("--config run.yaml --lr 3", "unknown argument '--lr'; write optim.lr=VALUE"),
    ("game.name=yaml", "game yaml is an installed package, …which is no game; for one of your own"),
    ("device=cuda", "device"),
    ("methods.legal_moves=on", "a game that lists its deals and moves…got game.name matching"),
    (
        (*KUHN_GAME, "methods.legal_moves.kl=0.3"),
        "methods.legal_moves.kl needs a reference…got kl 0.3 without; nearest",
    ),
    (
        (
            *KUHN_GAME,
            "methods={legal_moves: {kl: 0.3}, kl_reference: {every: 9}}",
        ),
        "methods.kl_reference must come before methods.legal_moves with a kl",
    ),
    (
        (*KUHN_GAME, "algorithm.kl=0.1", "methods.legal_moves={kl: 0.3, until: 9}"),
        "methods.legal_moves.until needs methods.legal_moves.entropy above 0…got entropy 0 with",
    ),
    (
        (f"game.name={KUHN}", "game.options=null", "monitors=[back to best if score falls 0.1]"),
        "monitors: in a zero-sum game…by observed/exploitability…got 'back to best if score falls",
    ),
    (
        "monitors=[halt if score < 1]",
        "override 'monitors=[halt if score < 1]': monitors: a rule must",
    ),
    ("algorithm.options.tau=0.1", "algorithm.options must be {} with a built-in…got tau"),
    ("monitors=[stop if entropy/usr < 1]", "monitors: entropy/usr must be entropy, got 'stop if"),
    (
        (TWO.replace("policies: ", "policies="), "monitors=[stop if entropy < 1 over 2]"),
        "monitors: entropy must be entropy/left or entropy/right, got 'stop if entropy < 1 over 2'",
    ),
    (
        ("eval.every=0", "monitors=[warn if score falls 1 while eval_score rises]"),
        "monitors: eval_score must be left out where eval.every is 0, got 'warn if score falls",
    ),
    (
        ("observers=[console]", "monitors=[warn if observed/x > 1]"),
        "monitors: observed/x must be left out where no observer gives numbers, as ['console']",
    ),
    ("--config run.yaml --dry-run --gpu nan", "--gpu must be"),
    ("engine.exact=true", "engine.exact must be false with engine.kind hf, got true"),
    ("engine.kind=sglan", "nearest is sglang"),
    (f"engine.kind={ROOT}/examples/engine/plain.py:PlainEngin", "nearest is PlainEngine"),
    (
        f"engine.kind={ROOT}/examples/method/median.py:advantage",
        "engine.kind must be a subclass of Engine",
    ),
    ("engine.kind=sglang", "engine.kind"),
    ("engine.kind=vllm", "engine.kind must be hf where vLLM is not installed, got vllm"),
    (("engine.kind=vllm", "engine.tp_size=2"), "engine.tp_size must be 1 with…vllm, got 2"),
    (("engine.kind=vllm", "engine.exact=true"), "engine.exact must be false with…vllm, got true"),
    (
        ("engine.kind=vllm", "engine.server_args={logprobs_mode: raw_logprobs}"),
        "engine.server_args must leave out logprobs_mode, got raw_logprobs",
    ),
    (
        ("engine.kind=vllm", "engine.server_args={speculative_config: {method: ngram}}"),
        "engine.server_args must leave out speculative_config…speculative decoding",
    ),
    (
        ("engine.kind=sglang", "engine.server_args={speculative_algorithm: NGRAM}"),
        "engine.server_args must leave out speculative_algorithm, got NGRAM",
    ),
    ("parallel.tp=3", "must divide the model's num_attention_heads (2), got 3; the nearest is 2"),
    ("--config run.yaml --dry-run parallel.tp=3", "parallel.tp must divide the model's"),
    ("rollout.partners=['endpoint:m@ftp://host/v1']", "rollout.partners"),
    ("endpoint.body={top_p: .inf}", "endpoint.body"),
    ("model.chat_template={chat_template: '{{ raise_exception(1) }}'}", "model.chat_template"),
    ("model={scratch: null, path: file}", "model.path"),
    ("model={scratch: null, path: good}", "nearest is good/final"),
    ("model={scratch: null, path: unfinished}", "the run unfinished has no final/"),
    ("model={scratch: null, path: Nobody/nothing-of-this-name}", "Nobody/nothing-of-this-name"),
    *((f"model={{scratch: null, path: {name}}}", named) for name, named in NAMED.items()),
    (("model={scratch: null, path: thinks}", THINKING), f"thinks…model.chat_template…{REMEDY}"),
    ("--config run.yaml --config tiny3", "--config is given twice"),
    (("steps=1", "steps=2"), "steps is given by"),
    *((f"rollout.partners=['endpoint:small@{url}']", "rollout.partners") for url in URLS),
    (f"rollout.partners=['endpoint:small@{URLS[0]}*x']", "rollout.partners"),
    (f"methods={{judge: {{model: 'endpoint:small@{URLS[1]}'}}}}", "methods.judge"),
    (f"eval.partners=['endpoint:small@{URLS[0]}']", "eval.partners"),
    (f"endpoint.body={{api_key: {KEY}}}", "endpoint.body"),
    (f"endpoint.body={{extra: [{{Authorization: {KEY}}}]}}", "endpoint.body"),
    (f"endpoint.body={{user: Bearer {KEY}}}", "endpoint.body"),
    (f"endpoint.api_key={KEY}", "endpoint.api_key"),
]

UNUSABLE = ("hollow", "cut", "mute", "wordless")

# Arguments after `eval.py --games generated --num 2`; the run good is added if none is named.
EVAL: list[Row] = [
    ("nowhere", "RUN must be"),
    ("Nobody/nothing-of-this-name", "Nobody/nothing-of-this-name"),
    *((f"--config run.yaml {name}", name) for name in UNUSABLE),
    ("good/finl", "nearest is good/final"),
    ("--num 2 two/final/left --partners two", "got two/final/left…nearest is two"),
    ("--num 2 two/final/left two/final/right", "the policies of a run together write two/final"),
    ("--num 2 two/lft", "nearest is two/final/left"),
    *(
        (("two", word), f"policies must leave RUN's policies, left, right…got {shown}")
        for word, shown in (
            ("policies={}", "{}"),
            ("policies.left.seats=[1]", "{left: {seats: [1]}}"),
            ("policies.lft.optim.lr=1", "{lft: {optim: {lr: 1}}}"),
        )
    ),
    (("good", "policies.left.seats=[1]"), "policies must leave RUN's policies, a single one"),
    ("--num 2 two --partners scripted:honest", "--partner scripted:honest plays with a single run"),
    ("--game.options.size=3", "write game.options.size=3"),
    ("--num 2 good unfinished", "without --partners, got 2; for a matrix of them write --partners"),
    ("--num 2 run.yaml", "got the settings file run.yaml; write --config run.yaml"),
    ("--games nowhere.parquet", "--games nowhere.parquet does not exist"),
    ("--games ./peple.jsonl", "peple.jsonl does not exist; nearest is people.jsonl"),
    ("--games generatd", "nearest is generated"),
    ("--num 0", "--num"),
    ("--temperature nan", "--temperature"),
    ("--partner solo", "nearest is scripted:solo"),
    ("--partner pool", "policy_pool"),
    ("--partner person", "--partner"),
    ("--partners self --config run.yaml", "--partners"),
    ("--partners honest --config run.yaml", "nearest is scripted:honest"),
    ("--partners scripted:solo good --partner self", "allows no --partner"),
    ("--partners scripted:solo good --temperature 1 --temperature 0", "one --temperature"),
    ("--partners scripted:honest,scripted:solo", "--config is needed"),
    ("--partners scripted:honest,scripted:solo --config run.yaml", "--out is needed"),
    (
        "--partners good,scripted:solo,endpoint:small@http://127.0.0.1:9/v1",
        "only checkpoints can play with an endpoint",
    ),
    ("--out file", "--out"),
    ("--out .", "--out must name a separate folder, got '.'"),
    ("--out begun/checkpoints", "--out must be apart from…begun/checkpoints, which the run there"),
    ("--out dangling/report", "dangling"),
    ("--out good", "--out must be a new folder or one with an earlier report, got good, whose"),
    ("--start often", "--start"),
    ("--config nowhere.yaml", "nowhere.yaml"),
    ("--nmu 3", "--num"),
    ("stray", "stray"),
    ("game.options.sise=3", "nearest is game.options.size"),
    ("model.path=good/final", "model.path must not be given"),
    ("emptied", "emptied/config.yaml"),
    ("game.options.size=8", "rollout.max_game_tokens"),
    (("engine.kind=sglang", "engine.device_map=auto"), "engine.device_map must be null"),
    ("engine.kind=sglang", "engine.kind"),
    (f"--config run.yaml thinks {THINKING}", f"thinks…model.chat_template…{REMEDY}"),
    (f"--partner endpoint:small@{URLS[0]}", "--partner"),
    *((f"{flag} ''", f"{flag} must have a value, got ''") for flag in ("--partner", "--out")),
    ("--partners ''", "--partners must have a value, got ''"),
    ("--partners=,", "--partners: must name a folder or a player, got ','"),
    ("--num 3 --num=4", "--num is given twice"),
    ("steps=3", "steps has no effect without training"),
    ("reward.error_penalty=0.1", "reward.error_penalty has no effect"),
    (("seed=5", "seed=6"), "seed is given by"),
]

PLAY: list[Row] = [
    ("runs/any --watch --seat=0", "--seat has no effect with --watch; remove one"),
    ("two --terminal --seat=2", "--seat must be one of 0, 1, player, got 2"),
    (
        "good --terminal --out begun/games.jsonl",
        "--out must be apart from…begun/games.jsonl, which",
    ),
]

BASE = ("model.scratch={}", "rollout.max_game_tokens=1000", "game.options.scale=false")
BRANCH = "rollout={play: branches, options: {turns: decisions}}"
FIRST, BESIDE = "warm_start={num_games: 4, first_games: 2}", "rollout.partners=[self,pool]"
HONEST = "rollout.partners=[scripted:honest]"
EXACT = ("engine.kind=sglang", "engine.exact=true", "model.dtype=bfloat16")
FILE = ("data.train=games.jsonl", "game.options.brief=true")
ROOMS = ("game.name=tests.helpers.three_rooms", "game.options=null", "warm_start.teachers=[clerk]")
GUESSER, CLERK = "rollout.partners=['scripted:guesser']", "rollout.policy_seats=[clerk]"
# Settings of which one has to change, after BASE, and the key or the choice that the message names.
SETTINGS: list[Row] = [
    ("algorithm.dual_clip=0.5", "dual_clip"),
    (("algorithm.dual_clip=3.0", "algorithm.loss=cispo"), "dual_clip"),
    ("algorithm.aggregation=constant", "algorithm.aggregation"),
    ("algorithm.constant_length=9", "algorithm.aggregation"),
    ("algorithm.kl_ratio=true", "algorithm.kl_estimator"),
    (("algorithm.kl=0.1", "algorithm.kl_estimator=k1"), "algorithm.kl_estimator"),
    ("methods.recompute.cap=3.0", "methods.recompute.importance"),
    ("methods.kl_reference.every=9", "methods.kl_reference needs algorithm.kl above 0…got 0"),
    (("algorithm.kl=0.1", "methods.kl_reference=on"), "an every above 1…got every 1…every 100"),
    ("rollout.group_size=1", "group_size"),
    ((HONEST, "rollout.group_size=2"), "group_size"),
    ((BESIDE, "rollout.group_size=5"), "group_size"),
    ((BESIDE, "rollout.group_size=2"), "group_size"),
    ("rollout.partners=[honest]", "rollout.partners"),
    ("algorithm.advantage=rlo", "grpo…nearest is rloo"),
    (("algorithm.advantage=ppo", "parallel.tp=2"), "parallel.tp"),
    (("model.lora={}", "parallel.tp=2"), "parallel.tp"),
    ("methods.ppo.lam=0.5", "methods.ppo needs algorithm.advantage ppo"),
    ("methods.ppo.lamb=1", "unknown key methods.ppo.lamb; nearest is methods.ppo.lam"),
    ("methods.best_game=on", "nearest is best_games"),
    (("algorithm.advantage=ema", "methods.resample=on"), "resample…ema"),
    ("critic.lam=0.5", "critic is methods.ppo now"),
    ("algorithm.imitate_best=0.1", "algorithm.imitate_best is methods.best_games.weight now"),
    ("warm_start.auxiliary_games=3", "is methods.auxiliary_imitation.games now"),
    ((BRANCH, "algorithm.advantage=ema"), "rollout.play branches…ema"),
    ((BRANCH, "rollout.group_size=1"), "group_size"),
    ((BRANCH, "game.name=collab", "game.options=null"), "game.name"),
    ("game.name=3", "game.name must be a valid string, got 3"),
    ((BRANCH, "engine.kind=sglang", "engine.sessions=true"), "engine.sessions"),
    (("rollout.play=branches", "methods.resample.instances=4"), "resample…decisions"),
    ("rollout.opponents=league", "rollout.partners must have pool with …league…got self"),
    (
        ("rollout.opponents=league", "policies={left: {seats: [0]}, right: {seats: [1]}}"),
        "rollout.opponents must be shares or …policies, got league",
    ),
    ((BRANCH, "rollout.options.siblings=1"), "siblings"),
    ("rollout.branch.turns=all", "rollout.play=branches"),
    (FIRST, "first_teachers"),
    ("warm_start.lora=true", "warm_start.lora needs model.lora"),
    (("warm_start={lora: true, optimizer: muon}", "model.lora={}"), "warm_start.optimizer"),
    ("warm_start.chat_roles=[tool]", "chat_roles.0 …'assistant'…tool"),
    ("warm_start.first_teachers=[solo]", "first_teachers"),
    ("warm_start={num_games: 4, first_games: 5, first_teachers: [solo]}", "first_games"),
    ((FIRST, "warm_start.first_teachers=[sole]"), "first_teachers: …nearest is solo"),
    ("warm_start.teachers=[sole*]", "the weight in 'sole*' must be a number"),
    (("warm_start.recorded=people.jsonl", "game.options.brief=true"), "game.options.brief"),
    ("methods.judge.model=endpoint:small@http://127.0.0.1:8000/v1", "rubric must be a text file"),
    ("methods.judge.model=self", "methods.judge.model must be checkpoint"),
    ("methods.judge.rubric=rubric.md", "methods.judge.model must be checkpoint…got ''"),
    (
        "methods={resample: {}, judge: {model: 'checkpoint:a', rubric: b}}",
        "methods.judge must come before methods.resample",
    ),
    ("reward.judge=endpoint:small@http://127.0.0.1:8000/v1", "is methods.judge.model now"),
    ((*FILE, "data.start=3", "data.train=generated"), "data.start needs data.train"),
    ((*FILE, "data.start=half"), "data.start"),
    ("optim.master_dtype=bfloat16", "model.dtype…optim.master_dtype"),
    (("parallel.offload=all", BESIDE), "parallel.offload"),
    ("observers=[consol]", "observers…nearest is console"),
    ("observers=[console, console]", "observers must not repeat an observer, got console twice"),
    ("observers=[one.py:Mine, other.py:Mine]", "observers must not repeat …, got Mine twice"),
    ("observers=[{console: 3}]", "observers must list NAME or {NAME: {KEY: VALUE}}, got {'co"),
    ((*EXACT, "engine.tp_size=2"), "engine.tp_size must be 1"),
    ((*EXACT, "engine.attention=triton"), "engine.attention must be auto or fa3"),
    ((*EXACT, "model.dtype=float32"), "model.dtype must be bfloat16"),
    ((*EXACT, "model.lora={}"), "engine.exact must be false"),
    ((*EXACT, "parallel.tp=2"), "engine.exact must be false"),
    ((*ROOMS, "game.options.max_valu=3"), "nearest is game.options.max_value"),
    ((*ROOMS, "game.max_value=3"), "unknown key game.max_value"),
    ((*ROOMS, "game.name=three_room"), "must be one of"),
    ((*ROOMS, "rollout.policy_seats=[clerc]"), "nearest is clerk"),
    ((*ROOMS, CLERK), "the policy …, rollout.partners=[scripted:caller] the others"),
    ((*ROOMS, GUESSER), "a multiple of 3"),
    ((*ROOMS, GUESSER, "rollout.group_size=3"), "at least 6"),
    (
        (*ROOMS, GUESSER, CLERK),
        "cannot play seat 0 (caller), 1 (caller) of …nearest is scripted:ca",
    ),
    ((*ROOMS, "rollout.partners=['scripted:gesser']"), "unknown scripted player"),
]
ACCEPTED: list[tuple[str, ...]] = [
    ("algorithm.advantage=ppo", "rollout.group_size=1"),
    ("algorithm.advantage=ppo", "rollout.group_size=2", HONEST),
    ("rollout.play=branches", "rollout.group_size=1"),
    ("model.lora={}",),
    ("observers=[]",),
    ("algorithm.advantage=ema", "rollout.group_size=1"),
    ("engine.kind=sglang", "engine.sessions=true"),
    EXACT,
    (*ROOMS, "rollout.group_size=6"),
    (*ROOMS, CLERK, "rollout.partners=['scripted:caller']", "rollout.group_size=2"),
]

RUN = Path("good")
PLAIN: dict[str, Any] = yaml.safe_load(TINY)
# Calls from Python.
API: list[tuple[Callable[[], object], str]] = [
    (lambda: selfplay.evaluate("nowhere"), "must be a run folder"),
    (lambda: selfplay.load_run("two").policy, f"policy must name one policy…{BOTH}"),
    (lambda: selfplay.evaluate(RUN, num=0), ": num must be an integer from 1"),
    (lambda: selfplay.evaluate(RUN, steps=3), "steps has no effect without training"),
    (lambda: selfplay.evaluate(RUN, temperature=-1), ": temperature must be 0"),
    (lambda: selfplay.evaluate([RUN, RUN]), ": policy must be a single one without partners"),
    (lambda: selfplay.evaluate(RUN, num="8"), ": num must be an integer …, got '8'"),
    (lambda: selfplay.evaluate(RUN, temperature="hot"), ": temperature … got 'hot'"),
    (lambda: selfplay.evaluate(RUN, partner=["scripted:solo"]), "partner must be a string"),
    (lambda: selfplay.evaluate(RUN, partners="self"), "partners must be a list of strings"),
    (lambda: selfplay.evaluate(RUN, partners=["", " "]), "partners must be a list of strings"),
    (lambda: selfplay.evaluate(RUN, config=PLAIN), "a policy's config must be a file"),
    (lambda: selfplay.evaluate(), ": policy must name a policy, such as runs/talk, got none"),
    (lambda: selfplay.evaluate(RUN, ["a=1"]), "overrides must be a mapping"),
    (lambda: selfplay.evaluate(3), "a policy must be a run, a folder or a name, got 3"),
    (lambda: selfplay.play("scripted:solo", partner=3), "partner must be a string"),
    (lambda: selfplay.load_run(3), "3 must be a run folder"),
    (lambda: selfplay.load_run("god"), "god must be a run folder …; nearest is good"),
    (lambda: selfplay.load_run("two/final/left"), "with a config.yaml; nearest is two"),
    (lambda: selfplay.evaluate("two/final/nobody"), f"does not exist here; there are …{BOTH}"),
    (lambda: selfplay.play(RUN, partner="scripted:nobody"), ": partner"),
    (lambda: selfplay.play("scripted:nobody", config="tiny"), "nobody"),
    (lambda: selfplay.play("scripted:solo", partner="self"), "must be a script, got self"),
    (lambda: selfplay.play("scripted:solo", config="tiny", num=0), ": num must be"),
    (lambda: selfplay.train("tinny"), "nearest shipped file is tiny"),
    (lambda: selfplay.train(3), "settings must be a file, its name or a mapping, got 3"),
    (lambda: selfplay.train({"step": 3}), "settings: unknown key step; nearest is steps"),
    (lambda: selfplay.train({"steps": {1, 2}}), "settings must be plain values"),
    (lambda: selfplay.train("tiny", device="cuda"), "device must be cpu"),
]

SMALL = "rollout.partners=['endpoint:small@http://127.0.0.1:9/v1']"
# Environment variables and the arguments of train.py with them.
ENVIRONMENT: list[tuple[dict[str, str], str, str]] = [
    ({"WORLD_SIZE": "two"}, "steps=0", "WORLD_SIZE"),
    ({"RANK": "1"}, "steps=0", "RANK"),
    ({"LOCAL_RANK": "9" * 30}, "steps=0", "LOCAL_RANK"),
    ({"WORLD_SIZE": "2"}, "parallel.fsdp=2", "RANK"),
    ({}, f"{SMALL} endpoint.key_variable=NOT_SET_ANYWHERE", "NOT_SET_ANYWHERE"),
    ({"BAD_KEY": "secret\nkey"}, f"{SMALL} endpoint.key_variable=BAD_KEY", "BAD_KEY"),
    # A key that a variable holds is found in an address, and in what is sent.
    ({"GIVEN": KEY}, f"{SMALL[:-5]}/{KEY}'] endpoint.key_variable=GIVEN", "rollout.partners"),
    ({"GIVEN": KEY}, f"{SMALL} endpoint.key_variable=GIVEN endpoint.body.x=x{KEY}x", "endpoint"),
]
DOORS: list[tuple[str, Any, str]] = [
    *(("train.py", words, named) for words, named in TRAIN),
    *(("eval.py", words, named) for words, named in EVAL),
    *(("selfplay.apps.play", words, named) for words, named in PLAY),
    *(("settings", words, named) for words, named in SETTINGS),
    *(("python", call, named) for call, named in API),
]


def _flags(words: str | Sequence[str]) -> list[str]:
    """Flags of a text stand between blanks; key=value is one word, whatever it holds."""
    if not isinstance(words, str):
        return [*words]
    if words.startswith(("--", "\N{EN DASH}")) or words.partition(" ")[2].startswith("--"):
        return [word.strip("'") for word in words.split(" ")]
    return [words] if words else []


def _train(words: str | Sequence[str]) -> int:
    given = _flags(words)
    if given and not given[0].startswith(("--", "\N{EN DASH}")):
        out = [] if given[0].startswith("out=") else ["out=fresh/run"]
        given = ["--config", "run.yaml", *out, *given]
    return train.main(given)


def _eval(words: str | Sequence[str]) -> int:
    given = _flags(words)
    plain = [word for before, word in pairwise(["", *given]) if before[:2] != "--" != word[:2]]
    if "--partners" not in given and not any("=" not in word for word in plain):
        given += ["good"]
    for option, value in (("--games", "generated"), ("--num", "2")):
        given += [] if any(word.startswith(option) for word in given) else [option, value]
    return evaluation.main(given)


def _said(call: Callable[[], object], door: str) -> int:
    """What a call raises, as a command would print it."""
    with pytest.raises(SettingsError) as refused:
        call()
    print(f"{door}: {refused.value}", file=sys.stderr)
    return 2


def check_settings(config: Config) -> None:
    check_players(config)
    check_teachers(config)


def ask(door: str, words: Any) -> int:
    """The exit status of a mistake at this door."""
    given = (words,) if isinstance(words, str) else words
    return {
        "train.py": lambda: _train(words),
        "eval.py": lambda: _eval(words),
        "selfplay.apps.play": lambda: play(_flags(words)),
        "settings": lambda: _said(lambda: check_settings(load_config(None, [*BASE, *given])), door),
        "python": lambda: _said(words, door),
    }[door]()


IDS = [f"{door} {words if isinstance(words, str) else named}"[:80] for door, words, named in DOORS]


@pytest.mark.parametrize(("door", "words", "named"), DOORS, ids=IDS)
def test_a_mistake_is_refused_in_one_line(
    door: str, words: Any, named: str, nothing_starts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 2, nothing written, no key shown."""
    before = sorted(nothing_starts.rglob("*"))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # it would be a line more
        assert ask(door, words) == 2
    assert sorted(nothing_starts.rglob("*")) == before
    shown = capsys.readouterr()
    assert_one_line(shown.err, door, named)
    assert KEY not in shown.out + shown.err


@pytest.mark.parametrize(("variables", "words", "named"), ENVIRONMENT, ids=lambda v: str(v)[:40])
def test_a_bad_variable_is_named(
    variables: dict[str, str],
    words: str,
    named: str,
    nothing_starts: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for variable in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    assert train.main(["--config", "run.yaml", "out=fresh", *words.split()]) == 2
    stderr = capsys.readouterr().err
    assert_one_line(stderr, "train.py", named)
    assert "secret" not in stderr and KEY not in stderr
    assert not (nothing_starts / "fresh").exists()


@pytest.mark.parametrize("overrides", ACCEPTED)
def test_settings_that_fit_are_taken(overrides: tuple[str, ...]) -> None:
    check_settings(load_config(None, [*BASE, *overrides]))


def test_ordinary_addresses_and_fields_are_no_keys() -> None:
    for url in ("http://127.0.0.1:8000/v1", "https://api.example.org/v1/openai"):
        check_url(f"endpoint:org/model@{url}*0.5")
        assert hidden(url) == url
    extra = {"skip_special_tokens": False, "api_key": None}
    sent = {"reasoning_effort": "low", "max_completion_tokens": 9, "stop_token_ids": [1]}
    check_body({**sent, "prompt_cache_key": "games", "extra": extra})


def test_good_settings_reach_the_run(nothing_starts: Path) -> None:
    """The settings that the bad cases start from are accepted, so only the fault is refused."""
    path = ["model={scratch: null, path: good/final}", "rollout.max_game_tokens=160"]
    for more in ([], path):
        with pytest.raises(Started):
            train.main(["--config", "run.yaml", "out=fresh/run", *more])
    with pytest.raises(Started):
        evaluation.main(["good", "--games", "generated", "--num", "2"])


@pytest.mark.slow
def test_an_unreachable_hub_is_refused_in_seconds(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(TINY)
    words = ["--config", "run.yaml", "out=fresh", "model={scratch: null, path: Nobody/nothing}"]
    closed = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": "hub"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *words],
        cwd=tmp_path,
        env=os.environ | closed,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 2
    assert_one_line(own_output(done.stderr), "train.py", "model.path Nobody/nothing")
    assert "http://127.0.0.1:9 cannot be reached" in done.stderr
    assert not (tmp_path / "fresh").exists()


def test_every_number_has_bounds() -> None:
    shown = all_described(Config)
    numbers = [entry for entry in shown if re.match(r"(int|float)\b", entry.kind or "")]
    assert len(numbers) > 70
    for entry in numbers:
        bounds = [float(rule.split()[-1]) for rule in entry.rules if rule.startswith("at ")]
        assert len(bounds) == 2 and bounds[0] <= bounds[1] < 10**10, entry


def test_a_download_takes_one_copy_of_the_weights_and_no_code() -> None:
    from huggingface_hub.utils import filter_repo_objects

    wanted = [
        *("config.json", "generation_config.json", "tokenizer.json", "tokenizer.model"),
        *("vocab.json", "merges.txt", "chat_template.jinja", "model.safetensors.index.json"),
        "model-00001-of-00002.safetensors",
    ]
    others = [
        *("pytorch_model.bin", "consolidated.safetensors", "original/consolidated.00.pth"),
        *("onnx/model.onnx", "onnx/config.json", "modeling_own.py", "tf_model.h5"),
        *("model.gguf", "figure.png"),
    ]
    taken = filter_repo_objects(
        wanted + others, allow_patterns=FETCHED, ignore_patterns=NOT_FETCHED
    )
    assert list(taken) == wanted


def test_a_run_that_is_not_there_and_is_like_none_names_those_that_are(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluation.main([str(run.parent / "b7"), "--games", "generated"]) == 2
    assert f"b7, which does not exist here; there are {run}" in capsys.readouterr().err


def test_eval_takes_a_model_by_its_name_on_the_hub(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a hub cache as a download leaves it, without a network."""
    cache = tmp_path / "hub" / "models--org--name"
    shutil.copytree(run / "final", cache / "snapshots" / ("a" * 40))
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", cache.parent)
    monkeypatch.chdir(tmp_path)
    words = ["org/name", "--games", "generated", "--num", "2"]
    words += ["--config", str(run / "given.yaml")]
    cached = sorted(cache.rglob("*"))
    assert evaluation.main(words) == 0
    report = tmp_path / "runs" / "org_name" / "eval_generated_config=given_num=2"
    assert json.loads((report / "evaluation.json").read_text())["checkpoint"] == "org/name"
    assert sorted(cache.rglob("*")) == cached, "no report goes into the cache"


def test_an_error_of_ones_own_code_is_one_line_and_its_traceback_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another error is a bug of this project and is raised."""

    def outcome(_: Config) -> NoReturn:
        error = KeyError("day")
        error.add_note("in instance 0-3")
        raise error

    monkeypatch.setattr(train, "start", outcome)
    hold_run(tmp_path).close()  # it leaves the record of a start
    (tmp_path / "settings.yaml").write_text(TINY)
    words = ["--config", str(tmp_path / "settings.yaml"), f"out={tmp_path}"]
    assert train.main(words) == 1
    assert re.fullmatch(
        r"train.py: test_bad_input.py:\d+ outcome: KeyError: 'day' \(in instance 0-3\); the "
        rf"traceback is in {re.escape(str(tmp_path))}/error.txt\n",
        capsys.readouterr().err,
    )
    assert "raise error\n" in (tmp_path / "error.txt").read_text()
    monkeypatch.setattr(train, "start", json.loads)
    with pytest.raises(TypeError, match="JSON object"):
        train.main(words)
