"""Evaluations and single games from Python, as tables and plain records."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from numbers import Real
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from selfplay.api.run import OpenRun, SavedRun, join_world, outside_event_loop, refusing
from selfplay.atomic import write_atomically
from selfplay.chat.rendering import Rendering
from selfplay.config import Config, GameConfig
from selfplay.config.load import load, override_words
from selfplay.config.own_code import own_code, played_names
from selfplay.config.player_spec import SCRIPTED, parse_spec
from selfplay.config.text import dump
from selfplay.data.instances import GENERATED
from selfplay.distributed import World
from selfplay.engines.kinds import engine_kind
from selfplay.engines.sglang.fast import early
from selfplay.errors import RunEnds, SettingsError
from selfplay.evaluation.asked import FROM_FIRST_MOVE, EvalPlan
from selfplay.evaluation.evaluate import (
    NUM_SHOWN,
    check_room,
    evaluate_people,
    evaluate_scripted,
    play_matches,
)
from selfplay.evaluation.games import Games, find_games, find_start, imitated_boards
from selfplay.evaluation.plan import PEOPLE, Matches, find_config, find_matches, place
from selfplay.evaluation.report import Evaluated, check_report_place, write_report
from selfplay.evaluation.rows import SCRIPT, Row
from selfplay.metrics.records import game_record
from selfplay.model.families import max_positions
from selfplay.model.hub import described_in
from selfplay.partners.checkpoints import Source, print_code, steps_of
from selfplay.partners.endpoint import check_endpoint
from selfplay.preflight.command_line import Parser
from selfplay.preflight.run import check_folder, check_machine, read_rendering
from selfplay.preflight.small_copy import check_copy
from selfplay.rollout.driver import play_scripted
from selfplay.rollout.episode import limits_of
from selfplay.rollout.seating import scripted_games
from selfplay.setup import warn_of_template

Policy = SavedRun | str | Path


@contextmanager
def _worded(first: str) -> Iterator[None]:
    """Refusals name the arguments of eval.py; here they name those of a call, whose `first` is RUN.
    Paths that have such a part stay as they are."""
    try:
        yield
    except SettingsError as error:
        said = re.sub(r"(?<![\w/.-])--(?=[a-z])", "", str(error))
        said = re.sub(r"(?<![\w/:.-])RUN(?![\w/'])", first, said)
        raise SettingsError(said) from error.__cause__


@outside_event_loop()
@_worded("policy")
def evaluate(
    policy: Policy | Sequence[Policy] = (),
    overrides: Mapping[str, Any] | None = None,
    *,
    games: str | Path = GENERATED,
    num: int | None = None,
    partner: str | None = None,
    partners: Sequence[str] = (),
    temperature: float | Sequence[float] = (),
    start: str | float = 0,
    config: str | Path | None = None,
    out: str | Path | None = None,
    **more: Any,
) -> Evaluated:
    """Evaluate a policy, or several with `partners`, as `eval.py` does with options of the same
    names, and write the same report.

    `policy` is a run, its folder, a Hugging Face folder or name. Under torchrun every rank must
    call.

    Raises:
        SettingsError: for players, games or settings that cannot be used.
        RunEnds: if all games are aborted, an engine is lost or the report cannot be written.
    """
    with refusing():
        plan = EvalPlan(
            runs=_folders(policy),
            games=str(games),
            num=num,
            partner=partner,
            partners=partners,
            temperature=_temperatures(temperature),
            start=str(start),
            config=_settings_file(config),
            out=None if out is None else Path(out),
            overrides=override_words(overrides, more),
        )
    return evaluate_plan(plan)


@outside_event_loop()
@_worded("player")
def play(
    player: Policy,
    overrides: Mapping[str, Any] | None = None,
    *,
    partner: str | None = None,
    games: str | Path = GENERATED,
    num: int = 1,
    temperature: float | None = None,
    config: str | Path | Mapping[str, Any] | None = None,
    **more: Any,
) -> list[dict[str, Any]]:
    """The first `num` games of a player, each in full, as records of games.jsonl.

    `player` is a policy as in `evaluate`, or `scripted:NAME` with the game in the settings
    `config`. With `partner`, a policy plays its seats in turn, a script seat 0.

    Raises:
        SettingsError, RunEnds: as `evaluate`.
    """
    words = override_words(overrides, more)
    is_script = isinstance(player, str) and player.startswith(f"{SCRIPTED}:")
    with refusing():
        plan = EvalPlan(
            runs=_folders(player),
            games=str(games),
            num=num,
            partner=partner,
            temperature=_temperatures(() if temperature is None else temperature),
            config=None if is_script else _settings_file(config),
            overrides=[*words, "eval.talk_games=0"],
        )
    if is_script:
        return _scripted_games(plan, config)
    with ExitStack() as cleanup:
        (row,) = _Evaluation(plan, cleanup).play(num_shown=num).values()
    return list(row.games)


def _scripted_games(
    plan: EvalPlan, config: str | Path | Mapping[str, Any] | None
) -> list[dict[str, Any]]:
    """Games of scripted players, which need no model."""
    settings = load(Config, Path(config) if isinstance(config, str) else config, plan.overrides)
    game, names = settings.game, []
    with refusing():
        for text in filter(None, (str(plan.runs[0]), plan.partner)):
            spec = parse_spec(text, game.kit.SCRIPT_NAMES)
            if spec.kind != SCRIPTED:
                raise ValueError(f"a script's partner must be a script, got {text}")
            game.kit.make_script(spec.argument, seed=0)
            names.append(spec.argument)
        found = find_games(plan.games, plan.num, settings)
    other = names[1] if plan.partner else None
    setups = scripted_games(found.instances, spec=names[0], game=game, other=other)
    episodes = play_scripted(setups, limits=limits_of(settings.rollout))
    return [game_record(episode, step=0) for episode in episodes]


def evaluate_plan(plan: EvalPlan) -> Evaluated:
    """Play the plan's games; rank 0 writes the report. Raises as `evaluate`."""
    with ExitStack() as cleanup:
        found = _Evaluation(plan, cleanup)
        rows, matches = found.play(), found.matches
        if found.world.rank == 0:
            rows |= {n: row for n, row in found.baselines().items() if n not in rows}
        title = "Cross-play" if matches.rows else f"Evaluation of {plan.runs[0]}"
        matrix = (matches.rows, matches.columns) if matches.rows else None
        facts = _facts_of(plan, matches, found.games, found.code)
        first = matches.players[0]
        alone = bool(first.source and first.source.policy and not first.cast)
        facts |= _roles_of(rows.values(), matches.config.game, alone=alone)
        report = Evaluated(title, facts, rows, matrix, roles=matches.roles)
        if found.world.rank == 0:
            try:
                out = place(plan, matches)
                report = replace(report, paths=write_report(report, out))
                write_atomically(out / "config.yaml", dump(matches.config))
            except OSError as error:
                print(report, flush=True)
                raise RunEnds(f"{error}; the tables are printed but not saved") from error
    return report


class _Evaluation:
    """A checked evaluation that has not loaded weights yet. Raises SettingsError for invalid
    input."""

    def __init__(self, plan: EvalPlan, cleanup: ExitStack) -> None:
        with refusing():
            Parser("eval.py", None).check_settings(plan.overrides, trains=False)
            self.matches = matches = find_matches(plan)
            config = matches.config
            cleanup.callback(early.end)
            early.begin(config)
            check_folder(out := place(plan, matches), what="--out")
            check_report_place(out)
            check_machine(config.device, config.engine)
            for player in matches.players:
                what = "--partners" if matches.rows else "--partner"
                check_endpoint(player.spec, config.endpoint, what=what)
            self.world = join_world(config, cleanup)
            if config.engine.device_map and self.world.world_size > 1:
                raise SettingsError(
                    f"engine.device_map must be null with {self.world.world_size} processes, got "
                    f"{config.engine.device_map}: each would take all GPUs"
                )
            self.games = find_games(
                plan.games,
                plan.num,
                config,
                start=find_start(plan.start),
                imitated=imitated_boards([*matches.sources]),
            )
            # Before hours of play, so that an unreadable record cannot end the evaluation later.
            records, instances = self.games.records, self.games.instances
            people = evaluate_people(records, instances, config.game) if records else None
            self._people = {PEOPLE: people} if people is not None else {}
            self._policies = _find_policies(matches, plan.overrides, self.games, self.world)
            self.code = own_code(played_names(config)).digests  # now: it may change during play
            if self.world.rank == 0:
                print_code(config, None if matches.rows else matches.players[0].source)

    def play(self, *, num_shown: int = NUM_SHOWN) -> dict[str, Row]:
        """The rows of the matches, each with its first `num_shown` games in full."""
        return play_matches(
            self.matches,
            instances=self.games.instances,
            policies=self._policies,
            world=self.world,
            num_shown=num_shown,
        )

    def baselines(self) -> dict[str, Row]:
        """The rows of people and of the game's scripted baselines on the same instances."""
        config = self.matches.config
        scripted = {
            f"{SCRIPT}{spec}": evaluate_scripted(
                self.games.instances, spec=spec, game=config.game, rollout=config.rollout
            )
            for spec in config.game.kit.BASELINES
        }
        return self._people | scripted


def _settings_file(config: object) -> Path | None:
    """Raises ValueError unless it is a path, a name or None."""
    if not isinstance(config, str | Path | None):
        kind = "a mapping" if isinstance(config, Mapping) else repr(config)
        raise ValueError(f"a policy's config must be a file or its name, got {kind}")
    return None if config is None else Path(config)


def _temperatures(given: Any) -> list[Any]:
    """One or several, as floats; `EvalPlan` refuses anything else."""
    listed = isinstance(given, Sequence) and not isinstance(given, str)
    several = list(given) if listed else [given]
    return [float(each) if isinstance(each, Real) else each for each in several]


def _folders(policy: Policy | Sequence[Policy]) -> list[Path]:
    """The policies' folders. Raises SettingsError for a run whose policy is not saved."""
    policies = policy if isinstance(policy, Sequence) and not isinstance(policy, str) else [policy]
    for one in policies:
        if not isinstance(one, SavedRun | str | Path):
            raise SettingsError(f"a policy must be a run, a folder or a name, got {one!r}")
        if isinstance(one, OpenRun) and one.takes_steps:
            raise SettingsError(
                f"{one.folder} is open and its policy is not saved; call its evaluate or finish"
            )
    return [one.folder if isinstance(one, SavedRun) else Path(one) for one in policies]


def _find_policies(
    matches: Matches, overrides: Sequence[str], games: Games, world: World
) -> dict[Source, tuple[Config, Rendering]]:
    """The settings and the rendering of each policy. Raises ValueError for a model that
    the engine cannot run, and for games whose prompts leave no room for a reply."""
    policies = {}
    for source, named in matches.sources.items():
        weights = source.weights
        config = find_config(source, matches.settings, overrides)
        rendering = read_rendering(config.model, config.game, seed=config.seed)
        warn_of_template(rendering, str(weights), world)
        described = AutoConfig.from_pretrained(described_in(weights))
        # A run has checked its family before training. SGLang supports its own list of families.
        if source.settings is None and engine_kind(config.engine.kind).in_trainer:
            why = check_copy(described, engine=True)
            if why is not None:
                raise ValueError(
                    f"{weights} is a {described.model_type}, which engine.kind=hf cannot play: "
                    f"{why}; engine.kind=sglang may support it"
                )
        positions = max_positions(described)
        check_room(games.instances, rendering, config, max_positions=positions)
        policies[source] = config, rendering
        if world.rank == 0:
            print(f"weights: {weights}" + (f" ({named})" if named else ""))
    return policies


def _roles_of(
    rows: Iterable[Row], game: GameConfig, *, alone: bool = False
) -> dict[str, list[str]]:
    """The player of each role, if the policy plays only some of several roles, or is one of several
    policies `alone`, which has not learned all. A game may replace a script that cannot play the
    remaining role."""
    roles = game.kit.ROLES
    seatings = dict.fromkeys(
        tuple(seat["player"] for seat in played["seats"]) for row in rows for played in row.games
    )
    shown = [
        " + ".join(map(" ".join, zip(roles, players, strict=True)))
        for players in seatings
        if "policy" in players and (alone or set(players) != {"policy"})
    ]
    return {"roles": shown} if shown and len(set(roles)) > 1 else {}


def _facts_of(
    plan: EvalPlan, matches: Matches, games: Games, code: dict[str, str]
) -> dict[str, Any]:
    """The facts above the report's tables."""
    weights = {name: str(source.weights) for source, name in matches.sources.items()}
    first = matches.players[0].source
    in_run = first is not None and first.hub is None and first.settings is not None
    step = steps_of(first.home, first.weights) if first and in_run else -1
    own = {
        "checkpoint": str(plan.runs[0]) if plan.runs else None,
        "weights": weights.get("", weights),
        "step": step if step >= 0 else None,
        "partner": matches.matches[0].other.spec.text,
    }
    facts = {
        **({"players": weights} if matches.rows else own),
        "games": plan.games,
        "num_games": len(games.instances),
        **matches.config.game.kit.described(games.instances, matches.config.game.options),
        "temperatures": sorted({match.temperature for match in matches.matches}, reverse=True),
        "engine": matches.config.engine.kind,
        "code": code or None,
        "config": "/".join(plan.config.parts[-2:]) if plan.config else None,
        "start": plan.start if plan.start != FROM_FIRST_MOVE else None,
        "overrides": plan.overrides or None,
        "asked": matches.asked,
    }
    return {name: fact for name, fact in facts.items() if fact is not None}
