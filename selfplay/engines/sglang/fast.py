"""The fast path to one SGLang process: token requests on its scheduler's socket, in sessions.

SGLang's front end (`Engine.async_generate`) serves strings, images and streams. Its Python costs
about as much time per turn as the game does, and token requests do not need it. Here requests that
are sent at the same moment go in one list (`patches.accept_lists`). Control calls and the socket
stay with the front end.

Without a session a turn sends its whole prompt. SGLang looks it up in the prefix cache, and enters
prompt and answer there when the turn ends, which is Python for each turn. In a streaming session
SGLang keeps the seat's tokens and its KV cache from turn to turn, so a turn sends only what is new.
A session's first prompt still shares the prefix cache with other games. Sampling is the same.
SGLang cannot evict a session from the KV cache, so `SessionPool` counts it.

Written for SGLang 0.5.17. Sizes in tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from selfplay.errors import EngineFault


@dataclass(frozen=True, slots=True)
class Answer:
    """New ids with their log-probs, in nats; the prompt's log-probs if requested (the first is
    None); why the answer ended; how many prompt tokens were cached."""

    ids: list[int]
    logprobs: list[float]
    prompt_logprobs: list[float | None]
    finish: str
    num_prompt: int
    num_cached: int


@dataclass(slots=True)
class _OpenRequest:
    answer: asyncio.Future[Answer]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[float | None] = field(default_factory=list)


class SchedulerClient:
    """Sends requests to one process and receives the answers. Its open requests are in
    `manager.rid_to_state`, where SGLang's own front keeps them too."""

    def __init__(self, manager: Any) -> None:
        """`manager` is the TokenizerManager of the process."""
        import zmq
        from sglang.srt.managers.io_struct import AbortReq

        self._manager = manager
        self._vocabulary = int(manager.model_config.vocab_size)
        self._open: dict[str, _OpenRequest] = manager.rid_to_state
        self._outbox: list[Any] = []
        # The front's asyncio socket creates a future for each send; a plain socket sends directly.
        self._socket = zmq.Socket.shadow(manager.send_to_scheduler.underlying)
        manager._handle_batch_output = self._receive
        manager._result_dispatcher._mapping[AbortReq] = self._receive_abort

    async def request(
        self,
        rid: str,
        ids: Sequence[int],
        parameters: Mapping[str, Any],
        *,
        score: bool = False,
        session: str = "",
    ) -> Answer:
        """Send a request and wait for its answer; `rid` is its name, new each time.

        In a session `ids` are those after the last answer's. If the caller is cancelled, the
        process drops the request. Raises ValueError for ids that are not in the vocabulary and for
        parameters that SGLang refuses.
        """
        from sglang.srt.managers.io_struct import (
            AbortReq,
            SessionParams,
            TokenizedGenerateReqInput,
        )

        if not ids or min(ids) < 0 or max(ids) >= self._vocabulary:
            raise ValueError(f"a prompt must have ids from 0 to {self._vocabulary - 1}")
        sampling = self._manager.sampling_params_class(**parameters)
        sampling.normalize(None)
        sampling.verify(self._vocabulary)
        request = TokenizedGenerateReqInput(
            rid=rid,
            input_text=None,
            input_ids=array("q", ids),
            input_embeds=None,
            mm_inputs=None,
            token_type_ids=None,
            sampling_params=sampling,
            return_logprob=True,
            logprob_start_len=0 if score else -1,
            top_logprobs_num=0,
            token_ids_logprob=None,
            stream=False,
            session_params=SessionParams(id=session) if session else None,
        )
        opened = self._open[rid] = _OpenRequest(asyncio.get_running_loop().create_future())
        self._enqueue(request)
        try:
            return await opened.answer
        except asyncio.CancelledError:
            if rid in self._open:
                self._enqueue(AbortReq(rid=rid))
            raise

    def open_session(self, session: str) -> None:
        """Create a session, before its first request; requests of a missing one are aborted."""
        from sglang.srt.managers.io_struct import OpenSessionReqInput

        self._enqueue(
            OpenSessionReqInput(capacity_of_str_len=0, session_id=session, streaming=True)
        )

    def close_session(self, session: str) -> None:
        """Free a session's cache; if a request of it is dropped, when that has ended."""
        from sglang.srt.managers.io_struct import CloseSessionReqInput

        self._enqueue(CloseSessionReqInput(session_id=session))

    def _enqueue(self, message: Any) -> None:
        """Send a message together with those of this moment, in order."""
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(message)

    def _flush(self) -> None:
        import zmq
        from sglang.srt.managers.io_struct import sock_send

        messages, self._outbox = self._outbox, []
        # The queue is unbounded, so a send fails only if the process is gone, which the event loop
        # reports. A blocking send would then wait forever.
        with contextlib.suppress(zmq.Again):
            sock_send(self._socket, messages, flags=zmq.NOBLOCK)

    async def _receive(self, output: Any) -> None:
        """Handle a message of the process, with answers or pieces of them."""
        for index, rid in enumerate(output.rids):
            opened = self._open.get(rid)
            if opened is None:
                continue
            try:
                opened.ids.extend(output.output_ids[index])
                opened.logprobs.extend(output.output_token_logprobs_val[index])
                opened.prompt_logprobs.extend(output.input_token_logprobs_val[index] or ())
                reason = output.finished_reasons[index]
                counts = output.prompt_tokens[index], output.cached_tokens[index]
                finish = None if reason is None else reason["type"]
            except (LookupError, TypeError) as error:  # SGLang would end the trainer
                fault = EngineFault(f"the engine's reply cannot be read: {error!r}")
                del self._open[rid]
                if not opened.answer.done():
                    opened.answer.set_exception(fault)
                continue
            if finish is not None:
                self._finish(rid, finish, num_prompt=counts[0], num_cached=counts[1])

    def _receive_abort(self, message: Any) -> None:
        """Handle the message that the process dropped a request before it began."""
        if message.rid in self._open:
            self._finish(message.rid, "abort", num_prompt=0, num_cached=0)

    def _finish(self, rid: str, finish: str, *, num_prompt: int, num_cached: int) -> None:
        opened = self._open.pop(rid)
        if not opened.answer.done():
            opened.answer.set_result(
                Answer(
                    opened.ids,
                    opened.logprobs,
                    opened.prompt_logprobs,
                    finish,
                    num_prompt,
                    num_cached,
                )
            )


@dataclass(slots=True, eq=False)
class Session:
    """One seat's context: the ids of its last prompt and of the answer to it."""

    name: str
    first_prompt: tuple[int, ...]
    ids: tuple[int, ...] = ()
    reserved: int = 0  # tokens that the session may hold after its first prompt
    closed: bool = False


class SessionPool:
    """The sessions of one process, at most `slots`, which hold at most `max_tokens`.

    A first prompt is counted once for all sessions that begin with it. A new session takes what is
    free. A session that grows closes those that are idle longest, or itself if none is idle.
    """

    def __init__(self, client: SchedulerClient, *, slots: int, max_tokens: int) -> None:
        self._client, self.free_slots, self.max_tokens = client, slots, max_tokens
        self.num_tokens = 0  # that all sessions hold or may come to hold in their turns
        self._idle: dict[Session, None] = {}  # those between two turns, the longest first
        self._first_prompts: Counter[tuple[int, ...]] = Counter()
        self._counter = itertools.count()

    def is_idle(self, session: Session) -> bool:
        """Whether the session is open and between two turns."""
        return session in self._idle

    def open(self, ids: Sequence[int], num_new: int) -> Session | None:
        """A session for this first prompt and its answer, or None if none is free."""
        first = tuple(ids)
        prompt = 0 if self._first_prompts[first] else len(first)
        if not self.free_slots or self.num_tokens + prompt + num_new > self.max_tokens:
            return None
        self.free_slots -= 1
        self._first_prompts[first] += 1
        self.num_tokens += prompt + num_new
        session = Session(f"session-{next(self._counter)}", first, reserved=num_new)
        self._client.open_session(session.name)
        return session

    def begin_turn(self, session: Session, num: int) -> bool:
        """An idle session begins a turn, after which it holds at most `num` tokens. If that is too
        many although no other session is idle, it is closed, and the result is False."""
        del self._idle[session]
        self._resize(session, num)
        while self.num_tokens > self.max_tokens and self._idle:
            self.close(next(iter(self._idle)))
        if self.num_tokens > self.max_tokens:
            self.close(session)
        return not session.closed

    def end_turn(self, session: Session, ids: tuple[int, ...]) -> None:
        """The turn has ended; `ids` are its prompt and answer."""
        session.ids = ids
        self._resize(session, len(ids))
        self._idle[session] = None

    def _resize(self, session: Session, num: int) -> None:
        reserved = num - len(session.first_prompt)
        self.num_tokens += reserved - session.reserved
        session.reserved = reserved

    def close(self, session: Session) -> None:
        """Free the session's cache, once."""
        if session.closed:
            return
        session.closed = True
        self._client.close_session(session.name)
        self._idle.pop(session, None)
        self.num_tokens -= session.reserved
        self.free_slots += 1
        self._first_prompts[session.first_prompt] -= 1
        if not self._first_prompts[session.first_prompt]:
            del self._first_prompts[session.first_prompt]
            self.num_tokens -= len(session.first_prompt)


class GameSessions:
    """The sessions of one game. Close them when the game ends."""

    def __init__(self, pool: SessionPool) -> None:
        self.pool = pool
        self._sessions: list[Session] = []

    @contextlib.contextmanager
    def turn(self, ids: Sequence[int], num_new: int) -> Iterator[Session | None]:
        """The session that these prompt ids continue, or a new one; None if none is free.

        Inside the block call `SessionPool.end_turn` with the answer. If that does not happen, the
        session is closed, since what the process holds is then unknown.
        """
        self._sessions = [session for session in self._sessions if not session.closed]
        session = next((s for s in self._sessions if self._continues(ids, s)), None)
        if session is None:
            session = self.pool.open(ids, num_new)
            if session is not None:
                self._sessions.append(session)
        elif not self.pool.begin_turn(session, len(ids) + num_new):
            session = None
        try:
            yield session
        finally:
            if session is not None and not self.pool.is_idle(session):
                self.pool.close(session)

    def close(self) -> None:
        """Free the cache of all sessions of the game."""
        for session in self._sessions:
            self.pool.close(session)

    def _continues(self, ids: Sequence[int], session: Session) -> bool:
        num, idle = len(session.ids), self.pool.is_idle(session)
        return idle and num < len(ids) and session.ids == tuple(ids[:num])
