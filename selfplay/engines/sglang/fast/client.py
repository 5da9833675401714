"""A client of one SGLang scheduler: sends token requests to its socket, bypassing the front end.

SGLang's front end (`Engine.async_generate`) serves strings, images and streams. Its Python takes
about as much time per turn as the game does, and token requests do not need it. Here requests that
are sent at the same moment form one list. Control calls and the socket stay with the front end.

SGLang is changed on both sides of the socket: here the front end's receiver is replaced, and
`patches.accept_lists` lets the scheduler read lists. Written for SGLang 0.5.17. Sizes in tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from selfplay.engines.sglang.requests import Answer
from selfplay.errors import EngineFault


class SchedulerClient:
    """Sends requests to one process and receives the answers. Its open requests are in
    `manager.rid_to_state`, like those of SGLang's own front end."""

    def __init__(self, manager: Any) -> None:
        """`manager` is the TokenizerManager of the process."""
        import zmq
        from sglang.srt.managers.io_struct import AbortReq

        self._manager = manager
        self._vocabulary = int(manager.model_config.vocab_size)
        self.context_length = int(manager.model_config.context_len)
        self._open: dict[str, tuple[Answer, asyncio.Future[Answer]]] = manager.rid_to_state
        self._outbox: list[Any] = []
        # The asyncio socket of the front end creates a future per send; a plain one sends directly.
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
        """Send a request and wait for its answer; `rid` is its unique name.

        In a session `ids` are the ids after the last answer. If the caller is cancelled, the
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
        ended: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._open[rid] = Answer(), ended
        self._enqueue(request)
        try:
            return await ended
        except asyncio.CancelledError:
            if rid in self._open:
                self._enqueue(AbortReq(rid=rid))
            raise

    def open_session(self, session: str) -> None:
        """Create a session before its first request; requests in a missing session are aborted."""
        from sglang.srt.managers.io_struct import OpenSessionReqInput

        self._enqueue(
            OpenSessionReqInput(capacity_of_str_len=0, session_id=session, streaming=True)
        )

    def close_session(self, session: str) -> None:
        """Free a session's cache; if it has a dropped request, once that has ended."""
        from sglang.srt.managers.io_struct import CloseSessionReqInput

        self._enqueue(CloseSessionReqInput(session_id=session))

    def _enqueue(self, message: Any) -> None:
        """Send a message together with the others of this moment, in order."""
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(message)

    def _flush(self) -> None:
        import zmq
        from sglang.srt.managers.io_struct import sock_send

        messages, self._outbox = self._outbox, []
        # The queue is unbounded, so a send fails only if the process is gone. The event loop
        # reports that; a blocking send would wait forever.
        with contextlib.suppress(zmq.Again):
            sock_send(self._socket, messages, flags=zmq.NOBLOCK)

    async def _receive(self, output: Any) -> None:
        """Handle a message from the process, with answers or parts of them."""
        for index, rid in enumerate(output.rids):
            if rid not in self._open:
                continue
            answer, ended = self._open[rid]
            try:
                answer.ids.extend(output.output_ids[index])
                answer.logprobs.extend(output.output_token_logprobs_val[index])
                answer.prompt_logprobs.extend(output.input_token_logprobs_val[index] or ())
                answer.num_prompt = output.prompt_tokens[index]
                answer.num_cached = output.cached_tokens[index]
                reason = output.finished_reasons[index]
                finish = None if reason is None else reason["type"]
            except (LookupError, TypeError) as error:  # otherwise SGLang would end the trainer
                del self._open[rid]
                if not ended.done():
                    fault = EngineFault(f"the engine's reply cannot be read: {error!r}")
                    ended.set_exception(fault)
                continue
            if finish is not None:
                self._finish(rid, finish)

    def _receive_abort(self, message: Any) -> None:
        """Handle the message that the process dropped a request before it started."""
        if message.rid in self._open:
            self._finish(message.rid, "abort")

    def _finish(self, rid: str, finish: str) -> None:
        answer, ended = self._open.pop(rid)
        answer.finish = finish
        if not ended.done():
            ended.set_result(answer)
