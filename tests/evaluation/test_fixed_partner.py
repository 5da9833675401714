"""Evaluations with a fixed partner: they see a private code, and do not change training."""

from dataclasses import replace
from pathlib import Path

import pytest

from dialop.matching.kit import write as write_instances
from selfplay.chat.rendering import Rendering, make_rendering
from selfplay.config import load_config
from selfplay.distributed import init_world
from selfplay.engines.base import Completion, Request
from selfplay.evaluation.held_out import EvaluationContext, validation
from selfplay.metrics.monitors import Monitors, MonitorStop
from selfplay.partners.router import EngineRouter, Frozen
from selfplay.rollout.players import FrozenPlayer, PolicyPlayer
from selfplay.rollout.seating import Partner
from selfplay.weight_sync.supervised import Supervised
from tests.helpers.chat_families import tokenizer_of
from tests.helpers.dialop_boards import BEST, SMALL, WORST
from tests.helpers.scripted_engine import WaveEngine
from tests.helpers.tiny_run import RUNS, finished, go_on_from, metrics_of

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


def test_a_private_code_stops_the_run(tmp_path: Path) -> None:
    """The warm start uses the plain word, the policy from its second evaluation on the code."""
    rendering: Rendering = make_rendering(tokenizer_of("no template"))
    boards = [
        replace(board, key=f"{board.key}/{seat}", first_seat=seat)
        for seat in (0, 1)
        for board in (SMALL, CROSSED)
    ]
    write_instances(tmp_path / "boards.parquet", boards)
    rules = [
        "game.options.size=2",
        "game.options.brief=true",
        "game.options.scale=false",
        "rollout.max_turns=6",
    ]
    settings = ["rollout.max_game_tokens=1000", "eval.num_games=4", f"out={tmp_path}"]
    file = f"data.validation={tmp_path / 'boards.parquet'}"
    config = load_config(None, ["model.scratch={}", *rules, *settings, file])
    policy, warm_start = Speaks(rendering, {}), Speaks(rendering, {})
    policy.version = warm_start.version = 0
    router = EngineRouter(policy, frozen={"warm_start": Frozen(warm_start, ())}, endpoints={})

    def sit(names: tuple[object, ...], seat: int) -> FrozenPlayer:
        player = PolicyPlayer(
            rendering, seed_names=names, max_new_tokens=60, max_game_tokens=900, model="warm_start"
        )
        return FrozenPlayer(player, name="warm_start")

    world = init_world(device="cpu")
    context = EvaluationContext(config, Supervised(router, world), rendering, world)
    fixed = Partner("warm_start", sit)
    monitors = Monitors(["stop if eval_score/* falls 0.03 while eval_score rises"], rank=0)
    measured = validation(context, [fixed])
    # One word for all boards: two are played best, two at 8 of 12.
    assert measured["eval_score"] == measured["eval_score/warm_start"] == pytest.approx(10 / 12)
    monitors.check(10, measured)
    policy.version = 1
    measured = validation(context, [fixed])
    assert measured["eval_score"] == pytest.approx(1.0)
    assert measured["eval_score/warm_start"] == 0.0
    with pytest.raises(MonitorStop, match=r"eval_score/warm_start is 0, .* from 0\.8333 to 1;"):
        monitors.check(20, measured)
    assert "eval_score/warm_start" not in validation(context)


@pytest.mark.slow
def test_a_run_measures_both_and_trains_as_without_it(tmp_path: Path) -> None:
    """A resumed run measures the same."""
    run = finished(*RUNS["fixed partner"])
    lines = metrics_of(run)
    scores = [line.pop("eval_score/warm_start", None) for line in lines]
    assert scores[0] is scores[2] is None and 0.0 < scores[1] < 1.0
    solo = [line.pop("eval_score/scripted:solo", None) for line in lines]
    assert solo[0] is solo[2] is None and 0.0 < solo[1] < 1.0
    assert lines == metrics_of(finished("eval.every=2"))
    go_on_from(run, tmp_path / "run", *RUNS["fixed partner"])
    assert metrics_of(tmp_path / "run") == metrics_of(run)
