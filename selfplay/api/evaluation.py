"""Held-out games and single games from Python, as tables and plain records."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
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
from selfplay.engines.sglang import early
from selfplay.errors import RunEnds, SettingsError
from selfplay.evaluation.evaluate import (
    NUM_SHOWN,
    Evaluation,
    check_room,
    evaluate_people,
    evaluate_scripted,
    play_matches,
)
from selfplay.evaluation.games import Games, find_games, find_start, imitated_boards
from selfplay.evaluation.plan import PEOPLE, EvalPlan, find_config, plan_evaluation
from selfplay.evaluation.report import (
    Report,
    as_json,
    check_report_place,
    markdown,
    write_report,
)
from selfplay.metrics.records import SCRIPT, game_record
from selfplay.model.families import max_positions
from selfplay.model.hub import described_in
from selfplay.partners.checkpoints import tell_code
from selfplay.preflight.command_line import check_asked
from selfplay.preflight.run import check_endpoint, check_folder, check_machine, read_rendering
from selfplay.preflight.small_copy import check_copy
from selfplay.rollout.driver import play_scripted
from selfplay.rollout.episode import limits_of
from selfplay.rollout.seating import scripted_games
from selfplay.setup import warn_of_template

Policy = SavedRun | str | Path


@dataclass(frozen=True, slots=True, repr=False)
class Evaluated:
    """A finished evaluation. It is shown as its tables, in a notebook too.

    `paths` are its evaluation.json and evaluation.md. Under torchrun only the first process has
    them, and all rows.
    """

    report: Report
    paths: tuple[Path, ...]

    @property
    def record(self) -> dict[str, Any]:
        """What evaluation.json holds: facts, `rows`, and the `matrix` of a cross-play."""
        record: dict[str, Any] = json.loads(json.dumps(as_json(self.report)))
        return record

    @property
    def rows(self) -> dict[str, dict[str, Any]]:
        """By the name of the players: `scores` (one for each game, from 0 to 1), `interval` (mean,
        low, high), `measures` (means per game), `talk`, and the first `games`."""
        rows: dict[str, dict[str, Any]] = self.record["rows"]
        return rows

    def __str__(self) -> str:
        return markdown(self.report, games=False, style="plain")

    __repr__ = __str__

    def _repr_markdown_(self) -> str:
        return markdown(self.report, games=False)


@outside_event_loop()
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
    """Evaluate a policy, or several with `partners`, as `eval.py` does with the options of these
    names, and write the same report.

    `policy` is a run, its folder, a Hugging Face folder or name. Under torchrun every rank must
    call.

    Raises:
        SettingsError: for players, games or settings that cannot be used.
        RunEnds: if all games are void, an engine is lost or the report cannot be written.
    """
    with refusing():
        settings = _settings_file(config)
        _check_partners(partner, partners)
    asked = Namespace(
        runs=_folders(policy),
        games=str(games),
        num=num,
        partner=partner,
        partners=list(partners),
        temperature=_temperatures(temperature),
        start=str(start),
        config=settings,
        out=None if out is None else Path(out),
        overrides=override_words(overrides, more),
    )
    return evaluate_asked(asked)


@outside_event_loop()
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

    `player` is a policy as `evaluate` takes it, or `scripted:NAME`; then `config` gives the game,
    as the settings of a run do. With `partner` a policy has its seats in turn, a script seat 0.

    Raises:
        SettingsError, RunEnds: as `evaluate` does.
    """
    words = override_words(overrides, more)
    with refusing():
        _check_partners(partner, ())
    if isinstance(player, str) and player.startswith(f"{SCRIPTED}:"):
        return _scripted_games(player, partner, str(games), num, config, words)
    with refusing():
        settings = _settings_file(config)
    asked = Namespace(
        runs=_folders(player),
        games=str(games),
        num=num,
        partner=partner,
        partners=[],
        temperature=_temperatures(() if temperature is None else temperature),
        start="0",
        config=settings,
        out=None,
        overrides=[*words, "eval.talk_games=0"],
    )
    with ExitStack() as cleanup:
        (row,) = _Plan(asked, cleanup).play(num_shown=num).values()
    return list(row.games)


def _scripted_games(
    player: str,
    partner: str | None,
    games: str,
    num: int,
    config: str | Path | Mapping[str, Any] | None,
    words: Sequence[str],
) -> list[dict[str, Any]]:
    """Games of scripted players, which need no model."""
    settings = load(Config, Path(config) if isinstance(config, str) else config, words)
    game, names = settings.game, []
    with refusing():
        for text in filter(None, (player, partner)):
            spec = parse_spec(text, game.kit.SCRIPT_NAMES)
            if spec.kind != SCRIPTED:
                raise ValueError(f"partner of a script must be a script, got {text}")
            game.kit.make_script(spec.argument, seed=0)
            names.append(spec.argument)
        found = find_games(games, num, game=game, data=settings.data, eval_settings=settings.eval)
    other = names[1] if partner else None
    setups = scripted_games(found.instances, spec=names[0], game=game, other=other)
    episodes = play_scripted(setups, limits=limits_of(settings.rollout))
    return [game_record(episode, step=0) for episode in episodes]


def evaluate_asked(asked: Namespace) -> Evaluated:
    """Play what `parse_eval` reads, and write its report; rank 0 writes. Raises as `evaluate`."""
    with ExitStack() as cleanup:
        planned = _Plan(asked, cleanup)
        rows, plan = planned.play(), planned.plan
        if planned.world.rank == 0:
            rows |= {n: row for n, row in planned.baselines().items() if n not in rows}
        title = "Cross-play" if plan.rows else f"Evaluation of {asked.runs[0]}"
        matrix = (plan.rows, plan.columns) if plan.rows else None
        facts = _facts_of(asked, plan, planned.games, planned.code)
        facts |= _roles_of(rows.values(), plan.config.game)
        report, paths = Report(title, facts, rows, matrix), list[Path]()
        if planned.world.rank == 0:
            try:
                paths = write_report(report, plan.out)
                write_atomically(plan.out / "config.yaml", dump(plan.config))
            except OSError as error:
                print(Evaluated(report, ()), flush=True)
                raise RunEnds(f"{error}; the tables are printed alone") from error
    return Evaluated(report, tuple(paths))


class _Plan:
    """An evaluation of which everything is found and checked, and no weights are loaded. Raises
    SettingsError for what cannot be used."""

    def __init__(self, asked: Namespace, cleanup: ExitStack) -> None:
        with refusing():
            check_asked(asked)
            options = _options_of(asked)
            self.plan = plan_evaluation(
                asked.runs,
                asked.partners,
                partner=asked.partner,
                games=asked.games,
                temperatures=asked.temperature,
                out=asked.out,
                given=asked.config,
                overrides=asked.overrides,
                options=[f"{name}={value}" for name, values in options.items() for value in values],
            )
            config = self.plan.config
            cleanup.callback(early.end)
            early.begin(config)
            check_folder(self.plan.out, what="--out")
            check_report_place(self.plan.out)
            check_machine(config.device, config.engine)
            for player in self.plan.players:
                what = "--partners" if self.plan.rows else "--partner"
                check_endpoint(player.spec, config.endpoint, what=what)
            self.world = join_world(config, cleanup)
            if config.engine.device_map and self.world.world_size > 1:
                raise SettingsError(
                    f"engine.device_map must be null with {self.world.world_size} processes, got "
                    f"{config.engine.device_map}: each would take all GPUs"
                )
            sources = [p.source for p in self.plan.players if p.source is not None]
            self.games = find_games(
                asked.games,
                asked.num,
                game=config.game,
                data=config.data,
                eval_settings=config.eval,
                start=find_start(asked.start),
                imitated=imitated_boards(sources),
            )
            # Scored before hours of play, so that a record that cannot be read ends nothing later.
            records, instances = self.games.records, self.games.instances
            people = evaluate_people(records, instances, config.game) if records else None
            self._people = {PEOPLE: people} if people is not None else {}
            self._policies = _find_policies(self.plan, asked.overrides, self.games, self.world)
            self.code = own_code(played_names(config)).digests  # it may change while games go on
            if self.world.rank == 0:
                tell_code(config, None if self.plan.rows else self.plan.players[0].source)

    def play(self, *, num_shown: int = NUM_SHOWN) -> dict[str, Evaluation]:
        """The rows of the matches, each with its first `num_shown` games in full."""
        return play_matches(
            self.plan,
            instances=self.games.instances,
            policies=self._policies,
            world=self.world,
            num_shown=num_shown,
        )

    def baselines(self) -> dict[str, Evaluation]:
        """The rows of people and of the game's scripted baselines on the same instances."""
        config = self.plan.config
        scripted = {
            f"{SCRIPT}{spec}": evaluate_scripted(
                self.games.instances, spec=spec, game=config.game, rollout=config.rollout
            )
            for spec in config.game.kit.BASELINES
        }
        return self._people | scripted


def _settings_file(config: object) -> Path | None:
    """Raises ValueError for another type than that of a file."""
    if not isinstance(config, str | Path | None):
        kind = "a mapping" if isinstance(config, Mapping) else repr(config)
        raise ValueError(f"config of a policy must be a file or the name of one, got {kind}")
    return None if config is None else Path(config)


def _check_partners(partner: Any, partners: Any) -> None:
    """Raise ValueError for arguments of other types."""
    if not isinstance(partner, str | None):
        raise ValueError(f"partner must be a text, as in 'scripted:honest', got {partner!r}")
    listed = isinstance(partners, Sequence) and not isinstance(partners, str)
    if not (listed and all(isinstance(each, str) and each.strip() for each in partners)):
        raise ValueError(f"partners must be a list of texts, got {partners!r}")


def _temperatures(given: Any) -> list[Any]:
    """One or several, as floats; what is no number stays, for `check_asked` to refuse."""
    listed = isinstance(given, Sequence) and not isinstance(given, str)
    several = list(given) if listed else [given]
    return [float(each) if isinstance(each, Real) else each for each in several]


def _folders(policy: Policy | Sequence[Policy]) -> list[Path]:
    """The folders of policies. Raises SettingsError for a run whose policy is not saved."""
    policies = policy if isinstance(policy, Sequence) and not isinstance(policy, str) else [policy]
    for one in policies:
        if not isinstance(one, SavedRun | str | Path):
            raise SettingsError(f"a policy must be a run, a folder or a name, got {one!r}")
        if isinstance(one, OpenRun) and one.takes_steps:
            raise SettingsError(
                f"{one.folder} is open and its policy is not saved; call its evaluate, or finish it"
            )
    return [one.folder if isinstance(one, SavedRun) else Path(one) for one in policies]


def _find_policies(
    plan: EvalPlan, overrides: Sequence[str], games: Games, world: World
) -> dict[str, tuple[Config, Rendering]]:
    """The settings and the rendering of each policy, by label. Raises ValueError for a model that
    the engine cannot play, and for games whose prompts leave no room for a reply."""
    policies = {}
    for player in plan.players:
        if player.source is None:
            continue
        weights = player.source.weights
        config = find_config(player.source, plan.settings, overrides)
        rendering = read_rendering(config.model, config.game, seed=config.seed)
        warn_of_template(rendering, str(weights), world)
        described = AutoConfig.from_pretrained(described_in(weights))
        # A run checked its family before it trained. SGLang has families of its own.
        if player.source.settings is None and config.engine.kind == "hf":
            why = check_copy(described, engine=True)
            if why is not None:
                raise ValueError(
                    f"{weights} is a {described.model_type}, which engine.kind=hf cannot play: "
                    f"{why}; engine.kind=sglang may support it"
                )
        check_room(
            games.instances,
            rendering=rendering,
            game=config.game,
            rollout=config.rollout,
            max_positions=max_positions(described),
        )
        policies[player.label] = config, rendering
        if world.rank == 0:
            print(f"weights: {weights}" + (f" ({player.label})" if plan.rows else ""))
    return policies


def _options_of(asked: Namespace) -> dict[str, list[str]]:
    """The options that change the result, for the name of its folder."""
    options = {
        "config": [asked.config.stem] if asked.config else [],
        "num": [] if asked.num is None else [str(asked.num)],
        "start": [asked.start] if asked.start != "0" else [],
    }
    return options | {"temperature": [f"{t:g}" for t in asked.temperature]}


def _roles_of(rows: Iterable[Evaluation], game: GameConfig) -> dict[str, list[str]]:
    """Who has which role, of a game of several roles in which the policy does not have all: where a
    script cannot play the role that is left, the game chooses another one."""
    roles = game.kit.ROLES
    seatings = dict.fromkeys(
        tuple(seat["player"] for seat in played["seats"]) for row in rows for played in row.games
    )
    shown = [
        " + ".join(map(" ".join, zip(roles, players, strict=True)))
        for players in seatings
        if "policy" in players and set(players) != {"policy"}
    ]
    return {"roles": shown} if shown and len(set(roles)) > 1 else {}


def _facts_of(
    asked: Namespace, plan: EvalPlan, games: Games, code: dict[str, str]
) -> dict[str, Any]:
    """What the report says above its tables."""
    weights = {p.label: str(p.source.weights) for p in plan.players if p.source}
    own = {
        "checkpoint": str(asked.runs[0]) if asked.runs else None,
        "weights": next(iter(weights.values()), None),
        "partner": plan.matches[0].other.spec.text,
    }
    facts = {
        **({"players": weights} if plan.rows else own),
        "games": asked.games,
        "num_games": len(games.instances),
        **plan.config.game.kit.described(games.instances, plan.config.game.options),
        "temperatures": sorted({match.temperature for match in plan.matches}, reverse=True),
        "engine": plan.config.engine.kind,
        "code": code or None,
        "config": "/".join(asked.config.parts[-2:]) if asked.config else None,
        "start": asked.start if asked.start != "0" else None,
        "overrides": asked.overrides or None,
    }
    return {name: fact for name, fact in facts.items() if fact is not None}
