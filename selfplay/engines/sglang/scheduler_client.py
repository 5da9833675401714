"""A client of one SGLang scheduler: token requests on its socket, past SGLang's front end.

The front end (`Engine.async_generate`) serves strings, images and streams. Its Python costs about
as much time per turn as the game does, and token requests do not need it. Here requests that are
sent at the same moment go in one list. Control calls and the socket stay with the front end.

SGLang is changed on both sides of the socket: here the front end's receiver is replaced, and
`patches.accept_lists` lets the scheduler read lists (`launch` starts `processes.run_scheduler`,
which applies the patches). Written for SGLang 0.5.17. Sizes in tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

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


class Client(Protocol):
    """Sends requests to one process of an engine."""

    context_length: int

    @property
    def loaded_version(self) -> str | None:
        """The stamp of the last push, as the process has it; None if it cannot be asked."""
        ...

    async def request(
        self,
        rid: str,
        ids: Sequence[int],
        parameters: Mapping[str, Any],
        *,
        score: bool = False,
        session: str = "",
    ) -> Answer:
        """The answer to these prompt ids, whatever its end; with `score` with their log-probs."""
        ...


class SchedulerClient:
    """Sends requests to one process and receives the answers. Its open requests are in
    `manager.rid_to_state`, where SGLang's own front keeps them too."""

    def __init__(self, manager: Any) -> None:
        """`manager` is the TokenizerManager of the process."""
        import zmq
        from sglang.srt.managers.io_struct import AbortReq

        self._manager = manager
        self._vocabulary = int(manager.model_config.vocab_size)
        self.context_length = int(manager.model_config.context_len)
        self._open: dict[str, _OpenRequest] = manager.rid_to_state
        self._outbox: list[Any] = []
        # The front's asyncio socket creates a future for each send; a plain socket sends directly.
        self._socket = zmq.Socket.shadow(manager.send_to_scheduler.underlying)
        manager._handle_batch_output = self._receive
        manager._result_dispatcher._mapping[AbortReq] = self._receive_abort

    @property
    def loaded_version(self) -> str | None:
        """As the front of the process counts."""
        return str(self._manager.config_value("weight_version"))

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
