"""The drift monitor: its verdict, what triggers it, what it does to a run."""

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dialop.matching.store import write_instances
from selfplay.atomic import atomic_folder
from selfplay.chat.rendering import Rendering, make_rendering
from selfplay.config import load_config
from selfplay.distributed import init_world
from selfplay.engines.base import Completion, Request
from selfplay.engines.router import EngineRouter, Frozen
from selfplay.evaluation.drift_monitor import (
    DriftMonitor,
    LanguageDrift,
    drift_message,
    drift_verdict,
    make_drift_monitor,
)
from selfplay.evaluation.held_out import EvaluationContext, validation
from selfplay.rollout.players import FrozenPlayer, PolicyPlayer
from selfplay.rollout.seating import Partner
from selfplay.weight_sync.supervisor import EngineSupervisor
from tests.helpers.chat_families import tokenizer_of
from tests.helpers.dialop_boards import BEST, SMALL, WORST
from tests.helpers.scripted_engine import WaveEngine
from tests.helpers.tiny_run import RUNS, finished, go_on_from, metrics_of, run_tiny

# --- the verdict --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("alone", "paired", "num_apart"),
    [
        # Both rise, both fall, or the fall is within the tolerance: no drift.
        ((0.5, 0.6, 0.7), (0.5, 0.6, 0.7), 0),
        ((0.5, 0.4, 0.3), (0.5, 0.4, 0.3), 0),
        ((0.5, 0.6, 0.7), (0.50, 0.46, 0.45), 0),
        # Self-play rises, the score with the partner falls: from the second or third evaluation.
        ((0.5, 0.6, 0.7), (0.5, 0.4, 0.3), 2),
        ((0.5, 0.6, 0.7), (0.5, 0.6, 0.5), 1),
        # In a row: one evaluation without drift restarts the count.
        ((0.5, 0.6, 0.6, 0.6), (0.5, 0.4, 0.48, 0.4), 1),
        # Both scores are compared with those of the best evaluation with the partner.
        ((0.5, 0.9, 0.8), (0.5, 0.8, 0.6), 0),
        ((0.5, 0.7, 0.8), (0.5, 0.8, 0.6), 1),
    ],
)
def test_the_verdict_on_short_histories(
    alone: Sequence[float], paired: Sequence[float], num_apart: int
) -> None:
    history = [(10 * i, *pair) for i, pair in enumerate(zip(alone, paired, strict=True))]
    assert drift_verdict(history, tolerance=0.06).num_apart == num_apart


def test_the_message_holds_both_scores_then_and_now() -> None:
    verdict = drift_verdict([(0, 0.8, 0.8), (10, 0.81, 0.85), (20, 0.97, 0.7)], tolerance=0.05)
    message = drift_message(verdict, "warm_start")
    assert re.findall(r"[0-9.]+", message) == ["10", "20", "0.810", "0.970", "0.850", "0.700", "1"]
    assert "warm_start" in message
    with pytest.raises(ValueError, match="at least 1 evaluation"):
        drift_verdict([], tolerance=0.1)


# --- a private code -----------------------------------------------------------------------------


CROSSED = replace(SMALL, key="crossed/0", table=((7, 3), (9, 1)), solo=(8.0, 12.0))


class Speaks(WaveEngine):
    """A pair with a language: the first player names the best plan, a partner who understands
    proposes it, one who does not asks "what" until the game ends; every proposal is accepted.

    Version 0 has one plain word and uses it for every board. Later versions have a code with a
    word for each of the two plans and understand nothing else.
    """

    def answer(self, request: Request) -> Completion:
        read = self.rendering.decode(list(request.prompt_ids))
        straight = "Electra 9" in read or "Electra 7" in read
        plans = {"zug": BEST, "zag": WORST} if self.version else {"hello": BEST}
        _, partner, message = read.rpartition("Partner:")
        understood = [plan for word, plan in plans.items() if word in message]
        if partner and "[propose]" in message:
            text = "[accept]"
        elif partner:
            text = understood[0] if understood else "[message] what"
        else:
            text = f"[message] {list(plans)[0 if straight else -1]}"
        ids = self.rendering.action_ids(text)
        return Completion(ids, [0.0] * len(ids), "stop", self.version)


def monitor_in(folder: Path, *overrides: str) -> tuple[DriftMonitor, EvaluationContext, Speaks]:
    """A monitor whose warm start uses the plain word, and a policy that can use the code."""
    rendering: Rendering = make_rendering(tokenizer_of("no template"))
    boards = [
        replace(board, key=f"{board.key}/{seat}", first_seat=seat)
        for seat in (0, 1)
        for board in (SMALL, CROSSED)
    ]
    write_instances(folder / "boards.parquet", boards)
    rules = ["game.size=2", "game.brief=true", "game.scale=false", "rollout.max_turns=6"]
    settings = [
        "rollout.max_game_tokens=1000",
        "eval.num_games=4",
        "eval.every=10",
        f"out={folder}",
    ]
    file = f"data.validation={folder / 'boards.parquet'}"
    config = load_config(None, ["model.scratch={}", *rules, *settings, file, *overrides])
    policy, warm_start = Speaks(rendering, {}), Speaks(rendering, {})
    policy.version = warm_start.version = 0
    router = EngineRouter(policy, frozen={"warm_start": Frozen(warm_start, ())}, endpoints={})

    def sit(names: tuple[object, ...], seat: int) -> FrozenPlayer:
        player = PolicyPlayer(
            rendering, seed_names=names, max_new_tokens=60, max_game_tokens=900, model="warm_start"
        )
        return FrozenPlayer(player, name="warm_start")

    world = init_world(device="cpu")
    context = EvaluationContext.of(config, EngineSupervisor(router, world), rendering, world)
    drift_monitor = DriftMonitor(config.eval.drift_monitor, Partner("warm_start", sit))
    return drift_monitor, context, policy


def test_a_private_code_triggers_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stop = ["eval.drift_monitor.action=stop", "eval.drift_monitor.patience=2"]
    drift_monitor, context, policy = monitor_in(tmp_path, *stop)
    drift_monitor.start({}, 0, context)
    measured = drift_monitor.measure(10, validation(context))
    # One word for all boards: two are played best, two at 8 of 12.
    assert measured["eval_score"] == measured["eval_drift_score"] == pytest.approx(10 / 12)
    policy.version = 1
    measured = drift_monitor.measure(20, validation(context))
    assert measured["eval_score"] == pytest.approx(1.0)
    assert (measured["eval_drift_score"], measured["num_drift_apart"]) == (0.0, 1.0)
    assert measured["eval_drift_fall"] == pytest.approx(10 / 12)
    drift_monitor.check()
    assert capsys.readouterr().err == ""
    drift_monitor.measure(30, validation(context))
    with pytest.raises(LanguageDrift, match=r"0\.833 .*1\.000.*warm_start"):
        drift_monitor.check()
    assert "drift monitor:" in capsys.readouterr().err


def test_a_monitor_that_warns_never_stops_and_plain_language_triggers_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drift_monitor, context, policy = monitor_in(
        tmp_path, "eval.drift_monitor.action=warn", "eval.drift_monitor.patience=1"
    )
    drift_monitor.start({}, 0, context)
    for step in (10, 20):
        drift_monitor.measure(step, validation(context))
    assert capsys.readouterr().err == ""
    policy.version = 1
    drift_monitor.measure(30, validation(context))
    assert capsys.readouterr().err.count("drift monitor:") == 1
    drift_monitor.check()
    # A resumed run continues the count; with another partner it restarts.
    resumed, context, policy = monitor_in(tmp_path, "eval.drift_monitor.action=warn")
    policy.version = 1
    state = json.loads(json.dumps(drift_monitor.state()))
    resumed.start(state, 30, context)
    assert resumed.measure(40, validation(context))["num_drift_apart"] == 2.0
    resumed.start({**state, "partner": "scripted:solo"}, 40, context)
    assert resumed.measure(50, validation(context))["num_drift_apart"] == 0.0


# --- in a run -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def monitored() -> Path:
    return finished(*RUNS["drift"])


def test_a_run_measures_both_and_trains_as_without_it(monitored: Path, tmp_path: Path) -> None:
    lines = metrics_of(monitored)
    assert ["eval_drift_score" in line for line in lines] == [False, True, False, True]
    assert lines[1]["num_drift_apart"] == 0.0 and 0.0 < lines[1]["eval_drift_score"] < 1.0
    progress = monitored / "checkpoints" / "step_000004" / "progress.json"
    history = json.loads(progress.read_text())["state"]["drift_monitor"]["seen"]
    assert [step for step, _, _ in history] == [0, 2, 4]
    # Before the first step the warm start plays with itself under two names.
    assert history[0][1] == history[0][2]
    assert [line["eval_drift_score"] for line in lines[1::2]] == [
        paired for _, _, paired in history[1:]
    ]

    watched = ("eval_drift_score", "eval_drift_fall", "num_drift_apart")
    bare = [{n: v for n, v in line.items() if n not in watched} for line in lines]
    assert bare == metrics_of(finished("eval.every=2"))


def test_a_resumed_monitored_run_measures_the_same(monitored: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    go_on_from(monitored, folder, *RUNS["drift"])
    assert metrics_of(folder) == metrics_of(monitored)


def test_a_run_that_drifted_is_stopped_with_its_checkpoint_saved(
    monitored: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its history is edited: score 0 by itself and 1 with its warm start."""
    folder = tmp_path / "run"
    shutil.copytree(monitored, folder)
    shutil.rmtree(folder / "checkpoints" / "step_000004")
    saved = folder / "checkpoints" / "step_000002"
    state = json.loads((saved / "progress.json").read_text())
    state["state"]["drift_monitor"]["seen"] = [[0, 0.0, 1.0], [2, 0.0, 1.0]]
    with atomic_folder(saved) as edited:
        shutil.copytree(saved, edited, dirs_exist_ok=True)
        (edited / "progress.json").write_text(json.dumps(state))
    drifted = (
        "eval.every=1",
        "eval.drift_monitor.action=stop",
        "eval.drift_monitor.patience=1",
        "save_every=50",
    )
    assert run_tiny(folder, *drifted) == 1
    message = capsys.readouterr().err
    assert "eval.drift_monitor" in message and "step 3" in message
    assert (folder / "checkpoints" / "step_000003" / "hf" / "model.safetensors").exists()
    assert [line["step"] for line in metrics_of(folder)] == [1, 2, 3]


def test_a_partner_that_is_not_read_is_told_by_rank_0(capsys: pytest.CaptureFixture[str]) -> None:
    partners: Any = None  # an idle monitor invites nobody

    def told(*words: str, rank: int = 0) -> str:
        config = load_config(Path("configs/tiny.yaml"), words)
        make_drift_monitor(
            config.eval.drift_monitor,
            config.game,
            weights=Path("start"),
            partners=partners,
            rank=rank,
        )
        return capsys.readouterr().err

    partner = "eval.drift_monitor.partner=checkpoint:nowhere"
    line = told(partner)
    assert line.count("\n") == 1 and "checkpoint:nowhere" in line
    assert "eval.drift_monitor.action is off" in line
    assert told(partner, rank=1) == told() == ""
