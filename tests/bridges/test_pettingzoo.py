"""Games as PettingZoo environments, with PettingZoo's own tests."""

from functools import partial
from importlib import import_module
from types import ModuleType

import pytest

from dialop.kit import load_kit


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("game", ["matching", "collab"])
def test_pettingzoo_accepts_the_environment(bridge: ModuleType, game: str) -> None:
    env = bridge.DialogueEnv(game, **({"size": 2} if game == "matching" else {}))
    import_module("pettingzoo.test").api_test(env, num_cycles=60)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_equal_seeds_give_equal_games(bridge: ModuleType) -> None:
    env = partial(bridge.DialogueEnv, "matching", size=2)
    import_module("pettingzoo.test").seed_test(env, num_cycles=10)


def test_scripted_players_reach_the_best_plan_through_the_environment(bridge: ModuleType) -> None:
    """Both seats tell all they see in full; the game's last rewards reach both agents."""
    env = bridge.DialogueEnv("matching", size=2, scale=False, max_value=10)
    kit = load_kit("matching")
    env.reset(seed=3)
    scripts = [kit.make_script("honest", seed=seat) for seat in (0, 1)]
    totals = dict.fromkeys(env.possible_agents, 0.0)
    for agent in env.agent_iter():
        observation, reward, over, cut, _ = env.last()
        totals[agent] += reward
        assert len(bridge.text_of(observation)) > 0 or over
        seat = env.possible_agents.index(agent)
        env.step(None if over or cut else scripts[seat].act(env._game.view(seat)))
    assert totals == {"player_0": 1.0, "player_1": 1.0}


def test_refused_tries_are_told_and_end_the_game_at_the_limit(bridge: ModuleType) -> None:
    env = bridge.DialogueEnv("matching", size=2, max_retries=1)
    env.reset(seed=0)
    agent = env.agent_selection
    env.step("propose it")
    assert env.agent_selection == agent and bridge.text_of(env.observe(agent)).startswith("Error:")
    assert not any(env.truncations.values())
    env.step("propose it")
    assert all(env.truncations.values()) and not any(env.terminations.values())
