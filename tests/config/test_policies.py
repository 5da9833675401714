"""Several policies in the settings: sections of their own over the run's, seats, rests, one line
for each mistake."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from selfplay.config import Config, load_config
from selfplay.config.learning import OptimConfig
from selfplay.config.text import dump
from selfplay.errors import SettingsError
from selfplay.policies.options import SECTIONS
from selfplay.preflight.seats import who_plays
from selfplay.rollout.seat_rules import chosen_seats

ALONE = ["rollout.partners=[self]", "rollout.policy_seats=[]"]
TWO = "policies={user: {}, agent: {optim: {lr: 1e-5}, rest: [2, 1]}}"


def read(*words: str) -> Config:
    return load_config("tiny_mediation", words)


def test_a_policy_has_its_own_sections_over_the_runs() -> None:
    config = read(TWO, "optim.final_share=0.25", "policies.agent.partners=[self, pool]")
    user, agent = map(config.of_policy, config.policy_names)
    assert (agent.optim.lr, user.optim.lr) == (1e-5, config.optim.lr)
    assert agent.optim.final_share == user.optim.final_share == 0.25
    assert (agent.rollout.partners, user.rollout.partners) == (("self", "pool"), ("self",))
    assert not agent.policies and agent.of_policy("") is agent


def test_a_model_folder_replaces_the_runs_scratch_model_and_the_other_way_around() -> None:
    config = read("policies={user: {model: {path: a_folder}}, agent: {}}")
    assert config.of_policy("user").model.scratch is None
    assert config.of_policy("agent").model.path is None


def test_an_empty_section_of_a_policy_has_defaults_and_null_is_the_runs(tmp_path: Path) -> None:
    """A folder of an earlier version has {} in each section of a policy for what is the run's."""
    given = ["methods={best_games: {weight: 0.2}}", "policies={user: {}, agent: {}}"]
    own = read(*given, "policies.agent={methods: {}, optim: {}, model: null}")
    user, agent = map(own.of_policy, own.policy_names)
    assert user.methods["best_games"].weight == 0.2 and agent.methods == {}
    assert (user.optim, user.model) == (own.optim, own.model) == (own.optim, agent.model)
    assert agent.optim == OptimConfig() != own.optim
    (tmp_path / "config.yaml").write_text(dump(own))
    assert load_config(tmp_path / "config.yaml") == own
    old = yaml.safe_load(dump(read(*given)))
    for policy in old["policies"].values():
        policy |= {section: {} for section in SECTIONS}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(old, sort_keys=False))
    assert load_config(tmp_path / "config.yaml") == read(*given)


def test_settings_with_policies_load_back_equal(tmp_path: Path) -> None:
    config = read(TWO)
    (tmp_path / "config.yaml").write_text(dump(config))
    assert load_config(tmp_path / "config.yaml") == config


def test_a_cycle_of_training_and_rest() -> None:
    rests = {
        "[2, 1]": [True, True, False, True, True, False],
        "[2, 1, 2]": [False, True, True, False, True, True],
        "[2, 0]": [True] * 6,
        "[]": [True] * 6,
    }
    for rest, steps in rests.items():
        policy = read(f"policies={{user: {{}}, agent: {{rest: {rest}}}}}").policies["agent"]
        assert [policy.trains(step) for step in range(6)] == steps


def test_seats_follow_the_roles_or_their_numbers() -> None:
    assert read(TWO).policy_of_seat == ("user", "user", "agent")
    assert read().policy_of_seat == ("", "", "")
    by_number = "policies={a: {seats: [0, agent]}, b: {seats: [1]}}"
    assert read(by_number).policy_of_seat == ("a", "b", "a")


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("{user: {}}", "each seat of mediation to one policy, got none for seat 2 (agent)"),
        ("{user: {}, agent: {seats: [2, 0]}}", "got user and agent for seat 0 (user)"),
        ("{user: {}, agnt: {}}", "policies.agnt must have the name of a role of mediation (user, "),
        ("{user: {}, agent: {}, usr: {}}", "got a policy usr beside user, agent; nearest is user"),
        ("{user: {}, agent: {}, a: {seats: [0]}}", "(user); a file's policies stay beside those"),
        (
            "{a: {seats: [user]}, user: {}, agent: {}}",
            "(user); numbers tell seats of one role apar",
        ),
        ("{'1': {}}", "letters, digits and _ that begin with a letter, got '1'"),
        ("{user: {}, agent: {seats: [3]}}", "or numbers of seats below 3, as [0], got 3"),
        ("{user: {}, agent: {game: {}}}", "policies.agent.game must be left out: game belongs to"),
        ("{user: {}, agent: {sets: []}}", "policies.agent.sets; nearest is policies.agent.seats"),
        ("{user: {}, agent: {optim: {lrr: 1}}}", "unknown key policies.agent.optim.lrr; nearest"),
        ("{user: {}, agent: {optim: {lr: -1.0}}}", "policies.agent.optim.lr must be at least 0"),
        ("{user: {rest: [1, 1]}, agent: {rest: [1, 2]}}", "at once, got rest of all in step 2"),
        ("{user: {}, agent: {model: {}}}", "one of model.path and model.scratch must be set"),
        (
            "{user: {}, agent: {model: {path: x, scratch: {}}}}",
            "exactly one of policies.agent.model.path and policies.agent.model.scratch must be set",
        ),
        ("{user: {}, agent: {engine: {tp_size: 2}}}", "agent.engine.tp_size must be the run's, 1"),
        *(
            (f"{{user: {{}}, agent: {{rest: {rest}}}}}", f"or [k, r, first], at least …got {rest}")
            for rest in ("[4]", "[4, 2, 1, 1]", "[0, 2]", "[4, 2, 6]", "[0, 0]")
        ),
        ("{user: {}, agent: {rest: [4, -2]}}", "policies.agent.rest.1 must be at least 0, got -2"),
        ("{user: {}, agent: {partners: [x]}}", "policies.agent.partners: a partner must be one"),
        ("{user: {}, 'an agent': {}}", "names of letters, digits and _ …, got 'an agent'"),
        (
            "{user: {}, agent: {model: {dtype: float32}, optim: {master_dtype: bfloat16}}}",
            "policies.agent.model.dtype must be bfloat16 with policies.agent.optim.master_dtype",
        ),
    ],
)
def test_a_mistake_is_one_line_with_the_policys_key(given: str, line: str) -> None:
    with pytest.raises(SettingsError) as refused:
        _ = read(f"policies={given}").policy_of_seat
    said, parts = str(refused.value), map(re.escape, line.split("…"))
    assert re.search(".*".join(parts), said) and "\n" not in said


@pytest.mark.parametrize("more", ["rollout.policy_seats=[user]", "rollout.partners=[pool]"])
def test_who_plays_is_set_by_policy(more: str) -> None:
    with pytest.raises(SettingsError, match=r"must be left out with policies, got .*; set polic"):
        read(TWO, more)


def test_policies_also_have_the_seats_that_a_game_leaves_to_a_partner() -> None:
    config = load_config("tiny_collab", ["policies={user: {}, assistant: {}}", *ALONE])
    assert config.policy_of_seat == ("user", "assistant")
    for each in (config, config.of_policy("user")):
        assert chosen_seats(each.game, each.rollout) is None
    alone = load_config("tiny_collab", ALONE)
    assert chosen_seats(alone.game, alone.rollout) == (1,)


@pytest.mark.parametrize(
    ("rest", "steps", "words"),
    [
        ([5, 15, 5], 50, "1 to 15, 21 to 35, 41 to 50"),
        ([1, 1], 12, "2, 4, 6, 8 and so on"),
        ([4, 2], 4, ""),
    ],
)
def test_a_start_names_the_steps_that_a_policy_rests(
    rest: list[int], steps: int, words: str
) -> None:
    two = {"one": {"seats": [0], "rest": rest}, "other": {"seats": [1]}}
    config = load_config("tiny", [f"steps={steps}", f"policies={json.dumps(two)}"])
    said = who_plays(config) or ""
    assert said.partition("policy other, ")[2] == (f"one rests in steps {words}" if words else "")
