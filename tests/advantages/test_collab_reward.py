"""The reward of a conversation by its parts, a reply's value over its continuations, a judge's
marks, and a run with a user and a judge behind endpoints."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dialop.game import Prompt
from selfplay.advantages.rewards import branch_samples, collab_parts, part_sums, seat_reward
from selfplay.chat.transcript import Transcript
from selfplay.config import CollabConfig, Config, RewardConfig, load_config
from selfplay.distributed import init_world
from selfplay.errors import SettingsError
from selfplay.metrics.games import game_sums
from selfplay.partners.judge import judge_interactivity, make_judge, read_mark
from selfplay.rollout.episode import BranchPoint, Episode, Turn
from tests.helpers.chat_server import Answer, chat_server
from tests.helpers.collab_tasks import NUMBER, talked
from tests.helpers.tiny_run import metrics_of

TINY = Path(__file__).resolve().parents[2] / "configs" / "tiny_collab.yaml"


def conversation(*texts: str, tokens: int = 10) -> Episode:
    """A conversation whose assistant sampled `tokens` tokens in each turn."""
    game, transcript, turns = talked(NUMBER, *texts), Transcript(), []
    for place, text in enumerate(texts):
        seat = 1 - place % 2
        if seat == 1:
            transcript.observe([1, 2])
            transcript.act(list(range(tokens)), logprobs=[-1.0] * tokens, version=0, finish="stop")
        action = game.view(0).log[place].kind
        turns.append(Turn(seat, text, action, None, None, ("", ""), tokens * seat))
    return Episode(
        instance=NUMBER.key,
        index=0,
        players=("scripted:user", "policy"),
        prompts=(Prompt("", ""), Prompt("", "")),
        turns=tuple(turns),
        transcripts=(None, transcript),
        views=(game.view(0), game.view(1)),
        outcome=game.outcome(),
        ended="agreed",
    )


ASKED = ("What number?", "My number is 5.", "[answer] 8")
WRONG = ("What number?", "My number is 5.", "[answer] 9")
GUESSED = ("[answer] 4",)


def test_parts_of_the_reward_by_hand() -> None:
    config = CollabConfig(accuracy=1.0, interactivity=0.5, token_cost=0.01, clamp=1.0)
    assert collab_parts(conversation(*ASKED), 1, config=config) == pytest.approx(
        {"accuracy": 1.0, "interactivity": 0.5, "token_cost": -0.2}
    )
    assert collab_parts(conversation(*GUESSED), 1, config=config) == pytest.approx(
        {"accuracy": 0.0, "interactivity": 0.0, "token_cost": -0.1}
    )


def test_each_part_is_clamped_separately() -> None:
    config = CollabConfig(accuracy=3.0, interactivity=0.5, token_cost=1.0, clamp=0.8)
    assert collab_parts(conversation(*ASKED), 1, config=config) == pytest.approx(
        {"accuracy": 0.8, "interactivity": 0.5, "token_cost": -0.8}
    )


def test_a_cost_may_take_the_reward_below_zero() -> None:
    config = RewardConfig(kind="collab", collab=CollabConfig(token_cost=0.01))
    assert seat_reward(conversation(*GUESSED), 1, config=config) == pytest.approx(-0.1)
    assert seat_reward(conversation(*ASKED), 1, config=config) == pytest.approx(1 + 1 - 0.2)


def test_parts_are_summed_for_the_log() -> None:
    config = RewardConfig(kind="collab", collab=CollabConfig(token_cost=0.01))
    episodes = [conversation(*ASKED), conversation(*GUESSED)]
    assert part_sums(episodes, config=config) == pytest.approx(
        {"accuracy": 1.0, "interactivity": 1.0, "token_cost": -0.3}
    )
    assert part_sums(episodes, config=RewardConfig()) == {}


def test_metrics_of_a_conversation_count_the_assistants_turns() -> None:
    episode = conversation(*ASKED)
    turns = [turn for turn in episode.turns if turn.seat == 1]
    assert game_sums(episode, turns) == {
        "words": 2.0,
        "questions": 1.0,
        "tokens": 20.0,
        "user_words": 4.0,
        "interactivity": 1.0,
    }


def test_the_reward_of_a_reply_is_the_mean_over_its_continuations() -> None:
    """The question ends right once (2.0) and wrong once (1.0); the guess is wrong (0)."""
    reward = RewardConfig(kind="collab", collab=CollabConfig(token_cost=0.0))
    point = BranchPoint(turn=0, seat=1)
    point.continuations.update({(0, 1): conversation(*WRONG), (1, 0): conversation(*GUESSED)})
    game = replace(conversation(*ASKED), branches=(point,))
    algorithm = load_config(None, ["model.scratch={}", "rollout.max_game_tokens=1000"]).algorithm
    samples = branch_samples([game], algorithm=algorithm, reward=reward)
    values = {
        s.name.rpartition("turn 0 ")[2]: sum(s.rewards)
        for s in samples
        if "continuation" not in s.name
    }
    assert values == pytest.approx({"sibling 0": 1.5, "sibling 1": 0.0})


def marks(body: dict[str, Any], number: int) -> Answer:
    """A judge that gives 0.25 to conversations with the question and no mark to others. The model
    `user` answers that its number is 5."""
    if body["model"] == "user":
        return Answer("My number is 5.")
    question = "What number?" in body["messages"][-1]["content"]
    return Answer('It asked.\n{"interactivity": 0.25}' if question else "I would rather not.")


def judged_config(url: str) -> Config:
    return load_config(TINY, [f"reward.collab.judge=endpoint:judge@{url}"])


def test_a_judge_marks_games_and_their_continuations() -> None:
    asked, guessed = conversation(*ASKED), conversation(*GUESSED)
    point = BranchPoint(turn=0, seat=1)
    point.continuations[1, 0] = guessed
    with chat_server(marks) as server, ExitStack() as cleanup:
        judge = make_judge(
            judged_config(server.url).reward,
            judged_config(server.url).endpoint,
            init_world(device="cpu"),
            cleanup=cleanup,
        )
        (judged,) = judge_interactivity([replace(asked, branches=(point,))], judge)
    (unmarked,) = judged.branches[0].continuations.values()
    assert len(server.bodies) == 2
    texts = [body["messages"][-1]["content"] for body in server.bodies]  # two threads: any order
    (text,) = [text for text in texts if "What number?" in text]
    assert NUMBER.goal in text and "assistant: What number?\n\nuser: My number is 5." in text
    assert judged.outcome.facts["interactivity"] == 0.25 and judged.outcome.facts["judged"] == 1.0
    assert "judged" not in asked.outcome.facts, "the input is not changed"
    assert unmarked.outcome.facts["interactivity"] == 0.0, "the rubric's mark stays"
    assert unmarked.outcome.facts["judged"] == 0.0


def test_marks_are_read_or_refused() -> None:
    assert read_mark('Because of {"interactivity": 0} no:\n{"interactivity": 0.5}') == 0.5
    for text in ("", "0.5", '{"interactivity": 2}', '{"interactivity": true}', '{"interactivity"}'):
        assert read_mark(text) is None, text


def test_invalid_reward_settings_are_refused() -> None:
    def refused(*overrides: str) -> str:
        with pytest.raises(SettingsError) as refusal:
            load_config(TINY, overrides)
        return str(refusal.value)

    assert "reward.collab.judge" in refused("reward.collab.judge=self")
    assert "reward.kind collab needs game.name" in refused("game.name=matching")
    assert "game.messages" in refused("game.messages=false")


@pytest.mark.slow
def test_a_run_with_a_user_and_a_judge_behind_endpoints(tmp_path: Path) -> None:
    import train

    with chat_server(marks) as server:
        overrides = [
            *(f"out={tmp_path / 'run'}", "threads=1", "device=cpu", "steps=2", "save_every=2"),
            *("warm_start.num_games=640", "rollout.instances=2", "rollout.group_size=4"),
            *("rollout.branch.turns=first", "rollout.branch.siblings=2", "eval.every=0"),
            *("eval.final_games=4", f"rollout.partners=[endpoint:user@{server.url}]"),
            f"reward.collab.judge=endpoint:judge@{server.url}",
        ]
        assert train.main(["--config", str(TINY), *overrides]) == 0
    models = [body["model"] for body in server.bodies]
    assert models.count("judge") >= 2 * (2 * 4 + 2 * 4), "games and continuations, both steps"
    assert "user" in models
    for line in metrics_of(tmp_path / "run"):
        assert 0 <= line["judged"] <= 1 and line["num_void"] == 0
