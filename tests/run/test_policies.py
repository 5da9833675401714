"""Several policies that learn together in one run: whose samples train whom, rest, partners of one
policy's seats, files, and an exact resume."""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed.checkpoint
import yaml
from safetensors.torch import load_file

import selfplay
from selfplay.chat.tokenizer import load_tokenizer
from selfplay.checkpoint import checkpoints
from selfplay.errors import RunEnds, SettingsError
from selfplay.learner.method import methods_of_games
from selfplay.learner.update import update_policy
from selfplay.metrics.observer import Step
from selfplay.policies.seats import games_beside
from selfplay.preflight.run import OF_UPDATE
from selfplay.rollout.episode import GameSetup
from selfplay.weight_sync.offload import HostStore
from selfplay.weight_sync.supervised import SupervisedPolicy
from tests.helpers.casts import PAIR, TRAINED, trained
from tests.helpers.interrupted import stopped
from tests.helpers.processes import HANG_S, fork
from tests.helpers.shared_work import slow_except
from tests.helpers.tiny_run import (
    LORA,
    RUN_GAP,
    assert_same_run,
    begin_halfway,
    begin_warm,
    go_on_from,
    metrics_of,
    run_tiny,
    same_weights,
    weights_of,
    write_tiny,
)

NAMES = ("one", "other")
EMA = "algorithm.advantage=ema"


def train(folder: Path, *words: str) -> list[dict[str, Any]]:
    begin_warm(folder)
    assert run_tiny(folder, "eval.final_games=1", *words) == 0
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def first_step(folder: Path, *words: str) -> Step:
    """The first step of a run under these overrides."""
    begin_warm(folder)
    given = dict(word.split("=", 1) for word in words)
    parsed = {key: yaml.safe_load(value) for key, value in given.items()}
    with selfplay.start(write_tiny(folder), {**parsed, "out": str(folder)}) as run:
        return run.step()


def test_one_policy_that_is_named_has_the_bits_of_none(tmp_path: Path) -> None:
    none, named = tmp_path / "none" / "run", tmp_path / "named" / "run"
    for folder, words in ((none, []), (named, ["policies={all: {seats: [0, 1]}}"])):
        folder.parent.mkdir()
        train(folder, "steps=2", EMA, *words)
    assert same_weights(none / "final", named / "final" / "all")


def test_what_a_monitor_must_name_with_its_policy_each_line_has_of_each_policy_alone() -> None:
    line = metrics_of(trained())[0]
    assert all(f"{name}/{policy}" in line for name in OF_UPDATE for policy in NAMES)
    assert not line.keys() & {*OF_UPDATE}


def test_each_policy_trains_on_its_own_seats_and_at_its_own_rate_and_old_weights_end_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every engine must have its last push, not only the one that runs the games."""
    begin_warm(folder := tmp_path / "run")
    given = yaml.safe_load(PAIR.partition("=")[2])
    start = weights_of(folder / "warm_start")
    with selfplay.start(write_tiny(folder), {"policies": given, "out": str(folder)}) as run:
        said = capsys.readouterr().out
        assert [f"start check of {name}: trainer" in said for name in NAMES] == [True, True]
        with pytest.raises(SettingsError, match="run's only policy, this run has one, other"):
            run.parts.learner  # noqa: B018
        line = run.step().metrics
        moved = {}
        for policy in run.parts.policies:
            new = dict(policy.learner.model.named_parameters())
            moved[policy.name] = max(float((new[key] - start[key]).abs().max()) for key in new)
        run.parts.policies[1].engine.push(0)
        with pytest.raises(RunEnds, match="engine of other must use the weights of step 1, uses"):
            run.step()
    assert line["num_trained_tokens"] == sum(line[f"num_trained_tokens/{name}"] for name in NAMES)
    assert "entropy" not in line and line["entropy/one"] > 0 and line["entropy/other"] > 0
    # AdamW's first step moves every weight by its rate: 1e-3 and 3e-4.
    assert moved["one"] == pytest.approx(1e-3, rel=0.01)
    assert moved["other"] == pytest.approx(3e-4, rel=0.01)


@pytest.mark.parametrize("lost", slow_except([1, 2], 2))
def test_a_resumed_run_equals_an_unbroken_one_bit_for_bit(tmp_path: Path, lost: int) -> None:
    """Without its last save, or the last two of three."""
    unbroken, broken = trained(), tmp_path / "run"
    go_on_from(unbroken, broken, *TRAINED, lost=lost)
    for name in NAMES:
        assert same_weights(unbroken / "final" / name, broken / "final" / name)
    assert not same_weights(unbroken / "final" / "one", unbroken / "final" / "other")
    states = [
        json.loads((run / "checkpoints" / "step_000003" / "progress.json").read_text())["state"]
        for run in (unbroken, broken)
    ]
    assert states[0]["policies"] == states[1]["policies"]
    assert states[0]["policies"]["other"]["partners"]["pool"] == [0, 1, 2, 3]


@pytest.mark.slow
def test_a_run_that_is_killed_three_times_equals_an_unbroken_one_bit_for_bit(
    tmp_path: Path,
) -> None:
    """Each time between the two policies: one has been updated, or pushed, or written."""
    begin_warm(run := tmp_path / "run")
    write = torch.distributed.checkpoint.FileSystemWriter.write_data
    newest = []
    for where in ((update_policy, 2), (SupervisedPolicy.push, 6), (write, 2)):

        def trains(where: tuple[Any, int] = where) -> int:
            with stopped(*where, signal.SIGKILL):
                return run_tiny(run, *TRAINED)

        process = fork(trains)
        said, _ = process.communicate(timeout=HANG_S)
        assert process.returncode == -signal.SIGKILL, said[-4000:]
        newest.append([each.name for each in checkpoints(run)][-1:])
    assert newest == [[], ["step_000001"], ["step_000001"]]
    assert run_tiny(run, *TRAINED) == 0
    assert_same_run(trained(), run)


@pytest.mark.slow
def test_policies_with_adapters_share_one_base_and_resume_bit_for_bit(tmp_path: Path) -> None:
    words = (PAIR, *LORA, "policies.other.model.lora.rank=2", "save_every=1", "steps=2")
    words += ("optim.schedule=constant",)
    unbroken, broken = tmp_path / "unbroken" / "run", tmp_path / "broken" / "run"
    for folder in (unbroken, broken):
        folder.parent.mkdir()
    lines = train(unbroken, *words)
    assert all(line[f"mismatch_max/{name}"] < RUN_GAP for line in lines for name in NAMES)
    go_on_from(unbroken, broken, "eval.final_games=1", *words)
    begun = weights_of(unbroken / "warm_start")
    for name, rank in zip(NAMES, (4, 2), strict=True):
        assert same_weights(unbroken / "final" / name, broken / "final" / name)
        final = weights_of(unbroken / "final" / name)
        assert {key for key in begun if not torch.equal(begun[key], final[key])} == {
            key for key in begun if "_proj.weight" in key
        }
        saved = load_file(unbroken / "final_adapters" / name / "adapter_model.safetensors")
        assert {len(t) for key, t in saved.items() if "lora_A" in key} == {rank}
    assert not same_weights(unbroken / "final" / "one", unbroken / "final" / "other")
    with selfplay.start(broken / "config.yaml") as run:
        one, other = run.parts.policies
        assert one.learner.model is other.learner.model


FAILS = """
from pathlib import Path
from selfplay.learner.method import Method

class Fails(Method):
    def prepare(self, samples, *, step, config):
        if step == 1 and Path(__file__).with_name("fails").exists():
            raise ValueError("bad")
        return samples, {}
"""

LOSS = """
from selfplay.learner.loss import clipped_surrogate

def one(logprobs_M, batch, algorithm):
    return clipped_surrogate(logprobs_M, batch, algorithm)

def other(logprobs_M, batch, algorithm):
    return clipped_surrogate(logprobs_M, batch, algorithm)
"""


def test_a_policy_that_fails_after_anothers_update_leaves_no_half_step(tmp_path: Path) -> None:
    """The step is not saved: one's weights have changed already. The run goes on as if unbroken."""
    (tmp_path / "own_fails.py").write_text(FAILS)
    (tmp_path / "own_loss.py").write_text(LOSS)
    own = f"methods: {{{tmp_path}/own_fails.py:Fails: {{}}}}"
    own += f", algorithm: {{loss: '{tmp_path}/own_loss.py:other'}}"
    words = [f"policies={{one: {{seats: [0]}}, other: {{seats: [1], {own}}}}}", "save_every=1"]
    words += ["steps=2", "eval.final_games=1", f"algorithm.loss={tmp_path}/own_loss.py:one"]
    unbroken, broken = tmp_path / "unbroken" / "run", tmp_path / "broken" / "run"
    for folder in (unbroken, broken):
        folder.parent.mkdir()
    begin_warm(unbroken)
    assert run_tiny(unbroken, *words) == 0
    begin_halfway(unbroken, broken)  # before its second step
    (tmp_path / "fails").touch()
    assert run_tiny(broken, *words) != 0
    assert [each.name for each in checkpoints(broken)] == ["step_000001"]
    (tmp_path / "fails").unlink()
    assert run_tiny(broken, *words) == 0
    for name in NAMES:
        assert same_weights(unbroken / "final" / name, broken / "final" / name)


LOOKER = """
from selfplay.learner.method import Method

LEARNERS, SEEN = {}, []

class Looker(Method):
    def prepare(self, samples, *, step, config):
        LEARNERS[self.parts.policy] = self.parts.learner
        states = [one.optimizer.state.values() for one in LEARNERS.values()]
        SEEN.append([sum(s["exp_avg"].untyped_storage().size() for s in each) for each in states])
        return samples, {}
"""


def test_moments_of_one_policy_wait_on_the_host_while_another_updates(tmp_path: Path) -> None:
    """A store that takes tensors of a CPU stands for the GPU's; the bits are those without."""
    (tmp_path / "own_looker.py").write_text(LOOKER)
    runs = [tmp_path / name / "run" for name in ("moved", "held")]
    for folder in runs:
        folder.parent.mkdir()
        begin_warm(folder)
        own = {"methods": {f"{tmp_path}/own_looker.py:Looker": {}}}
        policies = {"one": {"seats": [0], **own}, "other": {"seats": [1], **own}}
        given = {"policies": policies, "out": str(folder), "parallel.offload": "optimizer"}
        given |= {"save_every": 1, "eval.final_games": 1}
        with selfplay.start(write_tiny(folder), given, steps=2) as run:
            own_code = sys.modules[type(run.parts.policies[0].learner.methods[0]).__module__]
            own_code.LEARNERS.clear(), own_code.SEEN.clear()
            for policy in run.parts.policies if folder == runs[0] else ():
                policy.engine._offload._state_store = HostStore("cpu")
            while run.num_done < 2:
                run.step()
            seen = [[size > 0 for size in sizes] for sizes in own_code.SEEN[2:]]
            moved = folder == runs[0]
            assert seen == [[True, not moved], [not moved, True]]
            run.finish()
    for name in NAMES:
        assert same_weights(runs[0] / "final" / name, runs[1] / "final" / name)


def test_a_policy_that_rests_plays_with_the_weights_that_it_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = train(
        tmp_path / "run",
        *("steps=2", "save_every=1", "optim.schedule=constant", PAIR),
        *("policies.one.rest=[1, 1]", "policies.other.rest=[1, 1, 1]"),
    )
    said, finals = capsys.readouterr().out, [tmp_path / "run" / "final" / name for name in NAMES]
    assert "one rests in steps 2, other rests in steps 1\n" in said
    assert f"the policies are in {finals[0]}, {finals[1]}, the page is " in said
    saved = [tmp_path / "run" / "checkpoints" / f"step_00000{n}" / "policies" for n in (1, 2)]
    assert same_weights(saved[0] / "other" / "hf", tmp_path / "run" / "warm_start")
    assert not same_weights(saved[0] / "one" / "hf", tmp_path / "run" / "warm_start")
    assert same_weights(saved[0] / "one" / "hf", saved[1] / "one" / "hf")
    assert not same_weights(saved[0] / "other" / "hf", saved[1] / "other" / "hf")
    rested = [
        [line[f"num_trained_tokens/{name}"] == 0 for name in ("one", "other")] for line in lines
    ]
    assert rested == [[False, True], [True, False]]
    # 4 instances: a group of the seat that trains each, none of the one that rests.
    assert [line["num_groups"] for line in lines] == [4, 4]


def test_while_all_others_rest_a_policy_s_partners_do_not_play(tmp_path: Path) -> None:
    """Their games would train nobody; a sample of the step is one that the update trained on."""
    rests = ("policies.one.rest=[1, 1, 1]", "policies.other.partners=[scripted:solo]")
    step = first_step(tmp_path / "run", PAIR, *rests)
    assert {episode.partner for episode in step.episodes} == {"self"}
    assert {sample.policy for sample in step.samples} == {"other"}
    assert set(step.metrics) >= {"entropy/other"} and "entropy/one" not in step.metrics


def test_games_pass_the_run_s_methods_whichever_policy_has_them() -> None:
    """In the run's order, each once; a policy's own methods have no games."""

    config: Any = SimpleNamespace(methods={"judge": None, "resample": None})
    every: Any = [
        [SimpleNamespace(name=name, of=names) for name in names]
        for names in (("own", "resample"), ("judge", "resample"))
    ]
    found: Any = methods_of_games(config, every)
    assert [(each.name, each.of[0]) for each in found] == [("judge", "judge"), ("resample", "own")]


def test_partners_of_a_policy_play_its_seats_while_the_others_train(tmp_path: Path) -> None:
    step = first_step(
        tmp_path / "run", PAIR, "policies.other.partners=[self*0.25, scripted:solo*0.75]"
    )
    by_partner: dict[str, list[Any]] = {}
    for episode in step.episodes:
        by_partner.setdefault(episode.partner, []).append(episode)
    assert {name: len(games) for name, games in by_partner.items()} == {
        "self": 4,
        "other=scripted:solo": 12,
    }
    for episode in by_partner["other=scripted:solo"]:
        assert [t and t.policy for t in episode.transcripts] == ["one", None]
    for episode in by_partner["self"]:
        assert [t.policy for t in episode.transcripts] == ["one", "other"]
    assert {s.policy for s in step.samples if "scripted:solo" in s.group} <= {"one"}


@pytest.mark.slow
def test_policies_of_different_sizes_and_tokenizers_play_one_game(tmp_path: Path) -> None:
    small = "{width: 16, layers: 1, heads: 2, kv_heads: 2, mlp_width: 32, max_positions: 192"
    own = f"policies.other.model.scratch={small}, vocab_size: 330, tokenizer_games: 60}}"
    run = tmp_path / "run"
    evaluated = "eval={every: 1, num_games: 4, partners: [warm_start]}"
    step = first_step(run, PAIR, own, EMA, evaluated)
    assert step.metrics["mismatch_max/other"] < 1e-4 > step.metrics["mismatch_max/one"]
    for episode in step.episodes:
        assert max(episode.transcripts[1].ids) < 330
    # A log's tokens are the texts of the sampled ids in the seat's own tokenizer.
    logged: list[set[str]] = [set(), set()]
    for line in (run / "games.jsonl").read_text().splitlines():
        for turn in json.loads(line)["turns"]:
            texts = {text for text, _ in turn["tokens"] if text and text.isascii()}
            logged[turn["seat"]] |= texts  # not those of characters of several tokens
    tokenizers = [load_tokenizer(home / "tokenizer") for home in (run, run / "policies" / "other")]
    for seat, texts in enumerate(logged):
        ids = {number for game in step.episodes for number in game.transcripts[seat].ids}
        decoded = [{each.decode([n]) for n in ids if n < len(each)} for each in tokenizers]
        assert texts <= decoded[seat] and not texts <= decoded[1 - seat]
    # The warm start as a partner is that of the seat's policy: the other one's has other tokens.
    assert 0 <= step.metrics["eval_score/warm_start"] <= 1
    rows = json.loads((run / "held_out_before.json").read_text())
    players = {
        tuple(seat["player"] for seat in game["seats"])
        for game in rows["sampled with warm_start"]["games"]
    }
    assert players == {("policy", "warm_start 1"), ("warm_start 0", "policy")}
    # It imitates its own seat alone, as the run's policies with one start imitate both.
    for folder, num_seats in ((run, 2), (run / "policies" / "other", 1)):
        *_, line = map(json.loads, (folder / "warm_start.jsonl").read_text().splitlines())
        assert line["num_transcripts"] == 400 * num_seats


def test_auxiliary_imitation_of_a_policy_is_of_its_own_seats(tmp_path: Path) -> None:
    begin_warm(tmp_path / "run")
    given = {"out": str(tmp_path / "run"), "eval.final_games": 1}
    own = {"methods": {"auxiliary_imitation": {"weight": 0.1, "games": 3}}}
    given |= {"policies": {"one": {"seats": [0]}, "other": {"seats": [1], **own}}}
    with selfplay.start(write_tiny(tmp_path / "run"), given) as run:
        run.step()
        (method,) = run.parts.policies[1].learner.methods
        assert [each.name.partition(" seat ")[2] for each in method.term.samples] == ["1"] * 3


def test_what_only_a_start_can_refuse_names_the_policy_s_key(tmp_path: Path) -> None:
    """An endpoint that does not answer: nobody listens at port 9."""
    (tmp_path / "rubric.md").write_text("Was it right?")
    judge = {"model": "endpoint:small@http://127.0.0.1:9/v1", "rubric": f"{tmp_path}/rubric.md"}
    policies = {"one": {"seats": [0]}, "other": {"seats": [1], "methods": {"judge": judge}}}
    given = {"policies": policies, "out": str(tmp_path / "run"), "endpoint.retries": 0}
    with pytest.raises(SettingsError, match=r"policies\.other\.methods\.judge") as refused:
        selfplay.start(write_tiny(tmp_path / "run"), given)
    assert "\n" not in str(refused.value) and not (tmp_path / "run").exists()


SLEEPER = """
import torch
from examples.engine.plain import PlainEngine

class Sleeper(PlainEngine):
    scores, asleep, num_scored = True, False, 0

    def sleep(self):
        self.asleep = True

    def wake(self, what):
        self.asleep = what == "weights"

    def generate_batch(self, requests, sampling):
        assert not self.asleep
        return super().generate_batch(requests, sampling)

    def score(self, texts, *, temperature=1.0):
        assert not self.asleep
        self.num_scored += len(texts)
        def one(ids):
            logprobs = self.model(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
            return logprobs.gather(1, torch.tensor(ids)[1:, None])[:, 0].tolist()
        return lambda: [one(list(ids)) for ids in texts]
"""


def test_no_engine_is_asked_while_it_sleeps(tmp_path: Path) -> None:
    """Every policy's engine scores its turns before any of them goes to sleep for the update."""
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    begin_warm(tmp_path / "run")
    given: dict[str, Any] = {"out": str(tmp_path / "run"), "rollout.max_turns": 2}
    given |= {"engine.kind": f"{tmp_path}/sleeper.py:Sleeper", "eval.final_games": 1}
    given |= {"policies": {"one": {"seats": [0]}, "other": {"seats": [1]}}}
    with selfplay.start(write_tiny(tmp_path / "run"), given) as run:
        step = run.step()
        engines: list[Any] = [policy.engine.engine for policy in run.parts.policies]
        assert all(each.num_scored and not each.asleep for each in engines)
    for name in ("one", "other"):
        assert step.metrics[f"sync_check_mismatch/{name}"] < 1e-4


def test_the_opponents_of_a_policy_get_the_games_of_its_own_partners() -> None:
    """By the partner's own name, which may have an = too."""
    setup = GameSetup(cast(Any, None), (), "board", 0)
    names = ["self", "one=scripted:honest:tell=top", "one=pool:2", "other=scripted:honest:tell=top"]
    games: list[Any] = [replace(setup, partner=name) for name in names]
    own = [game.partner for game in games_beside("one", games)]
    assert own == ["self", "scripted:honest:tell=top", "pool:2"]
    assert [game.partner for game in games_beside("", games)] == names
