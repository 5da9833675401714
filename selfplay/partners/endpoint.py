"""An OpenAI-compatible chat endpoint: messages in, text out.

Network and server errors never raise, whatever a server sends. A failed request is retried with
exponential back-off and jitter (M. Brooker, "Exponential Backoff And Jitter", AWS 2015; here the
jitter factor lies between 0.5 and 1.5). When all retries fail, the completion has finish "void" and
its text is the reason. A complete answer must arrive within `endpoint.timeout_s` seconds and have
at most `MAX_BYTES`. The API key appears in one header and nowhere else.
Times in seconds.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from dialop.tags import MAX_MOVE, after_thought, in_thought
from selfplay.config.player_spec import ENDPOINT, Spec
from selfplay.data.seeds import named_seed
from selfplay.engines.base import Completion, Request
from selfplay.errors import SettingsError
from selfplay.partners.options import EndpointConfig

# HTTP statuses below 500 worth a retry: time-out, conflict, too early, too many requests.
_RETRIED = (408, 409, 425, 429)
# Seconds before the first retry; each further wait is twice as long, up to the longest.
BACKOFF_S, LONGEST_BACKOFF_S = 1.0, 60.0
MAX_BYTES = 8 * 2**20
_MAX_TOKENS = 2**31  # a larger count in an answer is invalid
# Servers' names for the `finish_reason` of a complete answer and of one cut off by a limit. Any
# other reason ("error", "content_filter", "tool_calls") means that there is no answer.
_WHOLE = ("stop", "eos", "eos_token", "end_turn", "stop_sequence", "stop_token", "complete")
_CUT_OFF = (
    *("length", "max_length", "model_length", "context_length", "model_context_window_exceeded"),
    *("max_tokens", "max_new_tokens", "max_output_tokens"),
)
_THOUGHTS = ("thinking", "redacted_thinking", "reasoning")  # types of the parts of a list
# After this many failed requests in a row the endpoint counts as dead for LONGEST_BACKOFF_S.
_DEAD_AFTER = 3
_USAGE = ("requests", "retries", "prompt_tokens", "tokens")  # of the metrics num_endpoint_*


def check_address(url: str, *, what: str) -> None:
    """Raise SettingsError, which starts with `what`, unless `url` is a usable HTTP address."""
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, ValueError) as error:
        raise SettingsError(f"{what} must name an endpoint's URL, got {url!r}: {error}") from None
    if not parsed.host or " " in url or not 0 < (parsed.port or 80) < 65536:
        raise SettingsError(
            f"{what} must name an endpoint's URL with a host and at most a port up to 65535, such "
            f"as http://127.0.0.1:8000/v1, got {url!r}"
        )


def endpoint_key(settings: EndpointConfig) -> str | None:
    """The API key from the variable named by endpoint.key_variable; None if no name is set.

    Raises SettingsError, which does not show the key, if the variable is not set or its value is
    not valid in a header.
    """
    variable = settings.key_variable
    if not variable:
        return None
    key = os.environ.get(variable)
    if not key:
        raise SettingsError(
            f"endpoint.key_variable must name a variable that is set, got {variable}"
        )
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise SettingsError(
            f"endpoint.key_variable: the value of {variable} must be printable ASCII without spaces"
        )
    return key


def check_endpoint(spec: Spec, endpoint: EndpointConfig, *, what: str) -> None:
    """Raise SettingsError if the partner is an endpoint without a valid address or API key, or if
    the partner's text or endpoint.body contains the key."""
    if spec.kind == ENDPOINT:
        check_address(spec.address[1], what=what)
        key = endpoint_key(endpoint)
        for name, text in ((what, spec.text), ("endpoint.body", json.dumps(endpoint.body))):
            if key and key in text:
                raise SettingsError(f"{name} must not hold the key of endpoint.key_variable")


class Endpoint:
    """One model behind one address, with at most `concurrency` requests at a time."""

    def __init__(self, model: str, url: str, *, settings: EndpointConfig, key: str | None) -> None:
        self.name = f"{model}@{url}"
        self._model, self._settings = model, settings
        self._key = key
        self._usage = dict.fromkeys(_USAGE, 0)
        self._lock = threading.Lock()
        self._num_failed_in_a_row, self._dead_until_s = 0, 0.0
        self._first_cut_off = ""  # why the first answer was cut off
        self._loop = asyncio.new_event_loop()
        self._free = asyncio.Semaphore(settings.concurrency)
        self._client = httpx.AsyncClient(
            base_url=url,
            headers={"Accept-Encoding": "identity"}
            | ({"Authorization": f"Bearer {key}"} if key else {}),
            timeout=None,  # `_ask` limits the whole request
            limits=httpx.Limits(max_connections=settings.concurrency),
        )
        self._thread = threading.Thread(target=self._loop.run_forever, name="endpoint", daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> Future[Completion]:
        """Send the request as soon as fewer than `concurrency` are running."""
        return asyncio.run_coroutine_threadsafe(self._answer(request), self._loop)

    def take_usage(self) -> dict[str, float]:
        """Requests and tokens of all threads since the last call, as metrics."""
        with self._lock:
            usage, self._usage = self._usage, dict.fromkeys(_USAGE, 0)
        return {f"num_endpoint_{name}": count for name, count in usage.items()}

    def close(self) -> None:
        """Cancel running requests and end the thread."""

        async def end() -> None:
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            await self._client.aclose()

        asyncio.run_coroutine_threadsafe(end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _answer(self, request: Request) -> Completion:
        async with self._free:
            return await self._tried(request)

    async def _tried(self, request: Request) -> Completion:
        body = self._body(request)
        self._count(requests=1)
        reason = "it is dead"
        for attempt in range(self._settings.retries + 1):
            if time.monotonic() < self._dead_until_s:
                break
            wait_s = self._backoff_s(request.seed, attempt)
            try:
                response, content = await self._ask(body)
            except TimeoutError:
                reason = f"no complete answer in {self._settings.timeout_s:g} s"
            except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
                reason = f"{type(error).__name__}: {self._excerpt(str(error))}"
            else:
                if response.status_code == 200:
                    answer = _read(content)
                    if not isinstance(answer, str):
                        return self._completion(*answer)
                    reason = self._excerpt(answer)
                else:
                    text = content[:1000].decode(errors="replace")
                    said = self._excerpt(text or response.reason_phrase) or "an empty answer"
                    reason = f"HTTP {response.status_code}: {said}"
                    if response.status_code not in _RETRIED and response.status_code < 500:
                        break
                    retry_after_s = _retry_after_s(response.headers.get("Retry-After"))
                    wait_s = min(max(wait_s, retry_after_s), LONGEST_BACKOFF_S)
            if attempt < self._settings.retries:
                self._count(retries=1)
                await asyncio.sleep(wait_s)
        return self._void(reason)

    async def _ask(self, body: dict[str, Any]) -> tuple[httpx.Response, bytes]:
        """The response to one request, and its content.

        Raises TimeoutError, httpx's errors, and ValueError for content that is too large or
        compressed, although identity encoding was requested.
        """
        content = bytearray()
        async with (
            asyncio.timeout(self._settings.timeout_s),
            self._client.stream("POST", "/chat/completions", json=body) as response,
        ):
            async for part in response.aiter_raw():
                content += part
                if len(content) > MAX_BYTES:
                    raise ValueError(f"an answer of more than {MAX_BYTES >> 20} MiB")
        if (encoding := response.headers.get("Content-Encoding", "identity")) != "identity":
            raise ValueError(f"an answer of encoding {encoding}")
        return response, bytes(content)

    def _body(self, request: Request) -> dict[str, Any]:
        settings = self._settings
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [{"role": m.role, "content": m.content} for m in request.messages],
        }
        if "max_completion_tokens" not in settings.body:  # some servers refuse both keys
            body["max_tokens"] = request.max_new_tokens
        return body | settings.body

    def _backoff_s(self, seed: int, attempt: int) -> float:
        jitter = 0.5 + named_seed(seed, "retry", attempt) / 2**63
        return min(BACKOFF_S * 2**attempt * jitter, LONGEST_BACKOFF_S)

    def _completion(self, text: str, cut_off: str, usage: tuple[int, int]) -> Completion:
        self._count(prompt_tokens=usage[0], tokens=usage[1])
        text = self._without_key(text)  # a server may echo its request
        if len(text) > MAX_MOVE:
            text, cut_off = text[:MAX_MOVE], f"the limit of {MAX_MOVE} characters"
        with self._lock:
            self._num_failed_in_a_row = 0
            first, self._first_cut_off = not self._first_cut_off, self._first_cut_off or cut_off
        if first and cut_off:
            print(
                f"endpoint {self.name}: an answer was cut off by {cut_off} (endpoint.max_new_tokens"
                f" is {self._settings.max_new_tokens}); such moves are invalid (errors_cut_off)",
                file=sys.stderr,
                flush=True,
            )
        finish = "length" if cut_off else "stop"
        return Completion(ids=[], logprobs=[], finish=finish, version=0, text=text)

    def _void(self, reason: str) -> Completion:
        with self._lock:
            self._num_failed_in_a_row += 1
            first, dead = self._num_failed_in_a_row == 1, self._num_failed_in_a_row >= _DEAD_AFTER
            if dead and time.monotonic() >= self._dead_until_s:
                self._dead_until_s = time.monotonic() + LONGEST_BACKOFF_S
        if first:
            message = f"endpoint {self.name} gave no answer; its games are aborted: {reason}"
            print(message, file=sys.stderr, flush=True)
        return Completion(ids=[], logprobs=[], finish="void", version=0, text=reason)

    def _without_key(self, text: str) -> str:
        key = (self._key or "").strip()  # quoting escapes a line end
        return text.replace(key, "[key]") if key else text

    def _excerpt(self, text: str) -> str:
        """The first 200 characters without the key, on one line, control characters escaped."""
        return repr(self._without_key(text)[:200])[1:-1]

    def _count(self, **more: int) -> None:
        with self._lock:
            for name, number in more.items():
                self._usage[name] += number


def _read(content: bytes) -> tuple[str, str, tuple[int, int]] | str:
    """The text of a chat completion after the model's thoughts, what cut it off ("" for a complete
    one), and its (prompt, answer) tokens; for any other content the reason why it is not one.

    An answer that was cut off may have no text, for example while thinking. Half of a surrogate
    pair becomes a question mark.
    """
    try:
        body = json.loads(content)
        choice = body["choices"][0]
        message, finish = choice["message"], choice.get("finish_reason")
        content = message.get("content")
        text, thinks = _joined(content)
        thinks = thinks or bool(message.get("reasoning_content") or message.get("reasoning"))
        name = "stop" if finish in (None, "") else str(finish).lower()
        if name not in (*_WHOLE, *_CUT_OFF):
            return f"its answer has finish_reason {finish!r:.80}"
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return "its answer is not a chat completion"
    cut_off = f"finish_reason {finish}" if name in _CUT_OFF else ""
    if in_thought(text) or (thinks and not text):
        cut_off = cut_off or "the end of the answer inside a thought"
    elif content is None and not cut_off:
        return "its answer has no text"
    usage = body.get("usage")
    counts = usage if isinstance(usage, dict) else {}
    tokens = _count(counts.get("prompt_tokens")), _count(counts.get("completion_tokens"))
    return after_thought(text).encode(errors="replace").decode(), cut_off, tokens


def _joined(content: Any) -> tuple[str, bool]:
    """The text of a message's content, and whether some of its parts are thoughts.

    Raises TypeError or LookupError for content that is neither null nor text nor a list of parts.
    """
    whole = {"type": "text", "text": "" if content is None else content}
    parts = content if isinstance(content, list) else [whole]
    said = [part for part in parts if part["type"] not in _THOUGHTS]
    if any(part["type"] not in ("text", "output_text") for part in said):
        raise TypeError("a part is not text")
    return "".join(part["text"] for part in said), len(said) < len(parts)


def _count(value: Any) -> int:
    """A number of tokens; 0 for anything else."""
    return value if type(value) is int and 0 <= value < _MAX_TOKENS else 0


def _retry_after_s(header: str | None) -> float:
    """The seconds in a Retry-After header (a number or a date); 0 for none or an invalid one."""
    if not header:
        return 0.0
    try:
        return max(0.0, float(header))
    except ValueError:
        with suppress(ValueError, TypeError, OverflowError):
            return max(0.0, (parsedate_to_datetime(header) - datetime.now(UTC)).total_seconds())
    return 0.0
