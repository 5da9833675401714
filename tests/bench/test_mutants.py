"""Mutants are one change each, of code, and the same in every draw."""

import ast
from collections import Counter

from bench.mutants import NEXT, ROOT, drawn, named, nearest
from tests.helpers.house import CORE

FILE = "selfplay/learner/loss.py"


def test_drawn_mutants_change_one_executed_line_each_and_repeat() -> None:
    """Every kind is drawn equally often while it lasts, and more are drawn after fewer."""
    text = (ROOT / FILE).read_text(encoding="utf-8")
    lines = {FILE: set(range(1, len(text.splitlines()) + 1))}
    mutants = drawn(lines, 18, seed=0)
    assert drawn(lines, 6, seed=0) == mutants[:6] != drawn(lines, 6, seed=1)
    assert set(Counter(mutant.kind for mutant in mutants).values()) == {3}
    assert len({mutant.line for mutant in mutants}) == 18
    for mutant in mutants:
        changed = mutant.written(text)
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(text)), mutant


def test_the_mutants_by_hand_have_their_place() -> None:
    """Whoever moves such a hand-over moves its mutant."""
    assert len({mutant.name for mutant in named()}) == 13


def test_every_room_of_the_core_has_tests_that_run_first() -> None:
    """A path that is not there would end pytest, and count as a mutant that is caught."""
    paths = [path for room in sorted(CORE) for path in nearest(f"selfplay/{room}.py")]
    assert [path for path in (*paths, *NEXT) if not (ROOT / path).exists()] == []
