"""An engine that fails is restarted, and the run goes on as if it had not failed; one that fails
three times in a row ends the run after a save."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import eval as evaluation
from selfplay.chat.rendering import Rendering
from selfplay.checkpoint import checkpoints
from selfplay.config import ParallelConfig
from selfplay.config.plugins import PLUGINS
from selfplay.data.seeds import named_seed
from selfplay.distributed import init_world
from selfplay.engines.base import Completion, Request, Sampling
from selfplay.engines.options import ChosenEngine
from selfplay.engines.weights import Compared, Weights
from selfplay.errors import EngineDisagrees, EngineLost
from selfplay.rollout.driver import FinishedGames, play_games
from selfplay.rollout.episode import Episode
from selfplay.weight_sync.offload import HostStore, Offload
from selfplay.weight_sync.start import choose_engine
from selfplay.weight_sync.supervised import MAX_FAILURES, SupervisedPolicy
from tests.helpers.faulty_engine import (
    DEATH,
    KINDS,
    Faults,
    FaultyHF,
    Unstarted,
    spoilt,
)
from tests.helpers.run_folders import evaluated
from tests.helpers.scripted_engine import StreamEngine, WaveEngine
from tests.helpers.small_games import GAMES, LIMITS, SAMPLING, hand_setups, prepared
from tests.helpers.small_updates import config_of, learner_of
from tests.helpers.tiny_run import begin_warm, finished, metrics_of, run_tiny, tiny_model

# --- one rollout --------------------------------------------------------------------------------


class Restartable:
    """Takes the weights of any model, and restarts."""

    dtype, num_copies, scores = torch.float32, 1, False
    faults: Faults
    held: dict[str, torch.Tensor]
    version: int

    def load(self, weights: Weights, version: int) -> None:
        self.held, self.version = {n: t.clone() for n, t in weights.named()}, version

    def compare(self, weights: Weights) -> Compared:
        different = sum(int((self.held[n] != t).sum()) for n, t in weights.named())
        return Compared(weights.num_elements, different)

    def restart(self) -> None:
        self.faults.restart()


class Wave(Restartable, WaveEngine):
    """Fails in a wave."""

    def generate_batch(self, requests: Any, sampling: Sampling) -> list[Completion]:
        kind = self.faults.call("generate")
        completions = super().generate_batch(requests, sampling)
        return completions[1:] if kind == "few" else [spoilt(kind, c) for c in completions]


class Stream(Restartable, StreamEngine):
    """Fails in the answer to one request, while the others wait for theirs."""

    def answer(self, request: Request) -> Completion:
        kind = self.faults.call("generate")
        return spoilt(kind, super().answer(request))


def facts(episode: Episode) -> Any:
    """What an episode says, its tokens and log-probs included."""
    transcripts = [(t.ids, t.mask, t.logprobs) for t in episode.transcripts if t is not None]
    return episode.index, episode.turns, episode.outcome, episode.ended, transcripts


def supervised(engine: Any, offloaded: str = "none") -> SupervisedPolicy:
    """`offloaded` is emptied while games are played, on a CPU too."""
    learner = learner_of(tiny_model())
    offload = Offload(learner, ParallelConfig(offload=offloaded))
    offload._state_store, offload._parameter_store = HostStore("cpu"), HostStore("cpu")
    supervisor = SupervisedPolicy(learner, engine, offload)
    supervisor.push(3)
    assert is_onloaded(supervisor) == (offloaded == "none")
    return supervisor


def is_onloaded(supervisor: SupervisedPolicy) -> bool:
    """As for a save."""
    return all(p.untyped_storage().size() for p in supervisor._learner.model.parameters())


CASES = [(Wave, 3, kind) for kind in KINDS]
CASES += [(Stream, 9, kind) for kind in ("dies", "nan")]  # it is answered one by one


@pytest.mark.parametrize(("engine_of", "number", "kind"), CASES)
def test_a_failed_rollout_ends_as_one_without_a_fault(
    rendering: Rendering, engine_of: Any, number: int, kind: str
) -> None:
    """The games that ended before the fault are not asked again; the others are, from their
    start."""
    texts, setups = prepared(*GAMES), hand_setups(rendering, len(GAMES))
    how: Any = {"sampling": SAMPLING, "limits": LIMITS, "versions": {"": 3}}
    sound = engine_of(rendering, texts)
    sound.faults = Faults()
    wanted, wanted_stats = play_games(setups, sound, **how)

    engine = engine_of(rendering, texts)
    engine.faults = Faults({("generate", number): kind})
    supervisor, num_ended, asked = supervised(engine), [0], list[int]()

    def ended() -> None:
        num_ended[0] += 1

    restart = engine.restart

    def restarted() -> None:
        asked.append(num_ended[0])
        engine.asked.clear()
        restart()

    engine.restart = restarted
    finished = FinishedGames()
    episodes, stats = play_games(setups, supervisor, **how, on_end=ended, finished=finished)
    assert [facts(episode) for episode in episodes] == [facts(episode) for episode in wanted]
    assert stats.num_generated_tokens == wanted_stats.num_generated_tokens
    assert stats.num_prompt_tokens == wanted_stats.num_prompt_tokens
    assert engine.faults.num_restarts == 1 and supervisor.take_num_restarts() == 1
    [ended_before] = asked
    assert 0 < ended_before < len(GAMES) == num_ended[0]
    all_first = {named_seed("hand", index, 0, 0) for index in range(len(GAMES))}
    asked_again = {request.seed for request in engine.asked} & all_first
    assert len(asked_again) == len(GAMES) - ended_before


def test_a_partners_engine_is_not_restarted(rendering: Rendering) -> None:
    """Its error is no fault of the policy's engine."""
    supervisor = supervised(Wave(rendering, {}))

    async def game(generate: Any) -> None:
        raise RuntimeError("a completion of the engine of checkpoint:x")

    with pytest.raises(RuntimeError, match="checkpoint:x"):
        supervisor.run_games([game], SAMPLING)


@pytest.mark.parametrize("method", ["restart", "push"])
def test_an_engine_that_does_not_come_back_is_lost_after_three_failures(
    rendering: Rendering, method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = Wave(rendering, {})
    engine.faults = Faults()
    supervisor = supervised(engine, "all")
    engine.faults = Faults({("generate", 1): "dies"} | {(method, n): "dies" for n in range(1, 9)})
    engine.load = lambda *_: engine.faults.call("push")  # type: ignore[method-assign]
    with pytest.raises(EngineLost, match=f"failed {MAX_FAILURES} times in a row"):
        supervisor.generate_batch([Request((1,), 1, 0)], SAMPLING)
    assert is_onloaded(supervisor)
    assert engine.faults.num_restarts <= MAX_FAILURES
    assert capsys.readouterr().err.count("engine failure") == 1 + MAX_FAILURES


# --- complete runs ------------------------------------------------------------------------------

BUILT_IN: Any = PLUGINS["engine.kind"].built_in
QUICK = ("eval.every=2", "eval.final_games=4", "eval.talk_games=0")


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FaultyHF]]:
    monkeypatch.setitem(BUILT_IN, "hf", "tests.helpers.faulty_engine:FaultyHF")
    yield FaultyHF
    FaultyHF.faults = Faults()


def without_restarts(folder: Path) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in line.items() if name != "num_engine_restarts"}
        for line in metrics_of(folder)
    ]


def texts_of(folder: Path) -> list[str]:
    """The games and held-out games without the log-probs of their tokens."""
    names = ("games.jsonl", "held_out_before.json", "held_out_after.json")
    texts = [(folder / name).read_text() for name in names]
    return [re.sub(r'(\["(?:[^"\\]|\\.)*"), -?[\d.e-]+\]', r"\1]", text) for text in texts]


@pytest.mark.slow
def test_a_run_with_faults_of_every_kind_ends_as_one_without(
    tmp_path: Path, faulty: type[FaultyHF]
) -> None:
    """In held-out games, play, validation, pushes, going to sleep and waking. Games played again
    make up other batches, so their log-probs are equal up to rounding, and their tokens equal."""
    begin_warm(tmp_path / "run", *QUICK)
    spread = {("generate", 3 + 7 * number): kind for number, kind in enumerate(KINDS)}
    faulty.faults = Faults(
        spread | {("push", 3): "dies", ("wake", 9): "dies", ("sleep", 4): "dies"}
    )
    assert run_tiny(tmp_path / "run", *QUICK) == 0
    lines = metrics_of(tmp_path / "run")
    assert faulty.faults.happened == faulty.faults.plan.keys()
    in_steps = sum(line["num_engine_restarts"] for line in lines)
    assert 0 < in_steps <= faulty.faults.num_restarts
    straight = finished(*QUICK)
    assert texts_of(tmp_path / "run") == texts_of(straight)
    assert without_restarts(tmp_path / "run") == [
        {name: pytest.approx(value, rel=1e-3, abs=1e-5) for name, value in line.items()}
        for line in without_restarts(straight)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "first", "step"), [("generate", 12, 2), ("push", 4, 4)])
def test_the_third_failure_in_a_row_ends_the_run_after_a_save(
    tmp_path: Path,
    faulty: type[FaultyHF],
    capsys: pytest.CaptureFixture[str],
    method: str,
    first: int,
    step: int,
) -> None:
    """The line names the cause and the step that a restart begins with; the restarted run ends as
    one that nothing ended."""
    plan = {(method, number): "dies" for number in range(first, 1000)}
    folder = tmp_path / "run"
    begin_warm(folder, *QUICK)
    faulty.faults = Faults(plan)
    assert run_tiny(folder, *QUICK) == 1
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert told.startswith("train.py: an engine failed 3 times in a row") and DEATH in told
    assert f"continues with step {step}" in told
    assert checkpoints(folder)[-1].name == f"step_{step - 1:06d}"
    assert faulty.faults.num_restarts == MAX_FAILURES - 1
    faulty.faults = Faults()
    assert run_tiny(folder, *QUICK) == 0
    assert texts_of(folder) == texts_of(finished(*QUICK))
    assert without_restarts(folder) == without_restarts(finished(*QUICK))


def test_weights_that_were_not_all_compared_end_the_run(
    rendering: Rendering, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model's loader may write weights in a way that the comparison does not see. No difference
    among too few elements is no proof. The engine is completely awake then, so it can be put to
    sleep for a save, for which everything is onloaded."""
    woken: list[str] = []

    class Few(Wave):
        few = 0

        def wake(self, what: str) -> None:
            woken.append(what)

        def compare(self, weights: Weights) -> Compared:
            return Compared(self.few or weights.num_elements, 0)

    engine = Few(rendering, {})
    engine.faults = Faults()
    for offloaded, again in (("all", False), ("none", True)):
        engine.few = 0
        supervisor = supervised(engine, offloaded)
        supervisor.sleep()
        engine.few = 63
        with pytest.raises(EngineDisagrees, match="were not compared"):
            (supervisor.push_again if again else supervisor.push)(4)
        assert re.search(r"compared 63 of \d+ elements", capsys.readouterr().err)
        assert woken[-2:] == ["weights", "kv_cache"]
        supervisor.sleep()
        assert is_onloaded(supervisor)


# --- eval.py -------------------------------------------------------------------------------------


def evaluate_with(faulty: type[FaultyHF], faults: Faults, out: Path) -> int:
    """Play a finished run's greedy games with these faults."""
    run, faulty.faults = str(finished(*QUICK)), faults
    words = [run, "--games", "generated", "--temperature", "0", "--out", str(out)]
    return evaluation.main(words)


def test_an_evaluation_with_faults_says_what_one_without_says(
    tmp_path: Path, faulty: type[FaultyHF], capsys: pytest.CaptureFixture[str]
) -> None:
    faults = Faults({("generate", 2): "dies", ("generate", 3): "nan"})
    assert evaluate_with(faulty, faults, tmp_path / "out") == 0
    assert faults.num_restarts == 2
    assert "engine failure 2 of 3 in a row, rank 0" in capsys.readouterr().err
    page = evaluated(tmp_path / "out")
    straight = json.loads((finished(*QUICK) / "held_out_after.json").read_text())
    assert page["rows"]["policy, greedy"]["scores"] == straight["greedy"]["scores"]


def test_an_engine_that_stays_lost_ends_an_evaluation_with_one_line(
    tmp_path: Path, faulty: type[FaultyHF], capsys: pytest.CaptureFixture[str]
) -> None:
    faults = Faults({("generate", number): "dies" for number in range(2, 99)})
    assert evaluate_with(faulty, faults, tmp_path / "out") == 1
    *told, last = capsys.readouterr().err.strip().splitlines()
    assert last.startswith("eval.py: an engine failed 3 times in a row") and DEATH in last
    assert not any("Traceback" in line for line in told)
    assert not (tmp_path / "out" / "evaluation.json").exists()


@pytest.mark.parametrize("program", ["train.py", "eval.py"])
def test_an_engine_that_does_not_start_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    program: str,
) -> None:
    monkeypatch.setitem(BUILT_IN, "sglang", "tests.helpers.faulty_engine:Unstarted")
    if program == "train.py":
        begin_warm(tmp_path / "run", *QUICK)
        status = run_tiny(tmp_path / "run", *QUICK, "engine.kind=sglang")
    else:
        words = [str(finished(*QUICK)), "--games", "generated"]
        status = evaluation.main([*words, "--out", str(tmp_path), "engine.kind=sglang"])
    assert status == 1
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith(f"{program}: the engine does not start: Rank 0 scheduler died")


class Recorded(Unstarted):
    """It starts nothing."""

    def __init__(self, folder: str, config: ChosenEngine, **_: Any) -> None:
        self.tp_size = config.tp_size


def test_an_engine_has_as_many_ranks_as_this_world_s_replica() -> None:
    """An evaluation may read the settings of a run whose engines were two ranks wide."""
    config, folder = config_of("engine.kind=sglang", "engine.tp_size=2"), finished(*QUICK) / "final"
    world = init_world(device="cpu")
    config, _ = choose_engine(config, folder, world, rewritten="")
    assert Recorded.start(config, folder, world).tp_size == 1
