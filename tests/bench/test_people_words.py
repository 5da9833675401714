"""The bench of what a warm start learns from people: equal budgets, and losses that are known."""

import json
import math
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from bench import people_words
from dialop.matching.generate import MatchingRecipe, generate_instance
from selfplay.config import load_config
from tests.helpers.dialop_boards import record_of, write_records

CONFIG = """\
model: {scratch: {tokenizer_games: 20, width: 32, layers: 1, heads: 2, kv_heads: 2,
                  init_range: 0.001, max_positions: 8192}}
warm_start: {batch_size: 2}
rollout: {max_turns: 4, max_game_tokens: 8000}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Eight recorded games of three moves."""
    boards = [generate_instance(MatchingRecipe(keep="all"), seed=3, index=i) for i in range(8)]
    moves = (0, "message", "hello"), (1, "propose", ""), (0, "accept", "")
    return write_records(tmp_path / "people.jsonl", *(record_of(b, *moves) for b in boards))


def test_every_source_imitates_as_many_transcripts(file: Path, tmp_path: Path) -> None:
    """Of 8 boards some fall below 0.5; `both` has about half of these, and only of these."""
    (tmp_path / "config.yaml").write_text(CONFIG)
    base = load_config(tmp_path / "config.yaml", people_words.SETTINGS)
    imitated, left = people_words.split_boards(base, file)
    assert len(imitated) + len(left) == 8 and imitated and left
    keys = {game.instance.table for game in imitated}
    num = len(imitated)
    for source, scripted in (("none", 0), ("scripted", num), ("people", 0), ("both", num / 2)):
        words = people_words.source_settings(source, file, share=0.5, num_people=num)
        config = load_config(tmp_path / "config.yaml", [*people_words.SETTINGS, *words])
        assert config.warm_start.num_games == round(scripted)
        assert (config.warm_start.recorded is not None) == (source in ("people", "both"))
        if config.warm_start.recorded:
            drawn = {game.instance.table for game in people_words.split_boards(config, file)[0]}
            assert drawn <= keys and (drawn == keys) == (source == "people")


@pytest.mark.slow
def test_a_model_that_knows_nothing_loses_the_log_of_its_vocabulary(
    file: Path, tmp_path: Path
) -> None:
    """With a learning rate of 0 the weights stay near 0. The second call has nothing to do."""
    (tmp_path / "config.yaml").write_text(CONFIG)
    out = tmp_path / "out"
    words = [str(file), "--sources", "none", "people", "--num", "2", "--out", str(out)]
    words += ["--config", str(tmp_path / "config.yaml"), "warm_start.lr=0", "threads=1"]
    words += ["rollout.max_new_tokens=8"]
    people_words.main(words)
    written = (out / "rows.jsonl").read_text()
    people_words.main(words)
    assert (out / "rows.jsonl").read_text() == written
    rows = [json.loads(line) for line in written.splitlines()]
    assert [(row["source"], row["games"]) for row in rows] == [("none", 2), ("people", 2)]
    vocabulary = len(AutoTokenizer.from_pretrained(out / "runs" / "people_0" / "warm_start"))
    for row in rows:
        for kind in ("all", "message", "proposal", "answer"):
            assert row[f"people's {kind}"] == pytest.approx(math.log(vocabulary), rel=0.01), kind
        assert row["scripted all"] == pytest.approx(math.log(vocabulary), rel=0.01)
        assert row["score"] == 0.0
