"""Bad settings, flags and variables: one line that names the fault, status 2, no files."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

import pytest
import torch

import eval as evaluation
import train
from selfplay.config import Config
from selfplay.config.schema import described
from selfplay.metrics.run_folder import hold_run
from selfplay.model.hub import FETCHED, NOT_FETCHED
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
    (home / "run.yaml").write_text(TINY)
    (home / "dangling").symlink_to("gone")
    (home / "circle").symlink_to("circle")
    (home / "unfinished").mkdir()
    (home / "unfinished" / "config.yaml").write_text("")
    for name, data in FILES.items():
        (home / name).write_bytes(data if isinstance(data, bytes) else data.encode())
    for name, change in MODELS.items():
        shutil.copytree(run / "final", home / name)
        change(home / name)
    return home


class Started(BaseException):
    """Raised where a run would start. No Exception, which would count as one of one's own code."""


@pytest.fixture
def check_refused(
    broken: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Callable[[], int]], None]:
    """A check that a program ends with status 2 and changes nothing in the working directory."""
    monkeypatch.chdir(broken)

    def started(*words: object, **more: object) -> NoReturn:
        raise Started

    # These would start after all checks have passed.
    monkeypatch.setattr("selfplay.api.run.set_up", started)
    monkeypatch.setattr("selfplay.api.evaluation.play_matches", started)
    # The same messages on a machine with a GPU and SGLang.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "sglang" else find(name)
    )

    def check(program: Callable[[], int]) -> None:
        before = sorted(broken.rglob("*"))
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # it would be a line more
            assert program() == 2
        assert sorted(broken.rglob("*")) == before

    return check


def assert_one_line(stderr: str, program: str, named: str) -> None:
    """Standard error holds one line of the program, with the name of the key or file."""
    assert stderr.startswith(f"{program}: ") and stderr.count("\n") == 1, stderr
    assert named in stderr, stderr
    assert len(stderr) < 2000


MEETING = Path(__file__).resolve().parents[2] / "examples/meeting/meeting.py"
FILES: dict[str, str | bytes] = {
    "file": "",
    "empty.yaml": "",
    "binary.yaml": bytes(range(256)),
    "list.yaml": "[1, 2]\n",
    "open.yaml": "game: {size: 2\n",
    "deep.yaml": "game: " + "[" * 5000 + "\n",
    "circle.yaml": "game: &game {size: 2, more: *game}\n",
    "base.yaml": "steps: 1\nbase: nowhere.yaml\n",
    "people.jsonl": "",
}


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

# Words behind `train.py`, and what the line must name. `--config run.yaml` stands before key=value.
TRAIN: list[tuple[str, str]] = [
    ("", "--config"),
    ("--confg run.yaml", "nearest is --config"),  # not: --config is required
    ("--config", "--config"),
    ("--config nowhere.yaml", "nowhere.yaml"),
    ("--config rum.yaml", "rum.yaml: no such file; nearest is run.yaml"),
    ("--dry-run run.yaml", "must be given as --config run.yaml, got 'run.yaml'"),
    ("--dry-run tiny_ppo", "must be given as --config tiny_ppo, got 'tiny_ppo'"),
    *((f"--config {name}", name) for name in FILES if name.endswith(".yaml") and name[0] != "b"),
    ("--config binary.yaml", "binary.yaml"),
    ("--config base.yaml", "base.yaml:2: base must be a file"),
    ("--help rolout", "nearest is rollout"),
    ("--config run.yaml --confg x", "--confg"),
    ("\N{EN DASH}config run.yaml", "nearest is --config"),
    ("--config run.yaml --steps=3", "write steps=3"),
    (f"--config {'x' * 300}", f"{'x' * 300}: cannot be read"),
    ("out=file", "out"),
    ("out=.", "out must name a folder of its own, got '.'"),
    ("out=/", "out must name a folder of its own, got '/'"),
    ("out=~/", "out must name a folder of its own"),
    ("out=''", "out must name a folder of its own"),
    ("out='  '", "out must have no blanks around a name"),
    ("out='fresh/ /run'", "out must have no blanks around a name, got 'fresh/ /run'"),
    ("out=dangling", "dangling"),
    ("out=dangling/run", "dangling"),
    ("out=circle/run", "circle"),
    (f"out={'x' * 300}", "out"),
    ("steps=1e22", "steps"),
    ("model.scratch.vocab_size=260", "model.scratch.vocab_size"),
    ("optim.lr=.inf", "optim.lr"),
    ("warm_start.teachers=[nobody]", "warm_start.teachers"),
    ("device=gpu", "nearest is cuda"),
    ("rollout.temperature=0", "rollout.temperature"),
    ("rollout={instances: 100000, group_size: 10000}", "rollout.instances"),
    ("rollout.partners=[checkpoint:pickled]", "rollout.partners: checkpoint:pickled"),
    ("rollout.partners=[checkpoint:nowhere]", "rollout.partners: checkpoint:nowhere must be"),
    (
        "rollout.partners=[self, checkpoint:god]",
        "got god, which does not exist here; nearest is good",
    ),
    ("rollout.instance=3", "nearest is rollout.instances"),
    ("game.brief=true", "nearest is game.options.brief"),
    (f"game.name={MEETING}", "unknown key game.options"),
    ("eval.partners=[warm_start]", "eval.every"),
    ("eval={every: 2, partners: [honest]}", "eval.partners"),
    ("eval={every: 2, partners: ['scripted:honst']}", "is honest"),
    ("eval={every: 2, partners: [warm_start, warm_start]}", "only once"),
    ("monitors=[stop if entropy]", "monitors"),
    (
        "--config run.yaml rollout.partners=[self, pool*2]",
        "unknown argument 'pool*2]'; quote values that contain blanks",
    ),
    ("device=cuda", "device"),
    ("--config run.yaml --dry-run --gpu nan", "--gpu must be"),
    ("engine.kind=sglang", "engine.kind"),
    ("parallel.tp=3", "must divide the model's num_attention_heads (2), got 3; the nearest is 2"),
    ("--config run.yaml --dry-run parallel.tp=3", "parallel.tp must divide the model's"),
    ("rollout.partners=[endpoint:m@http://]", "rollout.partners"),
    ("rollout.partners=['endpoint:m@ftp://host/v1']", "rollout.partners"),
    ("endpoint.body={top_p: .inf}", "endpoint.body"),
    ("model.chat_template={chat_template: '{{'}", "model.chat_template"),
    ("model.chat_template={chat_template: '{{ raise_exception(1) }}'}", "model.chat_template"),
    ("model={scratch: null, path: file}", "model.path"),
    ("model={scratch: null, path: good}", "nearest is good/final"),
    ("model={scratch: null, path: unfinished}", "the run unfinished has no final/"),
    ("model={scratch: null, path: Nobody/nothing-of-this-name}", "Nobody/nothing-of-this-name"),
    *((f"model={{scratch: null, path: {name}}}", name) for name in MODELS),
]

UNUSABLE = ("hollow", "cut", "mute", "wordless")

# Arguments after `eval.py --games generated --num 2`; the run good is added if none is named.
EVAL: list[tuple[str, str]] = [
    ("nowhere", "RUN must be"),
    ("Nobody/nothing-of-this-name", "Nobody/nothing-of-this-name"),
    *((f"--config run.yaml {name}", name) for name in UNUSABLE),
    ("god", "nearest is good"),
    ("good/finl", "nearest is good/final"),
    ("--game.options.size=3", "write game.options.size=3"),
    ("--num 2 good unfinished", "without --partners, got 2; for a matrix of them write --partners"),
    ("--num 2 run.yaml", "must be given as --config run.yaml, got it as a RUN"),
    ("--games nowhere.parquet", "--games nowhere.parquet does not exist"),
    ("--games ./peple.jsonl", "peple.jsonl does not exist; nearest is people.jsonl"),
    ("--games generatd", "nearest is generated"),
    ("--num 0", "--num"),
    ("--temperature nan", "--temperature"),
    ("--partner scripted:nobody", "--partner"),
    ("--partner solo", "nearest is scripted:solo"),
    ("--partner checkpoint:pickled", "pickled"),
    ("--partner endpoint:m@http://", "--partner"),
    ("--partner pool", "policy_pool"),
    ("--partner person", "--partner"),
    ("--partners nowhere --config run.yaml", "--partners"),
    ("--partners self --config run.yaml", "--partners"),
    ("--partners honest --config run.yaml", "nearest is scripted:honest"),
    ("--partners ./god --config run.yaml", "nearest is good"),
    ("--partners scripted:solo good --partner self", "needs no --partner"),
    ("--partners scripted:solo good --temperature 1 --temperature 0", "one --temperature"),
    ("--out file", "--out"),
    ("--out .", "--out must name a folder of its own, got '.'"),
    ("--out /", "--out must name a folder of its own, got '/'"),
    ("--out dangling/report", "dangling"),
    (
        "--out good",
        "--out must be a new folder or that of an earlier report, got good, which holds",
    ),
    ("--start often", "--start"),
    ("--config nowhere.yaml", "nowhere.yaml"),
    ("--nmu 3", "--num"),
    ("stray", "stray"),
    ("game.options.sise=3", "nearest is game.options.size"),
    ("game.options.size=9", "game.options.size"),
    ("model.path=good/final", "model.path must not be given"),
    ("model.scratch.layers=3", "model.scratch must not be given"),
    ("emptied", "emptied/config.yaml"),
    ("--partner checkpoint:emptied", "emptied/config.yaml"),
    ("game.options.size=8", "rollout.max_game_tokens"),
    ("rollout.max_game_tokens=2000", "rollout.max_game_tokens"),
    ("engine.kind=sglang", "engine.kind"),
]

# Environment variables and the arguments of train.py with them.
ENVIRONMENT: list[tuple[dict[str, str], str, str]] = [
    ({"WORLD_SIZE": "two"}, "steps=0", "WORLD_SIZE"),
    ({"RANK": "1"}, "steps=0", "RANK"),
    ({"LOCAL_RANK": "9" * 30}, "steps=0", "LOCAL_RANK"),
    ({"WORLD_SIZE": "2"}, "parallel.fsdp=2", "RANK"),
    ({}, "endpoint.key_variable=NOT_SET_ANYWHERE", "NOT_SET_ANYWHERE"),
    ({"BAD_KEY": "secret\nkey"}, "endpoint.key_variable=BAD_KEY", "BAD_KEY"),
    ({"BAD_KEY": "secret\u00e9key"}, "endpoint.key_variable=BAD_KEY", "BAD_KEY"),
]


def _split(words: str) -> list[str]:
    """Split flags at blanks; key=value is one word, whatever it holds."""
    if words.startswith(("--", "\N{EN DASH}")):
        return [word.strip("'") for word in words.split(" ")]
    return [words] if words else []


@pytest.mark.parametrize(("words", "named"), TRAIN, ids=lambda text: text[:60])
def test_train_refuses_in_one_line(
    words: str,
    named: str,
    check_refused: Callable[[Callable[[], int]], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = _split(words)
    if words and not words.startswith(("--", "\N{EN DASH}")):
        out = [] if words.startswith("out=") else ["out=fresh/run"]
        given = ["--config", "run.yaml", *out, *given]
    check_refused(lambda: train.main(given))
    assert_one_line(capsys.readouterr().err, "train.py", named)


@pytest.mark.parametrize(("words", "named"), EVAL, ids=lambda text: text[:60])
def test_eval_refuses_in_one_line(
    words: str,
    named: str,
    check_refused: Callable[[Callable[[], int]], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = _split(words)
    plain = [word for before, word in pairwise(["", *given]) if before[:2] != "--" != word[:2]]
    if "--partners" not in given and not any("=" not in word for word in plain):
        given += ["good"]
    for option, value in (("--games", "generated"), ("--num", "2")):
        given += [] if option in given else [option, value]
    check_refused(lambda: evaluation.main(given))
    assert_one_line(capsys.readouterr().err, "eval.py", named)


@pytest.mark.parametrize(("variables", "words", "named"), ENVIRONMENT, ids=lambda v: str(v)[:40])
def test_a_bad_variable_is_named(
    variables: dict[str, str],
    words: str,
    named: str,
    check_refused: Callable[[Callable[[], int]], None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for variable in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    partners = ["rollout.partners=['endpoint:m@http://127.0.0.1:9/v1']"] * words.startswith(
        "endpoint"
    )
    check_refused(lambda: train.main(["--config", "run.yaml", "out=fresh", words, *partners]))
    stderr = capsys.readouterr().err
    assert_one_line(stderr, "train.py", named)
    assert "secret" not in stderr


def test_good_settings_reach_the_run(check_refused: object) -> None:
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
    shown = described(Config)
    numbers = [entry for entry in shown if re.match("int|float", entry.kind or "")]
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
