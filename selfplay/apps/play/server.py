"""The local page on which a person plays: a few routes on the loopback interface.

Every request needs the token of this start and a Host of this machine; a request that changes
something also needs the page's Origin. Bodies are limited. No other site, and no other user of the
machine without the token, can read or play the game. A game belongs to the visitor who started it,
identified by a cookie; other visitors see only that a game is running.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from selfplay.apps.play.table import IDLE, OVER, TAKEN, NotNow, Table
from selfplay.apps.report import page as report

MAX_BODY = 16_384  # bytes
MAX_TEXT = 4_000  # characters of a move
VISIT_S = 7 * 24 * 3600  # how long a browser keeps the cookie
TOKEN_HEADER = "x-play-token"
_HERE, _REPORT = Path(__file__).parent, Path(report.__file__).parent
_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Refused(Exception):
    """A request that the server does not answer: an HTTP status and a reason."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


def make_app(table: Table, *, token: str, port: int, facts: Mapping[str, str]) -> Starlette:
    """The page and its routes: `/state`, `/start`, `/move`, and `/taken` for a move that is not
    sent yet. `facts` are the opponent's name, and the Session's title, rules, understood style and
    limits."""
    hosts = {f"127.0.0.1:{port}", f"localhost:{port}"}
    cookie, owner = f"selfplay-{port}", ""  # a cookie belongs to all ports of a host

    def check(request: Request) -> None:
        host, path = request.headers.get("host", ""), request.url.path
        if host not in hosts:
            raise Refused(421, "this page is only for 127.0.0.1")
        in_header = request.headers.get(TOKEN_HEADER, "")
        given = request.query_params.get("token", "") if path == "/" else in_header
        if not secrets.compare_digest(given.encode(), token.encode()):
            raise Refused(403, "the address must have the token that was printed at the start")
        if path in ("/start", "/move") and request.headers.get("origin") != f"http://{host}":
            raise Refused(403, "a move must come from this page")

    async def index(request: Request, visitor: str) -> Response:
        return HTMLResponse(play_page(token=token, facts=facts))

    def shown(visitor: str) -> Response:
        state = table.state()
        if visitor != owner:
            phase = IDLE if state["phase"] in (IDLE, OVER) else TAKEN
            state = {"version": state["version"], "game": 0, "phase": phase}
        return JSONResponse(state)

    async def owners_body(request: Request, visitor: str) -> dict[str, Any]:
        body = await read_body(request)
        if visitor != owner:
            raise NotNow("this game belongs to another visitor")
        return body

    async def state(request: Request, visitor: str) -> Response:
        return shown(visitor)

    async def start(request: Request, visitor: str) -> Response:
        nonlocal owner
        table.start()
        owner = visitor
        return shown(visitor)

    async def move(request: Request, visitor: str) -> Response:
        body = await owners_body(request, visitor)
        if body.get("leave") is True:
            table.leave()
        else:
            table.give(move_text(body))
        return shown(visitor)

    async def taken(request: Request, visitor: str) -> Response:
        words, ends = table.taken(move_text(await owners_body(request, visitor)))
        return JSONResponse({"words": words, "ends": ends})

    def guarded(
        handle: Callable[[Request, str], Awaitable[Response]],
    ) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            known = request.cookies.get(cookie, "")
            visitor = known or secrets.token_urlsafe(24)
            try:
                check(request)
                response = await handle(request, visitor)
                # Not for the page itself: a link from another site sends no cookie.
                if not known and request.url.path != "/":
                    response.set_cookie(
                        cookie, visitor, max_age=VISIT_S, httponly=True, samesite="strict"
                    )
            except (Refused, ValueError) as error:
                status = getattr(error, "status", 400)
                response = JSONResponse({"error": str(error)}, status_code=status)
            response.headers.update(_HEADERS)
            return response

        return answer

    return Starlette(
        routes=[
            Route("/", guarded(index), methods=["GET"]),
            Route("/state", guarded(state), methods=["GET"]),
            Route("/start", guarded(start), methods=["POST"]),
            Route("/move", guarded(move), methods=["POST"]),
            Route("/taken", guarded(taken), methods=["POST"]),
        ]
    )


def play_page(*, token: str, facts: Mapping[str, str]) -> str:
    """The page as HTML. The browser runs only its own script."""
    return report.fill(
        _HERE / "play.html.j2",
        scripts=[_REPORT / "game.js", _HERE / "play.js"],
        styles=[_REPORT / "page.css", _HERE / "play.css"],
        token=token,
        **facts,
        max_text=MAX_TEXT - 100,  # of the words without a move's tag
    )


async def read_body(request: Request) -> dict[str, Any]:
    """The JSON object of a request. Raises Refused for a body that is too long or not an object."""
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY:
                raise Refused(413, f"a move must have at most {MAX_BODY} bytes")
    except ClientDisconnect:
        raise Refused(400, "the page was closed while sending a move") from None
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise Refused(400, "a move must be one JSON object")
    return value


def move_text(body: dict[str, Any]) -> str:
    """The move in a request, {"text": MOVE}. Raises ValueError for anything else."""
    text = body.get("text")
    if not isinstance(text, str) or not text.strip():
        raise ValueError("a move must be non-empty text")
    if len(text) > MAX_TEXT:
        raise ValueError(f"a move must have at most {MAX_TEXT} characters, got {len(text)}")
    return text.strip()
