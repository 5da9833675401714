"""A game played by a function of one's own: the example by hand, a run, refusals."""

import re
from pathlib import Path

import pytest

from dialop.matching.game import MatchingGame
from selfplay.chat.rendering import Rendering
from selfplay.config.options import with_options
from selfplay.data.seeds import named_seed
from selfplay.rollout.driver import play_games
from selfplay.rollout.episode import GameSetup
from selfplay.rollout.play import play_of
from tests.helpers.dialop_boards import BEST, BRIEF, SMALL, WORST
from tests.helpers.scripted_engine import StreamEngine, WaveEngine
from tests.helpers.small_games import LIMITS, SAMPLING, config_of, policies, refusal
from tests.helpers.tiny_run import RUN_GAP, assert_same_run, finished, go_on_from, metrics_of

METHOD = Path(__file__).resolve().parents[2] / "examples" / "method"
BEST_OF = f"rollout.play={METHOD / 'best_of.py'}:play"
OWN = """
async def stops(position, generate):
    await position.turn(generate)
    return position.episode()

async def nothing(position, generate):
    while position.ended is None:
        await position.turn(generate)

async def other(position, generate):
    while position.ended is None:
        await position.turn(generate)
    return __import__("dataclasses").replace(position.episode(), index=7)

played = []

async def counts(position, generate):
    played.append(position)
    while position.ended is None and len(played) < 16:
        await position.turn(generate)
    position.ended = position.ended or "turns"
    return position.episode()

def plain(position, generate):
    return 1

async def fails(position, generate):
    return position.turns[0]
"""


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("stops", "it must play its game to the end, got Episode 0"),
        ("nothing", "it must play its game to the end, got None"),
        ("other", "it must play its game to the end, got Episode 7"),
        ("counts", "it must be deterministic"),
        ("plain", "it must be a coroutine function"),
        ("fails", "own_play.py:[0-9]+ fails: IndexError"),
    ],
)
def test_a_play_that_ends_no_game_is_refused_in_one_line(
    tmp_path: Path, name: str, rule: str
) -> None:
    own = tmp_path / "own_play.py"
    own.write_text(OWN)
    config = config_of(f"rollout.play={own}:{name}")
    assert re.search(rule, refusal("rollout.play", f"{own}:{name}", config))


@pytest.mark.parametrize("engine", [WaveEngine, StreamEngine])
def test_the_example_goes_on_with_the_best_of_its_tries(
    rendering: Rendering, engine: type[WaveEngine]
) -> None:
    """Seat 0 tries a refused move, the worst proposal and the best; seat 1 a refused move and
    accepts twice: of equal ones the first is taken. Only the chosen moves train."""
    tries = {0: ("hm", WORST, BEST), 1: ("hm", "[accept]", "[accept]")}
    texts = {
        named_seed("hand", "try", 0, number, *(("try", 1, after) if seat else ()), seat, 0): text
        for seat, moves in tries.items()
        for after, text in enumerate(moves)
        for number in ((2,) if seat else (after,))
    }
    setup = GameSetup(MatchingGame(SMALL, BRIEF), policies(rendering, "hand"), SMALL.key, 0)
    config = config_of(BEST_OF, "rollout.options.tries=3")
    played = engine(rendering, texts)
    (episode,), stats = play_games(
        [setup], played, sampling=SAMPLING, limits=LIMITS, play=play_of(config)
    )
    assert [turn.text for turn in episode.turns] == [BEST, "[accept]"]
    assert episode.outcome.score_norm == 1.0 and len(played.asked) == 6
    for seat, transcript in enumerate(episode.transcripts):
        assert transcript is not None
        own = sum(turn.num_tokens for turn in episode.turns if turn.seat == seat)
        assert sum(transcript.mask) == own
    all_tokens = sum(sum(t.mask) for t in episode.transcripts if t is not None)
    assert stats.num_generated_tokens > all_tokens


def test_an_option_that_the_play_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^unknown key rollout.options.trys; nearest is .*tries"):
        with_options("rollout.play", config_of(BEST_OF, "rollout.options.trys=3"))


def test_a_run_with_the_example_resumes_bit_for_bit(tmp_path: Path) -> None:
    """Tries make tokens that do not train; engine and trainer agree on those that do."""
    words = (BEST_OF, "rollout.options.tries=2", "steps=2", "save_every=1")
    run = finished(*words)
    for line in metrics_of(run):
        assert line["num_generated_tokens"] > 1.5 * line["num_trained_tokens"] > 0
        assert line["mismatch_max"] < RUN_GAP
    go_on_from(run, tmp_path / "run", *words)
    assert_same_run(run, tmp_path / "run")
