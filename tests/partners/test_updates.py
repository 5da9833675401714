"""Weights of a partner from Python: a moving average of the policy as its teacher, an exact resume,
and one line for weights that do not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import selfplay
from selfplay.api.run import OpenRun
from selfplay.errors import SettingsError
from selfplay.model.lora import full_weights
from tests.helpers.processes import HANG_S, on_ranks
from tests.helpers.tiny_run import begin_warm, same_weights, warm_started, write_tiny


def begun(folder: Path, **more: object) -> OpenRun:
    """A run whose policy plays half of its games with a copy of its start."""
    begin_warm(folder)
    partner = f"checkpoint:{warm_started() / 'warm_start'}"
    given = {"out": str(folder), "rollout.partners": ["self", partner], "eval.final_games": 1}
    given |= {"optim.schedule": "constant", "save_every": 1, "keep_checkpoints": 1}
    return selfplay.start(write_tiny(folder), given | more)


def spec_of(run: OpenRun) -> str:
    return str(run.config.rollout.partners[1])


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
                engine = run.parts.policies[0].partners._frozen.engines[spec_of(run)].engine
                held = dict(engine.model.named_parameters())
                for key, value in weights(run.partner_weights(spec_of(run))).items():
                    assert torch.equal(held[key], value)
                run.finish()
    unbroken, broken = tmp_path / "unbroken" / "run", tmp_path / "broken" / "run"
    assert same_weights(unbroken / "final", broken / "final")
    kept = [sorted((run / "partners").glob("*/*")) for run in (unbroken, broken)]
    assert [[each.name for each in of_run] for of_run in kept] == [
        ["step_000001", "step_000002"]
    ] * 2


def test_a_folder_gives_weights_and_those_that_do_not_fit_are_refused_in_one_line(
    tmp_path: Path,
) -> None:
    with begun(tmp_path / "run") as run:
        start = weights(run.partner_weights(spec_of(run)))
        for spec, given, line in (
            ("checkpoint:x", start, "must be a checkpoint among checkpoint:.*, got 'checkpoint:x'"),
            (spec_of(run), {**start, "a": torch.zeros(1)}, "tensors, got another one, a"),
            (spec_of(run), dict(list(start.items())[1:]), "tensors, got none named"),
            (spec_of(run), {n: t[:1] for n, t in start.items()}, r"tensors, got \[1.* which has"),
            (spec_of(run), tmp_path / "absent", "weights must be a run folder, a Hugging Face"),
        ):
            with pytest.raises(SettingsError, match=line):
                run.update_partner(spec, given)
        run.step()
        saved = tmp_path / "run" / "checkpoints" / "step_000001" / "hf"
        run.update_partner(spec_of(run), saved)
        assert same_weights(run.partner_weights(spec_of(run)), saved)
        run.step()


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
                (policy,) = run.parts.policies
                held = dict(
                    policy.partners._frozen.engines[spec_of(run)].engine.model.named_parameters()
                )
                given_weights = weights(run.partner_weights(spec_of(run)))
                assert all(torch.equal(held[key], value) for key, value in given_weights.items())
                assert (folder / "partners") in run.partner_weights(spec_of(run)).parents
                run.step()

    process = on_ranks(2, follows)
    said, _ = process.communicate(timeout=HANG_S)
    assert process.returncode == 0, said[-4000:]
