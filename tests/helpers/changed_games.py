"""Files of games of one's own, each a right one of which a part is changed."""

from pathlib import Path

from dialop import scaffold
from tests.helpers import three_rooms

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
GAMES = {
    "kuhn": EXAMPLES / "kuhn" / "kuhn.py",
    "meeting": EXAMPLES / "meeting" / "meeting.py",
    "rooms": Path(three_rooms.__file__),
    "turns": Path(scaffold.__file__),
}


def changed(folder: Path, game: str, change: dict[str, str]) -> Path:
    """A copy of the game, in a module of its own, with these parts replaced."""
    text = GAMES[game].read_text(encoding="utf-8")
    for part, instead in change.items():
        assert text.count(part) == 1, part
        text = text.replace(part, instead)
    own = folder / f"own_{folder.name}.py"
    own.write_text(text, encoding="utf-8")
    return own
