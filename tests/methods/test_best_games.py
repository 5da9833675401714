"""Imitation of the policy's best games: which, how long, what a checkpoint holds."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from selfplay.config import load_config
from selfplay.distributed import init_world
from selfplay.learner.method import Parts, make_methods
from selfplay.methods.best_games import best_games
from selfplay.rollout.episode import Turn
from tests.helpers.hand_episodes import episode
from tests.helpers.resampling import played_games
from tests.helpers.tiny_run import RUNS, finished


def test_the_best_game_of_an_instance_is_an_agreement_above_its_mean() -> None:
    """Instance a: 0.9 is open, so the second of its agreements, 0.8, above the mean 0.625. Instance
    b: both agree on 0.5, the mean. Instance c: nobody agrees."""
    games = [
        episode((score, score), index, instance=instance, agreed=agreed)
        for instance, index, score, agreed in (
            *(("a", 0, 0.9, False), ("a", 1, 0.8, True), ("a", 2, 0.8, True), ("a", 3, 0.0, False)),
            *(("b", 0, 0.5, True), ("b", 1, 0.5, True)),
            *(("c", 0, 0.7, False), ("c", 1, 0.0, False)),
        )
    ]
    assert [(game.instance, game.index) for game in best_games(games)] == [("a", 1)]


def test_with_a_partner_each_seat_has_its_own_best_game() -> None:
    """Seat 0's games score 0.25 and 0.5, seat 1's 0.75 and 1.0: as one group seat 0 had none."""
    games = []
    for index, score in enumerate([0.25, 0.75, 0.5, 1.0]):
        game = episode((score, score), index)
        transcripts = [t if seat == index % 2 else None for seat, t in enumerate(game.transcripts)]
        games.append(replace(game, transcripts=tuple(transcripts)))
    assert [game.index for game in best_games(games)] == [2, 3]


def test_the_newest_best_games_are_imitated() -> None:
    """Of three instances a step, a drawn two are kept. Those without variance have no best game, so
    the second step adds one and the third none."""
    settings = ["model.scratch={}", "rollout={instances: 2, max_game_tokens: 64}"]
    config = load_config(None, [*settings, "methods.best_games.weight=0.5"])
    learner: Any = SimpleNamespace(world=init_world(device="cpu"))
    (method,) = make_methods(Parts(config, learner, lambda: pytest.fail("it loads no model")))

    def imitated(*numbers: int) -> list[str]:
        games = played_games(lambda number: number != 0, numbers).episodes
        turn = Turn(0, "?", "message", None, None, ("", ""), 1)
        games = [replace(game, turns=(turn, replace(turn, seat=1))) for game in games]
        assert method.samples([], games) == []
        (term,) = method.terms([], [], step=0)
        assert (term.name, term.weight) == ("imitation", 0.5)
        return [sample.name for sample in term.samples]

    names = [[f"instance board {i} episode 1 seat {seat}" for seat in (0, 1)] for i in range(5)]
    first = imitated(3, 2, 1)
    assert first[:2] != first[2:] and all(kept in names[1:4] for kept in (first[:2], first[2:]))
    assert imitated(4, 0) == imitated(0) == first[2:] + names[4]
    (again,) = make_methods(method.parts)
    again.restore(json.loads(json.dumps(method.state())))
    (term,), (same) = method.terms([], [], step=0), again.terms([], [], step=0)
    assert [*same[0].samples] == [replace(s, starts=()) for s in term.samples]


@pytest.mark.slow
def test_a_checkpoint_holds_the_baselines_and_the_best_games() -> None:
    run = finished(*RUNS["baselines"])
    progress = json.loads((run / "checkpoints" / "step_000002" / "progress.json").read_text())
    state = progress["state"]["policies"][""]
    assert set(state["baselines"]) == {"seat 0", "seat 1"}
    assert 1 <= len(state["methods"]["BestGames"]["best"]) <= 4
