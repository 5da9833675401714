"""The built-in opponents `league`: members of the policy pool, drawn by the policy's results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from selfplay.config import Config
from selfplay.config.player_spec import POOL, parse_shares
from selfplay.data.seeds import named_seed, pick
from selfplay.league.options import LeagueOptions
from selfplay.partners.opponents import Opponents, Result

FADES = 0.9  # weight of a member's earlier games each time it plays
LEAST = 1e-3  # weight of a member that never wins


class League(Opponents):
    """The shares of `rollout.partners` in every step; the share of `pool` is split equally over
    `members` different members, drawn with weights from the policy's mean score against each.

    Prioritized fictitious self-play (Vinyals et al. 2019, doi.org/10.1038/s41586-019-1724-z,
    methods, "Prioritized fictitious self-play"): with x the policy's score, `hard` draws in
    proportion to (1 - x)^power, `close` to x (1 - x), `uniform` equally.
    """

    Options = LeagueOptions

    def __init__(self, config: Config) -> None:
        """Starts without results. `results` has a member's number of games and their sum of scores,
        with less weight for earlier ones."""
        super().__init__(config)
        self.results: dict[str, list[float]] = {}

    def score(self, member: str) -> float:
        """The policy's mean score with a member, later games with more weight; 0.5 is added as the
        score of one game, so it is 0.5 for a member that has not played."""
        games, total = self.results.get(member, (0.0, 0.0))
        return (total + 0.5) / (games + 1.0)

    def weight(self, member: str) -> float:
        """How often a member is drawn, relative to the others."""
        x, options = self.score(member), self.options
        of = {"hard": (1.0 - x) ** options.power, "close": x * (1.0 - x), "uniform": 1.0}
        return float(of[options.by]) + LEAST

    def draw(self, step: int, members: Sequence[str]) -> dict[str, float]:
        """The partners of a step; fewer members than `members` while the pool is smaller."""
        left, drawn = list(members), list[str]()
        for number in range(min(self.options.members, len(left))):
            seed = named_seed(self.config.seed, "league", step, number)
            drawn.append(pick(left, [self.weight(member) for member in left], seed))
            left.remove(drawn[-1])
        shares: dict[str, float] = {}
        for spec, share in parse_shares(self.config.rollout.partners):
            named = drawn if spec.kind == POOL else [spec.text]
            shares |= {name: share / len(named) for name in named}
        return shares

    def played(self, step: int, results: Mapping[str, Result]) -> None:
        """Add the games with each member; its earlier ones count `FADES` as much."""
        for name, result in results.items():
            if name.startswith(f"{POOL}:"):
                games, total = (FADES * each for each in self.results.get(name, (0.0, 0.0)))
                self.results[name] = [games + result.games, total + result.games * result.score]

    def state(self) -> dict[str, Any]:
        """A copy of the results, by member."""
        return {"results": {name: list(each) for name, each in self.results.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Another class's state, of a run that has changed `rollout.opponents`, has no results."""
        self.results = {name: list(each) for name, each in state.get("results", {}).items()}
