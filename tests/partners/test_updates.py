"""Weights of a partner from Python: a moving average of the policy as its teacher, an exact resume,
and one line for weights that do not fit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import selfplay
from selfplay.api.run import OpenRun
from selfplay.errors import EngineDisagrees, SettingsError
from selfplay.model.lora import full_weights
from tests.helpers.casts import trained
from tests.helpers.processes import HANG_S, on_ranks
from tests.helpers.tiny_run import (
    begin_halfway,
    begin_warm,
    same_weights,
    warm_started,
    write_tiny,
)


def begun(folder: Path, **more: object) -> OpenRun:
    """A run whose policy plays half of its games with a copy of its start."""
    begin_warm(folder)
    partner = f"checkpoint:{warm_started() / 'warm_start'}"
    given = {"out": str(folder), "rollout.partners": ["self", partner], "eval.final_games": 1}
    given |= {"optim.schedule": "constant", "save_every": 1, "keep_checkpoints": 1}
    return selfplay.start(write_tiny(folder), given | more)


def spec_of(run: OpenRun) -> str:
    return str(run.parts.policies[0].config.rollout.partners[1])


def follow(run: OpenRun) -> None:
    """Make the partner the mean of itself and the policy."""
    old = load_file(run.partner_weights(spec_of(run)) / "model.safetensors")
    own = dict(full_weights(run.parts.learner.model))
    run.update_partner(spec_of(run), {name: (old[name] + own[name]) / 2 for name in own})


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_a_teacher_that_follows_resumes_bit_for_bit(tmp_path: Path) -> None:
    for name, stops in (("unbroken", [3]), ("broken", [1, 3])):
        (tmp_path / name).mkdir()
        for number, stop in enumerate(stops):
            folder = tmp_path / name / "run"
            if number:
                run = selfplay.start(folder / "config.yaml", {"out": str(folder), "steps": stop})
            else:
                run = begun(folder, steps=stop)
            with run:
                while run.num_done < stop:
                    follow(run)
                    run.step()
                assert_plays_with(run.partner_weights(spec_of(run)), run)
                run.finish()
    unbroken, broken = tmp_path / "unbroken" / "run", tmp_path / "broken" / "run"
    assert same_weights(unbroken / "final", broken / "final")
    kept = [sorted((run / "partners").glob("*/*")) for run in (unbroken, broken)]
    assert [[each.name for each in of_run] for of_run in kept] == [
        ["step_000001", "step_000002"]
    ] * 2


def held_by(run: OpenRun, policy: int = 0) -> dict[str, torch.Tensor]:
    """The weights with which the partner of this policy's seats plays."""
    engine = run.parts.policies[policy].partners._frozen.engines[spec_of(run)].engine
    return dict(engine.model.named_parameters())


def assert_plays_with(folder: Path, run: OpenRun, policy: int = 0) -> None:
    held = held_by(run, policy)
    for key, value in weights(folder).items():
        assert torch.equal(held[key], value)


def test_a_folder_gives_weights_and_those_that_do_not_fit_are_refused_in_one_line(
    tmp_path: Path,
) -> None:
    """A refusal changes nothing. Two policies of a run are not one partner's weights."""
    shutil.copytree(warm_started() / "warm_start", tmp_path / "other")
    (tmp_path / "other" / "manifest.json").unlink()
    tokenizer = json.loads((tmp_path / "other" / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(tokenizer))
    with begun(tmp_path / "run") as run:
        folder = run.partner_weights(spec_of(run))
        start = weights(folder)
        for spec, given, line in (
            ("checkpoint:x", start, "must be a checkpoint among checkpoint:.*, got 'checkpoint:x'"),
            ("self", start, "must be a checkpoint among checkpoint:.*, got 'self'"),
            (spec_of(run), {**start, "a": torch.zeros(1)}, "tensors, got another one, a"),
            (spec_of(run), dict(list(start.items())[1:]), "tensors, got none named"),
            (spec_of(run), {n: t[:1] for n, t in start.items()}, r"tensors, got \[1.* which has"),
            (spec_of(run), tmp_path / "absent", "weights must be a run folder, a Hugging Face"),
            (spec_of(run), trained(), "weights must name one policy here.* has .*/final/one, "),
            (spec_of(run), tmp_path / "other", "of a model with the partner's tokenizer, got .*/o"),
        ):
            with pytest.raises(SettingsError, match=line) as refused:
                run.update_partner(spec, given)
            assert "\n" not in str(refused.value)
            assert run.partner_weights(spec_of(run)) == folder
        assert_plays_with(folder, run)
        run.step()
        saved = tmp_path / "run" / "checkpoints" / "step_000001" / "hf"
        run.update_partner(spec_of(run), saved)
        assert same_weights(run.partner_weights(spec_of(run)), saved)
        assert_plays_with(saved, run)
        run.step()


def test_an_engine_that_did_not_take_the_weights_is_told_and_one_that_restarts_has_them(
    tmp_path: Path,
) -> None:
    with begun(tmp_path / "run") as run:
        frozen = run.parts.policies[0].partners._frozen.engines[spec_of(run)]
        taken = trained() / "final" / "one"  # another run's policy
        load, frozen.engine.load = frozen.engine.load, lambda *words: None
        with pytest.raises(EngineDisagrees, match=r"must have the weights of .* [1-9]\d* differ"):
            run.update_partner(spec_of(run), taken)
        frozen.engine.load = load
        run.update_partner(spec_of(run), taken)
        assert_plays_with(taken, run)
        for parameter in held_by(run).values():
            parameter.data.zero_()
        frozen.engine.restart = lambda: None  # as a process that starts from the partner's folder
        frozen.restart()
        assert_plays_with(taken, run)


def test_the_policies_of_a_run_play_with_one_partner_that_gets_weights_and_resume_with_it(
    tmp_path: Path,
) -> None:
    """Each has it under its own state in the checkpoint that was saved after the update."""
    start = f"checkpoint:{warm_started() / 'warm_start'}"
    policies = {
        name: {"seats": [seat], "partners": ["self", start]}
        for seat, name in enumerate(("one", "other"))
    }
    unbroken, broken = tmp_path / "unbroken" / "run", tmp_path / "broken" / "run"
    given: dict[str, Any] = {"policies": policies, "optim.schedule": "constant", "steps": 3}
    given |= {"eval.final_games": 1, "save_every": 1, "keep_checkpoints": 3}
    for folder in (unbroken, broken):
        folder.parent.mkdir()
        if folder == unbroken:
            begin_warm(folder)
        else:  # as one that was ended after two of its three steps
            begin_halfway(unbroken, broken)
        with selfplay.start(write_tiny(folder), given, out=str(folder)) as run:
            assert run.num_done == (0 if folder == unbroken else 2)
            while run.num_done < 3:
                if run.num_done == 1:
                    one = run.parts.policies[0].learner.model
                    run.update_partner(start, dict(full_weights(one)))
                run.step()
                saved = folder / "checkpoints" / f"step_{run.num_done:06d}" / "progress.json"
                state = json.loads(saved.read_text())["state"]["policies"]
                for policy in ("one", "other"):
                    updated = {start: 1} if run.num_done > 1 else {}
                    assert state[policy]["partners"].get("updated", {}) == updated
            for number in range(2):
                assert_plays_with(run.partner_weights(start), run, number)
            assert folder in run.partner_weights(start).parents
            run.finish()
    for name in ("one", "other"):
        assert same_weights(unbroken / "final" / name, broken / "final" / name)


def test_a_run_does_not_go_on_with_a_partner_whose_given_weights_are_damaged(
    tmp_path: Path,
) -> None:
    with begun(tmp_path / "run", steps=1) as run:
        follow(run)
        run.step()
        given = run.partner_weights(spec_of(run))
    (given / "model.safetensors").write_bytes(b"")
    with pytest.raises(SettingsError, match=r"step_000000 must be undamaged, because checkpoint:"):
        selfplay.start(tmp_path / "run" / "config.yaml", {"out": str(tmp_path / "run"), "steps": 2})


@pytest.mark.slow
def test_two_ranks_play_with_the_weights_that_rank_0_gives_and_resume_with_them(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    begun(folder, steps=0).close()

    def follows() -> None:
        for stop in (1, 2):
            given = {"out": str(folder), "steps": stop}
            with selfplay.start(folder / "config.yaml", given) as run:
                if stop == 1:
                    follow(run)
                assert_plays_with(run.partner_weights(spec_of(run)), run)
                assert (folder / "partners") in run.partner_weights(spec_of(run)).parents
                run.step()

    process = on_ranks(2, follows)
    said, _ = process.communicate(timeout=HANG_S)
    assert process.returncode == 0, said[-4000:]
