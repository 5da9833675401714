"""The declarations of a game's module, and how a game's name is resolved to its module.

A game is one module. It must define

    ROLES                                        each seat's role, as in ("user", "agent")
    generate_instance(options, *, seed, index)   instance `index` of the stream `seed`
    new_game(instance, options)                  a new `dialop.game.Game`

and may define

    Options                  a frozen dataclass of the game's settings, all with defaults
    restore(state)           the game that `Game.state()` describes
    SCRIPTS                  its scripted players by name, as functions (view, draw) -> move
    SCRIPT_NAMES, make_script(spec, *, seed)   instead of SCRIPTS: the names, and the player of a
                             spec; ValueError for an unknown one
    BASELINES                scripted players that evaluations compare the policy with (default:
                             one per distinct cast of players)
    POLICY_SEATS             the seats of the policy, unless a run names others (default: all)
    PLAYED_BY_PEOPLE         whether a .jsonl of instances holds recorded human games
    deals(options)           all instances with their probabilities, in a game that also lists its
                             moves (`Game.legal_moves`): for exact values (dialop.tree)
    ANSWERS                  whether a move can require an answer (`Game.answer_due`; default: yes)
    TITLE                    the name of the game in prose (default: its name)
    FACTS                    for names of `Outcome.facts` the words that a page shows

for recorded games of people

    instance_from_record(record, *, key)       the instance of a record
    moves_from_record(record, instance)        its moves, each with `seat`, `kind` and `text`
    written(move, instance)  a recorded move as its seat would write it
    longest(moves)           the most moves in a start (default: all before an acceptance)
    ROOMS                    the seats that talk in each room (default: one room of two seats)
    RECORD_FIELDS            fields that only a record of this game has

and any other method of `Kit` as a function of that name. For a function that the module lacks,
`Kit` has a default or raises ValueError when it is called.

The fields of `Options` are the settings `game.options.NAME`. Three boolean fields have the same
meaning in every game that has them (`switch`): `messages` allows messages, `brief` selects short
texts for small models, `private_reasoning` allows private text before a move's tag.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dialop.forms import Form, tag_forms
from dialop.game import Game, GameError, Prompt, Script
from dialop.modules import own_module
from dialop.people import PeoplesGame, peoples_games
from dialop.shown import error_line, is_own
from dialop.specs import check_options as check_options
from dialop.specs import nearest, parse_spec
from dialop.specs import option as option
from dialop.starts import RecordedGame, before_accept, read_recorded, replay
from dialop.turns import FunctionScript, TurnGame
from dialop.workers import Spawn

if TYPE_CHECKING:
    import numpy as np

# Games of other libraries, by their names' prefix; by name, as games do not import the trainer.
BRIDGES = {"textarena": "selfplay.extras.textarena", "verifiers": "selfplay.extras.verifiers"}
SWITCHES = ("messages", "brief", "private_reasoning")
_REQUIRED = ("ROLES", "generate_instance", "new_game")
_HERE = Path(__file__).resolve().parent


@dataclasses.dataclass(frozen=True, slots=True)
class NoOptions:
    """The settings of a game without any."""


def switch(options: Any, name: str, *, default: bool = False) -> bool:
    """The boolean field `name` of a game's options; `default` if the game has no such field."""
    return bool(getattr(options, name, default))


def stream_rng(seed: int, index: int) -> np.random.Generator:
    """The generator of instance `index` of the stream `seed`, the same in every process."""
    if seed < 0 or index < 0:
        raise ValueError(f"seed and index must be at least 0, got {seed} and {index}")
    import numpy as np  # here, so that reading settings does not load it

    return np.random.default_rng((seed, index))


class Kit:
    """A game's module, with defaults for what it does not define.

    Raises:
        ValueError: if a required name is missing or a declaration is invalid.
    """

    def __init__(self, name: str, module: Any) -> None:
        self.name, self._module = name, module
        self.file: str | None = getattr(module, "__file__", None)
        missing = [each for each in _REQUIRED if not hasattr(module, each)]
        if missing and "site-packages" in Path(self.file or "").parts:
            raise ValueError(
                f"game {name} is an installed package, {self.file}, which is no game; for one of "
                f"your own give its file, such as my_games/{name}.py"
            )
        if missing:
            raise ValueError(f"game {name} must define {', '.join(missing)} (dialop/kit.py)")
        self.ROLES: tuple[str, ...] = tuple(module.ROLES)
        if isinstance(module.ROLES, str) or not all(isinstance(r, str) for r in self.ROLES):
            raise ValueError(f"ROLES of game {name} must be a tuple of names, got {module.ROLES!r}")
        self.Options: type[Any] = getattr(module, "Options", NoOptions)
        _check_options(name, self.Options)
        self._scripts: Mapping[str, Any] = getattr(module, "SCRIPTS", {})
        if not isinstance(self._scripts, Mapping):
            raise ValueError(
                f"SCRIPTS of game {name} must be a dict of functions by name, got {self._scripts!r}"
            )
        _check_class(name, module.new_game)
        names = getattr(module, "SCRIPT_NAMES", self._scripts)
        self.SCRIPT_NAMES: tuple[str, ...] = tuple(names)
        self.BASELINES: tuple[str, ...] = tuple(
            module.BASELINES if self.has("BASELINES") else self._different(self.SCRIPT_NAMES)
        )
        every_seat = range(len(self.ROLES))
        self.POLICY_SEATS: tuple[int, ...] = tuple(getattr(module, "POLICY_SEATS", every_seat))
        self.PLAYED_BY_PEOPLE: bool = getattr(module, "PLAYED_BY_PEOPLE", False)
        self.ANSWERS: bool = getattr(module, "ANSWERS", True)
        self.TITLE: str = getattr(module, "TITLE", name)
        self.FACTS: Mapping[str, str] = getattr(module, "FACTS", {})

    def generate(
        self, options: Any, *, seed: int, start: int = 0, num: int, processes: int = 1
    ) -> list[Any]:
        """Instances start..start+num-1 of the stream that `seed` selects."""
        if num < 0 or processes < 1:
            raise ValueError(f"num must be at least 0 and processes 1, got {num} and {processes}")
        indices = range(start, start + num)
        if processes == 1:
            return [self._made(options, seed, index) for index in indices]
        make_one = partial(_generate_one, self.name, options, seed)
        with ProcessPoolExecutor(processes, mp_context=Spawn()) as pool:
            chunk = max(1, min(64, num // (4 * processes)))
            return list(pool.map(make_one, indices, chunksize=chunk))

    def _made(self, options: Any, seed: int, index: int) -> Any:
        try:
            instance = self._module.generate_instance(options, seed=seed, index=index)
        except (Exception, SystemExit) as error:
            if not is_own(error) or isinstance(error, GameError):
                raise
            # A worker's traceback stays in its process.
            why = f"generate_instance of game {self.name} failed at index {index}: "
            raise GameError(f"{why}{error_line(error)}") from error
        if not isinstance(getattr(instance, "key", None), str):
            raise GameError(
                f"generate_instance of game {self.name} must return an instance with a text `key`, "
                f"got {instance!r}"
            )
        return instance

    def new_game(self, instance: Any, options: Any) -> Game:
        """A new game. Raises ValueError unless it has one seat for each role."""
        game: Game = self._module.new_game(instance, options)
        if isinstance(game, TurnGame) and not hasattr(game, "_texts"):
            raise GameError(
                f"{type(game).__name__}.__init__ of game {self.name} must call "
                "super().__init__(instance, options); set attributes in `begin` instead"
            )
        if game.num_seats != len(self.ROLES):
            raise ValueError(
                f"game {self.name} must have one seat for each role, got {game.num_seats} seats "
                f"and ROLES {self.ROLES}"
            )
        return game

    def has(self, name: str) -> bool:
        """Whether the module defines this name."""
        return hasattr(self._module, name)

    def near(self, name: str) -> str:
        """The end of a message about a missing name: the nearest name in the module, or ""."""
        home = getattr(self._module, "__name__", None)  # None for a module made by a bridge
        own = (n for n, v in vars(self._module).items() if getattr(v, "__module__", home) == home)
        return nearest(name, own)

    def restore(self, state: Mapping[str, Any]) -> Game:
        """The game that `Game.state()` describes."""
        return self._required("restore")(state)

    def make_script(self, spec: str, *, seed: int) -> Script:
        """A scripted player. Raises ValueError for an unknown spec; names the valid ones."""
        if self.has("make_script"):
            return self._module.make_script(spec, seed=seed)
        if not self._scripts:
            raise ValueError(
                f"game {self.name} must define SCRIPTS, which this needs (dialop/kit.py)"
                f"{self.near('SCRIPTS')}"
            )
        parse_spec(spec, dict.fromkeys(self._scripts, ()))
        return FunctionScript(self._scripts[spec], seed)

    def seated(self, spec: str) -> tuple[str, ...]:
        """The specs of all seats in a scripted game in which one player has this spec."""
        if self.has("seated"):
            return tuple(self._module.seated(spec))
        return (spec,) * len(self.ROLES)

    def _different(self, specs: Sequence[str]) -> list[str]:
        """The first spec of each distinct cast of players."""
        casts: dict[tuple[str, ...], str] = {}
        for spec in specs:
            try:
                casts.setdefault(self.seated(spec), spec)
            except Exception as error:
                raise ValueError(
                    f"seated({spec!r}) of game {self.name} must return a spec for each seat: "
                    f"{error_line(error)}"
                ) from error
        return [*casts.values()]

    def deals(self, options: Any) -> list[tuple[Any, float]]:
        """All instances with their probabilities. Raises GameError unless they sum to 1."""
        given = self._required("deals")(options)
        try:
            found = [(instance, float(share)) for instance, share in given]
        except (TypeError, ValueError) as error:
            if is_own(error):
                raise
            rule = "must give pairs of an instance and a probability, a number"
            raise GameError(
                f"deals of game {self.name} {rule}: {error}, got {given!r:.200}"
            ) from error
        total = sum(share for _, share in found)
        least = min([share for _, share in found], default=-1.0)
        if not (least >= 0 and abs(total - 1.0) <= 1e-9):  # so that NaN is refused
            raise GameError(
                f"deals of game {self.name} must give probabilities that sum to 1, got {total:g} "
                f"over {len(found)} deals"
            )
        return found

    def vary(self, instance: Any, seat: int, *, seed: int) -> Any:
        """Another instance that differs only in what this seat sees, None if there is none. For
        `python -m dialop check` and the view effect (docs/evaluation.md)."""
        return self._required("vary")(instance, seat, seed=seed)

    def read(self, path: Path) -> list[Any]:
        """The instances of a file. Raises ValueError for an invalid row."""
        return list(self._required("read")(path))

    def easy(self, options: Any) -> Any:
        """The options without the filter on instance difficulty."""
        return self._module.easy(options) if self.has("easy") else options

    def write(self, path: Path, instances: Sequence[Any]) -> None:
        """Write a .parquet file that `read` can read."""
        self._required("write")(path, instances)

    def replay(self, record: Mapping[str, Any], *, index: int) -> dict[str, Any]:
        """One recorded game, rescored by the module's `rescore(record, *, key)`, as plain values
        (`dialop.starts.replay`)."""
        return replay(self._required("rescore"), record, index=index)

    def read_recorded(self, path: Path) -> Sequence[RecordedGame]:
        """The recorded games of a file that can be continued, in the order of `read`."""
        if self.has("read_recorded"):
            return list(self._module.read_recorded(path))
        instance, moves = map(self._required, ("instance_from_record", "moves_from_record"))
        return read_recorded(path, instance, moves, getattr(self._module, "longest", before_accept))

    def read_people(self, path: Path) -> Sequence[PeoplesGame]:
        """The recorded games of a file, for imitation."""
        if self.has("read_people"):
            return list(self._module.read_people(path))
        options, rooms = self.Options(), getattr(self._module, "ROOMS", ((0, 1),))
        new = partial(self.new_game, options=options)
        return peoples_games(self.read_recorded(path), new, self._required("written"), rooms)

    def digest(self, instance: Any) -> str:
        """A digest of the players' view of the instance, independent of the file."""
        return str(self._module.digest(instance) if self.has("digest") else instance.key)

    def recorded_tally(self, record: Mapping[str, Any], instance: Any) -> dict[str, float]:
        """The measures of one recorded game, as in `Game.measures`, and its `score`."""
        return dict(self._required("recorded_tally")(record, instance))

    def described(self, instances: Sequence[Any], options: Any) -> dict[str, Any]:
        """Facts about the instances and options for a report, as plain values."""
        if self.has("described"):
            return dict(self._module.described(instances, options))
        return dataclasses.asdict(options)

    def phrases(
        self, instances: Sequence[Any], options: Any, *, split_lines: bool
    ) -> Sequence[str]:
        """Recurring phrases of the game's texts; a scratch model's tokenizer makes each one token.
        `split_lines` is `model.scratch.split_lines`."""
        if self.has("phrases"):
            return list(self._module.phrases(instances, options, split_lines=split_lines))
        return ()

    def board(self, game: Game, seat: int) -> dict[str, Any]:
        """The seat's own table for a page, {} for none: names of `rows` and `columns`, the `cells`
        of each row (a number, a text, or None for a cell that the seat does not see), and
        optionally a `note`, a `key` in words, and the `marks` [row, column] of seat `marked_by`."""
        return dict(self._module.board(game, seat)) if self.has("board") else {}

    def picture(self, state: Mapping[str, Any], turns: Sequence[Mapping[str, Any]]) -> Any:
        """The picture of a finished game and of each of its turns for a page: (table, turns).

        `state` and `turns` come from the game's record. The module's `picture(game, num)` gets the
        game and the number of legal moves made in play, and returns a table and a dict for each of
        these moves. A table, {} for none, is like a `board`, but of what all seats see together:
        `title`, `note`, `key`, `seen` (for each cell the seats that see it), `best` (a list of
        [row, column] to highlight) and `own` (each seat's board). A move's dict may have `notes`
        (each a list of texts and, for errors, {"wrong": text}) and `proposal`: its `cells`
        [row, column, text next to it], `best` for it, and `label`.
        """
        nothing: list[dict[str, Any]] = [{} for _ in turns]
        if not self.has("picture"):
            return {}, nothing
        legal = [number for number, turn in enumerate(turns) if turn["error"] is None]
        table, moves = self._module.picture(self.restore(state), len(legal))
        for number, move in zip(legal, moves, strict=True):
            nothing[number] = move
        return table, nothing

    def forms(self, game: Game, seat: int) -> list[Form]:
        """The forms of the moves that a person in this seat, whose turn it is, may make now."""
        return list(self._module.forms(game, seat) if self.has("forms") else tag_forms(game))

    def rooms(self, game: Game, seat: int) -> list[str]:
        """The names of a seat's private rooms, by number; [] if all seats share one room. A move
        starts with the number of its room, as in "0: [message] hello"."""
        return list(self._module.rooms(game, seat)) if self.has("rooms") else []

    def talk(self, game: Game, seat: int) -> list[tuple[int, str, str]] | None:
        """All moves so far as (seat, kind, text), if this seat knows them all; None if a page must
        take them from the seat's texts."""
        return list(self._module.talk(game, seat)) if self.has("talk") else None

    def record(self, game: Game) -> dict[str, Any] | None:
        """A finished game in the format of the game's published data set; None if it has none."""
        return dict(self._module.record(game)) if self.has("record") else None

    def judge_prompt(self, game: Game) -> Prompt:
        """The prompt in which a judge, a chat model, reads a finished game."""
        return self._required("judge_prompt")(game)

    def judged(self, game: Game, answer: str) -> Game | None:
        """A copy of the game whose outcome and measures use the judge's answer; None if the answer
        has no rating, so that the game's own rule applies."""
        return self._required("judged")(game, answer)

    def is_record(self, record: Mapping[str, Any]) -> bool:
        """Whether a record is a recorded game of this module."""
        if self.has("is_record"):
            return bool(self._module.is_record(record))
        fields = getattr(self._module, "RECORD_FIELDS", ())
        return bool(fields) and all(name in record for name in fields)

    def _required(self, name: str) -> Any:
        if not self.has(name):
            raise ValueError(
                f"game {self.name} does not define {name}, which this needs (dialop/kit.py)"
            )
        return getattr(self._module, name)


@lru_cache(maxsize=64)
def load_kit(name: str) -> Kit:
    """The game with this name: one of this package, a module, a path of a .py file, textarena:ID or
    verifiers:ID.

    Raises:
        ValueError: one line, if the name is not a game or its module cannot be imported.
    """
    if name in games():
        return Kit(name, importlib.import_module(f"dialop.{name}.kit"))
    prefix, _, of = name.partition(":")
    if of and prefix in BRIDGES:
        return Kit(name, importlib.import_module(BRIDGES[prefix]).module_of(of))
    expected = (
        f"one of {', '.join(games())}, a module such as my_package.my_game, the path of a .py file "
        f"textarena:ID or verifiers:ID, got {name!r}{nearest(name, games())}"
    )
    return Kit(name, own_module(name, what="game.name", expected=expected))


@lru_cache(maxsize=1)
def games() -> tuple[str, ...]:
    """The names of this package's games: its folders that have a kit.py."""
    return tuple(sorted(path.parent.name for path in _HERE.glob("*/kit.py")))


def _check_options(name: str, options: Any) -> None:
    if not (isinstance(options, type) and dataclasses.is_dataclass(options)):
        raise ValueError(f"Options of game {name} must be a dataclass, got {options!r}")
    if not options.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise ValueError(f"Options of game {name} must be a frozen dataclass")
    for entry in dataclasses.fields(options):
        if entry.default is dataclasses.MISSING and entry.default_factory is dataclasses.MISSING:
            raise ValueError(f"Options.{entry.name} of game {name} must have a default")
    try:
        check_options(options())
    except ValueError as error:
        raise ValueError(f"Options of game {name}: the default of {error}") from None


def _check_class(name: str, made_by: Any) -> None:
    """Raise ValueError if a game's class is not a complete `dialop.turns.TurnGame`."""
    if not (isinstance(made_by, type) and issubclass(made_by, TurnGame)):
        return
    called = f"{made_by.__name__} of game {name}"
    lacking = [
        *sorted(made_by.__abstractmethods__),
        *(each for each in ("num_seats", "tags") if not hasattr(made_by, each)),
    ]
    if lacking:
        raise ValueError(f"{called} must define {', '.join(lacking)} (dialop/turns.py)")
    try:
        inspect.signature(made_by).bind(None, None)
    except TypeError:
        raise ValueError(
            f"{called} must be made with (instance, options), got __init__"
            f"{inspect.signature(made_by.__init__)}; set attributes in `begin` instead"
        ) from None
    for each in ("tags", "bare"):
        texts = getattr(made_by, each)
        if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"{each} of {called} must be a tuple of texts, got {texts!r}")
    if upper := [tag for tag in made_by.tags if tag != tag.lower()]:
        raise ValueError(f"tags of {called} must be in lower case, as moves are read, got {upper}")


def _generate_one(name: str, options: Any, seed: int, index: int) -> Any:
    return load_kit(name).generate(options, seed=seed, start=index, num=1)[0]
