"""Sends metrics, settings and games to an experiment tracker: W&B, Trackio or TensorBoard.

A tracker gets the lines of metrics.jsonl under their own names, the settings as keys, and the games
of games.jsonl as rows of a table. `tracker.json` in the run folder keeps the tracker's run id, so
that a resumed run goes on in the same tracker run. The libraries are imported only here, and only
the one that `track.kind` names.
"""

from __future__ import annotations

import importlib
import json
import math
import netrc
import os
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from dialop.shown import fenced, printable
from selfplay.atomic import write_atomically
from selfplay.config import TrackConfig
from selfplay.errors import SettingsError

Record = Mapping[str, Any]


class Tracker:
    """A tracker that does nothing: for `track.kind: off` and ranks above 0."""

    def step(self, step: int, metrics: Mapping[str, float], games: Sequence[Record]) -> None:
        """Send the metrics of step number `step` and its games, records of games.jsonl."""

    def close(self) -> None:
        """Wait until everything is sent or written."""


def open_tracker(folder: Path, settings: TrackConfig, *, after_step: int, rank: int) -> Tracker:
    """The tracker of the run in `folder`, which continues after step `after_step`.

    Reads the settings of the run from its config.yaml. Raises SettingsError if the tracker's
    package or W&B's key is missing, or if W&B refuses the run.
    """
    if rank or settings.kind == "off":
        return Tracker()
    check_tracker(settings)
    config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    if settings.kind == "tensorboard":
        return TensorBoard(folder, config, after_step=after_step)
    saved = _Saved(folder / "tracker.json", settings.kind)
    return (_wandb if settings.kind == "wandb" else _trackio)(folder, config, settings, saved)


def check_tracker(settings: TrackConfig, *, here: bool = True) -> None:
    """Raise SettingsError before the run starts if the tracker's package or W&B's key is missing.

    Without `here` the run is for another machine, which may hold the key.
    """
    if settings.kind == "off":
        return
    try:
        importlib.import_module(settings.kind)
    except ModuleNotFoundError as error:
        raise SettingsError(
            f"track.kind must be off where the package {error.name} is not installed, got "
            f"{settings.kind}; `pip install -r requirements-track.txt` installs it"
        ) from error
    if here and settings.kind == "wandb" and _wandb_online() and not _wandb_key():
        raise SettingsError(
            "track.kind wandb needs a key (WANDB_API_KEY, or that of wandb's login), found none: "
            "run `wandb login`, or set WANDB_MODE=offline"
        )


def _wandb_online() -> bool:
    """Whether W&B's library sends what it gets, as it does unless its own variable says offline."""
    return os.environ.get("WANDB_MODE", "online") == "online"


def _wandb_key() -> bool:
    """Whether W&B's library will find a key without asking for it. Asks no server."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    import wandb

    known = wandb.setup().settings
    if known.api_key:
        return True
    hosts = (urlsplit(known.base_url).netloc, "api.wandb.ai")  # the second: also of older logins
    own = [os.environ["NETRC"]] if os.environ.get("NETRC") else ["~/.netrc", "~/_netrc"]
    for path in own:
        try:
            logins = netrc.netrc(Path(path).expanduser())
        except (OSError, netrc.NetrcParseError):
            continue
        if any((login := logins.authenticators(host)) and login[2] for host in hosts):
            return True
    return False


class Remembered(Tracker):
    """A run of W&B or Trackio, which refuse earlier steps: a step is never sent twice.

    `drop` names metrics that the library writes itself; `cell` converts a game's value for a table.
    """

    def __init__(
        self,
        run: Any,
        table: Callable[..., Any],
        saved: _Saved,
        *,
        drop: Collection[str] = (),
        cell: Callable[[Any], Any] = lambda value: value,
    ) -> None:
        self._run, self._table, self._saved = run, table, saved
        self._drop, self._cell = drop, cell

    def step(self, step: int, metrics: Mapping[str, float], games: Sequence[Record]) -> None:
        if not self._saved.is_new(step):
            return
        line: dict[str, Any] = {n: value for n, value in metrics.items() if n not in self._drop}
        if games:
            rows = [game_row(game) for game in games]
            data = [[self._cell(value) for value in row.values()] for row in rows]
            line["games"] = self._table(columns=list(rows[0]), data=data)
        self._run.log(line, step=step)
        self._saved.sent(step)

    def close(self) -> None:
        self._run.finish()


def _wandb(folder: Path, config: Record, settings: TrackConfig, saved: _Saved) -> Tracker:
    """Settings are nested, as W&B's pages expect. Raises SettingsError if W&B refuses the run."""
    import wandb

    online = _wandb_online()
    try:
        run = wandb.init(
            project=settings.project,
            mode="online" if online else "offline",
            dir=str(folder),
            name=folder.name,
            id=saved.id,
            resume="allow" if online else None,
            config=dict(config),
        )
    except wandb.Error as error:
        raise SettingsError(
            f"track.kind wandb must reach an account that takes the run, got {error}; set "
            "WANDB_MODE=offline to send it later by `wandb sync`"
        ) from error
    return Remembered(run, wandb.Table, saved)


def _trackio(folder: Path, config: Record, settings: TrackConfig, saved: _Saved) -> Tracker:
    """Trackio keeps its projects on this machine (TRACKIO_DIR) and shows them with `trackio show`.
    It finds runs by name, so the name contains the id. It renders cells as Markdown, so the model's
    text is escaped."""
    import trackio

    run = trackio.init(
        project=settings.project,
        name=f"{folder.resolve().name}-{saved.id}",
        resume="allow",
        config=flat(config),
        embed=False,
        auto_log_gpu=False,
        auto_log_cpu=False,
    )
    return Remembered(run, trackio.Table, saved, drop=("step",), cell=_as_block)


class TensorBoard(Tracker):
    """Event files in RUN/tensorboard, written with TensorBoard's own library, without torch.

    A resumed run tells TensorBoard to forget the steps that are played again.
    """

    def __init__(self, folder: Path, config: Record, *, after_step: int) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.plugins.text.summary_v2 import text_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary, self._text = event_pb2.Event, summary_pb2.Summary, text_pb
        self._writer = EventFileWriter(str(folder / "tensorboard"))
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._writer.add_event(self._event(step=after_step + 1, session_log=start))
        settings = flat(config)
        self._add(0, hparams_pb(settings, trial_id=folder.name))
        text = "\n".join(f"{name}: {value}" for name, value in settings.items())
        self._add(0, text_pb("settings", fenced(text)))

    def _add(self, step: int, summary: Any) -> None:
        self._writer.add_event(self._event(step=step, summary=summary))

    def step(self, step: int, metrics: Mapping[str, float], games: Sequence[Record]) -> None:
        scalars = [
            self._summary.Value(tag=name, simple_value=value)
            for name, value in metrics.items()
            if name != "step" and math.isfinite(value)
        ]
        self._add(step, self._summary(value=scalars))
        if games:
            parts = ["\n".join(f"{n}: {v}" for n, v in game_row(game).items()) for game in games]
            self._add(step, self._text("games", "\n\n".join(map(fenced, parts))))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def game_row(record: Record) -> dict[str, Any]:
    """A record of games.jsonl as one row: the outcome, what each seat sees, and the talk."""
    talk = []
    for turn in record["turns"]:
        refused = f"\n  refused: {turn['error']}" if turn["error"] else ""
        talk.append(f"seat {turn['seat']}: {turn['text']}{refused}")
    return {
        "instance": str(record["instance"]),
        "episode": record["episode"],
        "score": record["score_norm"],
        "agreed": record["agreed"],
        "ended": record["ended"],
        "players": ", ".join(seat["player"] for seat in record["seats"]),
        **{
            f"view of seat {seat}": printable(
                "\n\n".join(part for part in (prompt["system"], prompt["user"]) if part)
            )
            for seat, prompt in enumerate(record["seats"])
        },
        "talk": printable("\n".join(talk)),
    }


def flat(config: Record, prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted key, such as `rollout.group_size`. Lists and nulls are text."""
    keys: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            keys |= flat(value, f"{prefix}{name}.")
        elif isinstance(value, (bool, int, float, str)):
            keys[f"{prefix}{name}"] = value
        else:
            keys[f"{prefix}{name}"] = json.dumps(value)
    return keys


def _as_block(value: Any) -> Any:
    return fenced(value) if isinstance(value, str) and "\n" in value else value


class _Saved:
    """The id of the tracker's run and the last step it got, kept in the run folder.

    Trackers refuse earlier steps. Steps that a resumed run plays again keep their first values in
    the tracker; metrics.jsonl has the new ones.
    """

    def __init__(self, path: Path, kind: str) -> None:
        self._path, self._kind, self._last = path, kind, 0
        self.id = secrets.token_hex(4)
        if path.exists():
            try:
                saved = json.loads(path.read_text(encoding="utf-8"))
                if saved["kind"] == kind:
                    self.id, self._last = str(saved["id"]), int(saved["last_step"])
            except (ValueError, LookupError, TypeError) as error:
                raise SettingsError(
                    f"{path} must hold the kind, id and last_step of a tracker's run, got "
                    f"{error!r}; remove it to start a new tracker run"
                ) from None
        self.sent(self._last)

    def is_new(self, step: int) -> bool:
        return step > self._last

    def sent(self, step: int) -> None:
        """Note that the tracker has this step."""
        self._last = step
        state = {"kind": self._kind, "id": self.id, "last_step": step}
        write_atomically(self._path, json.dumps(state) + "\n")
