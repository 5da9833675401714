"""A warm start that imitates people: which games, which words, and what later evaluations play."""

import json
from itertools import compress
from pathlib import Path

import pytest

from dialop.matching.generate import MatchingRecipe, generate_instance
from selfplay.chat.rendering import Rendering
from selfplay.config import Config, load_config
from selfplay.data.instances import imitated_people
from selfplay.errors import SettingsError
from selfplay.evaluation.games import find_games, imitated_boards
from selfplay.metrics.run_folder import IMITATED_BOARDS
from selfplay.partners.checkpoints import Source
from selfplay.warm_start.imitation import people_samples
from tests.helpers.dialop_boards import record_of, write_records

BOARDS = [generate_instance(MatchingRecipe(keep="all"), seed=3, index=i) for i in range(8)]


def config_of(*overrides: str) -> Config:
    room = "rollout.max_game_tokens=20000"
    return load_config(None, ["model.scratch={max_positions: 20000}", room, *overrides])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Eight recorded games; in each both people speak, one proposes and the other agrees."""
    records = [
        record_of(
            board, (0, "message", f"mine is {i}"), (1, "message", "and mine"),
            (0, "propose", ""), (1, "accept", ""),
        )
        for i, board in enumerate(BOARDS)
    ]  # fmt: skip
    return write_records(tmp_path / "people.jsonl", *records)


def people(config: Config, file: Path, share: float = 1.0) -> list[str]:
    kit = config.game.kit
    drawn = imitated_people(config.game, config.data, recorded=str(file), share=share)
    return [kit.digest(game.instance) for game in drawn]


def test_both_seats_words_are_imitated_and_nothing_else(file: Path, rendering: Rendering) -> None:
    config = config_of()
    played = imitated_people(config.game, config.data, recorded=str(file), share=1.0)
    samples = people_samples(config, rendering, played)
    assert len(samples) == 16
    said = [rendering.decode(list(compress(s.ids, s.mask))) for s in samples[:2]]
    assert said[0].startswith("[message] mine is 0") and "[propose]" in said[0]
    assert said[1].startswith("[message] and mine") and said[1].endswith("[accept]")
    context = [rendering.decode([i for i, m in zip(s.ids, s.mask, strict=True) if not m])
               for s in samples[:2]]  # fmt: skip
    assert "Partner: [message] and mine" in context[0]
    assert "Partner: [message] mine is 0" in context[1]


def test_a_boards_digest_decides_whether_it_is_imitated(file: Path, tmp_path: Path) -> None:
    config = config_of()
    everyone, half = people(config, file), people(config, file, 0.5)
    assert len(everyone) == 8 and 0 < len(half) < 8
    lines = file.read_text().splitlines()
    reversed_file = tmp_path / "reversed.jsonl"
    reversed_file.write_text("\n".join(lines[::-1]) + "\n")
    assert sorted(people(config, reversed_file, 0.5)) == sorted(half)


def test_boards_of_the_runs_own_evaluations_are_never_imitated(file: Path, tmp_path: Path) -> None:
    lines = file.read_text().splitlines()
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("\n".join(lines[:3]) + "\n")
    config = config_of(f"data.test={held_out}")
    kit = config.game.kit
    assert people(config, file) == [kit.digest(board) for board in BOARDS[3:]]
    with pytest.raises(SettingsError, match=r"warm_start\.recorded .* instances of data\.test"):
        people(config_of(f"data.test={file}"), file)


def test_an_evaluation_leaves_out_what_the_warm_start_imitated(file: Path, tmp_path: Path) -> None:
    config = config_of()
    run = tmp_path / "run"
    run.mkdir()
    half = people(config, file, 0.5)
    (run / IMITATED_BOARDS).write_text(json.dumps(half))
    imitated = imitated_boards([Source(run / "final", run, None)])
    assert imitated == set(half)
    copy = tmp_path / "hub"  # as published: the file lies beside the weights
    copy.mkdir()
    (copy / IMITATED_BOARDS).write_text(json.dumps(half))
    assert imitated_boards([Source(copy, copy, copy / "selfplay.yaml", hub="me/pair")]) == imitated
    found = find_games(str(file), None, config, imitated=imitated)
    kept = [config.game.kit.digest(board) for board in found.instances]
    assert len(kept) == len(found.records) == 8 - len(half) and not set(kept) & imitated
    assert [record["table"] for record in found.records] == [
        [list(row) for row in board.table] for board in found.instances
    ]
    with pytest.raises(ValueError, match=f"at most {len(kept)}, .*did not imitate"):
        find_games(str(file), 8, config, imitated=imitated)
