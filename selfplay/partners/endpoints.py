"""Chat endpoints as partners in games, and as readers of chats outside games."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from dialop.game import Game
from selfplay.config import Config
from selfplay.config.player_spec import ENDPOINT, Spec, parse_shares
from selfplay.data.seeds import named_seed
from selfplay.engines.base import Completion, Generate, Message, Request
from selfplay.errors import SettingsError
from selfplay.learner.method import Ask
from selfplay.partners.endpoint import Endpoint, endpoint_key
from selfplay.partners.options import EndpointConfig
from selfplay.rollout.players import Move, PartnerPlayer, Player
from selfplay.rollout.seating import Partner


class Endpoints:
    """The endpoints of a run by their specs: `clients`, held only by ranks that play (`plays`)."""

    def __init__(self, settings: EndpointConfig, *, plays: bool = True) -> None:
        self._settings, self._plays = settings, plays
        self.clients: dict[str, Endpoint] = {}

    def partner(self, spec: Spec) -> Partner:
        """The endpoint as a partner. Raises SettingsError for a missing API key."""
        settings = self._settings
        model, url = spec.address
        key = endpoint_key(settings)
        if self._plays and spec.text not in self.clients:
            self.clients[spec.text] = Endpoint(model, url, settings=settings, key=key)

        def sit(names: tuple[object, ...], seat: int) -> Player:
            return EndpointPlayer(
                name=spec.text, seed_names=names, max_new_tokens=settings.max_new_tokens
            )

        return Partner(spec.text, sit)

    def reader(self, spec: Spec) -> Ask:
        """Answers chats outside games. One without an answer has the finish "void"."""
        self.partner(spec)

        def ask(requests: Sequence[Request]) -> list[Completion]:
            sent = [self.clients[spec.text].submit(request) for request in requests]
            return [answer.result() for answer in sent]

        return ask

    def close(self) -> None:
        for client in self.clients.values():
            client.close()


def try_endpoints(config: Config) -> None:
    """Ask the endpoints of `rollout.partners` for a first move before a new run trains. Raises
    SettingsError if one gives no answer."""
    specs = [spec for spec, _ in parse_shares(config.rollout.partners) if spec.kind == ENDPOINT]
    if not specs or (Path(config.out) / "metrics.jsonl").exists():
        return
    kit, options = config.game.kit, config.game.options
    (instance,) = kit.generate(kit.easy(options), seed=0, num=1)
    prompt = kit.new_game(instance, options).prompt(0)
    chat = [("system", prompt.system), ("user", prompt.user)]
    request = Request(
        prompt_ids=(),
        max_new_tokens=config.endpoint.max_new_tokens,
        seed=named_seed("endpoint", instance.key),
        messages=tuple(Message(role, text) for role, text in chat if text),
    )
    with closing(Endpoints(config.endpoint)) as endpoints:
        for spec in specs:
            (answer,) = endpoints.reader(spec)([request])
            if answer.finish == "void":
                raise SettingsError(
                    f"rollout.partners must answer before the run: {spec.text}: {answer.text}"
                )


class EndpointPlayer(PartnerPlayer):
    """A chat model: the game's texts are its system and user messages, its own moves the assistant
    messages.

    If the endpoint gives no answer, the game is aborted.
    """

    def __init__(self, *, name: str, seed_names: tuple[object, ...], max_new_tokens: int) -> None:
        self.name, self._seed_names, self._max_new_tokens = name, seed_names, max_new_tokens
        self._messages: tuple[Message, ...] = ()

    async def move(self, game: Game, seat: int, observation: str, generate: Generate) -> Move:
        user_text = observation
        if not self._messages:
            prompt = game.prompt(seat)
            (*earlier, user_text), moves = prompt.read(observation)
            if prompt.system:
                self._messages = (Message("system", prompt.system),)
            for user, move in zip(earlier, moves, strict=True):
                self._messages += (Message("user", user), Message("assistant", move))
        self._messages = (*self._messages, Message("user", user_text))
        request = Request(
            prompt_ids=(),
            max_new_tokens=self._max_new_tokens,
            seed=named_seed(*self._seed_names, seat, len(self._messages)),
            model=self.name,
            messages=self._messages,
        )
        completion = await generate(request)
        if completion.finish == "void":
            return Move(text="", complete=False, num_tokens=0, void=completion.text)
        self._messages = (*self._messages, Message("assistant", completion.text))
        return Move(text=completion.text, complete=completion.finish == "stop", num_tokens=0)

    def fork(self, *names: object) -> EndpointPlayer:
        twin = copy.copy(self)
        twin._seed_names = (*self._seed_names, *names)
        return twin
