"""The bound of pairs without messages, by hand and against the generator."""

import numpy as np
import pytest

from bench.silent_bound import boards, kept, main, silent, who_proposes
from dialop.kit import load_kit
from dialop.matching.generate import MatchingRecipe
from selfplay.config import load_config

generate = load_kit("matching").generate

ROWS = MatchingRecipe(size=2, scale=False, max_value=10, split_rows=True, skew=3.0, keep="random")
CELLS = MatchingRecipe(size=2, p_observed=0.5, scale=False, max_value=10, keep="exactly_one")


def test_values_of_0_and_1_by_hand() -> None:
    """Ten tables have plans worth 2 and 1 (four), 2 and 0 (two) or 1 and 0 (four); the mean of the
    plans is weak on no other. The first seat sees the first row. If it has one 1, the pair with it
    is in the best plan (three tables each). If it has two, the best plan is either, and the other
    is worth a half (two tables); if it has none, the other is worth nothing (two tables). So a
    guess scores (3 + 3 + 1.5 + 1) / 10. A seat that passes when its cells are equal says so, and
    its partner's cells then tell the best plan."""
    found = boards(MatchingRecipe(size=2, scale=False, max_value=2, split_rows=True, keep="random"))
    assert silent(found) == pytest.approx(0.85)
    assert who_proposes(found) == pytest.approx(1.0)
    assert len(found.weights) == 2 * 10 and found.weights == pytest.approx(1 / 20)


@pytest.mark.parametrize("recipe", [ROWS, CELLS], ids=["rows", "cells"])
def test_the_generator_draws_these_boards(recipe: MatchingRecipe) -> None:
    """The best first plans by exact probabilities score as much on drawn boards, and the kept
    boards are those whose plans are weak by the recipe's own words."""
    found = boards(recipe)
    numbers, view = np.unique(found.views[0], return_inverse=True)
    sums = [np.bincount(view, found.weights * score) for score in found.scores.T]
    plan = dict(zip(numbers.tolist(), np.argmax(sums, axis=0).tolist(), strict=True))
    drawn, scores = generate(recipe, seed=5, num=800), []
    for board in drawn:
        table, mask = np.array(board.table), np.array(board.masks[0], dtype=bool)
        seen = int((np.where(mask, table, 10).reshape(4) * 11 ** np.arange(4)).sum())
        own = ((0, 0), (1, 1)) if plan[seen] == 0 else ((0, 1), (1, 0))
        scores.append(board.norm(board.value(own)))
        assert kept(recipe, table[None], np.array(board.masks, dtype=bool))[0]
    error = np.std(scores) / len(scores) ** 0.5
    assert abs(np.mean(scores) - silent(found)) < 4 * error
    every = generate(load_kit("matching").easy(recipe), seed=6, num=200)
    for board in every:
        masks = np.array(board.masks, dtype=bool)
        weak = sum(solo * recipe.hardness < board.best for solo in board.solo) == 1
        if recipe.keep == "random":
            weak = sum(map(sum, board.table)) / 2 * recipe.hardness < board.best
        assert kept(recipe, np.array([board.table]), masks)[0] == weak


def test_the_figures_of_the_pages(capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    assert capsys.readouterr().out == (
        "without messages at most 0.8433\n"
        "with messages that only say who proposes at least 0.9693\n"
    )
    assert load_config("configs/talk.yaml").game.options.keep == "random"
    with pytest.raises(SystemExit):
        main(["game.options.size=3"])
    assert "size=2 and scale=false" in capsys.readouterr().err
