"""Games as OpenEnv environments, with OpenEnv's own classes and server."""

from __future__ import annotations

import pytest

pytest.importorskip("openenv", reason="requirements-bridges.txt installs it")

from fastapi.testclient import TestClient
from openenv.core.env_server import Environment

from dialop.bridges.openenv import DialogueEnvironment, Say, app
from dialop.kit import load_kit


def environment(**settings: int | str | bool) -> DialogueEnvironment:
    return DialogueEnvironment("matching", size=2, scale=False, max_value=10, **settings)


@pytest.mark.parametrize("seat", [0, 1])
def test_a_scripted_agent_and_its_partner_reach_the_best_plan(seat: int) -> None:
    env = environment(seat=seat)
    assert isinstance(env, Environment)
    script = load_kit("matching").make_script("honest", seed=9)
    for seed in range(5):
        heard = env.reset(seed=seed)
        assert heard.text and not heard.done
        while not heard.done:
            assert env._game is not None
            heard = env.step(Say(text=script.act(env._game.view(seat))))
        assert heard.reward == heard.score_norm == 1.0
    assert env.state.num_legal >= 3 and env.state.instance


def test_a_refused_try_is_told_and_the_limit_ends_the_game() -> None:
    env = environment(max_retries=1)
    env.reset(seed=0)
    first, second = (env.step(Say(text="propose it")) for _ in range(2))
    assert (first.done, first.error_kind) == (False, "no_tag")
    assert first.text.startswith("Error:")
    assert (second.done, second.reward) == (True, 0.0)
    with pytest.raises(ValueError, match="call reset"):
        env.step(Say(text="[message] hi"))


def test_equal_seeds_give_equal_games() -> None:
    assert environment().reset(seed=4) == environment().reset(seed=4)
    env = environment()
    assert env.reset(seed=4) != env.reset()


@pytest.mark.parametrize("settings", [{"seat": 2}, {"partner": "honst"}])
def test_what_the_game_lacks_is_refused(settings: dict[str, int | str]) -> None:
    with pytest.raises(ValueError, match=r"seat must be|nearest is honest"):
        environment(**settings)


def test_openenvs_server_serves_it() -> None:
    client = TestClient(app("matching", size=2))
    assert client.get("/health").status_code == 200
    opened = client.post("/reset", json={"seed": 0}).json()
    assert opened["observation"]["text"] and not opened["done"]
