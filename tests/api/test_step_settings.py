"""Partners and drawn instances of a single step from Python: what changes, an exact resume, and one
line for what a step cannot change."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

import selfplay
from selfplay.api.step_settings import read_in_play
from selfplay.checkpoint import checkpoints, state_of
from selfplay.config import load_config
from selfplay.errors import SettingsError
from tests.helpers.casts import PAIR
from tests.helpers.tiny_run import (
    assert_same_run,
    begin_halfway,
    begin_warm,
    metrics_of,
    write_tiny,
)

SETTINGS: dict[str, Any] = {
    "optim.schedule": "constant",
    "save_every": 1,
    "keep_checkpoints": 9,
    "steps": 4,
    "rollout.partners": ["self", "pool"],
    "policy_pool.every": 1,
    "eval.final_games": 1,
    "rollout.opponents": "league",
    "rollout.instances": 6,
}


def given(step: int) -> dict[str, Any]:
    """The settings of the step after `step`: the second has a scripted partner and small values."""
    if step != 1:
        return {}
    return {"rollout.partners": ["scripted:solo*2", "pool"], "game.options.max_value": 3}


def begun(folder: Path, **more: Any) -> selfplay.OpenRun:
    if not folder.exists():
        begin_warm(folder)
    return selfplay.start(write_tiny(folder), SETTINGS | {"out": str(folder)} | more)


def games_of(folder: Path, step: int) -> list[dict[str, Any]]:
    games = [json.loads(line) for line in (folder / "games.jsonl").open()]
    return [game for game in games if game["step"] == step]


def test_a_step_has_its_own_partners_and_instances_and_a_resume_is_exact(tmp_path: Path) -> None:
    unbroken, broken = tmp_path / "unbroken" / "run", tmp_path / "broken" / "run"
    for folder in (unbroken, broken):
        folder.parent.mkdir()
        if folder == broken:  # as one that was ended after two of its four steps
            begin_halfway(unbroken, broken, lost=2)
        with begun(folder) as run:
            assert run.num_done == (2 if folder == broken else 0)
            while run.num_done < SETTINGS["steps"]:
                run.step(given(run.num_done))
            (policy,) = run.parts.policies
            assert policy.opponents.config == policy.config, "the next step draws by the run's"
            run.finish()
    assert_same_run(unbroken, broken)
    for step in (1, 2, 3):
        players = {seat["player"] for game in games_of(unbroken, step) for seat in game["seats"]}
        alone = any(
            {seat["player"] for seat in game["seats"]} == {"policy"}
            for game in games_of(unbroken, step)
        )
        largest = max(
            value
            for game in games_of(unbroken, step)
            for row in game["state"]["instance"]["table"]
            for value in row
        )
        assert ("scripted:solo" in players, alone) == (step == 2, step != 2)
        assert (largest < 3) == (step == 2)
    second = metrics_of(unbroken)[1]
    assert second["game.options.max_value"] == 3.0 and any(
        name.startswith("score/scripted:solo") for name in second
    )
    named = [state_of(each).get("overrides") for each in checkpoints(unbroken)]
    partners = json.dumps(["scripted:solo*2", "pool"])
    assert named == [
        None,
        {"rollout.partners": partners, "game.options.max_value": "3"},
        None,
        None,
    ]


REFUSED = {
    "an option of play": (
        {"game.options.messages": False},
        r"game.options.messages must be the run's in a step.*got False; a step may change .*keep",
    ),
    "a model that is not loaded": (
        {"rollout.partners": ["pool", "checkpoint:else"]},
        r"rollout.partners of a step must be self, scripted.*\(self, pool\), got 'checkpoint:else'",
    ),
    "a script that is not there": (
        {"rollout.partners": ["pool", "scripted:sole"]},
        "rollout.partners.*sole.*nearest is solo",
    ),
    "another setting": ({"rollout.instances": 2}, "must be among .*got rollout.instances"),
}


def test_what_a_step_cannot_change_is_refused_in_one_line(tmp_path: Path) -> None:
    """And the run goes on as if it had not been asked."""
    with begun(tmp_path / "run", steps=1) as run:
        for overrides, line in REFUSED.values():
            with pytest.raises(SettingsError, match=line) as said:
                run.step(overrides)
            assert "\n" not in str(said.value)
        run.step()
    assert metrics_of(tmp_path / "run")[0]["step"] == 1


OF_SEVERAL = {
    "rollout.partners": (
        ["self"],
        "policies.NAME.partners, .*; nearest is policies.other.partners$",
    ),
    "policies.othr.optim.lr": (1.0, "; nearest is policies.other.optim.lr$"),
    "policies.other.partners": (["pool"], "^policies.other.partners of a step must be self, scrip"),
    "lr": (1.0, "; nearest is optim.lr$"),
}


def test_a_step_of_several_policies_changes_one_of_them(tmp_path: Path) -> None:
    """Its rate and who plays its seat; what is refused names the key that a step may change."""
    policies = yaml.safe_load(PAIR.partition("=")[2])
    alone = {"policies": policies, "rollout.partners": ["self"], "rollout.opponents": "shares"}
    with begun(tmp_path / "run", steps=1, **alone) as run:
        for key, (value, line) in OF_SEVERAL.items():
            with pytest.raises(SettingsError, match=line):
                run.step({key: value})
        step = run.step(
            {"policies.other.partners": ["self", "scripted:solo"], "policies.one.optim.lr": 2e-5}
        )
    assert {each.players for each in step.episodes} >= {("policy", "scripted:solo")}
    assert step.metrics["lr/one"] == step.metrics["policies.one.optim.lr"] == 2e-5
    assert step.metrics["lr/other"] == policies["other"]["optim"]["lr"]


@pytest.mark.parametrize(
    ("settings", "read"),
    [
        ("configs/tiny.yaml", {"brief", "demonstrations", "messages", "private_reasoning"}),
        ("configs/tiny_planning.yaml", {"brief", "messages", "private_reasoning", "search"}),
        ("configs/tiny_mediation.yaml", {"brief", "messages", "private_reasoning"}),
        ("examples/split/split.yaml", set()),
    ],
)
def test_what_play_reads_of_a_games_options(settings: str, read: set[str]) -> None:
    """The others only change which instances are drawn. Those that a game reads once it shows
    demonstrations of itself are then read too."""
    config = load_config(settings)
    kit, options = config.game.kit, config.game.options
    assert read_in_play(kit, options, kit.generate(options, seed=0, num=2)) == read
    assert len(fields(options)) > len(read)
    if "demonstrations" in read:
        config = load_config(settings, ["game.options.demonstrations=1"])
        own = config.game.options
        assert "keep" in read_in_play(kit, own, kit.generate(own, seed=0, num=1))
