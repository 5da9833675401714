"""Reads a run folder for its page: settings, steps, evaluations, games.

A missing or incomplete file leaves its part of the page empty; a file that cannot be read is named
in `problems`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dialop.kit import Kit
from dialop.shown import on_one_line
from selfplay.apps.report import PAGE_LOG
from selfplay.config import Config
from selfplay.config.load import load
from selfplay.config.own_code import changed_originals, copies_of
from selfplay.config.text import changed
from selfplay.errors import SettingsError
from selfplay.evaluation.rows import ALL_BEFORE, OTHER, Row, named_rows, one_game, read_row
from selfplay.metrics.monitors import warnings_of
from selfplay.metrics.run_folder import is_held
from selfplay.metrics.step_log import plain_json

MAX_TRAINING_GAMES = 240  # games of games.jsonl on a page, evenly spread over the file
LINKED = ("metrics.jsonl", "games.jsonl", "code.txt", "error.txt")  # files that the page links
MEMORY = ("memory_gib", "device_gib")
MAX_GROUPS = 32  # of groups.jsonl, each with all games of one instance in a step
STAGES = ("before", "after")
# Prefixes of the policy's rows in held-out games and in evaluations; a matrix has none.
_HELD_OUT, _EVALUATED, _MATRIX = ("sampled", "greedy"), ("policy",), ()


@dataclass(frozen=True, slots=True)
class RunRow(Row):
    """A row of one of the run's files, the `source`. `kind` is "policy" for the run's policy,
    "reference" for scripts and people, "" for another player of a pair or of a matrix."""

    source: str = ""
    kind: str = ""

    @property
    def all_games(self) -> Iterable[dict[str, Any]]:
        """The first games and the examples, each once."""
        return {
            game.get("instance"): game for game in (*self.games, *self.examples.values())
        }.values()


@dataclass(frozen=True, slots=True)
class RunFiles:
    """The contents of a run folder. `settings` are (key, default, value) where the two differ;
    `about` has model, game, start and command as (name, value); `games` start with the games of
    groups, whose seats have reward, return and advantage."""

    name: str
    folder: Path
    config: Config | None  # None if the settings cannot be read
    settings: list[tuple[str, str, str]]
    about: list[tuple[str, str]]
    state: str  # running, stopped or finished
    steps: list[dict[str, Any]]
    imitation: list[dict[str, Any]]  # the lines of warm_start.jsonl
    rows: list[RunRow]
    games: list[dict[str, Any]]
    problems: list[str] = field(default_factory=list)
    tracker: str = ""  # the address of the run's page at its tracker

    @property
    def kit(self) -> Kit | None:
        """The game's kit; None if its code cannot be imported."""
        return self.config.game.kit if self.config and self.config.game.is_imported else None

    @property
    def warnings(self) -> list[str]:
        """The warnings of the run's monitors about its steps."""
        return warnings_of(self.config.monitors, self.steps) if self.config else []

    @property
    def unequal(self) -> bool:
        """Whether the seats of some game have different rewards, as in mixed-motive and zero-sum
        games."""
        records = (*self.games, *(game for row in self.rows for game in row.all_games))
        return any(len(set(map(str, game.get("rewards") or ()))) > 1 for game in records)

    @property
    def redrawn_s(self) -> float:
        """Seconds until the page of a running run has certainly been redrawn: three times a minute
        and a step, plus two minutes for held-out games; an hour before a step's time is known."""
        seconds = [line["step_s"] for line in self.steps[-20:] if "step_s" in line]
        return 3 * (60 + max(seconds)) + 120 if seconds else 3600.0

    @property
    def unused(self) -> str:
        """The share of groups without variance, and the steps that made no update; "" before the
        first step."""
        flat = [n for step in self.steps if (n := step.get("zero_variance_groups")) is not None]
        if not flat:
            return ""
        newest = flat[-20:]
        text = f"{sum(flat) / len(flat):.0%}, {sum(newest) / len(newest):.0%} lately"
        num = sum(step.get("num_optimizer_steps") == 0 for step in self.steps)
        return text + f"; {num} of {len(self.steps)} steps made no update" * (num > 0)

    def row(self, source: str, name: str) -> RunRow | None:
        """The row of this name in a file; None without one."""
        return next((r for r in self.rows if (r.source, r.name) == (source, name)), None)


def run_above(folder: Path) -> str:
    """The end of an error message: the run's folder that this one is in, "" without one."""
    home = next((each for each in folder.parents if (each / "config.yaml").is_file()), None)
    return f"; nearest is {home}" if home else ""


def read_run(folder: Path) -> RunFiles:
    """Read a run's folder. Raises ValueError for a folder without a run."""
    if not (folder / "config.yaml").is_file():
        near = [p.parent.name for p in sorted(folder.parent.glob("*/config.yaml"))]
        hint = f"; nearby runs: {', '.join(near[:8])}" if near else run_above(folder)
        raise ValueError(f"RUN must be a folder with a config.yaml, got {folder}{hint}")
    problems: list[str] = []
    config = _config(folder / "config.yaml", problems)
    steps = list(_steps(folder / "metrics.jsonl", problems))
    page_log = {
        n: line for line in _lines(folder / PAGE_LOG, problems) if _is_number(n := line.get("step"))
    }
    last = steps[-1]["step"] if steps else 0
    rows = _with_others(_with_twins(folder, list(_rows(folder, last, problems)), problems))
    if not one_game(rows):
        problems.append("the game's code changed between evaluations: they are of different games")
    return RunFiles(
        name=folder.resolve().name,
        folder=folder,
        config=config,
        settings=changed(config, Config()) if config else [],
        about=list(_about(folder, config)),
        state=_state(folder),
        steps=[_derived(step, page_log.get(step["step"], {})) for step in steps],
        imitation=[
            each
            for each in _steps(folder / "warm_start.jsonl", problems)
            if "imitation_loss" in each
        ],
        rows=rows,
        games=[_with_numbers(game, page_log) for game in _training_games(folder, problems)],
        problems=problems,
        tracker=_tracker(folder, problems),
    )


def _tracker(folder: Path, problems: list[str]) -> str:
    """The address in tracker.json, "" without one that a browser may open."""
    address = str(_json(folder / "tracker.json", problems).get("url"))
    return address if address.startswith(("https://", "http://")) else ""


def with_unique_names(runs: Sequence[RunFiles]) -> list[RunFiles]:
    """The runs, each name preceded by as many parent folders as make it unique."""
    paths = {run.folder.resolve().parts for run in runs}

    def name(own: tuple[str, ...]) -> str:
        """The run's name, with as many parent folders as it needs."""
        ends = ({path[-num:] for path in paths - {own}} for num in range(1, len(own)))
        num = next((i for i, other in enumerate(ends, start=1) if own[-i:] not in other), len(own))
        return "/".join(own[-num:])

    return [replace(run, name=name(run.folder.resolve().parts)) for run in runs]


def _config(path: Path, problems: list[str]) -> Config | None:
    """The settings of a run, with its game if its files are unchanged; None if they cannot be read.

    A page imports no copies of code: with changed files the games are shown as text, and `problems`
    says so."""
    home = copies_of(path)
    try:
        if home is None:
            return load(Config, path)
        why = changed_originals(home, of_game=True)
        if not why:
            try:
                return load(Config, path, code="originals")
            except SettingsError as error:
                why = str(error)
        problems.append(on_one_line(f"{why}; games are shown as text: a page imports no copies"))
        return load(Config, path, code="none")
    except SettingsError as error:
        problems.append(on_one_line(str(error)))
        return None


def _about(folder: Path, config: Config | None) -> Iterator[tuple[str, str]]:
    """Model and game from the settings; the first start and the last command from code.txt."""
    if config is not None:
        shape = config.model.scratch
        scratch = f"from scratch, {shape.arch} of width {shape.width}" if shape else ""
        adapters = f", LoRA of rank {config.model.lora.rank}" if config.model.lora else ""
        yield "model", f"{config.model.path or scratch}{adapters}"
        if config.policies:
            models = {name: (of.model or {}).get("path") for name, of in config.policies.items()}
            own = (f"{name} from {path}" if path else name for name, path in models.items())
            yield "policies", ", ".join(own)
        yield "game", config.game.name
    path = folder / "code.txt"
    text = path.read_text("utf-8", errors="replace") if path.is_file() else ""
    lines = [line.partition(" ") for line in text.splitlines()]
    starts, commands = (
        [value for name, _, value in lines if name == wanted] for wanted in ("started", "command")
    )
    if starts:
        yield "started", on_one_line(starts[0])
    if commands:
        yield "command", on_one_line(commands[-1])


def _state(folder: Path) -> str:
    """Finished if the last held-out games are there; running if a trainer of this machine holds the
    folder; else stopped. A trainer on another machine is not seen."""
    if (folder / "held_out_after.json").exists():
        return "finished"
    return "running" if is_held(folder) else "stopped"


def _json(path: Path, problems: list[str]) -> dict[str, Any]:
    """The object in a JSON file; {} without one, or with a problem for a file that holds something
    else."""
    if path.exists() and not path.is_file():  # reading a pipe would block
        problems.append(f"{path.name} must be a file")
        return {}
    shown = path.name if path.name != "evaluation.json" else f"{path.parent.name}/{path.name}"
    try:
        value = plain_json(path.read_bytes())
        if isinstance(value, dict):
            return value
        problems.append(f"{shown} must contain one JSON object")
    except FileNotFoundError:
        pass
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{shown}: {error}")
    return {}


def _steps(path: Path, problems: list[str]) -> Iterator[dict[str, Any]]:
    """The numbers of each step of metrics.jsonl or warm_start.jsonl."""
    for line in _lines(path, problems):
        numbers = {name: n for name, n in line.items() if type(n) in (int, float)}
        if wrong := [name for name, n in line.items() if isinstance(n, bool)]:
            problem = f"{wrong[0]} must be a number, got {json.dumps(line[wrong[0]])}"
            problems.append(f"{path.name}, step {line.get('step')}: {problem}")
        if "step" in numbers:
            yield numbers
        else:
            problems.append(f"{path.name}: step must be a number, got {line.get('step')!r:.80}")


def _derived(step: dict[str, Any], page: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a step, with the memory of its line in page.jsonl, and sampled tokens a game
    and a turn, without those of its branches.

    Tokens are counted in aborted games too, so a step with one has neither. `turns` counts those of
    all players, so a step in which others played has no tokens a turn.
    """
    tokens, games = step.get("num_generated_tokens", 0), step.get("num_games")
    tokens -= step.get("num_branch_tokens", 0)
    own = {name: page[name] for name in MEMORY if _is_number(page.get(name))}
    if tokens and games and not step.get("num_void"):
        own["tokens_game"] = tokens / games
        with_others = any(name.startswith("score/") for name in step)
        if (turns := step.get("turns")) and not with_others:
            own["tokens_turn"] = tokens / games / turns
    return step | own


def _with_numbers(game: dict[str, Any], page_log: Mapping[Any, Any]) -> dict[str, Any]:
    """A game whose turns have the advantages and mismatches of their tokens, from page.jsonl."""
    with suppress(LookupError, TypeError, ValueError):  # damaged: the game is shown without them
        for own in page_log[game["step"]]["games"]:
            if (own["instance"], own["episode"]) == (game["instance"], game["episode"]):
                pairs = zip(game["turns"], own["turns"], strict=True)
                return game | {"turns": [turn | (numbers or {}) for turn, numbers in pairs]}
    return game


def _is_number(value: Any) -> bool:
    """Whether a value of JSON is a number; true and false are none."""
    return type(value) in (int, float)


def _with_twins(folder: Path, rows: list[RunRow], problems: list[str]) -> list[RunRow]:
    """The rows; the policy's before self-play also has the games of the instances that are examples
    after it, such as the worst."""
    before, after = (
        next((row for row in rows if (row.source, row.name) == (stage, "sampled")), None)
        for stage in STAGES
    )
    if before is None or after is None:
        return rows
    wanted = {game.get("instance") for game in after.all_games}
    wanted -= {game.get("instance") for game in before.all_games}
    path = folder / ALL_BEFORE
    twins = [game for game in _lines(path, problems) if game.get("instance") in wanted]
    return [replace(row, games=(*row.games, *twins)) if row is before else row for row in rows]


def _lines(path: Path, problems: list[str]) -> Iterator[dict[str, Any]]:
    """The complete JSON lines of a file. A running run may still be writing the last one."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            yield from _line(line, f"{path.name} line {number}", problems)


def _line(line: bytes, where: str, problems: list[str]) -> Iterator[dict[str, Any]]:
    """The object of a line, if it is complete and holds one; a line that cannot be read is a
    problem."""
    if not line.endswith(b"\n"):
        return
    try:
        value = plain_json(line)
    except (ValueError, RecursionError) as error:
        problems.append(f"{where}: {error}")
        return
    if isinstance(value, dict):
        yield value


def _training_games(folder: Path, problems: list[str]) -> Iterator[dict[str, Any]]:
    """The games of groups.jsonl, then the other games of games.jsonl."""
    seen: set[tuple[str, ...]] = set()

    def key(game: Mapping[str, Any]) -> tuple[str, ...]:
        """What tells a game from the others of its run: step, instance and number. groups.jsonl and
        games.jsonl may both have it."""
        return tuple(str(game.get(name)) for name in ("step", "instance", "episode"))

    for group in _spread(folder / "groups.jsonl", problems, most=MAX_GROUPS):
        games = group.get("games")
        if not (isinstance(games, list) and all(isinstance(game, dict) for game in games)):
            problems.append(f"groups.jsonl: games must be a list of objects, got {games!r:.80}")
            continue
        seen |= {key(game) for game in games}
        yield from games
    for game in _spread(folder / "games.jsonl", problems, most=MAX_TRAINING_GAMES):
        if key(game) not in seen:
            yield game


def _spread(path: Path, problems: list[str], *, most: int) -> Iterator[dict[str, Any]]:
    """At most `most` lines of a file, evenly spread, including the last one."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        num = sum(1 for _ in file)
        kept = {round((i + 1) * num / most) - 1 for i in range(most)}
        file.seek(0)
        for number, line in enumerate(file):
            if num <= most or number in kept:
                yield from _line(line, f"{path.name} line {number + 1}", problems)


def _rows(folder: Path, last: float, problems: list[str]) -> Iterator[RunRow]:
    """The rows of the held-out games before and after self-play, then of every `eval_*` folder,
    whose source names the step of its policy if that is not the run's `last`."""
    for stage in STAGES:
        page = _json(folder / f"held_out_{stage}.json", problems)
        yield from _parsed(stage, page, _HELD_OUT, problems)
    for path in sorted(folder.glob("eval_*/evaluation.json")):
        page = _json(path, problems)
        rows = page.get("rows", {})
        if isinstance(rows, dict):
            own = _MATRIX if "matrix" in page else _EVALUATED
            step = page.get("step", last)
            source = path.parent.name + f", step {step}" * (step != last)
            yield from _parsed(source, rows, own, problems)
        else:
            problems.append(
                f"{path.parent.name}/{path.name}: rows must be an object, got {rows!r:.80}"
            )


def _parsed(
    source: str, rows: Mapping[str, Any], own: tuple[str, ...], problems: list[str]
) -> Iterator[RunRow]:
    """The rows of a file, each followed by the other player's row."""
    named = named_rows(rows)
    for name in rows:
        if name not in named and name.startswith(own):
            problems.append(f"{source} {name}: a script of this name replaces the policy")
    for name, value in named.items():
        kind = ("policy" if name.startswith(own) else "reference") if own else ""
        try:
            yield (row := read_row(value, name, RunRow, source=source, kind=kind))
            if row.partner:
                yield read_row(value["partner"], f"{name}{OTHER}", RunRow, source=source)
        except (TypeError, ValueError) as error:
            problems.append(f"{source} {name}: {error}")


def _with_others(rows: Sequence[RunRow]) -> list[RunRow]:
    """The rows, without the other players' if they always have the policy's scores."""
    unequal = any(row.partner and row.partner.scores != row.scores for row in rows)
    return [row for row in rows if unequal or not row.name.endswith(OTHER)]
