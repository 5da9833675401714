"""Sends metrics, settings and games to an experiment tracker: W&B or TensorBoard.

A tracker gets the metrics of metrics.jsonl under the same names, the settings, and the games of
games.jsonl as rows of a table. The tracker's library is imported only here.
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

from dialop.shown import error_line, fenced
from selfplay.atomic import write_atomically
from selfplay.errors import SettingsError
from selfplay.metrics.observer import Observer, Step
from selfplay.metrics.records import Pieces, game_text, logged_games

Record = Mapping[str, Any]


class Tracker(Observer):
    """The tracker of the run in `folder`, which continues after step `after_step`; does nothing for
    `track: none` and on ranks above 0. Reads the run's settings from its config.yaml.

    If the tracker fails, one warning is printed and nothing more is sent: it never ends a run.
    """

    def __init__(
        self,
        folder: Path,
        track: str,
        *,
        after_step: int,
        rank: int,
        log_games_every: int = 1,
        pieces: Pieces | None = None,
    ) -> None:
        self._track, self._every, self._pieces = track, log_games_every, pieces
        self._run: _Wandb | _TensorBoard | None = None
        if rank or track == "none":
            return
        with self._survived():
            settings = (folder / "config.yaml").read_text(encoding="utf-8")
            if track == "tensorboard":
                self._run = _TensorBoard(folder, settings, after_step=after_step)
            else:
                self._run = _Wandb(folder, yaml.safe_load(settings))

    def on_step(self, step: Step) -> None:
        """Send the step's line of metrics.jsonl and its games in games.jsonl."""
        if self._run is not None:
            games = logged_games(step.episodes, step.number, every=self._every, pieces=self._pieces)
            self.step(step.number, step.metrics, games)

    def step(self, step: int, metrics: Mapping[str, float], games: Sequence[Record]) -> None:
        """Send the metrics of step number `step` and its games, records of games.jsonl."""
        if self._run is not None:
            with self._survived():
                self._run.step(step, metrics, [game_row(game) for game in games])

    def close(self) -> None:
        """Wait until everything has been sent or written."""
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
                f"warning: track {self._track} failed, the run continues without it: "
                f"{error_line(error)}",
                file=sys.stderr,
            )


class _Wandb:
    """A W&B run. W&B refuses earlier steps, so steps repeated by a resumed run keep their first
    values there. `tracker.json` in the run folder has the run's id and last step. W&B's variable
    WANDB_PROJECT names the project."""

    def __init__(self, folder: Path, config: Record) -> None:
        import wandb

        self._path, self._table = folder / "tracker.json", wandb.Table
        self._saved: dict[str, Any] = {"id": secrets.token_hex(4), "last_step": 0}
        if self._path.exists():
            self._saved = json.loads(self._path.read_text())
        # The mode is explicit, because the library may already have read its variable.
        online: dict[str, Any] = {"mode": "online", "resume": "allow"}
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "selfplay"),
            name=folder.name,
            id=self._saved["id"],
            dir=str(folder),
            config=dict(config),
            **(online if _wandb_online() else {"mode": "offline"}),
        )
        write_atomically(self._path, json.dumps(self._saved) + "\n")

    def step(self, step: int, metrics: Mapping[str, float], rows: Sequence[Record]) -> None:
        if step <= self._saved["last_step"]:
            return
        data = [list(row.values()) for row in rows]
        games = {"games": self._table(columns=list(rows[0]), data=data)} if rows else {}
        self._run.log({**metrics, **games}, step=step)
        self._saved["last_step"] = step
        write_atomically(self._path, json.dumps(self._saved) + "\n")

    def close(self) -> None:
        self._run.finish()


def _wandb_online() -> bool:
    """Whether W&B's library sends its data, which it does unless its variable says offline."""
    return os.environ.get("WANDB_MODE", "online") == "online"


class _TensorBoard:
    """Event files in RUN/tensorboard, written with TensorBoard's own library, without torch.

    A resumed run makes TensorBoard drop the steps that are repeated.
    """

    def __init__(self, folder: Path, settings: str, *, after_step: int) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.plugins.text.summary_v2 import text_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary, self._text = event_pb2.Event, summary_pb2.Summary, text_pb
        self._writer = EventFileWriter(str(folder / "tensorboard"))
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._writer.add_event(self._event(step=after_step + 1, session_log=start))
        self._add(0, text_pb("settings", fenced(settings)))

    def step(self, step: int, metrics: Mapping[str, float], rows: Sequence[Record]) -> None:
        scalars = [
            self._summary.Value(tag=name, simple_value=value)
            for name, value in metrics.items()
            if name != "step" and math.isfinite(value)
        ]
        self._add(step, self._summary(value=scalars))
        if rows:
            texts = ("\n".join(f"{name}: {value}" for name, value in row.items()) for row in rows)
            self._add(step, self._text("games", "\n\n".join(map(fenced, texts))))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _add(self, step: int, summary: Any) -> None:
        self._writer.add_event(self._event(step=step, summary=summary))


def check_tracker(track: str, *, here: bool = True) -> None:
    """Raise SettingsError before the run starts if the tracker's package or W&B's key is missing.

    Without `here` the run is for another machine, which may have the key.
    """
    if track == "none":
        return
    try:
        library = importlib.import_module(track)
    except ModuleNotFoundError as error:
        raise SettingsError(
            f"track must be none without the package {error.name}, got {track}; `pip install -r "
            "requirements/track.txt` installs it"
        ) from error
    if here and track == "wandb" and _wandb_online():
        try:
            why = "" if library.login(prompt=False) else "no key: run `wandb login`"
        except library.Error as error:
            why = str(error)
        if why:
            raise SettingsError(
                "track wandb needs a key (WANDB_API_KEY, or from `wandb login`) that W&B accepts, "
                f"got {why}; or set WANDB_MODE=offline and send the run later with `wandb sync`"
            )


def game_row(record: Record) -> dict[str, Any]:
    """A record of games.jsonl as one row: the outcome, and the game as text."""
    return {
        "instance": str(record["instance"]),
        "episode": record["episode"],
        "score": record["score_norm"],
        "agreed": record["agreed"],
        "ended": record["ended"],
        "players": ", ".join(seat["player"] for seat in record["seats"]),
        "game": game_text(record),
    }
