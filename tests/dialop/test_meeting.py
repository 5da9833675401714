"""The tutorial's game (docs/your_game.md): it is as short as promised, and passes the checks."""

import json
from pathlib import Path

import pytest

from dialop.checks import check_kit
from dialop.kit import load_kit
from selfplay.apps.report.games import Texts, drawn_game
from selfplay.config import load_config
from selfplay.evaluation.evaluate import evaluate_scripted

ROOT = Path(__file__).resolve().parents[2]
GAME = ROOT / "examples" / "meeting" / "meeting.py"
SETTINGS = ROOT / "examples" / "meeting" / "meeting.yaml"


def test_the_game_has_at_most_89_lines_and_passes_the_checks() -> None:
    """60 of rules and players, 25 of what pages and metrics show."""
    assert len(GAME.read_text(encoding="utf-8").splitlines()) <= 89
    kit = load_kit(str(GAME))
    problems = [result.line() for result in check_kit(kit, kit.Options()) if result.problem]
    assert not problems


def test_telling_finds_a_common_day_and_guessing_often_does_not() -> None:
    kit = load_kit(str(GAME))
    scores: dict[str, list[float]] = {"tell": [], "guess": []}
    for instance in kit.generate(kit.Options(), seed=0, start=0, num=200):
        for name, found in scores.items():
            game = kit.new_game(instance, kit.Options())
            script = kit.make_script(name, seed=1)
            while (seat := game.seat_to_move) is not None:
                assert game.step(seat, script.act(game.view(seat))).error is None
            found.append(game.outcome().score)
    assert sum(scores["tell"]) == 200
    assert 0.4 < sum(scores["guess"]) / 200 < 0.8


def test_its_settings_load_from_the_projects_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = load_config(SETTINGS)
    assert config.game.options == load_kit(config.game.name).Options()


def test_metrics_and_pages_show_it_as_they_show_the_projects_games() -> None:
    """What a run's page draws of its record, and a script's move made by the form of a person."""
    config = load_config(SETTINGS, [f"game.name={GAME}"])
    kit = config.game.kit
    instances = kit.generate(kit.Options(), seed=0, start=0, num=1)
    row = evaluate_scripted(instances, spec="tell", game=config.game, rollout=config.rollout)
    assert row.measures["days_named"] >= 1
    record = json.loads(json.dumps(row.games[0]))
    shown = drawn_game(record, "training", 0, Texts(), kit=kit)
    free = [[day in days for day in shown["board"]["columns"]] for days in instances[0].free]
    assert [[bool(cell) for cell in cells] for cells in shown["board"]["cells"]] == free
    day = record["turns"][-1]["text"].removeprefix("[meet] ")
    assert shown["turns"][-1]["notes"] == [[f"meet: {day}"]]
    game = kit.new_game(instances[0], kit.Options())
    say, meet = kit.forms(game, 0)
    assert game.step(0, say.before + "mon").error is None
    assert game.step(1, meet.before + meet.choices[0][1][0][0]).error is None
