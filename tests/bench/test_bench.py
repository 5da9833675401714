"""The benches run: each on its tiny shape on a CPU, by the path that the true shapes take."""

import functools
import importlib
import json
import os
import runpy
import sys
from pathlib import Path

import pytest

from bench import loop, one_gpu, rollout, soak
from bench.chat_templates import main as judge_templates
from bench.chat_templates import outcome
from bench.rows import STAGES
from selfplay.chat.rendering import make_rendering
from selfplay.config import load_config
from selfplay.warm_start.imitation import scratch_tokenizer
from tests.helpers.chat_families import TEMPLATES
from tests.helpers.processes import HANG_S, fork

ROOT = Path(__file__).resolve().parents[2]


def run_bench(name: str, *arguments: str, dry_run: bool = True) -> str:
    """What `python -m bench.NAME --dry-run …` prints."""

    def bench() -> None:
        os.chdir(ROOT)
        sys.argv[1:] = [*["--dry-run"] * dry_run, *arguments]
        runpy.run_module(f"bench.{name}", run_name="__main__", alter_sys=True)

    process = fork(bench)
    said, _ = process.communicate(timeout=HANG_S)
    assert process.returncode == 0, said[-4000:]
    return said


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        (),
        pytest.param(("--config", "configs/qwen2.5_0.5b.yaml"), marks=pytest.mark.nightly),
        pytest.param(("--set", "policies={a: {seats: [0, 1]}}"), marks=pytest.mark.nightly),
    ],
)
def test_the_loop_bench_measures_every_stage_of_a_step(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    out = tmp_path / "rows.jsonl"
    run_bench("loop", "--out", str(out), *words)
    [row] = [json.loads(line) for line in out.read_text().splitlines()]
    stages = [row[f"{stage}_s"] for stage in STAGES]
    assert all(seconds > 0 for seconds in stages)
    assert row["step_s"] > sum(stages) * 0.95
    assert row["num_games"] == 4
    # Two tries of 8 tokens a game, all of them trained on, whatever the words.
    assert row["num_generated_tokens"] == 4 * 2 * 8
    policy = "/a" if any("policies" in word for word in words) else ""
    assert row[f"num_packed_tokens{policy}"] > row["num_generated_tokens"]
    assert row[f"mismatch_mean{policy}"] < 1e-4
    assert row[f"GiB update{policy} planned"] > row["GiB play planned"] > 0


@pytest.mark.slow
def test_shared_prefixes_compute_fewer_tokens_for_the_same_loss(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    run_bench("update", "--groups", "2", "--checkpointing", "none", "--out", str(out))
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    for plain, shared in zip(rows[::2], rows[1::2], strict=True):
        assert not plain["share_prefixes"] and shared["share_prefixes"]
        # A prompt of 64 tokens once a row instead of once a transcript.
        saved = plain["computed_tokens"] - shared["computed_tokens"]
        assert 0 < saved <= (16 - 2) * 64 and saved % 64 == 0
        assert abs(plain["loss"] - shared["loss"]) < 1e-5


@pytest.mark.slow
@pytest.mark.nightly
def test_both_trainers_of_trl_take_their_steps_on_the_same_transcripts(tmp_path: Path) -> None:
    """A way that fails would be a row with its error."""
    out = tmp_path / "rows.jsonl"
    run_bench("peers", "--out", str(out))
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row.get("way") for row in rows[2:-2]] == ["sdpa"] * 2 + ["sdpa:async"] * 2
    assert all(row["tokens_per_s"] > 0 for row in rows[:-2])
    assert {*rows[-2], *rows[-1]} == {"shape", "times_as_fast_as_TRL", "times_as_fast_as_TRL_async"}


def test_a_row_of_the_table_is_worked_out_from_the_figures() -> None:
    """512 games of ten turns in 8 s are 640 turns/s; 0.5 of 700 TFLOP/s are 0.35 of 989."""
    row = {"step_s": 17.0, "play_s": 8.0, "update_s": 8.5, "num_games": 512}
    row |= {"update_utilisation": 0.5, "peak_operations": 7e14}
    line = one_gpu.table_row("0.5B", [row], 100.0)
    assert line == "| 0.5B | 512 | 17.0: 8.0, 8.5 | 640 | 0.50 | 0.35 | 700 | 100 |"
    assert line.count("|") == one_gpu.HEAD.partition("\n")[0].count("|")


@pytest.mark.parametrize("name", one_gpu.PARTS)
def test_every_part_of_the_one_gpu_table_has_words_that_its_bench_knows(
    name: str, tmp_path: Path
) -> None:
    """In a dry run, too, which leaves out what only a GPU has."""
    for dry in (False, True):
        module, *words = one_gpu.PARTS[name].command(tmp_path / "rows", dry=dry)[2:]
        assert words[-2:] == ["--out", str(tmp_path / "rows")]
        assert ("--dry-run" in words) is dry and not (dry and "--mean" in words)
        if module == "bench.loop" and dry:
            asked = loop.arguments(words)
            assert asked.shape == "tiny"
            assert loop.settings(asked, tmp_path, 1).optim.master_dtype == "float32"


def test_a_bench_refuses_to_measure_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        loop.arguments(["--steps", "0"])
    assert "--steps: must be at least 1, got 0" in capsys.readouterr().err


def test_a_load_may_have_more_games_than_a_step_of_the_config() -> None:
    """3 groups of 2 games where a step has 1 group; each repeat has boards of its own."""
    words = [
        "rollout={instances: 1, group_size: 2, max_game_tokens: 1024}",
        "game={options: {size: 3, brief: true}}",
    ]
    config = load_config(None, [*words, "model.scratch.tokenizer_games=20"])
    rendering = make_rendering(scratch_tokenizer(config))
    drawn = [rollout.own_games(config, rendering, 6, repeat) for repeat in range(2)]
    boards = [[setup.instance for setup in setups] for setups in drawn]
    assert [len(keys) for keys in boards] == [6, 6] and len({*boards[0], *boards[1]}) == 6


def test_every_stage_that_is_killed_is_a_function_of_the_run() -> None:
    for _, module, name, _ in soak.STAGES.values():
        assert callable(functools.reduce(getattr, name.split("."), importlib.import_module(module)))


def test_soak_deletes_no_folder_that_is_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (mine := tmp_path / "straight").mkdir()
    (mine / "notes.txt").touch()
    with pytest.raises(SystemExit, match="2"):
        soak.main(["--kills", "1", "--out", str(tmp_path)])
    assert f"--out: {mine} must hold a run or nothing if it exists" in capsys.readouterr().err
    assert (mine / "notes.txt").exists()


@pytest.mark.slow
@pytest.mark.nightly
def test_a_run_that_is_killed_again_and_again_ends_as_one_that_is_not() -> None:
    """Six SIGKILLs; `make soak` has 25, in every stage."""
    said = run_bench("soak", "--kills", "6", dry_run=False)
    assert "6 kills: " in said and "are the same bit for bit" in said


EXPECTED = {
    "qwen25": "extended",
    "qwen3": "turn by turn",
    "glm45": "turn by turn",
    "llama2": "refused: the chat template writes ' '",
    "gpt_oss": "refused: ",
}


@pytest.mark.parametrize("name", EXPECTED)
def test_an_outcome_is_that_of_the_template(name: str) -> None:
    assert outcome((TEMPLATES / f"{name}.jinja").read_text(), {}).startswith(EXPECTED[name])


def test_nothing_is_taken_that_is_not_exact(capsys: pytest.CaptureFixture[str]) -> None:
    judge_templates([str(TEMPLATES), "--names"])
    said = capsys.readouterr().out
    assert "WRONG" not in said
    assert "qwen25" in said and "the same as another" not in said


@pytest.mark.slow
def test_the_page_of_a_long_run_is_timed() -> None:
    said = run_bench("page", "--steps", "8", "--games", "6", dry_run=False)
    assert said.startswith("drawn in ") and said.count(", ") == 3 and "report.html" in said
