"""What a run shows for itself: held-out games before and after self-play, and during it on another
set of instances.

Only rank 0 writes and prints; every rank plays its share.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from selfplay.config import Config
from selfplay.config.settings import SettingsError
from selfplay.data.instances import HELD_OUT, VALIDATION, kept_back
from selfplay.evaluation.evaluate import (
    EvaluationContext,
    evaluate,
    evaluate_scripted,
    play_kept_back,
    summed,
)
from selfplay.evaluation.report import COLUMNS, rows_json, table_text
from selfplay.evaluation.word_drift import read_people, word_drift
from selfplay.games import kit_of
from selfplay.metrics.bootstrap import show_interval
from selfplay.metrics.run_folder import write_atomically


def held_out(stage: str, config: Config, *, context: EvaluationContext, folder: Path) -> None:
    """Play the held-out instances, sampling as in training and greedily; write
    `held_out_<stage>.json` and say it.

    `stage` is "before" or "after"; a stage that already stands in the folder is not played again.
    """
    path = folder / f"held_out_{stage}.json"
    if path.exists():
        return
    instances = kept_back(HELD_OUT, num=config.eval.final_games, game=config.game, data=config.data)
    temperatures = {"sampled": None, "greedy": 0.0}
    found = {
        name: evaluate(instances, context, temperature=temperature)
        for name, temperature in temperatures.items()
    }
    if context.world.rank:
        return
    if stage == "after":
        for spec in kit_of(config.game).BASELINES:
            found[spec] = evaluate_scripted(
                instances, spec=spec, game=config.game, rollout=config.rollout
            )
    write_atomically(path, json.dumps(rows_json(found), indent=1) + "\n")
    print(f"held-out games {stage} self-play ({len(instances)} instances):")
    print(table_text(found), flush=True)
    if stage == "after" and (folder / "held_out_before.json").exists():
        print(learnt(folder), flush=True)


def held_out_at_start(
    first_step: int, config: Config, *, context: EvaluationContext, folder: Path
) -> None:
    """Before the run's first step play its held-out games. Where more steps are to come, what a
    shorter run found in this folder after its last holds no longer."""
    if first_step == 0:
        held_out("before", config, context=context, folder=folder)
    if (folder / "held_out_before.json").exists():
        _read_stage(folder, "before")  # now and not after the last step
    if first_step < config.steps:
        (folder / "held_out_after.json").unlink(missing_ok=True)


def _read_stage(folder: Path, stage: str) -> dict[str, Any]:
    """What `held_out` wrote. Raises SettingsError where the file cannot be read."""
    path = folder / f"held_out_{stage}.json"
    try:
        found = json.loads(path.read_bytes())["sampled"]
        interval, messages = found["interval"], found["measures"]["messages"]
        if not all(math.isfinite(number) for number in (*interval, messages)) or len(interval) != 3:
            raise ValueError("an interval is three numbers")
    except (OSError, ValueError, RecursionError, LookupError, TypeError) as error:
        raise SettingsError(
            f"{path} must hold the games of an evaluation, cannot be read ({error}); move it away "
            "to go on in this folder"
        ) from None
    return {"interval": interval, "messages": messages}


def learnt(folder: Path) -> str:
    """What self-play changed, in one sentence, from the run's two held-out files."""
    before, after = (_read_stage(folder, stage) for stage in ("before", "after"))
    old, new = before["interval"], after["interval"]
    apart = "apart" if new[1] > old[2] or new[2] < old[1] else "overlapping"
    talk = [found["messages"] for found in (before, after)]
    return (
        f"self-play took the score from {show_interval(tuple(old))} to {show_interval(tuple(new))} "
        f"({new[0] - old[0]:+.3f}, intervals {apart}) and messages a game from {talk[0]:.2f} to "
        f"{talk[1]:.2f}; the policy is in {folder / 'final'}"
    )


def validation(config: Config, context: EvaluationContext) -> dict[str, float]:
    """Scores on the validation instances, sampling as in training: metrics with the prefix
    `eval_`."""
    instances = kept_back(VALIDATION, num=config.eval.num_games, game=config.game, data=config.data)
    played = play_kept_back(instances, context)
    found = summed(played, partner=context.partner, world=context.world)
    names = [measure for measure, _, _ in COLUMNS if measure in found.measures]
    measured = {name: found.measures[name] for name in names}
    if config.eval.human_words is not None:
        people = read_people(config.eval.human_words)
        measured |= word_drift(played.games.values(), people, context.world)
    return {f"eval_{name}": value for name, value in measured.items()} | {
        "eval_score": found.interval[0]
    }


def validation_score(config: Config, context: EvaluationContext) -> float:
    """The mean score alone of the games that `validation` plays."""
    instances = kept_back(VALIDATION, num=config.eval.num_games, game=config.game, data=config.data)
    return evaluate(instances, context).interval[0]
