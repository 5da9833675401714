"""`rollout.player: endpoint_seat`: another program plays the policy's seats through an endpoint.

The program takes a turn, asks the policy as often as it likes and makes the move
(docs/endpoint_seat.md). The seat's transcript has the ids that the engine sampled, with their
log-probs; a call that does not continue the seat's last sequence starts another.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from inspect import signature
from itertools import zip_longest
from secrets import token_urlsafe
from typing import Any

from dialop.game import Game
from selfplay.data.seeds import named_seed
from selfplay.engines.base import Generate, Request
from selfplay.errors import RunEnds
from selfplay.extras.endpoint_seat.chats import Chat, Refused, answered, read_chat
from selfplay.extras.endpoint_seat.server import MOVE, TIMEOUT, Call, OpenTurn, tell, the_server
from selfplay.rollout.players import Move, PolicyPlayer


def _aborted(why: str) -> Move:
    """No move, which aborts the game; a reason is printed once."""
    tell(f"a game is aborted, its program: {why}")
    return Move("", complete=False, num_tokens=0, void=why)


class EndpointSeat(PolicyPlayer):
    """The policy in training behind the endpoint, which a program uses. Each game has a key."""

    __signature__ = signature(PolicyPlayer)
    ready = staticmethod(the_server)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take what every `PolicyPlayer` takes, and start this process's server if it does not run.

        Raises SettingsError for a port that is taken, or other settings of the server.
        """
        super().__init__(*args, **kwargs)
        self._server, self._key = the_server(), token_urlsafe(16)
        self._named = self._model or "policy"
        self._system, self._said = "", list[str]()  # what the seat reads and its moves, in turn
        self._known: dict[tuple[str, ...], list[int]] = {}  # the ids of each chat up to an answer
        self._begun = 0  # how many ids the transcript has as the turn begins
        self._last = ("", False, False)  # the last answer, whether it was cut, by the game's limit

    async def move(
        self, game: Game, seat: int, observation: str, generate: Generate
    ) -> Move | None:
        """Offer the turn to a program, and answer its calls until it moves.

        None if a call finds no token left in the seat's limit for the game. The game is aborted
        (`void`) if the program gives up or is silent. Raises RunEnds if no program takes turns.
        """
        self._read(game, seat, observation)
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()
        messages = [{"role": "system", "content": self._system}] * bool(self._system)
        for number, text in enumerate(self._said):
            messages.append({"role": ("user", "assistant")[number % 2], "content": text})
        shown = {"key": self._key, "model": self._named, "messages": messages}
        turn = OpenTurn(self._key, shown, lambda: loop.call_soon_threadsafe(arrived.set))
        number, self._begun = len(self.transcript.spans), len(self.transcript)
        self._server.offer(turn)
        try:
            while True:
                if (call := await self._next_call(turn, arrived)) is None:
                    return _aborted(f"it was silent for {self._server.timeout_s:g} s ({TIMEOUT})")
                try:
                    if call.path != MOVE:
                        call.answer.set_result(await self._answer(call, seat, generate))
                        turn.active_s = time.monotonic()
                        continue
                    move = self._moved(call, asked=len(self.transcript.spans) > number)
                    call.answer.set_result({})
                    return move
                except Refused as error:
                    call.answer.set_exception(error)
                    if error.code:
                        return None  # no tokens are left
        finally:
            self._server.close(turn)

    def _read(self, game: Game, seat: int, observation: str) -> None:
        """Add what the seat reads: the opening prompt with its games, or what is new."""
        if self._said:
            self._said.append(observation)
        else:
            prompt = game.prompt(seat)
            self._system, pairs = prompt.system, zip_longest(*prompt.read(observation))
            self._said = [text for pair in pairs for text in pair if text is not None]

    async def _next_call(self, turn: OpenTurn, arrived: asyncio.Event) -> Call | None:
        """The program's next call; None if it is silent for too long. Raises RunEnds if no program
        takes turns."""
        while True:
            arrived.clear()
            call, left = self._server.next_call(turn)
            if call is not None or (left <= 0 and turn.taken):
                return call
            if left <= 0:
                where = f"{self._server.url} for {self._server.timeout_s:g} s ({TIMEOUT})"
                raise RunEnds(f"rollout.player endpoint_seat: no program took a turn at {where}")
            with suppress(TimeoutError):
                await asyncio.wait_for(arrived.wait(), left)

    def _moved(self, call: Call, *, asked: bool) -> Move:
        """The move of the program, as complete as the answer that it repeats.

        `asked` tells whether this turn has sampled tokens, without which it could not train. Raises
        Refused for a move without them, or that is no text.
        """
        text, why = call.body.get("move"), call.body.get("error")
        if why is not None:
            return _aborted(f"it gave up: {why!s:.200}")
        if not isinstance(text, str):
            raise Refused(400, f"move must be a text, got {text!r:.80}")
        if not asked:
            raise Refused(409, "a turn must have an answer of the policy before its move")
        self._said.append(text)
        cut = self._last[1] and text.strip() == self._last[0].strip()
        return Move(text=text, complete=not cut, num_tokens=0, used_up=cut and self._last[2])

    async def _answer(self, call: Call, seat: int, generate: Generate) -> dict[str, Any]:
        """Ask the engine, and append what it read and sampled to the transcript.

        The request's seed depends on the game, the seat and the number of the call, as in
        `PolicyPlayer`. Raises Refused for a call that cannot be answered; with a code if the seat
        has no tokens left.
        """
        chat, rendering = read_chat(call.body, self._named), self._rendering
        if chat.left_out:
            tell(f"leaves out {', '.join(chat.left_out)} of a call: the run decides")
        prompt = self._prompt(chat)
        sampled = sum(self.transcript.mask[self._begun :])  # so that calls without a move end
        left = self.max_game_tokens - max(len(prompt), sampled)
        room = min(self._max_new_tokens, left, chat.most or left)
        if room < 1:
            why = f"no token of rollout.max_game_tokens is left, {self.max_game_tokens}"
            raise Refused(400, why, "context_length_exceeded")
        seed = named_seed(*self._seed_names, seat, self._num_requests)
        self._num_requests += 1
        completion = await generate(Request(tuple(prompt), room, seed, self._model))
        ids, text = completion.ids, rendering.decode(completion.ids)
        if stopped := any(stop in text for stop in chat.stops):  # the ids end with the stop
            while any(stop in rendering.decode(ids[:-1]) for stop in chat.stops):
                ids = ids[:-1]
            text = text[: min(text.find(stop) for stop in chat.stops if stop in text)]
        kept = self.transcript.context()
        if kept and (rendering.rewritten or kept != prompt[: len(kept)]):
            tell("a call does not continue its seat's chat: a new sequence")
            self.transcript.begin()
            kept = []
        self.transcript.observe(prompt[len(kept) :])
        self.transcript.act(ids, logprobs=completion.logprobs[: len(ids)])
        cut = completion.finish != "stop" and not stopped
        self._last = (text, cut, cut and room == left < self._max_new_tokens)
        name, read, new = f"{self._key[:6]}-{self._num_requests}", len(prompt), len(ids)
        answer, shown = answered(chat, text, cut, self._named, name)
        usage = {"prompt_tokens": read, "completion_tokens": new, "total_tokens": read + new}
        answer["usage"] = usage | {"prompt_tokens_details": {"cached_tokens": len(kept)}}
        self._known[chat.key((*chat.texts, shown))] = [*prompt, *ids]
        return answer

    def _prompt(self, chat: Chat) -> list[int]:
        """The prompt's ids: the sampled ids of the longest chat of this seat that it continues, and
        its other texts as the template shows them."""
        texts, rendering = chat.texts, self._rendering
        ends = range(len(texts) - 1, 0, -2) if not rendering.rewritten else ()
        known = (end for end in ends if chat.key(texts[:end]) in self._known)
        if not (num := next(known, 0)):
            return rendering.conversation(chat.system, texts[::2], texts[1::2])
        context = self._known[chat.key(texts[:num])]
        kept, ids = rendering.continued(context, texts[num])
        ids = [*context[:kept], *ids]
        for answer, user in zip(texts[num + 1 :: 2], texts[num + 2 :: 2], strict=True):
            ids += rendering.action_ids(answer) + rendering.following(user, closed=True)
        return ids

    def fork(self, *names: object) -> Any:
        """An independent copy, with a key of its own.

        Its turns have the whole game in their messages, so a program needs no memory of the
        original.
        """
        twin: Any = super().fork(*names)
        twin._key, twin._said, twin._known = token_urlsafe(16), [*self._said], {**self._known}
        return twin
