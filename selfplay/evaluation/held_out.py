"""The evaluations of a run: held-out games before and after self-play, and validation games on
other instances during it.

All ranks play; only rank 0 writes and prints.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from selfplay.atomic import write_atomically
from selfplay.checkpoint import step_of
from selfplay.config import EvalConfig, GameConfig, RolloutConfig
from selfplay.config.own_code import CODE, game_digest
from selfplay.config.player_spec import CHECKPOINT, WARM_START, Spec
from selfplay.data.instances import HELD_OUT, VALIDATION, evaluation_instances
from selfplay.distributed import World, on_first_rank
from selfplay.errors import SettingsError
from selfplay.evaluation.evaluate import (
    NUM_SHOWN,
    EvaluationContext,
    evaluate,
    evaluate_scripted,
)
from selfplay.evaluation.report import rows_json, table_text
from selfplay.evaluation.rows import ALL_BEFORE, SCRIPT, one_game, read_rows
from selfplay.evaluation.tables import (
    columns_of,
    paired_change,
    show_change,
    show_interval,
    silent_text,
)
from selfplay.metrics.step_log import plain_json
from selfplay.partners.checkpoints import check_spec
from selfplay.partners.partners import Partners
from selfplay.partners.specs import read_spec
from selfplay.rollout.players import Player
from selfplay.rollout.seat_rules import chosen_seats
from selfplay.rollout.seating import Partner

_WITH = "sampled with "  # prefix of the rows with one of `eval.partners`


def held_out(
    stage: str, context: EvaluationContext, fixed: Sequence[Partner] = (), *, folder: Path
) -> None:
    """Play the held-out instances, sampled as in training and greedily, and sampled again with each
    of the partners `fixed`; write and print the result.

    `stage` is "before" or "after". The result goes to `held_out_<stage>.json` in the run's
    `folder`, and all sampled games before to `ALL_BEFORE` if they are more than the result keeps; a
    stage whose file exists is not played again.
    """
    path, config = folder / f"held_out_{stage}.json", context.config
    if path.exists():
        return
    instances = evaluation_instances(
        HELD_OUT, num=config.eval.final_games, game=config.game, data=config.data
    )
    if not context.world.rank:
        print(
            f"playing {len(instances)} held-out games {stage} self-play, sampled and greedy "
            f"(eval.final_games), and up to {min(len(instances), config.eval.talk_games)} of them "
            "with other messages or private views (eval.talk_games)",
            flush=True,
        )
    rows = {
        name: evaluate(
            instances,
            context,
            temperature=temperature,
            talk_games=config.eval.talk_games,
            num_shown=len(instances) if (stage, name) == ("before", "sampled") else NUM_SHOWN,
        )
        for name, temperature in (("sampled", None), ("greedy", 0.0))
    }
    for partner in fixed:
        rows[f"{_WITH}{partner.name}"] = evaluate(instances, replace(context, partner=partner))
    if context.world.rank:
        return
    for spec in config.game.kit.BASELINES:
        rows[f"{SCRIPT}{spec}"] = evaluate_scripted(
            instances, spec=spec, game=config.game, rollout=config.rollout
        )
    code = game_digest(config.game.name)
    rows = {name: replace(row, game_code=code) for name, row in rows.items()}
    if len(games := rows["sampled"].games) > NUM_SHOWN:  # before: any of them may be compared later
        lines = "".join(f"{json.dumps(game)}\n" for game in games)
        write_atomically(folder / ALL_BEFORE, lines)
        rows["sampled"] = replace(rows["sampled"], games=games[:NUM_SHOWN])
    write_atomically(path, json.dumps(rows_json(rows), indent=1) + "\n")
    print(f"held-out games {stage} self-play ({len(instances)} instances):")
    print(table_text(rows), flush=True)
    if stage == "after" and (folder / "held_out_before.json").exists():
        try:  # the policy is not exported yet
            print(what_changed(folder), flush=True)
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            print(f"{folder / 'held_out_before.json'} cannot be read: {error!r}", file=sys.stderr)


def held_out_at_start(
    first_step: int,
    num_steps: int,
    context: EvaluationContext,
    fixed: Sequence[Partner] = (),
    *,
    folder: Path,
) -> None:
    """Play the held-out games before the run's first step. If the run has steps left, rename the
    `held_out_after.json` of `final/` to `held_out_after_step_N.json` and say so; without a
    `final/` of its own it is deleted."""
    if first_step == 0:
        on_first_rank(partial(forget_another_game, folder, context.config.game.name), context.world)
        held_out("before", context, fixed, folder=folder)
    ended = folder / "held_out_after.json"
    if first_step < num_steps and not context.world.rank and ended.exists():
        step = step_of(folder / "final" / context.config.policy_names[0])
        kept = folder / f"held_out_after_step_{step:06d}.json"
        if step < 0 or kept.exists():
            ended.unlink()
            return
        ended.rename(kept)
        print(f"{ended} is now {kept.name}, because the run takes more steps", flush=True)


def forget_another_game(folder: Path, game: str) -> None:
    """Delete the held-out games before self-play of earlier code of the game."""
    path = folder / "held_out_before.json"
    rows = read_rows(json.loads(path.read_bytes())) if path.exists() else {}
    if any(row.game_code not in ("", game_digest(game)) for row in rows.values()):
        print(f"{path} has games of other code of {game}: they are played again", flush=True)
        path.unlink()


def unchanged(folder: Path, world: World) -> None:
    """Write the held-out results after self-play without a step: those before it."""

    def copy() -> None:
        write_atomically(
            folder / "held_out_after.json", (folder / "held_out_before.json").read_text("utf-8")
        )
        print("self-play made no step: the policy is unchanged", flush=True)

    on_first_rank(copy, world)


def what_changed(folder: Path) -> str:
    """One sentence on what self-play changed, from the run's two held-out files. The change's
    interval is over the differences on the same games."""
    if not _has_trained(folder):
        return "no step has trained a token: the policy is unchanged"
    all_before, all_after = (
        read_rows(json.loads((folder / f"held_out_{stage}.json").read_bytes()))
        for stage in ("before", "after")
    )
    before, after = all_before["sampled"], all_after["sampled"]
    old, new = before.interval, after.interval
    change = f"{new[0] - old[0]:+.3f}"
    if not one_game([before, after]):
        change = f"not compared: the game's code changed in between, see {folder / CODE}"
    fell = False
    if paired := paired_change(before, after):
        change = f"{show_change(paired)} on the same {len(after.scores):,} games"
        fell = paired[2] < 0
    partners = "".join(
        f", with {name.removeprefix(_WITH)} from {show_interval(row.interval)} to "
        f"{show_interval(all_after[name].interval)}"
        for name, row in all_before.items()
        if name.startswith(_WITH) and name in all_after
    )
    seats = [name for name in before.measures if name.startswith("reward/")]
    rewards = "".join(
        f", the reward of seat {name.removeprefix('reward/')} from "
        f"{before.measures[name]:.3f} to {after.measures[name]:.3f}"
        for name in seats
        if name in after.measures
    )
    worse = ""
    if fell and not seats:
        worse = "; it made the policy worse: try a fifth of optim.lr, or algorithm.kl=0.03"
    elif fell and not partners:
        worse = "; its seats are paid differently: eval.partners shows whether it got worse"
    talk = ""
    if before.talk and after.talk:
        effects = f"{show_change(before.talk.effect)} to {show_change(after.talk.effect)}"
        silent = silent_text(all_after, after.talk)
        talk = f", the talk effect from {effects}{silent and f' ({silent})'}"
    view = ""
    if before.view and after.view:
        view = f", the view effect from {show_change(before.view.effect)} to "
        view += show_change(after.view.effect)
    return (
        f"self-play took the score from {show_interval(old)} to {show_interval(new)} ({change})"
        f"{partners}{rewards}{talk}{view} and messages a game from "
        f"{before.measures['messages']:.2f} to {after.measures['messages']:.2f}{worse}"
    )


def _has_trained(folder: Path) -> bool:
    """Whether a step in metrics.jsonl trained a token of the policy."""
    path = folder / "metrics.jsonl"
    lines = [plain_json(line) for line in path.read_bytes().splitlines()] if path.exists() else []
    return not lines or any(line.get("num_trained_tokens", 1) for line in lines)


def validation(context: EvaluationContext, fixed: Sequence[Partner] = ()) -> dict[str, float]:
    """Play the validation instances, sampled as in training, and again with each of the partners
    `fixed`. Returns metrics with the prefix `eval_`. Every rank must call."""
    config = context.config
    instances = evaluation_instances(
        VALIDATION, num=config.eval.num_games, game=config.game, data=config.data
    )
    row = evaluate(instances, context, view_games=config.eval.talk_games)
    shown = [name for name, _, _ in columns_of([row.measures]) if name in row.measures]
    metrics = {f"eval_{name}": row.measures[name] for name in shown}
    names = ("eval_score", "eval_score_low", "eval_score_high")
    metrics |= zip(names, row.interval, strict=True)
    if row.view:
        names = ("eval_view_effect", "eval_view_effect_low", "eval_view_effect_high")
        metrics |= zip(names, row.view.effect, strict=True)
    for partner in fixed:
        with_partner = evaluate(instances, replace(context, partner=partner))
        metrics[f"eval_score/{partner.name}"] = with_partner.interval[0]
    return metrics


def fixed_partners(
    settings: EvalConfig,
    game: GameConfig,
    rollout: RolloutConfig,
    *,
    starts: Sequence[tuple[Path, Partners]],
) -> list[Partner]:
    """Load the partners listed in `eval.partners`. `starts` has, for each seat, the folder that
    self-play starts from, and the partners of the seat's policy."""
    return [
        _warm_start(starts)
        if name == WARM_START
        else starts[0][1].add(read_spec(name, game, rollout, what="eval.partners"))
        for name in settings.partners
    ]


def _warm_start(starts: Sequence[tuple[Path, Partners]]) -> Partner:
    """The warm start as a partner: in each seat that of the seat's policy."""
    by_folder = {str(folder): partners for folder, partners in starts}
    if len(by_folder) == 1:
        ((folder, partners),) = by_folder.items()
        return partners.add(Spec(CHECKPOINT, folder, WARM_START))
    made = {
        folder: partners.add(Spec(CHECKPOINT, folder, f"{WARM_START} {number}")).make_player
        for number, (folder, partners) in enumerate(by_folder.items())
    }

    def sit(names: tuple[object, ...], seat: int) -> Player:
        make_player = made[str(starts[seat][0])]
        assert make_player is not None
        return make_player(names, seat)

    return Partner(WARM_START, sit)


def check_fixed_partners(
    settings: EvalConfig, game: GameConfig, rollout: RolloutConfig, *, out: str
) -> None:
    """Raise SettingsError, before anything starts, if a partner in `eval.partners` is missing or
    cannot play this game."""
    if settings.partners and chosen_seats(game, rollout) is not None:
        raise SettingsError(
            f"eval.partners must be [] in {game.name} if the policy does not play all seats and "
            f"there is no self-play, got [{', '.join(settings.partners)}]"
        )
    for name in settings.partners:
        if name != WARM_START:
            spec = read_spec(name, game, rollout, what="eval.partners")
            seats = range(len(game.kit.ROLES))  # all in turn
            check_spec(spec, game, out=out, what="eval.partners", seats=seats)
