"""Demonstration games in prompts: legal, complete, and from both sides in turn."""

from collections.abc import Callable
from typing import Any

import pytest

from dialop.logged import Rules
from dialop.matching.game import MatchingGame
from dialop.matching.generate import MatchingRecipe, generate_instance
from dialop.matching.kit import NEW_GAME, Options, demonstrated, new_game
from dialop.matching.scripted import make_scripted

RECIPE = MatchingRecipe(size=3, keep="all")


def boards(num: int) -> list[MatchingGame]:
    return [MatchingGame(generate_instance(RECIPE, seed=5, index=i), Rules()) for i in range(num)]


def scripts(spec: str = "honest:reply=tell") -> list[Callable[[Any], str]]:
    return [make_scripted(spec, seed=seat).act for seat in (0, 1)]


def test_two_games_show_every_kind_of_move_from_the_seat_that_makes_it() -> None:
    earlier, between = demonstrated([(game, scripts()) for game in boards(2)])
    moves = [move.split()[0] for _, move in earlier]
    assert moves == ["[message]", "[propose]", "[message]", "[accept]"]
    first = boards(1)[0].prompt(0)
    assert "You move first." in earlier[0][0] and "You move first." not in earlier[2][0]
    assert earlier[0][0].startswith(first.user.split("\n")[0])
    assert NEW_GAME in earlier[2][0] and earlier[2][0].startswith("Partner: [accept]")
    assert between == NEW_GAME


def test_a_prompt_with_demonstrations_reads_them_before_its_own_game() -> None:
    shown = demonstrated([(game, scripts()) for game in boards(1)])
    game = MatchingGame(generate_instance(RECIPE, seed=6, index=0), Rules(), demonstrations=shown)
    seat = game.seat_to_move
    assert seat is not None
    reads, moves = game.prompt(seat).read()
    assert len(reads) == len(moves) + 1 == 3
    assert reads[-1].endswith("You move first.") and NEW_GAME in reads[-1]
    assert game.prompt(seat).user in reads[-1], "the seat's own view stays as it is"
    plain = MatchingGame(game.instance, Rules())
    assert plain.prompt(seat).read() == ([plain.prompt(seat).user], [])


def test_a_demonstration_holds_no_refused_move() -> None:
    with pytest.raises(ValueError, match="legal moves"):
        demonstrated([(game, scripts("honest:slip=1")) for game in boards(1)])


@pytest.mark.parametrize("size", [4, 8])
def test_demonstrations_show_many_plans_and_both_answers(size: int) -> None:
    """A model copies the plans that it reads; if all were one, a group's games would differ in
    nothing that can be compared."""
    options = Options(size=size, brief=True, demonstrations=2)
    prompt = new_game(generate_instance(options, seed=6, index=0), options).prompt(0)
    read = "\n".join(line for pair in prompt.earlier for line in pair)
    plans = [part.split("[")[0].split("Partner")[0] for part in read.split("[propose]\n")[1:]]
    plans = ["\n".join(plan.split("\n")[:size]) for plan in plans]
    assert len(plans) == 6
    assert len(set(plans)) >= 5
    own = [move.split()[0] for _, move in prompt.earlier]
    assert {"[message]", "[propose]", "[accept]", "[reject]"} == set(own)
