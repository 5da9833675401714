"""A run's league as a section of its page: the table of scores, and the ratings."""

from __future__ import annotations

from pathlib import Path

from markupsafe import Markup

from selfplay.config import Config
from selfplay.league.results import read_results
from selfplay.league.table import Payoffs, payoffs

_SECTION = Markup("""<section id="league">
  <h2>League <small class="quiet">the policy of each period against each partner</small></h2>
  <div class="scroll" tabindex="0" role="region" aria-label="league"><table>
    <thead><tr><th>the policy that became</th>{heads}</tr></thead>
    <tbody>{rows}</tbody>
  </table></div>
  <p class="quiet">Its mean score, with a 95 % interval over games.</p>
  {ratings}
</section>""")
_RATINGS = Markup("""<table class="narrow">
    <thead><tr><th>player</th><th class="num">rating</th></tr></thead>
    <tbody>{}</tbody>
  </table>
  <p class="quiet">Bradley-Terry in Elo points, mean 0, from all of these games: 400 more are odds
  of 10 to 1. A period is rated as the member of the pool that it became.</p>""")


def league_section(folder: Path, config: Config | None) -> Markup:
    """The section of a run with results in `league.jsonl`, else nothing."""
    if config is None:
        return Markup()
    lines, every = read_results(folder), config.policy_pool.every
    table = payoffs(lines, every=every, policies=config.policies)
    return Markup() if table is None else section_of(table)


def section_of(table: Payoffs) -> Markup:
    """The section of a table, with every name escaped."""

    def cell(value: tuple[float, float, float] | None) -> Markup:
        """Mean and interval; empty for partners that have not met."""
        text = "" if value is None else "{:.3f} [{:.3f}, {:.3f}]".format(*value)
        return Markup('<td class="num">{}</td>').format(text)

    heads = Markup().join(Markup('<th class="num">{}</th>').format(name) for name in table.columns)
    rows = Markup().join(
        Markup("<tr><td>{}</td>{}</tr>").format(name, Markup().join(map(cell, cells)))
        for name, cells in zip(table.rows, table.cells, strict=True)
    )
    best_first = sorted(table.ratings.items(), key=lambda pair: -pair[1])
    ratings = Markup().join(
        Markup('<tr><td>{}</td><td class="num">{}</td></tr>').format(name, f"{rating:+.0f}")
        for name, rating in best_first
    )
    rated = _RATINGS.format(ratings) if table.ratings else ""
    return _SECTION.format(heads=heads, rows=rows, ratings=rated)
