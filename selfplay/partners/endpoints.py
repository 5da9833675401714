"""Chat endpoints as partners in games, and as readers of chats outside games."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from selfplay.config import Config
from selfplay.config.player_spec import ENDPOINT, Spec, parse_shares
from selfplay.data.seeds import named_seed
from selfplay.engines.base import Completion, Message, Request
from selfplay.errors import SettingsError
from selfplay.learner.method import Ask
from selfplay.partners.endpoint import Endpoint, endpoint_key
from selfplay.partners.options import EndpointConfig
from selfplay.rollout.players import Player
from selfplay.rollout.seating import Partner
from selfplay.rollout.text_players import EndpointPlayer


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
