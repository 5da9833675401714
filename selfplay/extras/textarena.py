"""Any two-player TextArena game as a game of this package: `game.name: textarena:ID`.

The rules, texts and rewards are TextArena's. A move that it calls invalid is refused here and
changes nothing; the player may try again. The seats' rewards are the game's own, such as 1 for a
win and -1 for a loss; a seat's score is its reward mapped to [0, 1]. TextArena draws from Python's
global generator, so each game swaps in its own generator state while it runs.
"""

from __future__ import annotations

import copy
import difflib
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

try:
    import textarena
except ImportError as error:
    raise ValueError(
        f"game.name textarena:ID needs TextArena ({error}); `pip install -r "
        "requirements/bridges.txt` installs it"
    ) from error

from dialop.game import Game, Outcome, Prompt, Step
from dialop.shown import error_line
from dialop.tags import indent_further

PREFIX = "textarena:"
_RAW = "-raw"  # suffix of the ids of environments without TextArena's observation wrappers
_ACCEPT = "[accept]"  # the move that ends a negotiation, named in its prompt


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
    """One play of a TextArena environment. Error kinds: over, not_your_turn, invalid."""

    num_seats = 2

    def __init__(self, env_id: str, instance: Instance) -> None:
        self.env_id, self.instance = env_id, instance
        self._random = random.Random(instance.seed).getstate()
        self._moves: list[tuple[int, str]] = []
        self._num_errors = [0, 0]
        self._env = textarena.make(_raw_id(env_id))
        with self._own_random():
            self._env.reset(num_players=2, seed=instance.seed)
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
        before, random_before = self._env, self._random
        self._env = copy.deepcopy(before)
        with self._own_random():
            self._env.step(action=text.encode("utf-8", "replace").decode("utf-8"))
        state = self._env.state
        if state.error_count or state.game_info[seat].get("invalid_move"):
            why = [words for _, words, kind in state.observations[seat] if kind == _ADMIN]
            reason = why[-1] if why else str(state.game_info[seat].get("reason", "invalid move"))
            self._env, self._random = before, random_before
            return self._refused(seat, "invalid", reason)
        observations = self._take_observations(seat)
        self._moves.append((seat, text))
        for each, words in enumerate(observations):
            self._texts[each].append(words)
        return Step(seat, "move", None, None, observations)

    def clone(self) -> TextArenaGame:
        """An independent copy. The environment is shared: `step` replaces it, never changes it."""
        twin = copy.copy(self)
        twin._moves, twin._num_errors = list(self._moves), list(self._num_errors)
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
        """TextArena's rewards after too many invalid moves: -1 for this seat, 1 for the other."""
        return self._paid({seat: -1, 1 - seat: 1})

    def _paid(self, given: Mapping[int, float], *, scored: bool = True) -> Outcome:
        rewards = float(given.get(0, 0)), float(given.get(1, 0))
        scores = tuple(min(1.0, max(0.0, (reward + 1) / 2)) for reward in rewards)
        seat_scores = scores if scored else (0.0, 0.0)
        mean = sum(seat_scores) / 2
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
        trades = self._env.state.game_state.get("trade_history")
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
    def from_state(cls, state: Mapping[str, Any]) -> TextArenaGame:
        """The game described by `state()`."""
        game = cls(state["env_id"], Instance(**state["instance"]))
        for seat, text in state["moves"]:
            game.step(seat, text)
        game._num_errors = list(state["num_errors"])
        game._opening = ["\n".join(filter(None, texts)) for texts in game._texts]
        return game

    def _refused(self, seat: int, kind: str, why: str) -> Step:
        self._num_errors[seat] += 1
        return Step(seat, None, f"Error: {why}", kind, ("", ""))

    def _take_observations(self, mover: int | None) -> tuple[str, str]:
        """Remove and return each seat's unread text, without the mover's own words."""
        state, texts = self._env.state, []
        for seat in range(2):
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
        return texts[0], texts[1]

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


def module_of(env_id: str) -> SimpleNamespace:
    """A game module in the form that dialop/kit.py reads, for the TextArena game with this id.

    Raises:
        ValueError: for an unknown id (names the nearest), or if the game is not for two players.
    """
    known = textarena.envs.registration.ENV_REGISTRY
    if _raw_id(env_id) not in known:
        near = difflib.get_close_matches(env_id, known, n=1)
        raise ValueError(
            f"game.name must be {PREFIX}ID with an id of TextArena, got {PREFIX}{env_id}"
            + (f"; nearest is {PREFIX}{near[0]}" if near else "")
        )
    try:
        game = TextArenaGame(env_id, Instance("", 0))
    except Exception as error:
        raise ValueError(
            f"game.name {PREFIX}{env_id} cannot be played by two: {error_line(error)}"
        ) from error
    if not isinstance(game._env.state, textarena.TwoPlayerState):
        raise ValueError(f"game.name {PREFIX}{env_id} must be a game of two players")

    def generate_instance(options: Any, *, seed: int, index: int) -> Instance:
        draw = random.Random(f"{seed} {index}")
        return Instance(f"{env_id}-{seed}-{index}", draw.randrange(2**31))

    return SimpleNamespace(
        ROLES=("player", "player"),
        generate_instance=generate_instance,
        new_game=lambda instance, options: TextArenaGame(env_id, instance),
        restore=TextArenaGame.from_state,
    )


def _raw_id(env_id: str) -> str:
    return env_id if env_id.endswith(_RAW) else f"{env_id}{_RAW}"
