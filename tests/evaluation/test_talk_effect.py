"""The talk effect: what wrong messages cost, by hand-sized games."""

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dialop.collab import task
from dialop.collab.texts import user_turn
from dialop.game import Game, Outcome
from dialop.kit import load_kit
from dialop.tags import split_message
from dialop.turns import TurnGame
from selfplay.chat.transcript import Transcript
from selfplay.config import load_config
from selfplay.config.text import dump
from selfplay.distributed import World
from selfplay.engines.base import GameCoroutine, run_all
from selfplay.evaluation.asked import EvalPlan
from selfplay.evaluation.evaluate import EvaluationContext, evaluate, evaluate_scripted
from selfplay.evaluation.held_out import what_changed
from selfplay.evaluation.plan import find_matches
from selfplay.evaluation.rows import OTHERS_SENT
from selfplay.evaluation.tables import silent_text
from selfplay.evaluation.talk_effect import (
    NOTHING,
    HeardOtherwise,
    MessageBank,
    Said,
    TalkEffect,
    blank,
    talk_effect,
)
from selfplay.rollout.driver import play_scripted
from selfplay.rollout.episode import Episode, GameSetup, Limits
from selfplay.rollout.players import Move, PolicyPlayer
from tests.helpers.collab_tasks import NUMBER
from tests.helpers.dialop_boards import BEST
from tests.helpers.hand_games import HAND_GAMES
from tests.helpers.processes import two_ranks
from tests.helpers.run_folders import bare_weights, make_run
from tests.helpers.three_rooms import Instance as Rooms
from tests.helpers.three_rooms import Options as RoomOptions
from tests.helpers.three_rooms import ThreeRooms
from tests.helpers.two_ranks import ALONE


class Pointing(TurnGame):
    """Seat 0 knows a number, seats 1 and 2 guess it, each for half of the score."""

    num_seats, tags = 3, ("message", "guess")

    def begin(self) -> None:
        self.guesses: list[str] = []

    def sees(self, seat: int) -> str:
        return str(self.instance) if seat == 0 else "guess"

    def play(self, seat: int, tag: str, content: str) -> int | None:
        self.guesses += [content] if tag == "guess" and seat else []
        return (1, 2, None)[seat]

    def outcome(self) -> Outcome:
        score = min(1.0, sum(guess == str(self.instance) for guess in self.guesses) / 2)
        over = len(self.guesses) == 2
        both = (score,) * 3
        return Outcome(over=over, agreed=score == 1, score=score, score_norm=score, rewards=both)


@dataclass
class Hand:
    """A player whose move is a function of what it reads; the policy if it has a transcript."""

    move_of: Callable[[str], str]
    transcript: Transcript | None = None
    name: str = "hand"

    async def move(self, game: Game, seat: int, observation: str, generate: Any) -> Move:
        return Move(self.move_of(f"{game.prompt(seat).user} {observation}"), True, 0)

    def refused(self) -> None: ...

    def fork(self, *names: object) -> "Hand":
        return self


def tell(text: str) -> str:
    return f"[message] {text.split()[0]}"


def follow(text: str) -> str:
    """Guess the number that was heard last."""
    return f"[guess] {' '.join(text.split('[message]')[1].split()[:1]) or 'anything'}"


def meet(text: str) -> str:
    """The tutorial's game: tell the free days, or meet on the first common one."""
    own = text.split("free: ")[1].split("seat")[0].split()
    if "seat" not in text:
        return f"[message] {' '.join(own)}"
    told = text.split("[message]")[1].split()
    return f"[meet] {next((day for day in own if day in told), own[0])}"


def setups(numbers: Sequence[int], *listeners: Hand) -> list[GameSetup]:
    players = (Hand(tell, Transcript()), *listeners)
    return [
        GameSetup(Pointing(number, None), players, f"game {index}", 0)
        for index, number in enumerate(numbers)
    ]


def play(games: Mapping[Any, GameSetup]) -> dict[Any, Episode]:
    ready = [setup.copy() for setup in games.values()]
    return dict(zip(games, play_scripted(ready, limits=Limits(9, 1)), strict=True))


def measured(games: Sequence[GameSetup], world: World = ALONE) -> TalkEffect | None:
    own = {number: games[number] for number in world.replica.share(len(games))}
    return talk_effect(play(own), games, play, world)


def effects(found: TalkEffect | None) -> tuple[float, float]:
    assert found is not None and found.blank is not None
    return found.effect[0], found.blank[0]


POLICY = Hand(follow, Transcript())
DEAF = Hand(lambda text: "[guess] 3", Transcript())


def five_games() -> list[GameSetup]:
    return setups((1, 2, 3, 4, 5), POLICY, DEAF)


def test_followed_messages_are_worth_the_score_that_they_bring() -> None:
    """Every game has its own number, so each other game's message misleads."""
    found = measured(setups(range(4), POLICY, POLICY))
    assert effects(found) == (1.0, 1.0) and found is not None and found.num_games == 4
    assert found.agreement[0] == 1.0
    half = measured(setups(range(4), POLICY, DEAF))
    assert effects(half) == (0.5, 0.5)
    assert half is not None and half.agreement[0] == 0.25  # the deaf seat guesses one of four
    # If all games have the same number, another game's message is as good, an empty one is not.
    assert effects(measured(setups((7, 7, 7), POLICY, POLICY))) == (0.0, 1.0)


def test_ignored_messages_are_worth_exactly_nothing() -> None:
    assert effects(measured(setups(range(4), DEAF, DEAF))) == (0.0, 0.0)


def test_only_the_policy_hears_other_messages() -> None:
    """A partner that listens reads what was said, so only half of the score depends on it."""
    partner = Hand(follow)
    assert effects(measured(setups(range(4), POLICY, partner))) == (0.5, 0.5)
    assert measured(setups(range(4), partner, partner)) is None  # the policy only speaks


def test_games_without_a_message_to_change_have_no_talk_effect() -> None:
    assert measured(setups((3,), POLICY, POLICY)) is None  # there is no other game
    silent = [replace(s, players=(DEAF, DEAF, DEAF)) for s in setups(range(3), DEAF, DEAF)]
    assert measured(silent) is None


def test_a_game_in_which_nothing_was_heard_counts_with_no_difference_and_is_not_replayed() -> None:
    games = setups(range(4), POLICY, POLICY)
    games[3] = replace(games[3], players=(DEAF, DEAF, DEAF))
    own, played = play(dict(enumerate(games))), []

    def counting(controls: Mapping[Any, GameSetup]) -> dict[Any, Episode]:
        played.append(sorted(controls))
        return play(controls)

    assert effects(talk_effect(own, games, counting, ALONE)) == (0.75, 0.75)
    assert played == [[(control, index) for control in (0, 1) for index in (0, 1, 2)]]


def test_a_control_that_ended_void_is_left_out() -> None:
    games = setups(range(4), POLICY, DEAF)
    own = play(dict(enumerate(games)))
    found = talk_effect(
        own, games, lambda them: play({k: them[k] for k in them if k[1] % 3 == 0}), ALONE
    )
    assert found is not None and found.num_games == 2
    assert found.effect[0] == 0.5  # game 3 stays right with its deaf listener


def test_two_ranks_measure_what_one_measures() -> None:
    alone = json.loads(json.dumps(asdict(measured(five_games()))))
    assert two_ranks("talk effect") == [alone, alone]


# Who reads what in place of the hand games' messages.
TO_AGENT, TO_USER = (1, "User: [message]"), (0, "Agent: [message]")
_NO_QUESTION = user_turn(NUMBER, task.Move(1, "message", "")).replace(": \n", ":\n")
_BELOW = [(2, "User 0:\n"), (2, "User 1:\n")]
IN_ROOMS = [(2, "User 0: [message]"), (2, "User 1: [message]")]
HEARD = {
    "matching": [(1, "Partner: [message]"), (0, "Partner: [message]")],
    "planning": [*[TO_AGENT] * 3, TO_USER, TO_AGENT],
    "mediation": [*IN_ROOMS, (0, "Agent: [message]"), *IN_ROOMS],
    "collab": [(0, _NO_QUESTION), (1, "")] * 2,
    "matching, brief": [(1, "Partner:\n"), (0, "Partner:\n")],
    "planning, brief": [*[TO_AGENT] * 3, TO_USER, TO_AGENT],
    "mediation, brief": [*_BELOW, (0, "Agent:\n"), *_BELOW],
    "collab, brief": [(0, ""), (1, "")] * 2,
}


# --- what is heard ------------------------------------------------------------------------------


def test_the_bank_gives_a_message_of_another_game_alike_in_seat_turn_and_length() -> None:
    mine = Said("a", 0, (1,), 2, "[message] Ava BLEU 3")
    others = [
        Said("a", 0, (1,), 2, "[message] my own game"),
        Said("b", 1, (0,), 2, "[message] another speaker"),
        Said("b", 0, (1, 2), 2, "[message] other readers too"),
        Said("b", 0, (1,), 2, "[message] of a partner", by_policy=False),
        Said("b", 0, (1,), 0, "[message] another turn here"),
        Said("b", 0, (1,), 2, "[message] much longer than this one is"),
    ]
    assert MessageBank([mine, *others[:4]]).other(mine) is None
    assert MessageBank(others).other(mine) == "[message] much longer than this one is"
    assert MessageBank(others[:5]).other(mine) == "[message] another turn here"
    fitting = [Said(key, 0, (1,), 2, f"[message] Daniel {key}") for key in "bcdefgh"]
    fitting += [Said("b", 0, (1,), 2, "[message] Daniel BLEU 7")]  # 2 and 3 words are one class
    draws = {
        MessageBank([*others[1:], *fitting]).other(replace(mine, instance=f"i{n}"))
        for n in range(40)
    }
    assert draws == {message.text for message in fitting}
    assert len({MessageBank([*others, *fitting]).other(mine) for _ in range(3)}) == 1


@pytest.mark.parametrize(
    ("text", "start", "words"),
    [
        ("[message] Ava BLEU 3", "[message] ", "Ava BLEU 3"),
        ("1: [Message] two\nlines", "1: [Message] ", "two\nlines"),
        ("I think\nof 3\n[message] it is 3", "[message] ", "it is 3"),
        ("What number?", "", "What number?"),
    ],
)
def test_an_empty_message_has_the_start_of_the_message(text: str, start: str, words: str) -> None:
    assert split_message(text) == (start, words)
    assert blank(Said("a", 0, (1,), 0, text)) == f"{start}{NOTHING}"


@pytest.mark.parametrize(("name", "heard"), HEARD.items())
def test_only_what_is_heard_of_messages_changes(
    name: str, heard: Sequence[tuple[int, str]]
) -> None:
    """The games by hand, in both styles: of a message nothing is left but who speaks. Tools,
    proposals, answers and the speaker's own texts stay, rooms too."""
    name, _, style = name.partition(", ")
    hand, brief = HAND_GAMES[name], bool(style)
    plain = hand.new(brief=brief)
    other = HeardOtherwise(hand.new(brief=brief), "key", range(3), blank)
    found = []
    for seat, text in hand.moves:
        own, changed = plain.step(seat, text), other.step(seat, text)
        pairs = zip(own.observations, changed.observations, strict=True)
        different = [reader for reader, (read, now) in enumerate(pairs) if read != now]
        assert bool(different) == (own.action == "message") and seat not in different
        assert all(own.observations[reader] for reader in different)
        assert replace(changed, observations=own.observations) == own
        found += [(reader, changed.observations[reader]) for reader in different]
    assert found == heard and other.num_changed == len(heard)
    assert other.state() == plain.state() and other.outcome() == plain.outcome()


def test_a_message_that_the_game_refuses_or_gives_to_others_is_not_put_in() -> None:
    """The clerk of the three rooms writes to one caller; messages are numbers."""

    def first(change: Callable[[Said], str | None]) -> tuple[str, ...]:
        game = ThreeRooms(Rooms("k", (1, 2)), RoomOptions())
        other = HeardOtherwise(game, "k", (0, 1, 2), change)
        told = [other.step(seat, f"[message] {seat}") for seat in (0, 1)]
        assert [step.action for step in told] == ["message"] * 2
        return other.step(2, "0: [message] 5").observations

    assert first(lambda said: "0: [message] 6" if said.seat == 2 else None)[0] == "clerk: 6"
    for text in ("1: [message] 6", "[message] 6", "0: [message] six", "[answer] 6", "-"):
        change = (lambda text: lambda said: text if said.seat == 2 else None)(text)
        assert first(change) == ("clerk: 5", "", "")


def test_refused_moves_pass_unchanged() -> None:
    hand = HAND_GAMES["matching"]
    other = HeardOtherwise(hand.new(), "key", (0, 1), lambda said: "[message] x")
    first = hand.moves[0][0]
    assert other.step(first, "hm") == hand.new().step(first, "hm")
    assert other.step(1 - first, BEST).error_kind == "not_your_turn"
    assert other.num_changed == 0


def test_a_one_file_game_has_a_talk_effect_without_a_line_of_its_own() -> None:
    """The tutorial's two players: one tells its free days, the other meets on a common one."""
    weeks = [((a, b), (c, b)) for a, b, c in (("mon", "tue", "wed"), ("thu", "fri", "sat"))]

    kit = load_kit("examples/meeting/meeting.py")
    one = kit.generate(kit.Options(), seed=0, num=1)[0]
    games = []
    for number, free in enumerate(weeks):
        game = kit.new_game(replace(one, free=free), kit.Options())
        players = Hand(meet, Transcript()), Hand(meet, Transcript())
        games.append(GameSetup(game, players, str(number), 0))
    # Neither player of a game is free on a day that the other game's players name.
    assert effects(measured(games)) == (1.0, 1.0)


# --- evaluations --------------------------------------------------------------------------------


class NoEngine:
    """Plays games whose players ask no engine."""

    rollout = staticmethod(nullcontext)

    def run_games(self, games: Iterable[GameCoroutine], *_: Any) -> list[Any]:
        return asyncio.run(run_all(game(cast(Any, None)) for game in games))


class Meets(PolicyPlayer):
    """The seat of the policy, played by `meet` (`rollout.player`)."""

    async def move(self, game: Game, seat: int, observation: str, generate: Any) -> Move:
        self.transcript.act([0], logprobs=[0.0])
        return Move(meet(f"{game.prompt(seat).user} {observation}"), True, 1)


def test_an_evaluation_measures_it_on_its_first_games() -> None:
    player = f"rollout.player={__name__}:Meets"
    config = load_config("examples/meeting/meeting.yaml", [player])
    rendering = SimpleNamespace(stop_ids=(), pieces=lambda ids: ["x"] * len(ids))
    context = EvaluationContext(config, cast(Any, NoEngine()), cast(Any, rendering), ALONE)
    instances = config.game.kit.generate(config.game.options, seed=1, num=40)
    row = evaluate(instances, context, talk_games=30)
    assert len(row.scores) == 40 and row.talk is not None and row.talk.num_games == 30
    assert row.talk.effect[0] > 0.1 and row.interval[0] == 1.0
    assert evaluate(instances, context).talk is None
    assert evaluate(instances, context, talk_games=30) == row


def test_no_endpoint_is_asked_for_controls_and_a_matrix_has_none(tmp_path: Path) -> None:
    bare_weights(tmp_path / "run" / "final")
    config = load_config(None, ["model.path=x", "eval.talk_games=30"])
    (tmp_path / "run" / "config.yaml").write_text(dump(config))

    def talk_games(**asked: Any) -> int:
        return find_matches(EvalPlan([tmp_path / "run"], **asked)).talk_games

    assert talk_games() == talk_games(partner="scripted:honest") == 30
    assert talk_games(partner="endpoint:m@http://127.0.0.1:1/v1") == 0
    assert talk_games(partners=["scripted:honest"]) == 0


def test_it_is_told_with_what_can_be_had_without_talk(tmp_path: Path) -> None:
    """The last line of a run names the best of the scripts without a message, on the games of the
    talk effect: the random one, not one that scores less or one that talks."""
    folder = make_run(tmp_path / "run", num_games=4)
    for stage, mean in (("before", 0.0125), ("after", 0.194)):
        path = folder / f"held_out_{stage}.json"
        rows = json.loads(path.read_text())
        talk = {"effect": [mean, mean - 0.01, mean + 0.01], "blank": None, "num_games": 3}
        silent, own = rows["scripted:random"], rows["sampled"] | {"talk": talk}
        low = silent | {"scores": [0.0, 0.0, 0.0, 1.0]}
        talks = own | {"measures": silent["measures"] | {"messages": 1.0}}
        rows |= {"sampled": own, "greedy": own, "scripted:low": low, "scripted:talks": talks}
        path.write_text(json.dumps(rows))
    said, mean = what_changed(folder), sum(silent["scores"][:3]) / 3
    assert "+0.013 [+0.003, +0.022] to +0.194 [+0.184, +0.204]" in said
    assert f"{mean:.3f} there (scripted:random)" in said


def test_a_script_whose_other_seats_talk_says_nothing_of_silence(tmp_path: Path) -> None:
    """Two rooms by hand: with the clerk alone as the policy its script sends no message, but both
    callers do, in a file of any version. Where all seats count, the row has no further number."""
    rooms = [Rooms("a", (1, 2)), Rooms("b", (3, 0))]
    words = ["game.name=tests.helpers.three_rooms", "rollout.policy_seats=[clerk]"]
    config = load_config(None, ["model.path=x", *words])
    talk = TalkEffect((0.1, 0.0, 0.2), None, None, 2)
    row = evaluate_scripted(rooms, spec="clerk", game=config.game, rollout=config.rollout)
    assert (row.measures["messages"], row.measures[OTHERS_SENT]) == (0.0, 4.0)
    old = {name: value for name, value in row.measures.items() if name != OTHERS_SENT}
    for talks in (row, replace(row, games=()), replace(row, measures=old)):
        assert silent_text({"scripted:clerk": talks}, talk) == ""
    answers = [
        {"turns": [turn for turn in game["turns"] if turn["seat"] == 2]} for game in row.games
    ]
    mute = replace(row, measures=old, games=tuple(answers))
    assert "at least 1.000 there (scripted:clerk)" in silent_text({"scripted:clerk": mute}, talk)
    after = json.loads((make_run(tmp_path / "run") / "held_out_after.json").read_text())
    assert OTHERS_SENT not in after["scripted:random"]["measures"]
