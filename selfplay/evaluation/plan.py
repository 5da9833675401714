"""Plans an evaluation: who plays whom, with which settings, and where the report goes.

Every mistake is a ValueError that names the argument, the rule, the value and the nearest valid
choice. No weights are loaded.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from selfplay.chat.rendering import Rendering
from selfplay.config import Config, GameConfig, RolloutConfig, load_config
from selfplay.config.load import read_value
from selfplay.config.player_spec import (
    CHECKPOINT,
    ENDPOINT,
    POOL,
    SCRIPTED,
    SELF,
    Spec,
    parse_shares,
)
from selfplay.config.text import show
from selfplay.errors import SettingsError
from selfplay.evaluation.asked import EvalPlan
from selfplay.partners.checkpoints import (
    ONE_PROCESS,
    Source,
    check_same_game,
    find_policies,
    model_words,
    part_of_run,
    seated,
    seats_of,
    template_of,
    warn_of_seats,
)
from selfplay.partners.specs import read_spec
from selfplay.rollout.seat_rules import chosen_seats, partner_seats
from selfplay.rollout.seating import Seated

# Policies come first, because the engine of a match's first player runs its games.
_RANK = (SELF, CHECKPOINT, SCRIPTED, ENDPOINT)  # `self` is a cast in a matrix of roles
_LONGEST_NAME = 150  # bytes in the name of a report's folder; file systems allow 255
ITSELF = Spec(SELF, "", SELF)
PEOPLE = "people"  # the row of recorded games


@dataclass(frozen=True, slots=True)
class MatrixPlayer:
    """A player of the matrix. `label` is its name there; `source` is None if it has no weights.

    `cast` has the policy of each seat if they differ, and `source` is the first. `roles` replace
    `rollout.policy_seats` where they are set.
    """

    label: str
    spec: Spec
    source: Source | None
    cast: tuple[Source, ...] = ()
    roles: tuple[str, ...] = ()

    @property
    def others(self) -> list[Spec]:
        """The policies of the cast but the first as frozen ones, each named by its folder."""
        names = dict.fromkeys(str(each.weights) for each in self.cast if each != self.source)
        return [Spec(CHECKPOINT, name, name) for name in names]

    def seated(self, renderings: Mapping[Source, Rendering]) -> list[Seated]:
        """The policy of each seat of the cast. The first one's engine runs the games, the engines
        of `others` answer in them."""
        models = {each: "" if each == self.source else str(each.weights) for each in self.cast}
        return [Seated(models[each], renderings[each], models[each]) for each in self.cast]

    def settings(self, config: Config) -> Config:
        """The settings under which it plays: those of the evaluation, in which a cast has all
        roles, also those that the game leaves to partners."""
        rollout = replace(config.rollout, policy_seats=self.roles)
        return replace(config, rollout=rollout) if self.roles else config


Pair = tuple[MatrixPlayer, MatrixPlayer, int | None]  # `one`, `other` and the seat of `one`


@dataclass(frozen=True, slots=True)
class Match:
    """`one` plays `other` on every instance. `one` has seat `seat`, or takes the seats in turn if
    `seat` is None. `temperature` 0 is greedy. `name` is the row of the report."""

    name: str
    one: MatrixPlayer
    other: MatrixPlayer
    seat: int | None
    temperature: float


@dataclass(frozen=True, slots=True)
class Matches:
    """The matches of an evaluation. A player's matches are consecutive, so its weights load once.

    `config` holds the settings of the game, read from the file `settings` (None: the defaults).
    `rows` and `columns` are the labels of a cross-play matrix, empty for a single policy; in a
    matrix of roles, `roles` are the rows' roles and the columns'. `out` is the folder of the
    report, and `asked` the digest of what its name may not tell apart.
    """

    config: Config
    settings: Path | None
    matches: list[Match]
    out: Path
    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()
    asked: str = ""

    @property
    def sources(self) -> dict[Source, str]:
        """Each policy with weights once, and its name in messages: "" for a single one."""
        pairs = [(source, each) for each in self.players for source in each.cast or (each.source,)]
        sources = {source: player for source, player in pairs if source is not None}
        if self.roles:
            return _labels(sources)
        return {s: s.policy if p.cast else p.label if self.rows else "" for s, p in sources.items()}

    @property
    def players(self) -> list[MatrixPlayer]:
        """Each player once; policies with weights come first."""
        return list(dict.fromkeys(p for match in self.matches for p in (match.one, match.other)))

    @property
    def talk_games(self) -> int:
        """How many games of a match measure the talk effect: none in a matrix, and none with an
        endpoint, whose answers may cost money."""
        endpoint = any(match.other.spec.kind == ENDPOINT for match in self.matches)
        return 0 if self.rows or endpoint else self.config.eval.talk_games


def find_matches(plan: EvalPlan) -> Matches:
    """One policy with itself or with `partner`, taking the seats in turn; or, with `partners`, the
    matrix of policies and partners, each pair in both seats or, if a run has several policies or
    the game more seats, in both roles.

    Without `runs` the partners are also the rows of the matrix. The settings come from the file
    `config`, else from the first run.

    Raises:
        SettingsError, ValueError: for players or settings that cannot be used.
    """
    runs, partners, overrides = plan.runs, plan.partners, plan.overrides
    what = "RUN and --partners" if partners and runs else "--partners"
    found = [find_policies(path, what=what if partners else "RUN") for path in runs]
    found += [_policies_of(entry, what=what) for entry in partners]
    policies = [source for each in found for source in each.values()]
    path = plan.config or next((s.settings for s in policies if s.settings is not None), None)
    if not partners:
        return _matches_of_one(plan, found[0], path)
    if path is None:
        raise ValueError(
            "--config is needed: no player comes from a run whose settings name the game; give "
            "a file such as configs/tiny.yaml"
        )
    check_given(overrides, [name for each in found for name in each if name])
    config = _of_any_policy(load_config(path, [*ONE_PROCESS, *overrides]))
    for source in (each[""] for each in found if "" in each):
        if source.policy:
            raise ValueError(
                f"{what} must name runs, whose policies play all roles, got {source.weights}, the "
                f"policy {source.policy} alone; nearest is {source.home}"
            )
    for source in policies:
        check_same_game(source, config.game, what=what, played=path, overrides=overrides)
    settings = [path, *(source.settings for source in policies if source.settings is not None)]
    _check_seats(settings, config, overrides, what=what)
    entries, sides = [*map(str, runs), *partners], tuple[str, ...]()
    if len(config.game.kit.ROLES) > 2 or any(len(each) > 1 for each in found):
        sides = _two_sides(config.game, what=what)
        named = _read_casts(entries, found, config.game, what=what)
    else:
        sources = [next(iter(each.values()), None) for each in found]
        named = _read_players(entries, sources, config.game, config.rollout, what=what)
    players = sorted(dict.fromkeys(named), key=lambda player: _RANK.index(player.spec.kind))
    rows = [player for player in players if player in named[: len(runs) or None]]
    columns = [*rows, *(player for player in players if player not in rows)]
    pairs = (
        _pairs_of_roles(columns, rows, config.game) if sides else _pairs_of_matrix(players, rows)
    )
    down, across = (tuple(player.label for player in each) for each in (rows, columns))
    home = next((_home(source) for source in policies if source.hub is None), None)
    if plan.out is None and home is None:
        raise ValueError("--out is needed: no player is a local folder to write to")
    who = [player.label for player in players]
    name = _folder_name(["crossplay", Path(plan.games).stem], [*who, *plan.options])
    return Matches(
        config,
        path,
        _with_temperatures(pairs, plan, config, in_matrix=True),
        plan.out or Path(f"{home}/{name}"),
        down,
        across,
        sides,
        _digest_of(plan, players, down, across),
    )


def _matches_of_one(plan: EvalPlan, found: Mapping[str, Source], path: Path | None) -> Matches:
    """The matches of one policy, or of the cast of a run, with itself or with a partner."""
    policy, config = find_policy(found, path, plan.overrides, partner=plan.partner or SELF)
    pair = _pair_of_one(policy, plan.partner, config, path, plan.overrides)
    assert policy.source is not None
    if pair[1] != policy:  # its roles' seats; seats of equal roles are played in turn
        roles = config.game.kit.ROLES
        seats = chosen_seats(config.game, config.rollout) or range(len(roles))
        warn_of_seats(found, roles, seats, what="RUN")
    partner, cast = pair[1].spec.text, bool(policy.cast)
    folder = report_folder(policy.source, plan.games, partner, plan.options, cast=cast)
    return Matches(
        config,
        path,
        _with_temperatures([pair], plan, config, in_matrix=False),
        plan.out or folder,
        asked=_digest_of(plan, pair[:2]),
    )


def _digest_of(plan: EvalPlan, players: Iterable[MatrixPlayer], *labels: Sequence[str]) -> str:
    """A digest of what plays what: the players with their weights, the rows and columns, the files
    of games and settings, the options."""
    sources = [source for each in players for source in each.cast or (each.source,) if source]
    files = [Path(name) for name in (plan.games, plan.config) if name]
    facts = [
        *(player.spec.text for player in players),
        *(str(source.weights.resolve()) for source in sources),
        *map(" ".join, labels),
        *(str(file.resolve() if file.exists() else file) for file in files),
        *plan.options,
    ]
    return _digest(facts)


def _digest(words: Iterable[str]) -> str:
    """Eight hexadecimal digits."""
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:8]


def place(plan: EvalPlan, matches: Matches) -> Path:
    """The folder for the report: --out, or the default one, with the digest at its end if it holds
    the report of something else of the same name. Reports before 2026-11-30 have no digest."""
    out = matches.out
    with suppress(OSError, ValueError, LookupError, TypeError):
        held = json.loads((out / "evaluation.json").read_bytes())["asked"]
        if plan.out is None and held != matches.asked:
            return out.with_name(f"{out.name}_{matches.asked}")
    return out


def find_policy(
    found: Mapping[str, Source],
    path: Path | None,
    overrides: Sequence[str],
    *,
    partner: str = SELF,
) -> tuple[MatrixPlayer, Config]:
    """The policies of `find_policies` as one player, a cast if they are several, and the settings
    of `find_config`. One of several alone has the seats that it learned if there is a partner for
    the others, else all. Raises as `find_config`."""
    source, *_ = found.values()
    config = find_config(source, path, overrides)
    roles, cast = config.game.kit.ROLES, tuple[Source, ...]()
    own: Sequence[int] = range(len(roles))
    if len(found) > 1:
        cast = tuple(seated(found, roles, what="RUN").values())
        source = cast[0]
    elif "" in found and source.policy and partner != SELF:
        own = seats_of(source, roles, source.policy)
    named = tuple(dict.fromkeys(roles[seat] for seat in own)) if source.policy else ()
    policy = MatrixPlayer("policy", ITSELF, source, cast, named)
    return policy, policy.settings(config)


def _with_temperatures(
    pairs: Sequence[Pair], plan: EvalPlan, config: Config, *, in_matrix: bool
) -> list[Match]:
    """A match of each pair at each temperature of the command, by default the settings' own. The
    matches of a matrix are named by their players alone, because it allows one temperature."""
    usual = config.rollout.temperature
    return [
        Match(_row_name(pair, t, usual=usual, in_matrix=in_matrix), *pair, t)
        for pair in pairs
        for t in plan.temperature or [usual]
    ]


def _pair_of_one(
    policy: MatrixPlayer,
    partner: str | None,
    config: Config,
    settings: Path | None,
    overrides: Sequence[str],
) -> Pair:
    """The policy and who plays its games with it: `partner`, a spec of --partner, or itself.

    `settings` is the file that the game was read from. Raises ValueError as `find_partner`."""
    text = partner
    if text is None:  # self, or the first training partner where the policy has not all seats
        all_seats = chosen_seats(config.game, config.rollout) is None
        text = SELF if all_seats else parse_shares(config.rollout.partners)[0][0].text
    assert policy.source is not None
    played = settings or policy.source.home
    spec = find_partner(text, config.game, config.rollout, played=played, overrides=overrides)
    return policy, policy if spec.kind == SELF else MatrixPlayer(text, spec, None), None


def _pairs_of_matrix(players: Sequence[MatrixPlayer], rows: Sequence[MatrixPlayer]) -> list[Pair]:
    """Every pair that includes a player of the rows, in both seats; self-play pairs once."""
    kinds = {player.spec.kind for player in rows}
    with_endpoint = any(player.spec.kind == ENDPOINT for player in players)
    if ENDPOINT in kinds or (SCRIPTED in kinds and with_endpoint):
        raise ValueError("--partners: only checkpoints can play with an endpoint; give them as RUN")
    return [
        (one, other, seat)
        for number, one in enumerate(players)
        for other in players[number:]
        if one in rows or other in rows
        for seat in ((None,) if one == other else (0, 1))
    ]


def pair_name(first: str, second: str) -> str:
    """The row name of a cell of the matrix, with `first` in seat 0."""
    return first if first == second else f"{first} with {second}"


def _row_name(pair: Pair, temperature: float, *, usual: float, in_matrix: bool) -> str:
    """The name of a match; for a single policy it names a temperature other than the usual one."""
    one, other, seat = pair
    labels = (other.label, one.label) if seat == 1 else (one.label, other.label)
    name = pair_name(*labels)
    if in_matrix or temperature == usual:
        return name
    return f"{name}, temperature {temperature:g}" if temperature else f"{name}, greedy"


def find_config(source: Source, given: Path | None, overrides: Sequence[str]) -> Config:
    """The settings from --config (`given`), else from the run, else the defaults (the full default
    game), with the policy's folder as the model and the chat template it was trained with.

    Raises:
        SettingsError, ValueError: for settings that cannot be used.
    """
    names = read_value(source.settings, (), "policies") if source.settings else None
    check_given(overrides, [*(names or ())])
    path = given or source.settings
    policy = source.policy if path == source.settings else ""
    home = f"policies.{policy}." if policy else ""
    config = load_config(path, [*ONE_PROCESS, *overrides, *model_words(source, home)])
    config = config.of_policy(policy) if policy else _of_any_policy(config)
    own, keys = template_of(source), ("model.chat_template", f"{home}model.chat_template")
    if own is None or any(word.startswith(keys) for word in overrides):
        return config
    return replace(config, model=replace(config.model, chat_template=own))


def check_given(overrides: Sequence[str], names: Sequence[str]) -> None:
    """Raise SettingsError for overrides of what RUN alone says: its model, its policies `names` and
    their seats."""
    for key in ("model.path", "model.scratch"):
        if (value := read_value(None, overrides, key)) is not None:
            raise SettingsError(
                f"{key} must not be given, because RUN names the model, got {value}"
            )
    own = read_value(None, overrides, "policies")
    kept = isinstance(own, dict) and all(
        name in names and "seats" not in (of or ()) for name, of in own.items()
    )
    if own is not None and not (kept and (own or not names)):
        raise SettingsError(
            f"policies must leave RUN's policies, {', '.join(names) or 'a single one'}, and their "
            f"seats as they are, got {show(own)}"
        )


def _of_any_policy(config: Config) -> Config:
    """The settings without those of several policies."""
    return replace(config, policies={}) if config.policies else config


def find_partner(
    partner: str,
    game: GameConfig,
    rollout: RolloutConfig,
    *,
    played: Path | str,
    overrides: Sequence[str],
    seats: Sequence[int] = (),
) -> Spec:
    """The partner named by --partner. Raises ValueError for one that cannot play here; warns of one
    of several policies in a seat that it has not learned.

    `played` is where `game` was read from, `seats` are those that the partner plays, by default
    those that the policy lacks.
    """
    spec = read_spec(partner, game, rollout, what="--partner")
    if spec.kind == CHECKPOINT:
        what = f"--partner {spec.text}"
        found = find_policies(Path(spec.argument), what=what)
        seats = seats or partner_seats(game, rollout)
        for source in seated(found, game.kit.ROLES, what=what, seats=seats).values():
            check_same_game(source, game, what=what, played=played, overrides=overrides)
        warn_of_seats(found, game.kit.ROLES, seats, what=what)
    if spec.kind == POOL:
        raise ValueError(
            "--partner must name a single policy, got pool; nearest is checkpoint:RUN/policy_pool/"
            "step_000020, or RUN/policy_pool/NAME/step_000020 for NAME of several policies"
        )
    return spec


def report_folder(
    source: Source, games: str, partner: str, options: Sequence[str] = (), *, cast: bool = False
) -> Path:
    """RUN/eval_NAME, where NAME joins the part of the run (unless it is final/), the games, the
    partner (unless it is self) and `options` (words such as num=64), so that reports with
    different options do not overwrite each other; `place` keeps those of one name apart. `cast`
    says that all policies of a run play."""
    part = part_of_run(source, cast=cast)
    words = ["eval", *([part.replace("/", "_")] if part else []), Path(games).stem]
    words += [re.sub(r"[^\w.-]+", "_", partner)] if partner != SELF else []
    return _home(source) / _folder_name(words, options)


def _home(source: Source) -> Path:
    """The folder of a policy's reports: its run. For weights without a run it is runs/MODEL, named
    after the hub repository, the .gguf file, or the folder and its parent."""
    if source.hub is None and source.settings is not None:
        return source.home
    name = source.hub or "_".join(source.home.resolve().parts[-2:])
    return Path("runs") / re.sub(r"[^\w.-]+", "_", name)


def _folder_name(words: Sequence[str], options: Sequence[str]) -> str:
    """Words and options joined by underscores; a hash replaces the end of a name that is too
    long."""
    plain = [re.sub(r"[^\w.=-]+", "_", word).strip("_") for word in options]
    name = "_".join([*words, *plain])
    if len(name.encode()) <= _LONGEST_NAME:
        return name
    cut = name.encode()[:_LONGEST_NAME].decode(errors="ignore")
    return f"{cut}_{_digest([*words, *options])}"


def _policies_of(entry: str, *, what: str) -> dict[str, Source]:
    """The policies on disk named by an entry of --partners; {} for a player without weights.

    Raises:
        ValueError: for a path that does not exist, with the nearest folder that does.
    """
    path = Path(entry.removeprefix(f"{CHECKPOINT}:"))
    looks_like_path = "/" in entry and "://" not in entry
    has_weights = path.is_dir() or entry.startswith(f"{CHECKPOINT}:") or looks_like_path
    return find_policies(path, what=what) if has_weights else {}


def _check_seats(
    settings: Sequence[Path], config: Config, overrides: Sequence[str], *, what: str
) -> None:
    """Raise ValueError unless the game has two seats or more and the run of each settings file
    learned all."""
    game, roles = config.game, ",".join(dict.fromkeys(config.game.kit.ROLES))
    if len(game.kit.ROLES) < 2:
        raise ValueError(f"{what}: the game must have 2 seats or more, got game.name {game.name}")
    for path in dict.fromkeys(settings):
        named = read_value(path, overrides, "rollout.policy_seats") or ()
        some = chosen_seats(game, replace(config.rollout, policy_seats=tuple(named)))
        if some is not None and not read_value(path, overrides, "policies"):
            raise ValueError(
                f"{what}: rollout.policy_seats must be [{roles}] in {game.name}, because each pair "
                f"plays in all seats, got [{','.join(named)}] in {path}; --partner compares runs "
                "of one role"
            )


def _read_players(
    entries: Sequence[str],
    sources: Sequence[Source | None],
    game: GameConfig,
    rollout: RolloutConfig,
    *,
    what: str,
) -> list[MatrixPlayer]:
    """The players named by these entries, possibly with repeats. `sources` holds each entry's
    policy on disk; its label is RUN or RUN/PART, or its path if two would share a label.

    Raises:
        ValueError, SettingsError: for an entry that is not a player or cannot play in a matrix.
    """
    labels = _labels(filter(None, sources))
    players = []
    for entry, source in zip(entries, sources, strict=True):
        if source is not None:
            weights = str(source.weights)
            spec = Spec(CHECKPOINT, weights, f"{CHECKPOINT}:{weights}")
            players.append(MatrixPlayer(labels[source], spec, source))
            continue
        spec = read_spec(entry, game, rollout, what=what)
        if spec.kind in (SELF, POOL):
            raise ValueError(
                f"{what} must name folders, scripted players and endpoints, got {entry!r}; "
                "every player plays with itself anyway"
            )
        players.append(MatrixPlayer(_one_word(spec.text), spec, None))
    return players


def _labels(sources: Iterable[Source], *, cast: bool = False) -> dict[Source, str]:
    """The label of each policy: RUN or RUN/PART, or its path if two would share a label."""
    names = {s: "/".join(filter(None, (s.home.name, part_of_run(s, cast=cast)))) for s in sources}
    labels = {}
    for source, name in names.items():
        path = str(source.home / name.partition("/")[2] if cast else source.weights)
        label = name if [*names.values()].count(name) == 1 else path
        taken = label == PEOPLE or ":" in label  # the form of scripts' and endpoints' labels
        labels[source] = _one_word(label, quoted=taken)
    return labels


def _two_sides(game: GameConfig, *, what: str) -> tuple[str, str]:
    """The roles of the rows and of the columns of a matrix of roles: the first role, and the
    others. Of two equal seats they are the seats. Raises ValueError for more equal seats."""
    roles = game.kit.ROLES
    others = [role for role in dict.fromkeys(roles) if role != roles[0]]
    if not others and len(roles) > 2:
        raise ValueError(
            f"{what}: the game must have 2 seats or several roles, got game.name {game.name}"
        )
    return (roles[0], " and ".join(others)) if others else ("seat 0", "seat 1")


def _read_casts(
    entries: Sequence[str], found: Sequence[dict[str, Source]], game: GameConfig, *, what: str
) -> list[MatrixPlayer]:
    """The players of a matrix of roles: runs and models on disk, each with its policy of each seat.

    Raises:
        ValueError: for a player without weights.
    """
    firsts = [next(iter(each.values()), None) for each in found]
    labels = _labels(filter(None, firsts), cast=True)
    players = []
    for entry, each, source in zip(entries, found, firsts, strict=True):
        if source is None:
            raise ValueError(
                f"{what} must name runs or models on disk in a matrix of roles, got {entry!r}; "
                f"--partner {entry} plays with a single run"
            )
        cast = tuple(seated(each, game.kit.ROLES, what=what).values())
        players.append(MatrixPlayer(labels[source], ITSELF, cast[0], cast, tuple(game.kit.ROLES)))
    return players


def _pairs_of_roles(
    players: Sequence[MatrixPlayer], rows: Sequence[MatrixPlayer], game: GameConfig
) -> list[Pair]:
    """The casts of a matrix of roles: the seats of the first role from one player, the others from
    the same or another one, at least one of them from the rows."""
    roles = game.kit.ROLES
    first = [
        seat == 0 if len(set(roles)) == 1 else role == roles[0] for seat, role in enumerate(roles)
    ]
    pairs: list[Pair] = []
    for one in players:
        for other in players:
            if one in rows or other in rows:
                both = zip(first, one.cast, other.cast, strict=True)
                cast = tuple(a if own else b for own, a, b in both)
                name = pair_name(one.label, other.label)
                pairs.append((player := replace(one, label=name, cast=cast), player, None))
    return pairs


def _one_word(label: str, *, quoted: bool = False) -> str:
    """The label, quoted if it contains spaces or quotes: row names join labels with spaces, and so
    stay distinct."""
    return json.dumps(label, ensure_ascii=False) if quoted or re.search(r'[\s"]', label) else label
