"""A whole game as a tree, and how far a policy is from an equilibrium of it, exactly.

For games whose chance is all in the deal, and which list their deals (`deals` of the module) and
their moves (`Game.legal_moves`). Positions that a seat cannot tell apart, because it has read and
written the same, are one information set; a policy is a probability for each of its moves.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from dialop.game import Game, GameError, wrong_outcome, wrong_step
from dialop.kit import Kit

MAX_POSITIONS = 500_000
_ROUNDING = 1e-6

Payoffs = tuple[float, ...]  # of each seat, in the units of the game's rewards
Policy = Sequence[Sequence[float]]  # the probabilities of each information set's moves


@dataclass(frozen=True, slots=True)
class InfoSet:
    """What a seat knows when it moves. `moves` are its legal moves; `instance` and `path` are a
    deal and the moves that lead to it. `name` is the seat and what it has read and written,
    beginning with its private `view` of the deal."""

    name: str
    seat: int
    view: str
    moves: tuple[str, ...]
    instance: Any
    path: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Position:
    """A position in which the seat of the information set number `at` moves; what follows each of
    its moves is a position, or the payoffs at the end."""

    at: int
    after: tuple[Position | Payoffs, ...]


@dataclass(frozen=True, slots=True)
class Tree:
    """The information sets, in the order in which play meets them, and the start of each deal with
    its probability."""

    num_seats: int
    sets: tuple[InfoSet, ...]
    deals: tuple[tuple[float, Position | Payoffs], ...]


@dataclass(frozen=True, slots=True)
class Values:
    """`own` is what each seat is paid if all play the policy, `best` what the best response to the
    others is paid."""

    own: Payoffs
    best: Payoffs

    @property
    def exploitability(self) -> float:
        """The mean over the seats of what the best response gains: NashConv divided by the number
        of seats, as in OpenSpiel (open_spiel/python/algorithms/exploitability.py). 0 in an
        equilibrium."""
        return sum(map(float.__sub__, self.best, self.own)) / len(self.own)


# --- the tree -------------------------------------------------------------------------------------


def tree_of(kit: Kit, options: Any) -> Tree:
    """Play every sequence of listed moves in every deal.

    Raises GameError for a game that lists no moves or too many, for a listed move that it refuses,
    and for moves that differ between positions that their seat cannot tell apart.
    """
    sets: dict[tuple[int, tuple[str, ...]], InfoSet] = {}
    numbers: dict[tuple[int, tuple[str, ...]], int] = {}
    num = 0

    def grow(game: Game, read: tuple[tuple[str, ...], ...], path: tuple[str, ...]) -> Any:
        """What follows from this game after the moves of `path`. `read[seat]` are the texts that
        the seat has read and written, which name its information set."""
        nonlocal num
        num += 1
        if num > MAX_POSITIONS:
            raise GameError(
                f"game {kit.name} must have at most {MAX_POSITIONS} positions for exact values, "
                f"got more; set game.options to a smaller game"
            )
        seat = game.seat_to_move
        if seat is None:
            outcome = game.outcome()
            _check(game, "outcome", wrong_outcome(game, outcome))
            return tuple(map(float, outcome.rewards))
        given = game.legal_moves()
        moves = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else ()
        if not moves or len({each for each in moves if isinstance(each, str)}) < len(moves):
            rule = "must list each move of the seat to move once, as texts"
            _check(game, "legal_moves", f"{rule}, got {moves or given!r} after {list(path)}")
        key = seat, read[seat]
        if key not in sets:
            name = f"{seat}: " + " / ".join(read[seat])
            numbers[key] = len(sets)
            sets[key] = InfoSet(name, seat, read[seat][0], moves, instance, path)
        known = sets[key]
        if known.moves != moves:
            rule = "must list the same moves wherever a seat has read the same"
            _check(game, "legal_moves", f"{rule}, got {moves!r} and {known.moves!r}: {known.name}")
        return Position(numbers[key], tuple(follow(game, read, path, text) for text in moves))

    def follow(
        game: Game, read: tuple[tuple[str, ...], ...], path: tuple[str, ...], text: str
    ) -> Any:
        """What follows one more move, with the move's own rewards."""
        seat, twin = game.seat_to_move, game.clone()
        assert seat is not None
        step = twin.step(seat, text)
        _check(game, "step", wrong_step(twin, step))
        if step.error is not None:
            rule = "must list moves that the game takes"
            _check(game, "legal_moves", f"{rule}, got {text!r}, to which it says {step.error!r}")
        now = tuple(
            (*read[each], *((text,) if each == seat else ()), *filter(None, [new]))
            for each, new in enumerate(step.observations)
        )
        return _plus(step.rewards, grow(twin, now, (*path, text)))

    starts = []
    for instance, probability in kit.deals(options):
        game = kit.new_game(instance, options)
        prompts = [game.prompt(seat) for seat in range(game.num_seats)]
        starts.append((probability, grow(game, tuple((p.user,) for p in prompts), ())))
    return Tree(len(kit.ROLES), tuple(sets.values()), tuple(starts))


def _plus(rewards: Sequence[float], rest: Position | Payoffs) -> Position | Payoffs:
    """What follows, with these rewards of a move added to every payoff."""
    if not any(rewards):
        return rest
    if isinstance(rest, Position):
        return Position(rest.at, tuple(_plus(rewards, each) for each in rest.after))
    return tuple(map(float.__add__, map(float, rewards), rest))


def _check(game: Game, method: str, problem: str) -> None:
    """Raise GameError, which names the game's method, if there is a problem."""
    if problem:
        raise GameError(f"{type(game).__name__}.{method}() {problem}")


# --- its values -----------------------------------------------------------------------------------


def values_of(tree: Tree, policy: Policy) -> Values:
    """What the policy and its best responses are paid. Raises ValueError for wrong probabilities.

    A best response is found from the last information set of its seat to the first: in each the
    move with the largest payoff over its positions, weighted by how often chance and the others
    lead there. This needs seats that forget nothing, which is so where a set is all that a seat has
    read.
    """
    check_policy(tree, policy)
    own = [0.0] * tree.num_seats
    for probability, start in tree.deals:
        for seat, payoff in enumerate(_expected(start, policy)):
            own[seat] += probability * payoff
    best = tuple(_best_response(tree, policy, seat) for seat in range(tree.num_seats))
    return Values(tuple(own), best)


def check_policy(tree: Tree, policy: Policy) -> None:
    """Raise ValueError unless it has a probability for each move of each information set.

    Probabilities are at least 0 and sum to 1, up to the rounding of single precision.
    """
    for info, probabilities in zip(tree.sets, policy, strict=True):
        num, total = len(probabilities), math.fsum(probabilities)
        wrong = num != len(info.moves) or min(probabilities) < 0 or abs(total - 1) > _ROUNDING
        if wrong:
            raise ValueError(
                f"a policy must have {len(info.moves)} probabilities that sum to 1 in information "
                f"set {info.name!r}, got {list(probabilities)}"
            )


def _expected(node: Position | Payoffs, policy: Policy) -> Payoffs:
    """Each seat's payoff if all play the policy from here.

    Positions below are averaged by the probabilities of the moves that lead to them.
    """
    if not isinstance(node, Position):
        return node
    parts = (_expected(each, policy) for each in node.after)
    weighed = [
        [probability * payoff for payoff in part]
        for probability, part in zip(policy[node.at], parts, strict=True)
    ]
    return tuple(map(math.fsum, zip(*weighed, strict=True)))


def _best_response(tree: Tree, policy: Policy, seat: int) -> float:
    """What the best response of a seat is paid."""
    where: dict[int, list[tuple[float, Position]]] = defaultdict(list)
    for weight, node in _reached(tree, policy, seat):
        where[node.at].append((weight, node))
    chosen: dict[int, int] = {}
    known: dict[int, float] = {}

    def value(node: Position | Payoffs) -> float:
        """The seat's payoff from here."""
        if not isinstance(node, Position):
            return node[seat]
        if id(node) not in known:
            if tree.sets[node.at].seat == seat:
                known[id(node)] = value(node.after[choice(node.at)])
            else:
                pairs = zip(policy[node.at], node.after, strict=True)
                known[id(node)] = math.fsum(p * value(each) for p, each in pairs)
        return known[id(node)]

    def choice(at: int) -> int:
        """The number of the best move in an information set of the seat."""
        if at not in chosen:
            moves = range(len(tree.sets[at].moves))
            chosen[at] = max(moves, key=partial(worth, at))
        return chosen[at]

    def worth(at: int, move: int) -> float:
        """The payoff of a move there, times the probability that the others lead there."""
        return math.fsum(weight * value(node.after[move]) for weight, node in where[at])

    return math.fsum(probability * value(start) for probability, start in tree.deals)


def _reached(tree: Tree, policy: Policy, seat: int) -> Iterator[tuple[float, Position]]:
    """The positions in which this seat moves, with the probability that chance and the others lead
    there if the seat does its part."""
    left = list(tree.deals)
    while left:
        weight, node = left.pop()
        if not isinstance(node, Position):
            continue
        mine = tree.sets[node.at].seat == seat
        if mine:
            yield weight, node
        for probability, each in zip(policy[node.at], node.after, strict=True):
            left.append((weight * (1.0 if mine else probability), each))


def own_reach(tree: Tree, policy: Policy) -> list[float]:
    """For each information set the probability that the earlier moves of its seat lead there: the
    weight of the policy there in an average (realisation weight)."""
    reach = [0.0] * len(tree.sets)

    def walk(node: Position | Payoffs, own: Mapping[int, float]) -> None:
        """`own` is each seat's probability of its moves so far."""
        if isinstance(node, Position):
            seat = tree.sets[node.at].seat
            reach[node.at] = own.get(seat, 1.0)
            for probability, each in zip(policy[node.at], node.after, strict=True):
                walk(each, {**own, seat: own.get(seat, 1.0) * probability})

    for _, start in tree.deals:
        walk(start, {})
    return reach


def mean_over_moves(tree: Tree, policy: Policy, values: Sequence[float]) -> float:
    """The mean of a value of each information set over the moves of play: each counts as often as
    chance and the policy, in every seat, lead there."""
    total = weight = 0.0
    left = list(tree.deals)
    while left:
        reach, node = left.pop()
        if isinstance(node, Position):
            total, weight = total + reach * values[node.at], weight + reach
            left += [(reach * p, each) for p, each in zip(policy[node.at], node.after, strict=True)]
    return total / weight


def entropies(policy: Policy) -> list[float]:
    """The entropy of the moves in each information set, in nats."""
    return [-math.fsum(p * math.log(p) for p in each if p > 0) for each in policy]


@dataclass(frozen=True, slots=True)
class ViewUse:
    """How much a policy's moves depend on the private view of the deal.

    `effect` is the mean over the seats of what a seat is paid, minus what it is paid if it plays
    through the game as it would with another view of the deal, each of the others as likely: 0 for
    a policy that ignores its view. `distance` is the mean total variation distance, from 0 to 1,
    between the moves with the own and with another view, over the sets that have both.
    """

    effect: float
    distance: float


def view_use(tree: Tree, policy: Policy) -> ViewUse:
    """Exact, by the sets of the same seat after the same moves. Both are 0 without other views."""
    at = {(info.seat, info.view, info.path): n for n, info in enumerate(tree.sets)}
    own, effects, distances = values_of(tree, policy).own, list[float](), list[float]()
    for seat in range(tree.num_seats):
        views = list(dict.fromkeys(info.view for info in tree.sets if info.seat == seat))
        for shift in range(1, len(views)):
            other = {view: views[(n + shift) % len(views)] for n, view in enumerate(views)}
            changed = list(policy)
            for number, info in enumerate(tree.sets):
                there = at.get((seat, other.get(info.view, ""), info.path))
                if info.seat == seat and there is not None:
                    changed[number] = policy[there]
                    pairs = zip(policy[number], policy[there], strict=True)
                    distances.append(sum(abs(a - b) for a, b in pairs) / 2)
            effects.append(own[seat] - values_of(tree, changed).own[seat])
    return ViewUse(_mean(effects), _mean(distances))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


class Average:
    """The realisation-weighted average of the policies that are added: playing it is to draw one of
    them for each game. `sums` are by the name of an information set: the weighted probabilities."""

    def __init__(self, sums: Mapping[str, Sequence[float]] | None = None) -> None:
        """Empty, or from the `sums` of an earlier one."""
        self.sums = {name: list(each) for name, each in (sums or {}).items()}

    def add(self, tree: Tree, policy: Policy) -> None:
        """Add a policy with the same weight as each earlier one.

        Its probabilities in an information set count as much as its own earlier moves lead there,
        so against any opponent the average is paid the mean of what the policies are paid.
        """
        for info, weight, probabilities in zip(
            tree.sets, own_reach(tree, policy), policy, strict=True
        ):
            before = self.sums.get(info.name, [0.0] * len(probabilities))
            new = [weight * probability for probability in probabilities]
            self.sums[info.name] = list(map(float.__add__, before, new))

    def policy(self, tree: Tree) -> list[list[float]]:
        """Its probabilities; equal ones in a set that no policy reaches."""
        found = []
        for info in tree.sets:
            sums = self.sums.get(info.name, [0.0])
            total = math.fsum(sums)
            even = [1.0 / len(info.moves)] * len(info.moves)
            found.append([each / total for each in sums] if total else even)
        return found
