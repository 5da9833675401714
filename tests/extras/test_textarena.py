"""TextArena's games as games of this package, with the real library."""

import json
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from dialop.checks import check_kit
from dialop.kit import Kit, load_kit
from selfplay.advantages.advantages import reward_samples
from selfplay.chat.rendering import Rendering
from selfplay.config import AlgorithmConfig, RewardConfig, load_config
from selfplay.errors import SettingsError
from selfplay.rollout.episode import Episode, Limits
from tests.helpers.chat_server import Answer, ChatServer, chat_server
from tests.helpers.house import ROOT
from tests.helpers.small_games import play_one
from tests.helpers.tiny_run import metrics_of

NAME = "textarena:TicTacToe-v0"


def in_order(view: Any, draw: random.Random) -> str:
    """Take the cells 0, 1, 2, … in turn: player 0 gets 2, 4 and 6 and wins."""
    return f"[{len(view.texts) - 1}]"


def test_a_game_passes_the_checks(bridge: ModuleType) -> None:
    own = vars(bridge.module_of("TicTacToe-v0"))
    module = SimpleNamespace(**own, SCRIPTS={"in_order": in_order})
    results = {
        result.name: result for result in check_kit(Kit(NAME, module), Kit(NAME, module).Options())
    }
    assert not [result.line() for result in results.values() if result.problem]
    unchecked = {name for name, result in results.items() if result.unchecked}
    assert unchecked == {"views", "forgery"}


def test_pythons_own_generator_is_left_alone_and_games_do_not_share_one() -> None:
    """Poker deals cards in the middle of a game."""
    random.seed(5)
    before = random.getstate()
    kit = load_kit("textarena:KuhnPoker-v0")
    first, second = kit.generate(kit.Options(), seed=0, start=0, num=2)

    def cards(instance: Any) -> list[str]:
        game = kit.new_game(instance, kit.Options())
        while (seat := game.seat_to_move) is not None:
            game.clone().step(seat, "[check]")
            if game.step(seat, "[check]").error is not None:
                game.step(seat, "[fold]")
        return [*game.view(0).texts, *game.view(1).texts]

    assert cards(first) == cards(first) != cards(second)
    assert random.getstate() == before


def play(rendering: Rendering, moves: list[str]) -> Episode:
    kit = load_kit(NAME)
    (instance,) = kit.generate(kit.Options(), seed=0, start=0, num=1)
    game, seated = kit.new_game(instance, kit.Options()), []
    for text in moves:
        seated.append((game.seat_to_move, text))
        game.step(*seated[-1])
    game, limits = kit.new_game(instance, kit.Options()), Limits(max_turns=20, max_retries=1)
    return play_one(game, rendering, seated, key=instance.key, limits=limits, max_game_tokens=9000)


def test_both_seats_train_on_the_win_and_on_the_loss(rendering: Rendering) -> None:
    episode = play(rendering, ["[0]", "[0]", *(f"[{cell}]" for cell in range(1, 7))])
    assert [turn.error_kind for turn in episode.turns].count("invalid") == 1
    assert episode.outcome.rewards == (1.0, -1.0) and episode.outcome.seat_scores == (1.0, 0.0)
    samples, _ = reward_samples(
        [episode], algorithm=AlgorithmConfig(advantage="ppo"), reward=RewardConfig()
    )
    assert [sample.total_reward for sample in samples] == [1.0, -1.0]
    assert all(1 in sample.mask for sample in samples)


def test_a_seat_whose_tries_are_used_up_loses(rendering: Rendering) -> None:
    """As TextArena itself pays it after one invalid move too many."""
    for moves, paid in ((["[9]", "[9]"], -1.0), (["[0]", "[0]", "no"], 1.0)):
        episode = play(rendering, moves)
        assert (episode.ended, episode.outcome.rewards) == ("retries", (paid, -paid))
        assert episode.outcome.seat_scores == ((1 + paid) / 2, (1 - paid) / 2)
        assert not (episode.outcome.over or episode.outcome.agreed)
        env = episode.game._env
        env.state.error_count = env.state.error_allowance
        env.step(action="no")
        assert env.state.done and episode.game.outcome().rewards == (paid, -paid)


@pytest.mark.parametrize(
    ("name", "moves", "agreed"),
    [
        ("SimpleNegotiation-v0-short", ["hello"] * 9, False),
        ("SimpleNegotiation-v0-short", ["[Accept] nothing"] * 9, False),
        (
            "SimpleNegotiation-v0-short",
            ["[Offer: 1 Ore -> 1 Ore]", "[Accept]", *["hello"] * 9],
            True,
        ),
        ("TwoDollar-v0", ["[Propose] $1.00", "[Accept]"], True),
        ("TwoDollar-v0", ["[Propose] $1.00", "[Reject]"] * 20, False),
        ("NewRecruit-v0", ["[Propose] AAAAAAAA", "[Accept]"], True),
        ("NewRecruit-v0", ["[Propose] AAAAAAAA", "[Reject]"] * 20, False),
        ("TicTacToe-v0", ["[0]", "[1]", "[3]", "[2]", "[6]"], True),
    ],
)
def test_players_of_a_trade_have_agreed_if_an_offer_was_accepted(
    name: str, moves: list[str], agreed: bool
) -> None:
    kit = load_kit(f"textarena:{name}")
    (instance,) = kit.generate(kit.Options(), seed=0, start=0, num=1)
    game = kit.new_game(instance, kit.Options())
    for text in moves:
        if (seat := game.seat_to_move) is not None:
            assert game.step(seat, text).error is None
    assert game.seat_to_move is None and game.outcome().over
    assert game.outcome().agreed == kit.restore(game.state()).outcome().agreed == agreed


def test_a_run_names_a_game_by_its_id(bridge: ModuleType) -> None:
    config = load_config(None, [f"game.name={NAME}", "model.path=x"])
    kit = config.game.kit
    (instance,) = kit.generate(config.game.options, seed=0, start=0, num=1)
    assert isinstance(kit.new_game(instance, config.game.options), bridge.TextArenaGame)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("textarena:TicTacTo-v0", "nearest is textarena:TicTacToe-v0"),
        ("textarena:Bandit-v0", "cannot be played by two or more"),
        ("textarena:ThreePlayerIPD-v0:2", "cannot be played by 2"),
        ("textarena:LiarsDice-v0:99", "must have 2 to 16 players, got 99"),
    ],
)
def test_an_id_that_these_cannot_play_gets_one_line(name: str, words: str) -> None:
    with pytest.raises(SettingsError, match=words) as caught:
        load_config(None, [f"game.name={name}", "model.path=x"])
    assert "\n" not in str(caught.value)


def kinds(name: str, *moves: str) -> list[str | None]:
    """The kinds of these moves, one after another by the seat whose turn it is."""
    game = opened(name)
    return [game.step(game.seat_to_move, text).action for text in moves]


def opened(name: str) -> Any:
    kit = load_kit(f"textarena:{name}")
    (instance,) = kit.generate(kit.Options(), seed=0, start=0, num=1)
    return kit.new_game(instance, kit.Options())


def test_words_to_another_player_are_a_message_and_a_move_in_brackets_is_none() -> None:
    trade = ("I need ore.", "Take it. [Offer: 1 Ore -> 1 Ore]", "[Accept]")
    assert kinds("SimpleNegotiation-v0-short", *trade) == ["message", "move", "move"]
    assert kinds("TicTacToe-v0", "[0]", "hello", "[1]") == ["move", None, "move"]
    # Any text is talk here, and a choice reaches nobody.
    rounds = ["I [cooperate].", "Me too", "[cooperate]", "hello"] * 2
    expected = ["message", "message", "move", "move"] * 2
    assert kinds("IteratedPrisonersDilemma-v0", *rounds) == expected


def test_three_players_talk_and_are_paid_by_rank() -> None:
    game = opened("ThreePlayerIPD-v0")
    heard = game.step(0, "I cooperate.")
    assert game.num_seats == 3 and heard.action == "message" and game.seat_to_move == 1
    assert heard.observations == ("", "[Player 0] I cooperate.", "[Player 0] I cooperate.")
    choice = {0: "[1 defect] [2 defect]", 1: "[0 defect] [2 cooperate]", 2: "well"}
    while (seat := game.seat_to_move) is not None:
        assert game.step(seat, choice[seat]).error is None
    outcome = game.outcome()
    assert outcome.rewards == (1.0, 0.0, -1.0) and outcome.seat_scores == (1.0, 0.5, 0.0)
    again = load_kit("textarena:ThreePlayerIPD-v0").restore(game.state())
    assert again.outcome() == outcome and again.state() == game.state()
    assert opened("ThreePlayerIPD-v0").outcome_of_forfeit(1).rewards == (0.5, -1.0, 0.5)
    assert len(load_kit("textarena:LiarsDice-v0:4").ROLES) == 4


def test_a_promise_is_true_if_the_next_choice_keeps_it() -> None:
    """A text with both words is no promise, and TextArena reads no choice as to cooperate."""
    game = opened("IteratedPrisonersDilemma-v0")
    rounds = [
        ("I COOPERATE!", "I will defect.", "[cooperate]", "[cooperate]"),
        ("Cooperate or defect?", "Defect!", "[defect]", "well"),
    ]
    for text in (text for texts in rounds for text in texts):
        game.step(game.seat_to_move, text)
    assert game.measures([0]) == {"statements": 1.0, "true_statements": 1.0}
    assert game.measures([1]) == {"statements": 2.0, "true_statements": 0.0}
    assert game.measures([0, 1]) == {"statements": 3.0, "true_statements": 1.0}
    assert opened("TicTacToe-v0").measures([0]) == {}


DEBATE = "examples/textarena/debate.py"


def fresh(config: bool = False) -> Any:
    """The debate's kit, or settings with it, of its file as it is read anew."""
    load_kit.cache_clear()
    for name, module in [*sys.modules.items()]:
        if str(getattr(module, "__file__", "")).endswith(DEBATE):
            del sys.modules[name]
    return (
        load_config(None, [f"game.name={DEBATE}", "model.path=x"]) if config else load_kit(DEBATE)
    )


@contextmanager
def jury(monkeypatch: pytest.MonkeyPatch, vote: Callable[[str, int], str]) -> Iterator[ChatServer]:
    """A jury on this machine: `vote(question, seed)`, by members that are seeds."""

    def script(body: dict[str, Any], number: int) -> Answer:
        return Answer(vote(body["messages"][-1]["content"], body["seed"]))

    with chat_server(script) as server:
        monkeypatch.setenv("JURY_URL", server.url)
        yield server


def test_a_jury_of_ones_own_judges_a_debate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it, three of the seven members are for the affirmative side, and after it all, whose
    player therefore wins. Copies, restored games and moves in between ask nobody again."""

    def vote(question: str, seed: int) -> str:
        return "Negative" if "No debate has occurred" in question and seed > 2 else "affirmative!"

    with jury(monkeypatch, vote) as server:
        kit = fresh()
        (instance,) = kit.generate(kit.Options(), seed=0, start=0, num=1)
        game = kit.new_game(instance, kit.Options())
        sides = ["Affirmative" in game.prompt(seat).user for seat in (0, 1)]
        before = len(server.bodies)
        while (seat := game.seat_to_move) is not None:
            said = game.clone().step(seat, "Because.")
            assert said == game.step(seat, "Because.") and said.action == "message"
            assert said.observations[1 - seat] == f"[Player {seat}] Because."
        assert len(server.bodies) == before + 7 and len(game.state()["moves"]) == 6
        assert game.outcome().rewards == tuple(1.0 if side else -1.0 for side in sides)
        again = kit.restore(json.loads(json.dumps(game.state())))
        assert again.outcome() == game.outcome() and len(server.bodies) == before + 7


def test_a_jury_that_does_not_vote_or_answer_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with jury(monkeypatch, lambda question, seed: "Both."), pytest.raises(SettingsError) as caught:
        fresh(config=True)
    assert "JURY_MODEL must vote for one of" in str(caught.value)
    with pytest.raises(SettingsError, match="JURY_URL must be a jury's chat endpoint") as caught:
        fresh(config=True)  # its server is gone
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["", "any"])
@pytest.mark.parametrize(
    ("name", "need"),
    [
        ("Debate-v0", "a jury of your own"),
        ("ScenarioPlanning-v0", "a jury of your own"),
        ("GuessWho-v0", "player"),
        ("TwentyQuestions-v0", "player"),
    ],
)
def test_a_game_that_asks_a_paid_service_is_refused_in_one_line(
    bridge: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str, need: str, key: str
) -> None:
    """With a key of the service or without one; nothing is asked."""
    monkeypatch.setenv("OPENROUTER_API_KEY", key)
    with pytest.raises(ValueError, match=f"{name} cannot be played .*{need}") as caught:
        bridge.module_of(name)
    assert "\n" not in str(caught.value)


def test_a_missing_word_list_is_refused_in_one_line_with_the_command_for_it(
    bridge: ModuleType, capfd: pytest.CaptureFixture[str]
) -> None:
    import nltk

    tries: list[bool] = []

    class Words:
        def __init__(self) -> None:
            tries.append(True)
            print("[nltk_data] Error loading words")
            nltk.data.find("corpora/no_such_words")

    registration = bridge.textarena.envs.registration
    registration.register("Words-v0-raw", Words)
    try:
        with pytest.raises(ValueError, match=r"python -m nltk\.downloader no_such_words$"):
            bridge.module_of("Words-v0")
    finally:
        del registration.ENV_REGISTRY["Words-v0-raw"]
    assert len(tries) == 1 and capfd.readouterr() == ("", "")


DILEMMA = "examples/textarena/dilemma.py"


def test_scripts_of_ones_own_play_a_game_and_keep_or_break_their_word() -> None:
    kit = load_kit(DILEMMA)
    (instance,) = kit.generate(kit.Options(), seed=0, start=0, num=1)
    for name, share in (("keeps", 1.0), ("breaks", 0.0)):
        game = kit.new_game(instance, kit.Options())
        scripts = [kit.make_script(name, seed=0)] * 2
        while (seat := game.seat_to_move) is not None:
            step = game.step(seat, scripts[seat].act(game.view(seat)))
            assert step.error is None
        counts = game.measures([0, 1])
        assert counts["true_statements"] == share * counts["statements"] and counts["statements"]
        assert len(game.state()["moves"]) == 40


@pytest.mark.slow
@pytest.mark.nightly
def test_a_scratch_model_learns_the_scripts_and_its_talk_is_measured(tmp_path: Path) -> None:
    from train import main

    words = (f"out={tmp_path / 'run'}", "steps=1", "threads=1", "eval.final_games=8")
    assert main(["--config", str(ROOT / "examples" / "textarena" / "dilemma.yaml"), *words]) == 0
    (step,) = metrics_of(tmp_path / "run")
    assert step["messages"] > 10 and step["errors"] == 0 and "honesty" in step
    measured = json.loads((tmp_path / "run" / "held_out_after.json").read_text())
    assert measured["sampled"]["talk"]["num_games"] == 8
