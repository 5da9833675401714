"""Play against a trained policy, a script or a chat model, on a local page or in the terminal, or
watch two of them.

    python -m selfplay.apps.play runs/talk
    python -m selfplay.apps.play runs/talk --partner scripted:honest
    python -m selfplay.apps.play runs/talk --partner endpoint:MODEL@http://127.0.0.1:8000/v1
    python -m selfplay.apps.play runs/talk --terminal
    python -m selfplay.apps.play runs/talk --partner checkpoint:runs/other --watch
    python -m selfplay.apps.play scripted:tell --config FILE      # before any training

The page is only for this machine: the printed address contains a new token for each start. Finished
games go to RUN/played.jsonl (watched ones to RUN/watched.jsonl), or to ./played.jsonl if RUN is a
script.
"""

from __future__ import annotations

from dialop.shown import error_line
from dialop.terminal import open_terminal, show_error

open_terminal("selfplay.apps.play")  # before the imports, which take seconds

# isort: split

import argparse
import importlib.util
import secrets
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from itertools import count, takewhile
from pathlib import Path

from dialop.kit import switch
from dialop.specs import nearest
from selfplay.apps.play.games import (
    Opponent,
    PartnersAlone,
    Session,
    ending_text,
    keep_game,
    result_of,
    seats_beside,
    seats_for_a_person,
    talk_text,
)
from selfplay.apps.play.limits import the
from selfplay.apps.play.person import PersonPlayer
from selfplay.apps.play.table import SeatedPerson, Table
from selfplay.apps.report.games import seat_names
from selfplay.config import Config, load_config
from selfplay.config.load import read_value
from selfplay.config.player_spec import CHECKPOINT, SCRIPTED, SELF, Spec
from selfplay.engines.base import GameRunner
from selfplay.errors import RunEnds, SettingsError
from selfplay.evaluation.evaluate import check_room
from selfplay.evaluation.games import find_games
from selfplay.evaluation.plan import ITSELF, MatrixPlayer, find_config, find_partner, find_policy
from selfplay.partners.checkpoints import (
    ONE_PROCESS,
    find_policies,
    find_source,
    print_code,
    warn_of_seats,
)
from selfplay.partners.endpoint import check_endpoint
from selfplay.partners.partners import Partners
from selfplay.partners.specs import read_spec
from selfplay.preflight.command_line import Parser, refused
from selfplay.preflight.run import check_apart, check_machine, check_writable, read_rendering
from selfplay.rollout.episode import Position
from selfplay.rollout.seating import scripted_partner
from selfplay.setup import open_world
from selfplay.weight_sync.start import choose_engine, load_engine

PROGRAM = "selfplay.apps.play"
GAMES_FILE, WATCHED_FILE = "played.jsonl", "watched.jsonl"
NUM_GAMES = 64  # instances of the held-out stream, played in turn
POLICY = "the policy"
PAGE_PACKAGES = ("starlette", "uvicorn")  # the extra `play`, which --terminal does not need


def read_arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(PROGRAM, __doc__)
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="a run, a Hugging Face folder or name, scripted:NAME")
    add("--partner", default=SELF, help="who plays the other seat (default: the policy)")
    add("--games", default="generated", help="'generated', a .parquet of instances or a .jsonl")
    add("--num", type=int, help=f"instances (default: {NUM_GAMES}, or all of the file)")
    add("--seat", help="your seat, a number or a role (default: each in turn)")
    add("--port", type=int, help="port of the page (default: 8765); 0 takes a free one")
    add("--terminal", action="store_true", help="play in the terminal, without a page")
    add("--watch", action="store_true", help="watch the policy play with --partner")
    files = f"RUN/{GAMES_FILE}, with --watch RUN/{WATCHED_FILE}"
    add("--out", type=Path, help=f"the .jsonl file for the games (default: {files})")
    add("--config", type=Path, help="settings file (default: the run's)")
    add("overrides", nargs="*", default=[], metavar="key=value", help="overriding settings")
    args = parser.parse_intermixed_args(words)
    parser.check_settings(args.overrides, trains=False)
    if args.watch and args.seat is not None:
        raise ValueError("--seat has no effect with --watch; remove one")
    if (args.terminal or args.watch) and args.port is not None:
        which = "--watch" if args.watch else "--terminal"
        raise ValueError(f"--port has no effect with {which}; remove one")
    args.terminal = args.terminal or args.watch
    args.port = 8765 if args.port is None else args.port
    return args


def find_players(args: argparse.Namespace) -> tuple[Spec, Config, MatrixPlayer | None, list[int]]:
    """The player of the other seats, the settings, the policy or the cast of RUN (None if it is a
    script) and the person's seats. Raises ValueError for invalid arguments; warns of one of several
    policies in a seat that it has not learned."""
    name = str(args.run)
    if name.startswith(f"{SCRIPTED}:"):
        if args.config is None or args.watch or args.partner != SELF:
            given = "--partner or --watch" if args.config else "no --config FILE"
            raise ValueError(f"{name} needs only --config FILE, with the game's name, got {given}")
        config = load_config(args.config, [*ONE_PROCESS, *args.overrides])
        print_code(config, None)
        spec = read_spec(name, config.game, config.rollout, what="RUN")
        return spec, config, None, seats_of_person(args.seat, config, spec)
    found = find_policies(args.run)
    policy, config = find_policy(found, args.config, args.overrides, partner=args.partner)
    source, game, rollout = policy.source, config.game, config.rollout
    assert source is not None
    print_code(config, source)
    spec = ITSELF
    # The policy may have any seats here: the person takes one that it leaves.
    if args.partner != SELF:
        spec = read_spec(args.partner, game, rollout, what="--partner")
    seats = seats_of_person(args.seat, config, spec)
    theirs = [] if args.watch else seats_beside(seats, game)
    if spec.kind == SELF:
        played = theirs or range(len(game.kit.ROLES))
        warn_of_seats(found, game.kit.ROLES, played, what="RUN")
    else:
        read_from = args.config or source.settings or source.home
        find_partner(
            args.partner, game, rollout, played=read_from, overrides=args.overrides, seats=theirs
        )
    return spec, config, policy, seats


def seats_of_person(given: str | None, config: Config, spec: Spec) -> list[int]:
    """The seats that the person takes in turn, or the one that --seat names. Raises ValueError for
    one that leaves the opponent `spec` no seat."""
    seats = seats_for_a_person(config.game, config.rollout, spec)
    if given is None:
        return seats
    names = [*map(str, seats), *(config.game.kit.ROLES[seat] for seat in seats)]
    if given not in names:
        raise ValueError(
            f"--seat must be one of {', '.join(dict.fromkeys(names))}, got {given}"
            f"{nearest(given, names)}"
        )
    return [seats[names.index(given) % len(seats)]]


def find_opponent(
    spec: Spec,
    config: Config,
    policy: MatrixPlayer | None,
    args: argparse.Namespace,
    *,
    seats: Sequence[int],
    cleanup: ExitStack,
) -> Opponent:
    """The partner with its engine; loads the weights that play while the person takes `seats` in
    turn. The policy of RUN is not loaded if a partner has the other seats, unless games of the two
    are watched, and a scripted partner needs no weights."""
    if spec.kind == SCRIPTED and not args.watch:
        make_player = partial(scripted_partner, spec.argument, game=config.game)
        return Opponent(spec.text, None, None, make_player)
    assert policy is not None and policy.source is not None
    theirs = [] if args.watch else seats_beside(seats, config.game)
    plays = spec.kind == SELF or args.watch
    if not plays:
        policy = replace(policy, cast=())
    elif policy.cast:  # without the policies that have only the person's seat
        playing = [policy.cast[seat] for seat in theirs or range(len(policy.cast))]
        sat = tuple(each if each in playing else playing[0] for each in policy.cast)
        policy = replace(policy, source=playing[0], cast=sat)
        config = policy.settings(find_config(playing[0], args.config, args.overrides))
    assert policy.source is not None
    source, world = policy.source, open_world(config)
    rendering = read_rendering(config.model, config.game, seed=config.seed)
    config, _ = choose_engine(config, source.weights, world, rewritten=rendering.rewritten)
    renderings = {
        each: read_rendering(
            find_config(each, args.config, args.overrides).model, config.game, seed=config.seed
        )
        for each in dict.fromkeys(policy.cast)
    }
    specs = [spec, *policy.others]
    partners = Partners(specs, config, rendering=rendering, world=world, seats=theirs)
    cleanup.callback(partners.close)
    runner: GameRunner = PartnersAlone()
    if plays:
        runner = load_engine(config, source.weights, world, cleanup=cleanup)
    home = source.weights if source.hub is not None else source.home
    called = "the policies" if policy.cast else f"{POLICY} {source.policy}".strip()
    name = f"{called} of {home.resolve().name}" if spec.kind == SELF else spec.text
    own = source
    if spec.kind == CHECKPOINT:
        own, *_ = find_policies(Path(spec.argument)).values()
    return Opponent(
        name,
        partners.routed(runner),
        rendering,
        partners.named(spec.text).make_player,
        began_at_random(own.settings, own.policy),
        policy.seated(renderings),
        [f"policy {each.policy}" for each in policy.cast],
    )


def began_at_random(settings: Path | None, policy: str = "") -> bool:
    """Whether a run's policy, or the one whose weights it starts from, began with random
    weights."""
    seen: set[Path] = set()
    while settings is not None and settings not in seen:
        seen.add(settings)
        own = read_value(settings, (), f"policies.{policy}.model") or {}
        model = {} if own.get("path") else read_value(settings, (), "model") or {}
        if own.get("scratch", model.get("scratch")) is not None:
            return True
        path = Path(own.get("path", model.get("path")) or "")
        try:
            source = find_source(path) if path.parts and path.is_dir() else None
            settings, policy = (source.settings, source.policy) if source else (None, "")
        except ValueError:  # its weights are gone, but are not needed here
            return False
    return False


def main(words: Sequence[str] | None = None) -> int:
    """Returns the exit status: 2 for invalid arguments, refused before weights are loaded."""
    with ExitStack() as cleanup:
        try:
            args = read_arguments(words)
            if not (args.terminal or all(map(importlib.util.find_spec, PAGE_PACKAGES))):
                raise ValueError(
                    f"the page needs {' and '.join(PAGE_PACKAGES)}: pip install "
                    "'selfplay-lm[play]', or play with --terminal"
                )
            spec, config, policy, seats = find_players(args)
            source = policy.source if policy else None
            if not 0 <= args.port < 65536:
                raise ValueError(f"--port must be from 0 to 65535, got {args.port}")
            if args.out is None and source is not None and source.hub is not None:
                raise ValueError(
                    "--out is required, because the weights are on the hub, not in a local folder"
                )
            home = source.home if source else Path()
            out: Path = args.out or home / (WATCHED_FILE if args.watch else GAMES_FILE)
            if out.suffix != ".jsonl":
                raise ValueError(f"--out must end in .jsonl, got {out}")
            check_apart(out, what="--out")
            check_writable(out.absolute().parent, what="--out")
            if source is not None:
                check_machine(config.device, config.engine)
            check_endpoint(spec, config.endpoint, what="--partner")
            num = args.num
            if num is None and args.games == "generated":
                num = NUM_GAMES
            games = find_games(args.games, num, config)
            opponent = find_opponent(spec, config, policy, args, seats=seats, cleanup=cleanup)
            if opponent.rendering is not None:
                for rendering in [each.rendering for each in opponent.cast] or [opponent.rendering]:
                    check_room(games.instances, rendering, config, max_positions=None)
            session = Session(
                games.instances,
                opponent,
                seats=seats,
                game=config.game,
                rollout=config.rollout,
                seed=config.seed,
            )
            sock = None if args.terminal else bound(args.port)
        except (SettingsError, RunEnds, ValueError, OSError) as error:
            return refused(PROGRAM, error)
        if args.watch or sock is None:
            try:
                return (watch_here if args.watch else play_here)(session, out)
            except (SettingsError, RunEnds) as error:  # as if no program plays the policy
                return refused(PROGRAM, error)
        return play_on_page(session, out, sock)


def bound(port: int) -> socket.socket:
    """A listening socket on the loopback interface, unreachable from other machines."""
    # With its protocol, without which asyncio leaves Nagle's algorithm on: 40 ms for each answer.
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(("127.0.0.1", port))
        sock.listen(64)
    except OSError as error:
        sock.close()
        raise OSError(f"--port {port} cannot be used: {error}; 0 takes a free one") from None
    return sock


def play_here(session: Session, out: Path) -> int:
    """Play in the terminal until the input ends or Ctrl-C."""
    name, about, roles = session.opponent.name, session.introduction(), session.game.kit.ROLES
    running: list[Position] = []

    def advice(text: str) -> str:
        if text:
            words, ends = session.taken(running[-1], text)
            return words if ends else ""
        lines = session.left(running[-1], seat)
        news = takewhile(lambda turn: turn.seat != seat, reversed(running[-1].turns))
        if refused := sum(turn.error is not None for turn in news):
            lines.append(f"invalid moves of others: {refused}; you see them at the end")
        example = session.suggested(running[-1].setup.game, seat)
        lines += ["a script would write here:", example] if example else []
        return "\n".join(lines)

    for number in count():
        seat, limits = session.seat_of(number), session.limits(number)

        person = PersonPlayer(
            name="person",
            called="" if len(set(roles)) < len(roles) == 2 else the(seat_names(roles)[seat]),
            lines_in=sys.stdin,
            lines_out=sys.stdout,
            advice=advice,
        )
        begin = lambda game, seat, rules, limits=limits, number=number: print(  # noqa: E731
            f"\nYou play {about['title']} with {name}; {session.seating(number)}.",
            about["understands"],
            f"What can end the game: {limits}.",
            *([rules] if switch(session.game.options, "brief") else []),
            sep="\n\n",
        )
        episode = None
        with suppress(KeyboardInterrupt):
            episode = session.play(number, person, begin, running.append)
        if episode is None:
            print("\nThe game ended without a result.")
            return 0
        keep_game(episode, session.game.kit, out)
        ending = ending_text(episode, session.game.kit, own=seat)
        print(f"\n{ending}\nsaved in {out}", flush=True)
    return 0


def watch_here(session: Session, out: Path) -> int:
    """Show games of the policy and its partner in the terminal, one per line of input."""
    kit = session.game.kit
    for number in count():
        episode = session.watch(number)
        if episode is None:
            print("\nThe game ended without a result.")
        else:
            keep_game(episode, kit, out)
            print(f"\n{talk_text(episode, kit)}\n\n{ending_text(episode, kit)}\nsaved in {out}")
        print("Press Enter for another game; end the input (Ctrl-D) to leave.", flush=True)
        if not sys.stdin.readline():
            return 0
    return 0


def play_on_page(session: Session, out: Path, sock: socket.socket) -> int:
    """Serve the page until the program is stopped; games run in a separate thread."""
    import uvicorn

    from selfplay.apps.play.server import make_app

    table = Table(session)
    token, port = secrets.token_urlsafe(24), sock.getsockname()[1]
    facts = {"opponent": session.opponent.name, **session.introduction()}
    facts["limits"] = session.limits()
    app = make_app(table, token=token, port=port, facts=facts)
    server = uvicorn.Server(
        uvicorn.Config(app, log_level="warning", access_log=False, server_header=False)
    )

    def deal() -> None:
        for number in count():
            if not table.wait_for_start():
                return
            try:
                episode = session.play(number, SeatedPerson(table), table.begin, table.follow)
                if episode is None:
                    table.finish({"error": "The game ended without a result and is not saved."})
                    continue
                keep_game(episode, session.game.kit, out)
                table.finish(result_of(episode, session))
            except Exception as error:  # noqa: BLE001 the page shows it and can start another game
                show_error(PROGRAM, error)
                table.finish({"error": f"The game failed: {error_line(error)}"})

    threading.Thread(target=deal, name="games", daemon=True).start()
    first = "in the first game " * (len(session.seats) > 1)
    print(f"You play with {session.opponent.name}; {first}{session.seating(0)}.")
    print("Open this address on this machine; Ctrl-C ends it:")
    print(f"http://127.0.0.1:{port}/?token={token}", flush=True)
    with suppress(KeyboardInterrupt):  # raised after the server has stopped
        server.run(sockets=[sock])
    table.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
