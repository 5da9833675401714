"""The endpoint on this machine: programs take turns, ask the policy and move, with a key a game.

    GET  /v1/turn               with the run's key: the next turn that waits for a program
    POST /v1/chat/completions   with the game's key: an answer of the policy
    POST /v1/move               with the game's key: {"move": TEXT}, or {"error": WHY} to give up

One server per process, in threads beside the games' event loop.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from selfplay.errors import SettingsError
from selfplay.extras.endpoint_seat.chats import Refused, streamed

PORT, KEY, TIMEOUT = (f"SELFPLAY_SEAT_{name}" for name in ("PORT", "KEY", "TIMEOUT_S"))
CHAT, MOVE, TURN = "/v1/chat/completions", "/v1/move", "/v1/turn"


def has_left(connection: socket.socket) -> bool:
    """Whether the program has closed the connection."""
    with suppress(OSError, ValueError):
        readable = select.select([connection], [], [], 0)[0]
        return bool(readable) and connection.recv(1, socket.MSG_PEEK) == b""
    return True


@dataclass(eq=False)
class Call:
    """A chat call or a move of a program, and its answer. A repetition of one whose answer was lost
    is the same call, on another connection."""

    path: str
    raw: bytes
    body: dict[str, Any]
    connection: socket.socket
    answer: Future[dict[str, Any]] = field(default_factory=Future)


@dataclass(eq=False)
class OpenTurn:
    """A turn that waits for a program's move, its calls whose answers no program has yet, and the
    time of the program's last sign. `wake` tells the game that a call has come."""

    key: str
    shown: dict[str, Any]
    wake: Callable[[], object]
    calls: list[Call] = field(default_factory=list)
    taken: bool = False
    active_s: float = field(default_factory=time.monotonic)


class Server:
    """The open turns by their games' keys. Any thread may call a method."""

    def __init__(self, port: int, key: str, timeout_s: float) -> None:
        self._lock, self._open = threading.Condition(), dict[str, OpenTurn]()
        self.key, self.timeout_s, self._taken_s = key, timeout_s, 0.0
        http = ThreadingHTTPServer(("127.0.0.1", port), type("", (_Handler,), {"seats": self}))
        http.socket.listen(1024)  # games that ask at once
        self.url = f"http://127.0.0.1:{http.server_address[1]}/v1"
        threading.Thread(target=http.serve_forever, daemon=True).start()

    def offer(self, turn: OpenTurn) -> None:
        """Let a program take this turn."""
        with self._lock:
            self._open[turn.key] = turn
            self._lock.notify()

    def close(self, turn: OpenTurn) -> None:
        """End a turn; calls without an answer are refused."""
        with self._lock:
            del self._open[turn.key]
        for call in turn.calls:
            with suppress(InvalidStateError):  # it has its answer
                call.answer.set_exception(Refused(410, "this turn has ended"))

    def take(self, connection: socket.socket) -> dict[str, Any] | None:
        """The next turn as a program reads it; None if none comes for 20 seconds.

        A turn is not given to a program that has left while it waited.
        """
        with self._lock:
            self._taken_s, turns = time.monotonic(), self._open.values()
            self._lock.wait_for(lambda: not all(each.taken for each in turns), timeout=20)
            turn = next((each for each in turns if not each.taken), None)
            if turn is None or has_left(connection):
                self._lock.notify()  # another program may wait
                return None
            turn.taken, turn.active_s = True, time.monotonic()
            return turn.shown

    def next_call(self, turn: OpenTurn) -> tuple[Call | None, float]:
        """The turn's first call without an answer, and the seconds for which its program may still
        be silent; for a turn that none has taken, those until a program must take some turn."""
        with self._lock:
            call = next((each for each in turn.calls if not each.answer.done()), None)
            since = max(turn.active_s, self._taken_s * (not turn.taken))
            busy = not turn.taken and any(each.calls for each in self._open.values())
            return call, self.timeout_s + (0 if busy else since - time.monotonic())

    def called(self, key: str, call: Call) -> Call:
        """Hand a call to its game, or find the one that it repeats, whose program has left.

        Raises Refused for a key without an open turn.
        """
        with self._lock:
            if (turn := self._open.get(key)) is None:
                raise Refused(401, "the key must be one of a turn that waits for a move")
            turn.active_s = self._taken_s = time.monotonic()
            for old in turn.calls:
                if (old.path, old.raw) == (call.path, call.raw) and has_left(old.connection):
                    old.connection = call.connection
                    return old
            turn.calls.append(call)
        turn.wake()
        return call

    def delivered(self, key: str, call: Call) -> None:
        """Forget a call whose answer has reached its program."""
        with self._lock, suppress(KeyError, ValueError):
            self._open[key].calls.remove(call)


class _Handler(BaseHTTPRequestHandler):
    """Answers the requests of one connection, in a thread."""

    seats: Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else a body waits 40 ms for the program's receipt of its head

    def handle(self) -> None:
        """Answer the requests until the program leaves."""
        with suppress(OSError):
            super().handle()

    def do_GET(self) -> None:
        """Answer, or refuse in one line."""
        key = self.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        try:
            if (self.command, self.path) == ("GET", TURN):
                if not secrets.compare_digest(key.encode(), self.seats.key.encode()):
                    raise Refused(401, f"the key must be the run's, which it prints ({KEY})")
                self._send(self.seats.take(self.connection))
            elif self.command == "POST" and self.path in (CHAT, MOVE):
                self._call(key)
            else:
                raise Refused(404, f"must be GET {TURN}, POST {CHAT} or {MOVE}, got {self.path}")
        except Refused as error:
            about = {"message": str(error), "type": "invalid_request_error", "code": error.code}
            self._send({"error": about}, error.status)

    do_POST = do_GET

    def _call(self, key: str) -> None:
        """Answer a chat call or a move, once its game has.

        An answer that cannot be delivered is kept for the repetition of its call.
        """
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > 2**23:
            self.close_connection = True  # the body would be read as a request
            raise Refused(413, f"a body must have at most 8 MiB, got {length or '?'} bytes")
        raw, body = self.rfile.read(int(length)), None
        with suppress(ValueError, RecursionError):
            body = json.loads(raw)
        if not isinstance(body, dict):
            raise Refused(400, f"a body must be a JSON object, got {raw!r:.80}")
        call = self.seats.called(key, Call(self.path, raw, body, self.connection))
        answer = call.answer.result()
        if has_left(call.connection):
            raise ConnectionError("the repetition of the call gets its answer")
        events = streamed(answer, body) if call.path == CHAT and body.get("stream") else None
        self._send("".join(events) if events else answer)
        self.seats.delivered(key, call)

    def _send(self, body: Any, status: int = 200) -> None:
        """Send a body as JSON, a text as a stream of events, or status 204 without a body."""
        is_stream = isinstance(body, str)
        content = (body if is_stream else "" if body is None else json.dumps(body)).encode()
        self.send_response(204 if body is None else status)
        self.send_header("Content-Type", "text/event-stream" if is_stream else "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing for a request."""


@lru_cache(maxsize=64)
def tell(line: str) -> None:
    """Print a line, once."""
    print(f"rollout.player endpoint_seat: {line}", file=sys.stderr, flush=True)


@lru_cache(maxsize=1)
def the_server() -> Server:
    """This process's server, started at the first call. Raises SettingsError for settings in the
    environment that do not fit, such as a port that is taken."""
    given = {PORT: os.environ.get(PORT, "8765"), TIMEOUT: os.environ.get(TIMEOUT, "120")}
    for name, value in given.items():
        if not value.isdecimal() or int(value) > 65_000:
            raise SettingsError(f"{name} must be an integer from 0 to 65000, got {value!r}")
    port, key = int(given[PORT]), os.environ.get(KEY)
    port += int(os.environ.get("LOCAL_RANK", "0")) if port else 0
    try:
        server = Server(port, key or secrets.token_urlsafe(16), float(given[TIMEOUT]))
    except OSError as error:
        rule = f"{PORT} must be a free port of 127.0.0.1 (0: any)"
        raise SettingsError(f"{rule}, got {port}: {error.strerror}") from None
    shown = f"the key in {KEY}" if key else f"the key {server.key}"
    tell(f"waits for programs at {server.url} with {shown}")
    return server
