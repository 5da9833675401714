"""The tutorial's game (docs/your_game.md): it is as short as promised, and passes the checks."""

from pathlib import Path

import pytest

from dialop.checks import check_kit
from dialop.kit import load_kit
from selfplay.config import load_config

ROOT = Path(__file__).resolve().parents[2]
GAME = ROOT / "examples" / "meeting" / "meeting.py"
SETTINGS = ROOT / "examples" / "meeting" / "meeting.yaml"


def test_the_game_has_at_most_60_lines_and_passes_the_checks() -> None:
    assert len(GAME.read_text(encoding="utf-8").splitlines()) <= 60
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
    assert config.game.rules() == load_kit(config.game.name).Options()
