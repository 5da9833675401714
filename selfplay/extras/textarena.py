"""TextArena's games of two and more players as games of this package: `game.name: textarena:ID`, or
`textarena:ID:N` for N players. `python -m selfplay.extras.textarena` prints which open.

The rules, texts and rewards are TextArena's. A move that it calls invalid is refused here and
changes nothing; the player may try again. The seats' rewards are the game's own, such as 1 for a
win and -1 for a loss; a seat's score is its reward mapped to [0, 1]. TextArena draws from Python's
global generator, so each game swaps in its own generator state while it runs.
"""

from __future__ import annotations

from dialop.terminal import open_terminal

if __name__ == "__main__":  # before the imports that need packages
    open_terminal("selfplay.extras.textarena")

# isort: split

import argparse
import copy
import difflib
import random
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from types import SimpleNamespace
from typing import Any

try:
    import textarena
except ImportError as error:
    if __name__ == "__main__":
        raise
    raise ValueError(
        f"game.name textarena:ID needs TextArena ({error}); `pip install -r "
        "requirements/bridges.txt` installs it"
    ) from error

from dialop import __version__
from dialop.game import Game, Outcome, Prompt, Step
from dialop.shown import error_line
from dialop.tags import indent_further

PREFIX = "textarena:"
_RAW = "-raw"  # suffix of the ids of environments without TextArena's observation wrappers
_ACCEPT = "[accept]"  # the move that ends a negotiation, named in its prompt
_CALL = re.compile(r"\[[^\[\]]+\]")  # a move inside a text, such as [Offer: 2 Ore -> 1 Wood]
_TALK = "conversation"  # the phase of a game in which any text is talk
_MOST = 16  # players
_JURY = "jury_class"  # the setting of games whose winner a jury chooses
_OWN_JURY = "examples/textarena/debate.py"
_WORDS = re.compile(r"nltk\.download\('(\w+)'\)")  # what nltk tells about a missing list
_SERVICE, _MASTER = "OpenRouter", "its game master is a model of a paid service, for one player"
# What a player can promise in the talk before a choice, in the games with such a choice.
_PROMISES = {
    "IteratedPrisonersDilemma": ("cooperate", "defect"),
    "IteratedStagHunt": ("stag", "hare"),
}


@dataclass(frozen=True, slots=True)
class Instance:
    """One start of a game: `seed` is passed to TextArena's `reset`."""

    key: str
    seed: int


@dataclass(frozen=True, slots=True)
class View:
    """What a seat has read, and the moves it has made."""

    seat: int
    texts: tuple[str, ...]
    seat_to_move: int | None


class TextArenaGame(Game):
    """One play of a TextArena environment.

    A move is a `message` if its words reach another player and it has no [move] in it, or if the
    game is in a phase of talk; else it is a `move`. Error kinds: over, not_your_turn, invalid.
    """

    def __init__(
        self, env_id: str, instance: Instance, num_players: int = 2, **settings: Any
    ) -> None:
        """Open and start the environment.

        `settings` are its own, such as its `jury_class`. Raises what TextArena raises, as for
        another number of players.
        """
        self.env_id, self.instance, self.num_seats = env_id, instance, num_players
        self._random = random.Random(instance.seed).getstate()
        self._moves: list[tuple[int, str]] = []
        self._kinds: list[str] = []
        self._num_errors = [0] * num_players
        with self._own_random():
            self._env = textarena.make(_raw_id(env_id), **settings)
            self._env.reset(num_players=num_players, seed=instance.seed)
        opening = self._take_observations(None)
        self._texts = [[text] for text in opening]
        self._opening = list(opening)

    @property
    def seat_to_move(self) -> int | None:
        """The seat whose move it is, None when the game is over."""
        return None if self._env.state.done else int(self._env.state.current_player_id)

    def prompt(self, seat: int) -> Prompt:
        """TextArena's prompt; in a restored game also all later texts."""
        return Prompt("", self._opening[seat])

    def step(self, seat: int, text: str) -> Step:
        """Try a move on a copy of the environment, which is kept unless the move is invalid."""
        mover = self.seat_to_move
        if mover is None or seat != mover:
            over = mover is None
            error = "the game is over" if over else "it is the other player's turn"
            return self._refused(seat, "over" if over else "not_your_turn", error)
        before, random_before, in_talk = self._env, self._random, self._in_talk
        self._env = copy.deepcopy(before)
        with self._own_random():
            self._env.step(action=text.encode("utf-8", "replace").decode("utf-8"))
        state = self._env.state
        if state.error_count or state.game_info[seat].get("invalid_move"):
            why = [words for _, words, kind in state.observations[seat] if kind == _ADMIN]
            reason = why[-1] if why else str(state.game_info[seat].get("reason", "invalid move"))
            self._env, self._random = before, random_before
            return self._refused(seat, "invalid", reason)
        heard = any(
            sender == seat != each
            for each, read in state.observations.items()
            for sender, *_ in read
        )
        says = heard and (in_talk or not _CALL.search(text))
        observations = self._take_observations(seat)
        self._moves.append((seat, text))
        self._kinds.append("message" if says else "move")
        for each, words in enumerate(observations):
            self._texts[each].append(words)
        return Step(seat, self._kinds[-1], None, None, observations)

    @property
    def _in_talk(self) -> bool:
        """Whether the game is in a phase in which any text is talk."""
        state = self._env.state.game_state
        return isinstance(state, Mapping) and state.get("phase") == _TALK

    def clone(self) -> TextArenaGame:
        """An independent copy. The environment is shared: `step` replaces it, never changes it."""
        twin = copy.copy(self)
        twin._moves, twin._num_errors = list(self._moves), list(self._num_errors)
        twin._kinds = list(self._kinds)
        twin._texts = [list(texts) for texts in self._texts]
        return twin

    def view(self, seat: int) -> View:
        """The texts that the seat has read."""
        return View(seat, tuple(self._texts[seat]), self.seat_to_move)

    def outcome(self) -> Outcome:
        """TextArena's rewards; 0 for both before the end."""
        given = self._env.state.rewards or {}
        return self._paid(given) if self._env.state.done else self._paid({}, scored=False)

    def outcome_of_forfeit(self, seat: int) -> Outcome:
        """TextArena's rewards after too many invalid moves: -1 for this seat, which the others
        share."""
        others = 1 / (self.num_seats - 1)
        return self._paid({each: -1 if each == seat else others for each in range(self.num_seats)})

    def measures(self, seats: Collection[int]) -> dict[str, float]:
        """In a game with promises: how many the seats have made, and how many of them are kept.

        A message that names one of the two choices promises it. The seat's next choice keeps or
        breaks all of its promises since its last one.
        """
        choices = _PROMISES.get(self.env_id.partition("-")[0], ())
        promised: dict[int, list[str]] = {seat: [] for seat in seats}
        made = kept = 0
        for (seat, text), kind in zip(self._moves, self._kinds, strict=True):
            named = [choice for choice in choices if choice in text.lower()]
            if seat not in promised or not choices:
                continue
            if kind == "message":
                promised[seat] += named if len(named) == 1 else []
            else:
                chosen = next(
                    (c for c in reversed(choices) if f"[{c}]" in text.lower()), choices[0]
                )
                made += len(promised[seat])
                kept += promised[seat].count(chosen)
                promised[seat] = []
        return {"statements": float(made), "true_statements": float(kept)} if choices else {}

    def _paid(self, given: Mapping[int, float], *, scored: bool = True) -> Outcome:
        rewards = tuple(float(given.get(seat, 0)) for seat in range(self.num_seats))
        scores = tuple(min(1.0, max(0.0, (reward + 1) / 2)) for reward in rewards)
        seat_scores = scores if scored else (0.0,) * self.num_seats
        mean = sum(seat_scores) / self.num_seats
        over = self._env.state.done
        return Outcome(
            over=over,
            agreed=over and self._agreed(),
            score=mean,
            score_norm=mean,
            rewards=rewards,
            seat_scores=seat_scores,
        )

    def _agreed(self) -> bool:
        """Whether an offer was accepted, in a game with offers; True in other games."""
        state = self._env.state.game_state
        trades = state.get("trade_history") if isinstance(state, Mapping) else None
        if trades is not None:  # an accept without an offer is legal there
            return any(trade["outcome"] == "Accepted" for trade in trades)
        accepts = (_ACCEPT in text.lower() for _, text in self._moves)
        return _ACCEPT not in self._texts[0][0].lower() or any(accepts)

    def state(self) -> dict[str, Any]:
        """The seed and the moves, which are played again to restore the game."""
        return {
            "env_id": self.env_id,
            "instance": {"key": self.instance.key, "seed": self.instance.seed},
            "moves": [list(move) for move in self._moves],
            "num_errors": list(self._num_errors),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], **settings: Any) -> TextArenaGame:
        """The game described by `state()`, in an environment with these settings."""
        instance, num_players = Instance(**state["instance"]), len(state["num_errors"])
        game = cls(state["env_id"], instance, num_players, **settings)
        for seat, text in state["moves"]:
            game.step(seat, text)
        game._num_errors = list(state["num_errors"])
        game._opening = ["\n".join(filter(None, texts)) for texts in game._texts]
        return game

    def _refused(self, seat: int, kind: str, why: str) -> Step:
        self._num_errors[seat] += 1
        return Step(seat, None, f"Error: {why}", kind, ("",) * self.num_seats)

    def _take_observations(self, mover: int | None) -> tuple[str, ...]:
        """Remove and return each seat's unread text, without the mover's own words."""
        state, texts = self._env.state, []
        for seat in range(self.num_seats):
            lines = [
                f"[{state.role_mapping.get(sender, f'Player {sender}')}] "
                f"{words if sender == textarena.GAME_ID else indent_further(words)}"
                for sender, words, kind in state.observations[seat]
                if not (sender == seat == mover and kind == _ACTION)
            ]
            state.observations[seat] = []
            if not lines and seat == self.seat_to_move:
                lines = ["Your turn."]
            texts.append("\n".join(lines))
        return tuple(texts)

    @contextmanager
    def _own_random(self) -> Iterator[None]:
        """Give Python's global generator this game's state; restore the previous one at exit."""
        outer = random.getstate()
        random.setstate(self._random)
        try:
            yield
        finally:
            self._random = random.getstate()
            random.setstate(outer)


_ADMIN = textarena.ObservationType.GAME_ADMIN
_ACTION = textarena.ObservationType.PLAYER_ACTION


def module_of(name: str, **settings: Any) -> SimpleNamespace:
    """A game module in the form that dialop/kit.py reads, for the TextArena game with this id, or
    ID:N, without N for the fewest players from two on. `settings` are the environment's own.

    Raises:
        ValueError: for an unknown id (names the nearest), or a game that such players cannot play.
    """
    env_id, _, num = name.partition(":")
    known = textarena.envs.registration.ENV_REGISTRY
    if _raw_id(env_id) not in known:
        near = difflib.get_close_matches(env_id, known, n=1)
        raise ValueError(
            f"game.name must be {PREFIX}ID with an id of TextArena, got {PREFIX}{env_id}"
            + (f"; nearest is {PREFIX}{near[0]}" if near else "")
        )
    if num and not (num.isdecimal() and 2 <= int(num) <= _MOST):
        raise ValueError(f"game.name {PREFIX}ID:N must have 2 to {_MOST} players, got {num}")
    game: TextArenaGame | None = None
    judged = _JURY in known[_raw_id(env_id)].kwargs and _JURY not in settings
    why = f"it needs a jury of your own ({_OWN_JURY})" if judged else ""
    for num_players in [] if judged else [int(num)] if num else range(2, _MOST + 1):
        try:
            with redirect_stdout(StringIO()):  # a download that fails is printed for each try
                game = TextArenaGame(env_id, Instance("", 0), num_players, **settings)
            break
        except Exception as error:  # noqa: BLE001
            why = why or error_line(error)
            if words := _WORDS.search(str(error)):
                why = f"it needs a word list: python -m nltk.downloader {words[1]}"
                break
    if game is None:
        players = f"by {num}" if num else "by two or more"
        why = _MASTER if _SERVICE in why else why
        raise ValueError(f"game.name {PREFIX}{env_id} cannot be played {players}: {why}")
    num_seats = game.num_seats

    def generate_instance(options: Any, *, seed: int, index: int) -> Instance:
        draw = random.Random(f"{seed} {index}")
        return Instance(f"{env_id}-{seed}-{index}", draw.randrange(2**31))

    return SimpleNamespace(
        ROLES=("player",) * num_seats,
        generate_instance=generate_instance,
        new_game=lambda instance, options: TextArenaGame(env_id, instance, num_seats, **settings),
        restore=lambda state: TextArenaGame.from_state(state, **settings),
    )


def _raw_id(env_id: str) -> str:
    return env_id if env_id.endswith(_RAW) else f"{env_id}{_RAW}"


def table() -> Iterator[str]:
    """Lines of a table in markdown, a row for each kind of game.

    A row has its first id, the number of players, and whether a first move of words alone is a
    message; or why it does not open here.
    """
    first: dict[str, str] = {}
    for env_id in textarena.envs.registration.ENV_REGISTRY:
        first.setdefault(env_id.partition("-v")[0], env_id)
    yield "| id | players | talk |"
    yield "|---|---|---|"
    for env_id in first.values():
        try:
            module = module_of(env_id)
            game = module.new_game(Instance("", 0), None)
            step = game.step(game.seat_to_move or 0, "Hello there.")
            talk = "yes" if step.action == "message" else "no"
            yield f"| `{env_id}` | {game.num_seats} | {talk} |"
        except Exception as error:  # noqa: BLE001
            why = error_line(error).rpartition("by two or more: ")[2]
            why = re.sub(r"\*{5,}|(?<!\w)'?/\S*/", "", why).strip().partition(". ")[0]
            why = why.replace("|", "/")
            yield f"| `{env_id}` | – | {why[:80]} |"


def main(words: Sequence[str] | None = None) -> int:
    """Run the command: print the table of the games that open here.

    It opens every game once, which takes a minute; what the games print goes to stderr. Returns 0.
    """
    parser = argparse.ArgumentParser(
        prog="python -m selfplay.extras.textarena", description="Prints which games open."
    )
    parser.add_argument("--version", action="version", version=f"selfplay {__version__}")
    parser.parse_args(words)
    with redirect_stdout(sys.stderr):  # some games print
        lines = list(table())
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
