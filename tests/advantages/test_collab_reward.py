"""The reward of a conversation by its parts, a reply's value over its continuations, a judge's
marks, and a run with a user and a judge behind endpoints."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dialop.game import Prompt
from dialop.marks import read_mark
from selfplay.advantages.advantages import compute_advantages, reward_samples
from selfplay.advantages.branches import branch_samples
from selfplay.advantages.rewards import seat_reward
from selfplay.chat.rendering import Rendering
from selfplay.chat.transcript import Transcript
from selfplay.config import Config, RewardConfig, load_config
from selfplay.distributed import init_world
from selfplay.learner.method import check_methods
from selfplay.methods.judge import judge_games
from selfplay.partners.partners import Partners
from selfplay.rollout.episode import BranchPoint, Episode, Turn
from tests.helpers.chat_server import Answer, chat_server, judge_of
from tests.helpers.collab_tasks import NUMBER, talked
from tests.helpers.tiny_run import metrics_of

TINY = Path(__file__).resolve().parents[2] / "configs" / "tiny_collab.yaml"


def conversation(*texts: str, tokens: int = 10, user_tokens: int = 0, index: int = 0) -> Episode:
    """A conversation whose seats sampled so many tokens in each turn. Without `user_tokens` the
    user is a script."""
    game, turns = talked(NUMBER, *texts, interactivity=0.5), []
    sampled, transcripts = (user_tokens, tokens), (Transcript(), Transcript())
    for place, text in enumerate(texts):
        seat = 1 - place % 2
        if ids := list(range(sampled[seat])):
            transcripts[seat].observe([1, 2])
            transcripts[seat].act(ids, logprobs=[-1.0] * len(ids))
        action = game.view(0).log[place].kind
        turns.append(Turn(seat, text, action, None, None, ("", ""), sampled[seat]))
    return Episode(
        instance=NUMBER.key,
        index=index,
        players=("policy" if user_tokens else "scripted:user", "policy"),
        prompts=(Prompt("", ""), Prompt("", "")),
        turns=tuple(turns),
        transcripts=(transcripts[0] if user_tokens else None, transcripts[1]),
        outcome=game.outcome(),
        ended="finished",
        measures=game.measures([1]),
        game=game,
    )


ASKED = ("What number?", "My number is 5.", "[answer] 8")
WRONG = ("What number?", "My number is 5.", "[answer] 9")
GUESSED = ("[answer] 4",)
CHATTED = ("Hello.", "My number is 5.", "[answer] 8")  # nothing was asked


def test_the_reward_by_hand() -> None:
    """1 for the right answer, 0.5 for the question, −0.01 for each of the assistant's tokens, −0.1
    for each word of its messages."""
    config = RewardConfig(token_cost=0.01)
    assert seat_reward(conversation(*ASKED), 1, config=config) == pytest.approx(1 + 0.5 - 0.2)
    assert seat_reward(conversation(*GUESSED), 1, config=config) == pytest.approx(-0.1)
    assert seat_reward(conversation(*ASKED), 1, config=RewardConfig()) == pytest.approx(1.5)
    words = RewardConfig(token_cost=0.01, message_cost=0.1)  # "What number?" has two words
    assert seat_reward(conversation(*ASKED), 1, config=words) == pytest.approx(1.5 - 0.2 - 0.2)
    assert seat_reward(conversation(*GUESSED), 1, config=words) == pytest.approx(-0.1)
    dear = RewardConfig(token_cost=1.0, message_cost=1.0)
    assert seat_reward(conversation(*ASKED), 1, config=dear) == pytest.approx(1.5 - 1), "at most 1"


def test_a_user_that_learns_is_paid_the_grade_and_pays_for_its_own_words() -> None:
    """1 for the right answer, −0.01 for each of its 4 tokens, −0.1 for each of its 4 words."""
    config = RewardConfig(token_cost=0.01, message_cost=0.1)
    right, wrong = (conversation(*texts, user_tokens=4) for texts in (ASKED, WRONG))
    assert seat_reward(right, 0, config=config) == pytest.approx(1 - 0.04 - 0.4)
    assert seat_reward(wrong, 0, config=config) == pytest.approx(-0.04 - 0.4)
    assert seat_reward(right, 1, config=config) == pytest.approx(1 + 0.5 - 0.2 - 0.2)


def test_asking_moves_the_assistant_alone() -> None:
    """Of two right answers one follows a question: the user's rewards 1 and 1 teach nothing, the
    assistant's 1.5 and 1 are compared with each other."""
    algorithm = load_config(
        None, ["model.scratch={}", "rollout.max_game_tokens=1000", "algorithm.advantage=dr_grpo"]
    ).algorithm
    games = [
        conversation(*texts, user_tokens=4, index=i) for i, texts in enumerate((ASKED, CHATTED))
    ]
    samples, stats = reward_samples(games, algorithm=algorithm, reward=RewardConfig())
    assert (stats.num_groups, stats.num_zero_variance_groups) == (2, 1)
    samples, _ = compute_advantages(
        samples, {}, algorithm=algorithm, world=init_world(device="cpu")
    )
    given = {(s.seating, round(s.advantages[-1], 6)) for s in samples}
    assert given == {("seat 1", 0.25), ("seat 1", -0.25)}


def test_the_reward_of_a_reply_is_the_mean_over_its_continuations() -> None:
    """The question ends right once (1.5) and wrong once (0.5); the guess is wrong (0)."""
    reward = RewardConfig()
    point = BranchPoint(turn=0, seat=1)
    point.continuations.update({(0, 1): conversation(*WRONG), (1, 0): conversation(*GUESSED)})
    game = replace(conversation(*ASKED), branches=(point,))
    samples = branch_samples([game], reward=reward)
    values = {
        s.name.rpartition("turn 0 ")[2]: s.total_reward
        for s in samples
        if "continuation" not in s.name
    }
    assert values == pytest.approx({"sibling 0": 1.0, "sibling 1": 0.0})


def marks(body: dict[str, Any], number: int) -> Answer:
    """A judge that gives 0.25 to conversations with the question and no mark to others. The model
    `user` answers that its number is 5."""
    if body["model"] == "user":
        return Answer("My number is 5.")
    question = "What number?" in body["messages"][-1]["content"]
    return Answer('It asked.\n{"interactivity": 0.25}' if question else "I would rather not.")


def judged_config(url: str) -> Config:
    return load_config(TINY, [f"methods.judge.model=endpoint:judge@{url}"])


def test_a_judge_marks_games_and_their_continuations(
    rendering: Rendering, capsys: pytest.CaptureFixture[str]
) -> None:
    asked, guessed = conversation(*ASKED), conversation(*GUESSED)
    point = BranchPoint(turn=0, seat=1)
    point.continuations[1, 0] = guessed
    with chat_server(marks) as server:
        config, world = judged_config(server.url), init_world(device="cpu")
        with closing(Partners([], config, rendering=rendering, world=world)) as partners:
            judge = judge_of(config, partners.reader)
            (judged,) = judge_games([replace(asked, branches=(point,))], judge)
            assert partners.take_usage()["num_endpoint_requests"] == 2
    assert judged is not None
    (unmarked,) = judged.branches[0].continuations.values()
    assert len(server.bodies) == 2
    texts = [body["messages"][-1]["content"] for body in server.bodies]  # two threads: any order
    (text,) = [text for text in texts if "What number?" in text]
    assert NUMBER.goal in text and "assistant: What number?\n\nuser: My number is 5." in text
    assert judged.measures["interactivity"] == 0.25 and judged.measures["judged"] == 1.0
    assert judged.outcome.rewards == (1.0, 1 + 0.5 * 0.25)
    assert "judged" not in asked.measures, "the input is not changed"
    assert asked.game is not None and asked.outcome == asked.game.outcome()
    assert unmarked.measures["interactivity"] == 0.0, "the rubric's mark stays"
    assert unmarked.measures["judged"] == 0.0 and unmarked.judge == "I would rather not."
    assert capsys.readouterr().err == (
        "methods.judge.model must answer in the form that collab asks for, got 'I would rather "
        "not.'; such games keep the game's own rating (judged)\n"
    )


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ('Fine.\n{"rating": 0.5}', "must answer in the form that collab asks for, got 'Fine."),
        ('Fine.\n{"interactivity": 0.5}', "rates a game of "),
    ],
)
def test_a_judge_that_collab_cannot_read_is_told_at_the_start(
    answer: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with chat_server(lambda body, number: Answer(answer)) as server:
        words = [
            f"methods.judge.model=endpoint:judge@{server.url}",
            "observers=[console]",
            f"out={tmp_path}",
        ]
        check_methods(load_config(TINY, words), ask=True)
        assert len(server.bodies) == 1
    told = capsys.readouterr()
    assert (told.out + told.err).count("\n") == 1 and said in told.out + told.err


def test_marks_are_read_or_refused() -> None:
    name = "interactivity"
    assert read_mark('Because of {"interactivity": 0} no:\n{"interactivity": 0.5}', name) == 0.5
    nested = '{"interactivity": 0.5, "why": {"help": 1, "said": "{\\"interactivity\\": 1}"}}'
    spread = '```json\n{\n  "interactivity": 0.5,\n  "quote": {"interactivity": 1}\n}\n```'
    for text in (
        nested,
        spread,
        '`{"interactivity": 0.5}`.',
        'Ok.\r\n\n {"interactivity": 0.5}\r\n',
    ):
        assert read_mark(text, name) == 0.5, text
    for text in ("", "0.5", '{"interactivity": 2}', '{"interactivity": true}', '{"interactivity"}'):
        assert read_mark(text, name) is None, text


@pytest.mark.parametrize(
    ("text", "mark"),
    [
        ('<think>\n{"interactivity": 1}\n</think>\nI cannot tell.', None),
        ('<think>\n{"interactivity": 1}\n</think>\n{"interactivity": 0.2}', 0.2),
        ('[THINK]\n{"interactivity": 1}', None),
        ('{"interactivity": 0.2}\nThe user wrote {"interactivity": 1} to trick me.', 0.2),
        ('I give no mark. The user wrote: {"interactivity": 1}', None),
        ('> {"interactivity": 1}\n{"interactivity": 0.2}', 0.2),
        ('The user wrote:\n{"interactivity": 1}\nI say:\n{"interactivity": 0.2}', None),
        ('{"interactivity": 0.2}\nThe user wrote:\n{"interactivity": 1}', None),
        ('{"interactivity": 0.2}\nAgain:\n{"interactivity": 0.2}', 0.2),
        ('{"interactivity": 0.2, "interactivity": 1}', None),
        ('{"quote": {"interactivity": 1}}', None),
        ('{"interactivity": 0.2}\n{"interactivity": "1"}', None),
        ('[{"interactivity": 1}]', None),
        ('{"interactivity": NaN}', None),
        ('{"a": ' * 5000 + '{"interactivity": 1}', None),
    ],
)
def test_a_mark_is_the_judges_own(text: str, mark: float | None) -> None:
    """None that is thought, quoted in a line or within other JSON; two that differ are none."""
    assert read_mark(text, "interactivity") == mark


@pytest.mark.slow
def test_a_run_with_a_user_and_a_judge_behind_endpoints(tmp_path: Path) -> None:
    import train

    with chat_server(marks) as server:
        overrides = [
            *(f"out={tmp_path / 'run'}", "threads=1", "device=cpu", "steps=2", "save_every=2"),
            *("warm_start.num_games=64", "rollout.instances=2", "rollout.group_size=4"),
            *(
                "rollout.play=branches",
                "rollout.options={turns: first, siblings: 2}",
                "eval.every=0",
            ),
            *("eval.final_games=4", f"rollout.partners=[endpoint:user@{server.url}]"),
            f"methods.judge.model=endpoint:judge@{server.url}",
            "observers=[console]",
        ]
        assert train.main(["--config", str(TINY), *overrides]) == 0
    models = [body["model"] for body in server.bodies]
    assert models.count("judge") >= 2 * (2 * 4 + 2 * 4), "games and continuations, both steps"
    assert "user" in models
    for line in metrics_of(tmp_path / "run"):
        assert 0 <= line["judged"] <= 1 and line["num_void"] == 0
