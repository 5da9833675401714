"""Sends metrics, settings and games to an experiment tracker: W&B, Trackio or TensorBoard.

A tracker gets the lines of metrics.jsonl under their own names, the settings as keys, and the games
of games.jsonl as rows of a table. The library that `track.kind` names is imported only here.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from dialop.shown import fenced, printable
from selfplay.atomic import write_atomically
from selfplay.config import TrackConfig
from selfplay.errors import SettingsError

Record = Mapping[str, Any]


class Tracker:
    """The tracker of the run in `folder`, which continues after step `after_step`; nothing for
    `track.kind: off` and on ranks above 0. Reads the settings of the run from its config.yaml.

    If the tracker fails, one warning is printed and nothing more is sent: it never ends a run.
    """

    def __init__(self, folder: Path, settings: TrackConfig, *, after_step: int, rank: int) -> None:
        self._kind = settings.kind
        self._run: _Run | _TensorBoard | None = None
        if rank or settings.kind == "off":
            return
        with self._survived():
            config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
            if settings.kind == "tensorboard":
                self._run = _TensorBoard(folder, config, after_step=after_step)
            else:
                self._run = _Run(folder, config, settings)

    def step(self, step: int, metrics: Mapping[str, float], games: Sequence[Record]) -> None:
        """Send the metrics of step number `step` and its games, records of games.jsonl."""
        if self._run is not None:
            with self._survived():
                self._run.step(step, metrics, [game_row(game) for game in games])

    def close(self) -> None:
        """Wait until everything is sent or written."""
        if self._run is not None:
            with self._survived():
                self._run.close()

    @contextmanager
    def _survived(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001  whatever the library or its server answers
            self._run = None
            print(
                f"warning: track.kind {self._kind} failed, the run goes on without it: {error}",
                file=sys.stderr,
            )


class _Run:
    """A run of W&B or Trackio. Both refuse earlier steps: steps that a resumed run plays again keep
    their first values there. `tracker.json` in the run folder has the run's id and last step."""

    def __init__(self, folder: Path, config: Record, settings: TrackConfig) -> None:
        self._path = folder / "tracker.json"
        saved = json.loads(self._path.read_text()) if self._path.exists() else {}
        if saved.get("kind") != settings.kind:
            saved = {"kind": settings.kind, "id": secrets.token_hex(4), "last_step": 0}
        self._saved = saved
        library = importlib.import_module(settings.kind)
        self._table, self._is_wandb = library.Table, settings.kind == "wandb"
        options: dict[str, Any] = {"project": settings.project, "resume": "allow"}
        if self._is_wandb:
            options |= {"name": folder.name, "id": saved["id"], "dir": str(folder)}
            # Named, because the library may have read its variable before.
            options |= {"config": dict(config), "mode": "online" if _wandb_online() else "offline"}
            if not _wandb_online():
                del options["resume"]
        else:  # finds runs by name
            options |= {"name": f"{folder.resolve().name}-{saved['id']}", "config": flat(config)}
            options |= {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        self._run = library.init(**options)
        write_atomically(self._path, json.dumps(saved) + "\n")

    def step(self, step: int, metrics: Mapping[str, float], rows: Sequence[Record]) -> None:
        if step <= self._saved["last_step"]:
            return
        # Trackio writes the step itself.
        line = {name: v for name, v in metrics.items() if self._is_wandb or name != "step"}
        data = [[self._cell(value) for value in row.values()] for row in rows]
        games = {"games": self._table(columns=list(rows[0]), data=data)} if rows else {}
        self._run.log({**line, **games}, step=step)
        self._saved["last_step"] = step
        write_atomically(self._path, json.dumps(self._saved) + "\n")

    def close(self) -> None:
        self._run.finish()

    def _cell(self, value: Any) -> Any:
        """Trackio renders cells as Markdown, so the model's text becomes a code block."""
        as_block = not self._is_wandb and isinstance(value, str) and "\n" in value
        return fenced(value) if as_block else value


def _wandb_online() -> bool:
    """Whether W&B's library sends what it gets, as it does unless its own variable says offline."""
    return os.environ.get("WANDB_MODE", "online") == "online"


class _TensorBoard:
    """Event files in RUN/tensorboard, written with TensorBoard's own library, without torch.

    A resumed run tells TensorBoard to forget the steps that are played again.
    """

    def __init__(self, folder: Path, config: Record, *, after_step: int) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.plugins.text.summary_v2 import text_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary, self._text = event_pb2.Event, summary_pb2.Summary, text_pb
        self._writer = EventFileWriter(str(folder / "tensorboard"))
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._writer.add_event(self._event(step=after_step + 1, session_log=start))
        self._add(0, text_pb("settings", fenced(_lines(flat(config)))))

    def step(self, step: int, metrics: Mapping[str, float], rows: Sequence[Record]) -> None:
        scalars = [
            self._summary.Value(tag=name, simple_value=value)
            for name, value in metrics.items()
            if name != "step" and math.isfinite(value)
        ]
        self._add(step, self._summary(value=scalars))
        if rows:
            text = "\n\n".join(fenced(_lines(row)) for row in rows)
            self._add(step, self._text("games", text))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _add(self, step: int, summary: Any) -> None:
        self._writer.add_event(self._event(step=step, summary=summary))


def check_tracker(settings: TrackConfig, *, here: bool = True) -> None:
    """Raise SettingsError before the run starts if the tracker's package or W&B's key is missing.

    Without `here` the run is for another machine, which may hold the key.
    """
    if settings.kind == "off":
        return
    try:
        library = importlib.import_module(settings.kind)
    except ModuleNotFoundError as error:
        raise SettingsError(
            f"track.kind must be off where the package {error.name} is not installed, got "
            f"{settings.kind}; `pip install -r requirements/track.txt` installs it"
        ) from error
    if here and settings.kind == "wandb" and _wandb_online():
        try:
            why = "" if library.login(prompt=False) else "no key: run `wandb login`"
        except library.Error as error:
            why = str(error)
        if why:
            raise SettingsError(
                "track.kind wandb needs a key (WANDB_API_KEY, or that of wandb's login) that W&B "
                f"takes, got {why}; or set WANDB_MODE=offline, to send the run by `wandb sync`"
            )


def game_row(record: Record) -> dict[str, Any]:
    """A record of games.jsonl as one row: the outcome, what each seat sees, and the talk."""
    talk = []
    for turn in record["turns"]:
        refused = f"\n  refused: {turn['error']}" if turn["error"] else ""
        talk.append(f"seat {turn['seat']}: {turn['text']}{refused}")
    views = {
        f"view of seat {seat}": printable("\n\n".join(filter(None, (s["system"], s["user"]))))
        for seat, s in enumerate(record["seats"])
    }
    return {
        "instance": str(record["instance"]),
        "episode": record["episode"],
        "score": record["score_norm"],
        "agreed": record["agreed"],
        "ended": record["ended"],
        "players": ", ".join(seat["player"] for seat in record["seats"]),
        **views,
        "talk": printable("\n".join(talk)),
    }


def flat(config: Record, prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted key, such as `rollout.group_size`. Lists and nulls are text."""
    keys: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            keys |= flat(value, f"{prefix}{name}.")
        else:
            plain = isinstance(value, (bool, int, float, str))
            keys[f"{prefix}{name}"] = value if plain else json.dumps(value)
    return keys


def _lines(values: Record) -> str:
    return "\n".join(f"{name}: {value}" for name, value in values.items())
