"""The example whose players have opposed interests: its rules by hand, and what its run shows."""

import json
from pathlib import Path

import pytest

import train
from dialop.checks import check_kit
from dialop.kit import load_kit
from selfplay.config import load_config
from selfplay.evaluation.evaluate import evaluate_scripted
from tests.helpers.tiny_run import metrics_of

ROOT = Path(__file__).resolve().parents[2]
GAME, SETTINGS = ROOT / "examples/split/split.py", ROOT / "examples/split/split.yaml"


def test_the_game_passes_the_checks() -> None:
    kit = load_kit(str(GAME))
    assert not [line.line() for line in check_kit(kit, kit.Options()) if line.problem]


def test_each_player_is_paid_what_its_share_is_worth_to_it() -> None:
    """2 books, 1 hat, 1 ball: worth 4, 1, 1 to one and 1, 5, 3 to the other."""
    kit = load_kit(str(GAME))
    instance = type(kit.generate(kit.Options(), seed=0, num=1)[0])(
        "hand", (2, 1, 1), ((4, 1, 1), (1, 5, 3))
    )
    game = kit.new_game(instance, kit.Options())
    assert game.prompt(1).user == "2 1 1 worth 1 5 3"
    for seat, text, kind in (
        (0, "[accept]", "nothing_pending"),
        (0, "[offer] 3 0 0", "no_split"),
        (0, "[offer] 2 1", "no_split"),
        (0, "[offer] 2 1 0", None),
        (1, "[message] no", None),
        (0, "[accept]", "nothing_pending"),
        (0, "[message] why", None),
        (1, "[offer] 0 1 1", None),
        (0, "[accept]", None),
    ):
        assert game.step(seat, text).error_kind == kind
    outcome = game.outcome()
    assert outcome.rewards == outcome.seat_scores == (0.8, 0.8)
    assert (outcome.score, outcome.score_norm) == (16, 1.0)  # the best of all splits
    assert not kit.new_game(instance, kit.Options()).outcome().agreed


def test_who_asks_for_more_gets_more() -> None:
    config = load_config(SETTINGS, [f"game.name={GAME}"])
    instances = config.game.kit.generate(config.game.options, seed=0, num=50)
    rows = [
        evaluate_scripted(
            instances, spec=one, other=other, game=config.game, rollout=config.rollout
        ).measures
        for one, other in (("fair", "fair"), ("greedy", "soft"), ("soft", "greedy"))
    ]
    assert all(row["agreement"] == 1 for row in rows)
    assert rows[1]["reward/0"] > rows[0]["reward/0"] > rows[2]["reward/0"]
    assert rows[2]["reward/1"] > rows[0]["reward/1"] > rows[1]["reward/1"]


def test_scripts_are_scored_in_the_seats_that_the_policy_has(tmp_path: Path) -> None:
    """With another role for each seat and the policy in the second."""
    game = tmp_path / "roles.py"
    game.write_text(GAME.read_text().replace('("player", "player"), (', '("giver", "taker"), ('))
    words = [f"game.name={game}", "rollout.partners=[scripted:fair]"]
    means = {}
    for seats in ("[]", "[taker]"):
        config = load_config(SETTINGS, [*words, f"rollout.policy_seats={seats}"])
        instances = config.game.kit.generate(config.game.options, seed=0, num=50)
        row = evaluate_scripted(instances, spec="soft", game=config.game, rollout=config.rollout)
        means[seats] = row.interval[0], row.measures["reward/0"], row.measures["reward/1"]
    score, giver, taker = means["[]"]
    assert score == pytest.approx((giver + taker) / 2) and abs(giver - taker) > 0.02
    assert means["[taker]"] == (pytest.approx(taker), giver, taker)


@pytest.mark.slow
def test_its_run_shows_rewards_and_partners_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["warm_start.num_games=512", "steps=2", "eval.every=2", "eval.num_games=8"]
    small += ["eval.final_games=8", "rollout.instances=4", "rollout.group_size=4", "save_every=2"]
    small += ["observers=[console]"]
    run = tmp_path / "run"
    words = ["--config", str(SETTINGS), f"game.name={GAME}", f"out={run}", *small]
    assert train.main(words) == 0
    line = metrics_of(run)[1]
    assert {"reward", "reward_std"} <= line.keys()
    assert {"eval_score/scripted:fair", "eval_score/scripted:greedy"} <= line.keys()
    after = json.loads((run / "held_out_after.json").read_text())
    with_fair, itself = after["sampled with scripted:fair"], after["sampled"]
    assert {"score/scripted:fair/0", "score/scripted:fair/1"} <= with_fair["measures"].keys()
    # A seat's pay is that of two players there; in self-play it is the policy's.
    pay = {"reward/0", "reward/1"}
    assert pay <= itself["measures"].keys() and not pay & with_fair["measures"].keys()
    own, other = (row["measures"] for row in (with_fair, with_fair["partner"]))
    assert {"score/policy/0", "score/policy/1"} <= other.keys() and own["turns"] == other["turns"]
    best = [game["facts"]["best"] for game in itself["games"]]
    sums = [
        10 * sum(game["seat_scores"]) / b for game, b in zip(itself["games"], best, strict=True)
    ]
    assert itself["measures"]["score_norm"] == pytest.approx(sum(sums) / 8)
    said = capsys.readouterr().out
    assert "sampled with scripted:greedy" in said and ", with scripted:greedy from " in said
