"""Games that start within recorded ones: what trains, and what a run and an evaluation play."""

import json
from pathlib import Path

import pytest

import eval as door
from selfplay.chat.rendering import make_rendering
from selfplay.config import Config, load_config
from selfplay.data.stream import TrainStream
from selfplay.evaluation.games import find_games, find_start
from selfplay.rollout.driver import play_games
from tests.helpers.chat_families import tokenizer_of
from tests.helpers.dialop_boards import RECORD, write_records
from tests.helpers.run_folders import evaluated
from tests.helpers.small_games import LIMITS, SAMPLING, Proposes, games_of
from tests.helpers.tiny_run import run_warm


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Eight records of the same game on different boards."""
    records = [
        {
            **RECORD,
            "table": [[3, 7], [1, 9 - n]],
            "proposal_reward": 12 - n,
            "best_assignment_reward": max(12 - n, 8),
        }
        for n in range(8)
    ]
    return write_records(tmp_path / "games.jsonl", *records)


class Accepts(Proposes):
    text = "[accept]"


def config_of(file: Path, *overrides: str) -> Config:
    rules = [
        "game.options.size=2",
        "game.options.brief=true",
        "rollout.max_game_tokens=1000",
        "game.options.scale=false",
    ]
    batch = ["rollout.instances=4", "rollout.group_size=4", f"data.train={file}"]
    return load_config(None, ["model.scratch={}", *rules, *batch, *overrides])


def test_both_transcripts_hold_the_start_and_train_nothing_of_it(file: Path) -> None:
    config = config_of(file, "data.start=5")
    rendering = make_rendering(tokenizer_of("no template"))
    instances = TrainStream(config).step(0, range(4))
    assert all(len(instance.opening) == 5 for instance in instances)  # type: ignore[attr-defined]
    tables = games_of(instances, rendering, config)
    engine = Accepts(rendering, {})
    episodes, _ = play_games(tables, engine, sampling=SAMPLING, limits=LIMITS)
    assert len(episodes) == 16 and len(engine.asked) == 16
    for episode in episodes:
        assert [(turn.seat, turn.action) for turn in episode.turns] == [(0, "accept")]
        transcript = episode.transcripts[0]
        said = [i for i, m in zip(transcript.ids, transcript.mask, strict=True) if m]
        assert said == rendering.action_ids("[accept]"), "people's words do not train"
        prompt = rendering.decode(transcript.ids[: transcript.spans[0].start])
        assert "my 9 is large" in prompt and "I see 7" in prompt and "final offer" not in prompt


def test_random_starts_are_draws_with_names(file: Path) -> None:
    def lengths(*overrides: str) -> list[list[int]]:
        stream = TrainStream(config_of(file, "data.start=random", *overrides))
        return [
            [len(instance.opening) for instance in stream.step(step, range(4))]  # type: ignore[attr-defined]
            for step in range(20)
        ]

    drawn = lengths()
    assert drawn == lengths() and drawn != lengths("seed=1")
    assert {length for step in drawn for length in step} == set(range(7))


def test_a_run_that_starts_from_what_people_said(file: Path, tmp_path: Path) -> None:
    settings = (f"data.train={file}", "data.start=0.5", "eval.final_games=1", "steps=1")
    folder = run_warm(tmp_path / "run", *settings)
    shown = [json.loads(line) for line in (folder / "games.jsonl").read_text().splitlines()]
    assert all("I see 7" in game["seats"][0]["user"] for game in shown)

    words = [str(folder), "--games", str(file), "--out"]
    assert door.main([*words, str(tmp_path / "begun"), "--start", "5"]) == 0
    page = evaluated(tmp_path / "begun")
    assert page["start"] == "5" and page["rows"]["people"]["scores"]
    assert "[propose]" in page["rows"]["policy"]["games"][0]["seats"][0]["user"]


def test_a_start_that_cannot_be_played_is_told(file: Path) -> None:
    assert [find_start(text) for text in ("3", "0.5", "random")] == [3, 0.5, "random"]
    with pytest.raises(ValueError, match="--start: a start must be a number of entries"):
        find_start("half")
    with pytest.raises(ValueError, match="--start needs --games FILE"):
        find_games("generated", 1, config_of(file), start=2)
