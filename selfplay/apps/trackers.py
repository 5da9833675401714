"""Observers that send a run to an experiment tracker: W&B or TensorBoard.

A tracker gets the metrics of metrics.jsonl under the same names, the settings, the games of
games.jsonl as rows of a table, and, W&B, the page. The tracker's library is imported only here.
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
from selfplay.apps.report import REPORT
from selfplay.atomic import write_atomically
from selfplay.config import Config
from selfplay.distributed import World
from selfplay.errors import SettingsError
from selfplay.metrics.observer import Observer, Step
from selfplay.metrics.records import game_text, logged_games

Record = Mapping[str, Any]


class _Tracker(Observer):
    """A tracker of the run in `config.out`; does nothing on ranks above 0. Opened at the first
    step, with the settings of the run's config.yaml.

    If the tracker fails, one warning is printed and nothing more is sent: it never ends a run.
    """

    name = ""  # in `observers`, and of the library

    def __init__(self, config: Config, world: World) -> None:
        """Opens nothing yet."""
        super().__init__(config, world)
        self._run: Any = None
        self._works = world.rank == 0

    def open(self, folder: Path, settings: str, *, step: int) -> Any:
        """The tracker's run, which has `step(number, metrics, rows)` and `close()`; `step` is the
        number of the first step that it gets."""
        raise NotImplementedError

    @classmethod
    def ready(cls, config: Config, options: Any = None, *, here: bool = True) -> None:
        """Raise SettingsError before the run starts if the tracker's package is missing."""
        try:
            importlib.import_module(cls.name)
        except ModuleNotFoundError as error:
            raise SettingsError(
                f"observers must not have {cls.name} without the package {error.name}; `pip "
                "install -r requirements/track.txt` installs it"
            ) from error

    def on_step(self, step: Step) -> None:
        """Send the step's line of metrics.jsonl and its games in games.jsonl."""
        if self._works:
            every = self.config.log_games_every
            self.step(
                step.number, step.metrics, logged_games(step.episodes, step.number, every=every)
            )

    def step(self, step: int, metrics: Mapping[str, float], games: Sequence[Record]) -> None:
        """Send the metrics of step number `step` and its games, records of games.jsonl."""
        with self._survived():
            if self._works and self._run is None:
                folder = Path(self.config.out)
                settings = (folder / "config.yaml").read_text(encoding="utf-8")
                self._run = self.open(folder, settings, step=step)
            if self._works:
                self._run.step(step, metrics, [game_row(game) for game in games])

    def close(self) -> None:
        """Wait until everything has been sent or written."""
        if self._run is not None and self._works:
            with self._survived():
                self._run.close()

    @contextmanager
    def _survived(self) -> Iterator[None]:
        """Turn any error into a warning, after which nothing is sent."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  whatever the library or its server answers
            self._works = False
            print(
                f"warning: the observer {self.name} failed, the run continues without it: "
                f"{error_line(error)}",
                file=sys.stderr,
            )


class WandB(_Tracker):
    """Weights & Biases. Its own variables WANDB_* choose mode, project, names and folder."""

    name = "wandb"

    def open(self, folder: Path, settings: str, *, step: int) -> Any:
        """A new W&B run, or the one in tracker.json."""
        return _Wandb(folder, yaml.safe_load(settings))

    @classmethod
    def ready(cls, config: Config, options: Any = None, *, here: bool = True) -> None:
        """Also refuses a start that would be online without a key. Without `here` the run is for
        another machine, which may have the key."""
        super().ready(config)
        if not here or _mode() != "online":
            return
        library = importlib.import_module(cls.name)
        try:
            why = "" if library.login(prompt=False) else "no key: run `wandb login`"
        except library.Error as error:
            why = str(error)
        if why:
            raise SettingsError(
                "observers: wandb needs a key (WANDB_API_KEY, or from `wandb login`) that W&B "
                f"accepts, got {why}; or set WANDB_MODE=offline and send the run later with `wandb "
                "sync`"
            )


class TensorBoard(_Tracker):
    """TensorBoard, as event files in RUN/tensorboard."""

    name = "tensorboard"

    def open(self, folder: Path, settings: str, *, step: int) -> Any:
        """A new event file, in which the steps from `step` on replace earlier ones."""
        return _TensorBoard(folder, settings, after_step=step - 1)


class _Wandb:
    """A W&B run. W&B refuses earlier steps, so steps repeated by a resumed run keep their first
    values there. `tracker.json` in the run folder has the run's id, address and last step.

    The library reads its variables itself; what is passed here would override them, so a default
    of this project is passed only where its variable is not set. The mode is passed because the
    library may already have read its variable.
    """

    def __init__(self, folder: Path, config: Record) -> None:
        """`config` are the settings, nested."""
        import wandb

        self._path, self._page, self._table = folder / "tracker.json", folder / REPORT, wandb.Table
        own = os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)
        self._saved: dict[str, Any] = {"id": own, "last_step": 0}
        if self._path.exists():
            self._saved = json.loads(self._path.read_text())
        defaults = {"project": "selfplay", "name": folder.name, "dir": str(folder)}
        defaults |= {"resume": "allow"} if _mode() == "online" else {}
        named: dict[str, Any] = {
            name: os.environ.get(f"WANDB_{name.upper()}") or default
            for name, default in defaults.items()
        }
        mode: Any = _mode()
        self._run = wandb.init(id=self._saved["id"], config=dict(config), mode=mode, **named)
        self._saved |= {"url": self._run.url} if self._run.url else {}
        self._has_page = False
        self._save()

    def step(self, step: int, metrics: Mapping[str, float], rows: Sequence[Record]) -> None:
        """Log a step that W&B does not have, and from the first page on keep the page there."""
        if step <= self._saved["last_step"]:
            return
        data = [list(row.values()) for row in rows]
        games = {"games": self._table(columns=list(rows[0]), data=data)} if rows else {}
        self._run.log({**metrics, **games}, step=step)
        self._saved["last_step"] = step
        self._save()
        self._keep_page()

    def close(self) -> None:
        """Finish the run, with its last page."""
        self._keep_page()
        self._run.finish()

    def _keep_page(self) -> None:
        """Upload report.html now and whenever it changes, and link it in the run's summary."""
        if self._has_page or _mode() == "disabled" or not self._page.is_file():
            return
        self._has_page = True
        self._run.save(str(self._page), base_path=str(self._page.parent), policy="live")
        url = self._run.url
        self._run.summary["page"] = f"{url}/files/{REPORT}" if url else str(self._page)

    def _save(self) -> None:
        """Write tracker.json."""
        write_atomically(self._path, json.dumps(self._saved) + "\n")


def _mode() -> str:
    """What W&B's library does with its data by its variables: online, offline, or disabled."""
    if os.environ.get("WANDB_DISABLED", "").lower() in ("1", "true", "yes", "on"):
        return "disabled"
    mode = os.environ.get("WANDB_MODE") or "online"
    return {"dryrun": "offline", "run": "online"}.get(mode, mode)


class _TensorBoard:
    """Event files in RUN/tensorboard, written with TensorBoard's own library, without torch.

    A resumed run makes TensorBoard drop the steps that are repeated.
    """

    def __init__(self, folder: Path, settings: str, *, after_step: int) -> None:
        """Start a new event file, in which the steps after `after_step` replace earlier ones, with
        the `settings` as text."""
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.plugins.text.summary_v2 import text_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary, self._text = event_pb2.Event, summary_pb2.Summary, text_pb
        self._writer = EventFileWriter(str(folder / "tensorboard"))
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._writer.add_event(self._event(step=after_step + 1, session_log=start))
        self._add(0, text_pb("settings", fenced(settings)))

    def step(self, step: int, metrics: Mapping[str, float], rows: Sequence[Record]) -> None:
        """Write the finite numbers of a step as scalars, and its games as one text."""
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
        """Write what is left."""
        self._writer.close()

    def _add(self, step: int, summary: Any) -> None:
        """Add a summary at a step."""
        self._writer.add_event(self._event(step=step, summary=summary))


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
