"""A game of three seats, two rooms, a tool and rewards of moves: who plays, what trains, credit."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from dialop import scaffold
from dialop.game import Game, GameError, Outcome, Prompt
from dialop.kit import Kit
from selfplay.advantages.advantages import reward_samples
from selfplay.advantages.rewards import with_rewards
from selfplay.chat.rendering import Rendering
from selfplay.config import AlgorithmConfig, Config, RewardConfig, load_config
from selfplay.config.text import dump
from selfplay.data.instances import generated
from selfplay.distributed import init_world
from selfplay.engines.base import Completion, Request
from selfplay.errors import OwnFault, SettingsError
from selfplay.methods.judge import judge_games
from selfplay.preflight.run import baseline_games, check_state, cut_off
from selfplay.preflight.seats import check_players
from selfplay.rollout.driver import Rollout, RolloutStats, play_games, play_scripted
from selfplay.rollout.episode import Episode, GameSetup, Limits, limits_of
from selfplay.rollout.players import Teacher
from selfplay.rollout.seating import Partner, policy_seats_in, scripted_games, scripted_partner
from selfplay.step import logged_samples
from selfplay.warm_start.imitation import scratch_tokenizer, teacher_games
from selfplay.warm_start.teachers import check_teachers
from tests.helpers import three_rooms
from tests.helpers.changed_games import changed
from tests.helpers.chat_server import judge_of
from tests.helpers.hand_episodes import with_advantages
from tests.helpers.scripted_engine import CUT
from tests.helpers.small_games import SAMPLING, Lines, Proposes, games_of, play_one, policies
from tests.helpers.three_rooms import CLERK, Instance, ThreeRooms

ROOT = Path(__file__).resolve().parents[2]

RIGHT = [(0, "[message] 1"), (1, "[message] 2"), (CLERK, "[tool] 1 2"), (CLERK, "[answer] 3")]


def config_of(*overrides: str) -> Config:
    small = ["model.scratch={}", "rollout.max_game_tokens=1000", "warm_start.teachers=[clerk]"]
    return load_config(None, ["game.name=tests.helpers.three_rooms", *small, *overrides])


def told(rendering: Rendering, *overrides: str) -> list[str]:
    config = config_of(*overrides)
    return cut_off(config, baseline_games(config), rendering)


def play(
    rendering: Rendering, moves: list[tuple[int, str]], *, index: int = 0, max_turns: int = 9
) -> Episode:
    """A game of the policy in all seats with these moves, on the numbers 1 and 2."""
    game = ThreeRooms(Instance("three", (1, 2)), three_rooms.Options())
    limits = Limits(max_turns, 1)
    return play_one(game, rendering, moves, key="three", index=index, limits=limits)


def test_limits_that_cut_scripted_games_and_moves_off_are_told(rendering: Rendering) -> None:
    """Two callers and the clerk need three legal moves."""
    games = baseline_games(config_of())
    lengths = sorted(len(rendering.action_ids(turn.text)) for game in games for turn in game.turns)
    least, longest = lengths[0], lengths[-1]
    assert least < longest <= 400
    assert not told(rendering, "rollout.max_turns=3", "rollout.max_new_tokens=400")
    num = sum(length > least for length in lengths)
    turns, new = told(rendering, "rollout.max_turns=2", f"rollout.max_new_tokens={least}")
    assert "rollout.max_turns 2 is" in turns and "32 of 32 games" in turns and "3 turns" in turns
    assert f"max_new_tokens {least} is" in new and f"{num} of {len(lengths)} moves" in new


# --- a game's rooms and tools -------------------------------------------------------------------


def test_a_tools_answer_is_read_by_its_caller_alone_and_never_trains(rendering: Rendering) -> None:
    episode = play(rendering, RIGHT)
    assert episode.ended == "finished" and episode.score == 1.0
    clerk = episode.transcripts[CLERK]
    called, answered = clerk.spans
    between = clerk.ids[called.end : answered.start]
    assert between == rendering.following("3", closed=True)
    assert not any(clerk.mask[called.end : answered.start])
    assert sum(clerk.mask) == sum(span.end - span.start for span in clerk.spans)
    for seat in (0, 1):
        transcript = episode.transcripts[seat]
        assert transcript is not None and len(transcript.spans) == 1
    assert episode.measures == {"tool_calls": 1.0}


def test_a_room_is_read_by_those_in_it(rendering: Rendering) -> None:
    asked = [*RIGHT[:2], (CLERK, "1: [message] 9"), (1, "[message] 2"), *RIGHT[3:]]
    episode = play(rendering, asked)
    assert [turn.observations for turn in episode.turns[2:4]] == [
        ("", "clerk: 9", ""),
        ("", "", "caller 1: 2"),
    ]


def test_a_move_that_keeps_the_turn_counts_towards_the_limit(rendering: Rendering) -> None:
    calls = [*RIGHT[:2], (CLERK, "[tool] 1 2"), (CLERK, "[tool] 1 2"), *RIGHT[3:]]
    assert play(rendering, calls, max_turns=4).ended == "turns"
    assert play(rendering, calls, max_turns=5).ended == "finished"


@pytest.mark.parametrize(("most", "seat"), [(20, 0), (29, 1), (30, CLERK), (48, None)])
def test_a_text_that_no_tokenizer_takes_ends_the_run_with_one_line(
    most: int, seat: int | None, monkeypatch: pytest.MonkeyPatch, rendering: Rendering
) -> None:
    """A prompt, here 21 characters, and what others said, 30 with the second prompt."""
    monkeypatch.setattr("selfplay.rollout.episode.MAX_TEXT", most)
    rule = rf"^ThreeRooms: the text for seat {seat} must have at most {most} characters, .*three"
    with nullcontext() if seat is None else pytest.raises(GameError, match=rule):
        assert play(rendering, RIGHT).ended == "finished"


def test_a_clone_that_is_no_copy_ends_the_run_with_one_line(rendering: Rendering) -> None:
    class Uncopied(ThreeRooms):
        def clone(self) -> ThreeRooms:
            return self

    with pytest.raises(GameError, match="must give a copy, got"):
        play_one(Uncopied(Instance("k", (1, 2)), three_rooms.Options()), rendering, RIGHT, key="k")


SHORT = ("model.scratch={}", "rollout.max_game_tokens=99")


def test_a_state_that_is_no_json_is_refused_before_a_run(tmp_path: Path) -> None:
    check_state(config_of())
    own = changed(
        tmp_path, "rooms", {'play["told"] = {str(seat)': 'play["days"] = {1} or {str(seat)'}
    )
    with pytest.raises(SettingsError, match=r"state\(\) must give plain JSON .* got play="):
        check_state(config_of(f"game.name={own}"))


def test_a_state_that_is_no_json_after_some_moves_is_refused_before_the_weights_change(
    tmp_path: Path, rendering: Rendering
) -> None:
    """Also where only games of the policy come so far: those that are logged are asked."""
    end = 'play["log"] = {1} if self.seat_to_move is None else [list(entry)'
    own = changed(tmp_path, "rooms", {'play["log"] = [list(entry)': end})
    with pytest.raises(SettingsError, match=r"state\(\) must give plain JSON .* got play="):
        check_state(config_of(f"game.name={own}"))

    class Ended(ThreeRooms):
        def state(self) -> dict[str, object]:
            return super().state() | {"seats": {1}}

    episode = play_one(
        Ended(Instance("k", (1, 2)), three_rooms.Options()), rendering, RIGHT, key="k"
    )
    config = replace(config_of(), log_games_every=1)
    run = SimpleNamespace(config=config, world=init_world(device="cpu"))
    rule = r"Ended.state\(\) must give plain JSON values, got seats=\{1\} .* \(instance k\).*py:"
    with pytest.raises(OwnFault, match=rule):
        logged_samples(run, Rollout([episode], RolloutStats(0, 0, 0.0)), 0)


# --- credit -------------------------------------------------------------------------------------


def test_a_moves_reward_is_a_return_of_its_own_and_earlier_tokens(rendering: Rendering) -> None:
    """The tool costs the clerk 0.25; the second game answers without it, and wrong."""
    episodes = [
        play(rendering, RIGHT),
        play(rendering, [*RIGHT[:2], (CLERK, "[answer] 4")], index=1),
    ]
    algorithm = AlgorithmConfig(advantage="dr_grpo")
    samples, _ = reward_samples(episodes, algorithm=algorithm, reward=RewardConfig())
    clerks = [s for s in samples if s.seating == f"seat {CLERK}"]
    assert [s.total_reward for s in clerks] == [0.75, -1.0]
    first, second = with_advantages(clerks, algorithm=algorithm)
    transcript = episodes[0].transcripts[CLERK]
    called, answered = transcript.spans
    n, m = called.end - called.start, answered.end - answered.start
    mean = (n * 0.75 + m * 1.0) / (n + m)
    baseline = (mean - 1.0) / 2
    on_call, on_answer = first.advantages[called.start : called.end], first.advantages[-m:]
    assert on_call == pytest.approx([0.75 - baseline] * n)
    assert on_answer == pytest.approx([1.0 - baseline] * m)
    wrong = second.advantages[second.mask.index(1) :]
    assert wrong == pytest.approx([-1.0 - baseline] * len(wrong))


def test_a_reward_before_a_seats_first_move_is_left_out(rendering: Rendering) -> None:
    episode = play(rendering, RIGHT)
    early = replace(episode.turns[0], rewards=(0.5, 7.0, 7.0))
    episode = replace(episode, turns=(early, *episode.turns[1:]))
    samples, _ = reward_samples(
        [episode], algorithm=AlgorithmConfig(advantage="ppo"), reward=RewardConfig()
    )
    assert [s.total_reward for s in samples] == [1.0, 0.5, 0.75]


def test_other_kinds_of_reward_leave_the_moves_rewards_out(rendering: Rendering) -> None:
    config = RewardConfig(function="accept")
    episodes = with_rewards([play(rendering, RIGHT)], config)
    samples, _ = reward_samples(episodes, algorithm=AlgorithmConfig(advantage="ppo"), reward=config)
    assert [s.total_reward for s in samples] == [1.0, 1.0, 1.0]


# --- seats --------------------------------------------------------------------------------------


def partner_of(config: Config, spec: str) -> Partner:
    return Partner(
        f"scripted:{spec}", lambda names, seat: scripted_partner(spec, names, seat, config.game)
    )


def test_the_policy_has_chosen_roles_or_the_seats_in_turn() -> None:
    config = config_of("rollout.group_size=6")
    partner = partner_of(config, "guesser")

    def places(*overrides: str) -> list[tuple[int, ...]]:
        rollout = config_of(*overrides).rollout
        return [
            policy_seats_in(config.game, rollout, partner=partner, index=index)
            for index in range(4)
        ]

    assert places() == [(0,), (1,), (2,), (0,)]
    assert places("rollout.policy_seats=[caller]") == [(0, 1)] * 4
    assert places("rollout.policy_seats=[clerk]") == [(2,)] * 4


def test_a_partner_fills_all_other_seats(rendering: Rendering) -> None:
    config = config_of("rollout.group_size=3")
    instance = three_rooms.generate_instance(three_rooms.Options(), seed=0, index=0)
    setups = games_of([instance], rendering, config, [(partner_of(config, "guesser"), 1.0)])
    names = [tuple(player.name for player in setup.players) for setup in setups]
    caller, guesser = "scripted:caller", "scripted:guesser"
    assert names == [
        ("policy", caller, guesser),
        (caller, "policy", guesser),
        (caller, caller, "policy"),
    ]


def test_a_game_that_leaves_a_seat_to_others_gives_it_to_a_run_that_names_it(
    rendering: Rendering,
) -> None:
    """In collab the policy is the assistant, unless the run names both roles."""
    partner, roles = "rollout.partners=['scripted:user']", "rollout.policy_seats=[user,assistant]"
    small = ["game.name=collab", "warm_start.teachers=[ask]", "rollout.max_game_tokens=1000"]
    alone, both = (load_config(None, ["model.scratch={}", *small, w]) for w in (partner, roles))
    with pytest.raises(SettingsError, match=r"self'; rollout.policy_seats sets the roles"):
        check_players(replace(both, rollout=replace(both.rollout, policy_seats=())))
    for config, imitated in ((alone, [False, True]), (both, [True, True])):
        check_players(config)
        (setup,) = teacher_games(
            generated("teachers", game=config.game, seed=1, start=0, num=1),
            teachers=config.warm_start.teachers,
            game=config.game,
            rollout=config.rollout,
            seed=1,
            rendering=rendering,
        )
        assert [isinstance(player, Teacher) for player in setup.players] == imitated


def test_scripts_play_all_seats_and_only_able_teachers_are_imitated(rendering: Rendering) -> None:
    config = config_of()
    instances = [
        three_rooms.generate_instance(three_rooms.Options(), seed=0, index=i) for i in range(6)
    ]
    (played, *_) = play_scripted(
        scripted_games(instances, spec="clerk", game=config.game), limits=limits_of(config.rollout)
    )
    assert played.score == 1.0
    assert played.players == ("scripted:caller", "scripted:caller", "scripted:clerk")
    setups = teacher_games(
        instances,
        teachers=["clerk", "guesser", "caller"],
        game=config.game,
        rollout=config.rollout,
        seed=1,
        rendering=rendering,
    )
    names = [tuple(player.name for player in setup.players) for setup in setups]
    assert {pair for *pair, _ in map(tuple, names) for pair in [tuple(pair)]} == {
        ("scripted:caller", "scripted:caller")
    }
    assert {name[2] for name in names} == {"scripted:clerk", "scripted:guesser"}


# --- settings -----------------------------------------------------------------------------------


def test_a_games_own_options_are_settings(tmp_path: Path) -> None:
    config = config_of("game.options.max_value=5", "game.options.brief=true")
    assert config.game.options == three_rooms.Options(max_value=5, brief=True)
    saved = tmp_path / "config.yaml"
    saved.write_text(dump(config))
    assert load_config(saved) == config


class Duel(scaffold.MyGame):
    """A zero-sum game: the seat that names a number loses, as does a seat that forfeits."""

    def outcome(self) -> Outcome:
        return self.won_by(1 - self.log[-1][0] if self.answer else None)

    def outcome_of_forfeit(self, seat: int) -> Outcome:
        return self.won_by(1 - seat)

    def won_by(self, seat: int | None) -> Outcome:
        sign = {0: 1.0, 1: -1.0, None: 0.0}[seat]
        scores = (1 + sign) / 2, (1 - sign) / 2
        over = bool(self.answer)
        own = {"rewards": (sign, -sign), "seat_scores": scores}
        return Outcome(over=over, agreed=False, score=0.5, score_norm=0.5, **own)


class Silent(Duel):
    """The same game, which does not say what a forfeit pays."""

    outcome_of_forfeit = Game.outcome_of_forfeit


HI = "[message] hi"
LONG = " ".join(["[message]"] + 40 * ["word"])


@pytest.mark.parametrize(
    ("moves", "ended", "paid", "room"),
    [
        ([(0, "no"), (0, "no")], "retries", -1.0, 900),
        ([(0, HI), (1, "no"), (1, HI + CUT)], "retries", 1.0, 900),
        ([(0, HI), (1, "no"), (1, HI), (0, HI)], "turns", 0.0, 900),
        ([(0, HI), (1, "no"), (1, "[answer] 3")], "finished", 1.0, 900),
        ([(0, LONG)], "tokens", -1.0, 150),
        ([(0, HI), (1, LONG)], "tokens", 1.0, 160),
    ],
)
def test_a_seat_whose_tries_are_used_up_is_paid_what_losing_pays(
    moves: list[tuple[int, str]], ended: str, paid: float, room: int, rendering: Rendering
) -> None:
    limits = Limits(max_turns=3, max_retries=1)
    for game, own in ((Duel, paid), (Silent, paid if ended == "finished" else 0.0)):
        start = game(scaffold.Instance("duel", (1, 2)), scaffold.Options())
        episode = play_one(start, rendering, moves, key="duel", limits=limits, max_game_tokens=room)
        assert (episode.ended, episode.outcome.rewards) == (ended, (own, -own))
        assert episode.outcome.over == (ended == "finished")
        samples, _ = reward_samples(
            [episode], algorithm=AlgorithmConfig(advantage="ppo"), reward=RewardConfig()
        )
        assert {s.total_reward for s in samples} <= {own, -own}


def test_a_judges_rating_leaves_a_forfeit_one(rendering: Rendering) -> None:
    """The game's own rubric gives another game, in which the seat has still lost."""
    start = Duel(scaffold.Instance("duel", (1, 2)), scaffold.Options())
    lost = play_one(start, rendering, [(0, "no"), (0, "no")], key="duel")
    parts = {"judge_prompt": lambda _: Prompt("", "Rate."), "judged": lambda game, _: game.clone()}
    kit = Kit("duel", SimpleNamespace(**{**vars(scaffold), **parts}))

    def ask(requests: Sequence[Request]) -> list[Completion]:
        return [Completion([], [], "stop", 0, text="1") for _ in requests]

    words = ["model.path=x", "game.name=collab", "methods.judge.model=checkpoint:a"]
    judge = judge_of(load_config(None, words), lambda _: ask)
    judge.kit = kit
    (rated,) = judge_games([lost], judge)
    assert rated is not None and rated.measures["judged"] == 1.0
    assert rated.outcome == lost.outcome and rated.outcome.rewards == (-1.0, 1.0)


def test_a_partner_that_uses_up_its_tries_loses_also_in_a_copied_game(rendering: Rendering) -> None:
    game = Duel(scaffold.Instance("duel", (1, 2)), scaffold.Options())
    limits, engine = Limits(max_turns=9, max_retries=1), Proposes(rendering, {})
    engine.text = HI
    seats = *policies(rendering, "hand", num=1), Lines("no", "no")
    setup = GameSetup(game, seats, "duel", 0)
    episodes, _ = play_games(
        [setup, setup.copy("branch")], engine, sampling=SAMPLING, limits=limits
    )
    assert [each.outcome.rewards for each in episodes] == [(1.0, -1.0)] * 2


@pytest.mark.parametrize("has_scripts", [True, False])
def test_a_scratch_model_needs_no_teacher_where_none_is_imitated(
    has_scripts: bool, tmp_path: Path
) -> None:
    """Its tokenizer then learns from the game's own scripts, or from the prompts alone."""
    text = Path(scaffold.__file__).read_text("utf-8")
    own = tmp_path / f"own_{has_scripts}.py"
    own.write_text(text if has_scripts else text.replace("SCRIPTS = ", "NAMED = "), "utf-8")
    words = [*SHORT, f"game.name={own}", "model.scratch.tokenizer_games=9"]
    chats = ROOT / "examples" / "chats.jsonl"
    for off in (["warm_start=off"], [f"warm_start.chats={chats}"]):
        config = load_config(None, [*words, *off])
        check_teachers(config)
        tokenizer = scratch_tokenizer(config)
        assert tokenizer.decode(tokenizer.encode("[answer] 12")) == "[answer] 12"
    assert (len(tokenizer.encode("seat")) == 1) == has_scripts  # as in "seat 0: [message] 7"
    assert len(tokenizer.encode("user")) == 1
    for used in (["warm_start.num_games=9"], ["warm_start.teachers=[tall]"]):
        with pytest.raises(SettingsError, match=r"^warm_start.teachers: "):
            check_teachers(load_config(None, [*words, *used]))
