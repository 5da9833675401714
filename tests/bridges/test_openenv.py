"""Games as OpenEnv environments, with OpenEnv's own classes and server."""

from importlib import import_module
from types import ModuleType
from typing import Any

import pytest

from dialop.kit import load_kit

pytestmark = pytest.mark.slow


def environment(bridge: ModuleType, **settings: int | str | bool) -> Any:
    return bridge.DialogueEnvironment("matching", size=2, scale=False, max_value=10, **settings)


@pytest.mark.parametrize("seat", [0, 1])
def test_a_scripted_agent_and_its_partner_reach_the_best_plan(
    bridge: ModuleType, seat: int
) -> None:
    env = environment(bridge, seat=seat)
    assert isinstance(env, import_module("openenv.core.env_server").Environment)
    script = load_kit("matching").make_script("honest", seed=9)
    for seed in range(5):
        heard = env.reset(seed=seed)
        assert heard.text and not heard.done
        while not heard.done:
            heard = env.step(bridge.Say(text=script.act(env._game.view(seat))))
        assert heard.reward == heard.score_norm == 1.0
    assert env.state.num_legal >= 3 and env.state.instance


def test_a_refused_try_is_told_and_the_limit_ends_the_game(bridge: ModuleType) -> None:
    env = environment(bridge, max_retries=1)
    env.reset(seed=0)
    first, second = (env.step(bridge.Say(text="propose it")) for _ in range(2))
    assert (first.done, first.error_kind) == (False, "no_tag")
    assert first.text.startswith("Error:")
    assert (second.done, second.reward) == (True, 0.0)
    with pytest.raises(ValueError, match="call reset"):
        env.step(bridge.Say(text="[message] hi"))


def test_equal_seeds_give_equal_games(bridge: ModuleType) -> None:
    assert environment(bridge).reset(seed=4) == environment(bridge).reset(seed=4)
    env = environment(bridge)
    assert env.reset(seed=4) != env.reset()


@pytest.mark.parametrize("settings", [{"seat": 2}, {"partner": "honst"}])
def test_what_the_game_lacks_is_refused(bridge: ModuleType, settings: dict[str, int | str]) -> None:
    with pytest.raises(ValueError, match=r"seat must be|nearest is honest"):
        environment(bridge, **settings)


def test_openenvs_server_serves_it(bridge: ModuleType) -> None:
    from fastapi.testclient import TestClient

    client = TestClient(bridge.app("matching", size=2))
    assert client.get("/health").status_code == 200
    opened = client.post("/reset", json={"seed": 0}).json()
    assert opened["observation"]["text"] and not opened["done"]
