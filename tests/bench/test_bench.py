"""The benches run: each on its tiny shape on a CPU, by the path that the true shapes take."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench import branch_variance, imitation_loss, loop, readings, rollout, table
from selfplay.chat.rendering import make_rendering
from selfplay.config import load_config
from selfplay.config.settings import dump
from selfplay.data.instances import TRAIN, generated
from selfplay.metrics.step import game_record
from selfplay.model.policy import export, scratch_model
from selfplay.rollout.driver import play_scripted
from selfplay.rollout.episode import limits_of
from selfplay.rollout.seating import scripted_games
from selfplay.warm_start import scratch_tokenizer
from tests.helpers.processes import HANG_S
from tests.helpers.tiny_run import finished

ROOT = Path(__file__).resolve().parents[2]


def run_bench(name: str, *arguments: str, dry_run: bool = True) -> str:
    """What `python -m bench.NAME --dry-run …` prints."""
    done = subprocess.run(
        [sys.executable, "-m", f"bench.{name}", *["--dry-run"] * dry_run, *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("rollout", "needs SGLang"),
        ("loop", "--dry-run measures"),
        ("readings", "a run is a folder"),
    ],
)
def test_what_is_missing_is_told_in_one_line(
    name: str,
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    monkeypatch.setattr(sys, "argv", [name, *([str(tmp_path)] if name == "readings" else [])])
    with pytest.raises(SystemExit) as ended:
        {"rollout": rollout, "loop": loop, "readings": readings}[name].main()
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and line.startswith(f"bench.{name}: ") and named in line


@pytest.mark.slow
@pytest.mark.parametrize("config", ["", "qwen2.5_0.5b"])
def test_the_loop_bench_measures_every_stage_of_a_step(config: str, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    run_bench(
        "loop", "--out", str(out), *(["--config", f"configs/{config}.yaml"] if config else [])
    )
    [row] = [json.loads(line) for line in out.read_text().splitlines()]
    stages = [row[f"{stage}_s"] for stage in loop.STAGES]
    assert all(seconds > 0 for seconds in stages)
    assert row["step_s"] > sum(stages) * 0.95
    assert row["num_games"] == 4
    # Two tries of 8 tokens a game, all of them trained on, whatever the words.
    assert row["num_generated_tokens"] == 4 * 2 * 8
    assert row["num_packed_tokens"] > row["num_generated_tokens"]
    assert row["mismatch_mean"] < 1e-4


def test_the_share_of_other_stages_is_taken_step_by_step() -> None:
    """Steps of (play, update, all) seconds. The medians of the columns, 4, 4 and 10, are of
    different steps and would give 0.2."""
    warm_up = dict.fromkeys([f"{stage}_s" for stage in (*loop.STAGES, "step")], 1.0)
    warm_up |= {"num_generated_tokens": 1.0, "num_packed_tokens": 1.0}
    steps = [
        warm_up | {"play_s": play, "update_s": update, "step_s": step}
        for play, update, step in ((4.0, 5.0, 10.0), (5.0, 4.0, 10.0), (3.0, 3.0, 10.0))
    ]
    assert loop.summary([warm_up, *steps])["other_share"] == pytest.approx(0.1)


@pytest.mark.slow
def test_the_table_has_a_line_for_each_case_and_names_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(sys, "argv", ["table", "--dry-run", "--out", str(tmp_path)])
    table.main()
    *_, columns, _, line = capsys.readouterr().out.splitlines()
    assert line.startswith("| tiny | 1 | fsdp 1 x tp 1")
    assert line.count("|") == columns.count("|")
    sys.argv += ["--games", "one"]
    with pytest.raises(SystemExit, match="failed: tiny_on_1; each one's output is in"):
        table.main()
    assert "invalid int value: 'one'" in (tmp_path / "tiny_on_1.log").read_text()
    assert "| tiny" not in capsys.readouterr().out, "an earlier line stands for nothing"


@pytest.mark.slow
def test_the_shared_prefix_bench_computes_fewer_tokens_for_the_same_loss() -> None:
    _, plain, shared, line = run_bench("shared_prefix").splitlines()
    plain, shared = json.loads(plain), json.loads(shared)
    # 4 prompts of 64 tokens instead of 32.
    assert plain["computed_tokens"] - shared["computed_tokens"] == (32 - 4) * 64
    assert abs(plain["loss"] - shared["loss"]) < 1e-5
    assert line.endswith("gradient cosine 1.000000")


@pytest.mark.slow
def test_the_branch_bench_compares_gradients_of_a_finished_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = finished()
    words = ["--run", str(run), "--config", str(run / "config.yaml"), "--instances", "0"]
    words += ["--setting", "groups:", "--setting", "branches: rollout.branch.turns=first"]
    monkeypatch.setattr(sys, "argv", ["bench.branch_variance", *words, "--steps", "8"])
    capsys.readouterr()
    branch_variance.main()
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows if row[0].startswith("| ")][1:] == ["| groups", "| branches"]


def test_a_table_leads_each_case_to_its_ranks_and_mesh() -> None:
    alone = " ".join(table.Case("7B", 1).command(Path("out"), ["--games", "8"]))
    assert "-m bench.loop --shape 7B --tp 1" in alone and "--games 8" in alone
    spread = " ".join(table.Case("7B", 4).command(Path("out"), []))
    assert "--nproc-per-node 4 -m bench.loop --shape 7B --tp 2" in spread
    assert "--tp 1" in " ".join(table.Case("1.5B", 4).command(Path("out"), []))


@pytest.mark.parametrize("think", ["levels", "trial"])
def test_a_plans_loss_is_followed_from_the_cells_to_the_proposal(
    think: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Teachers write every level right; in one game a level is altered, in another the table
    lacks a line."""
    model, rules = "model.scratch={max_positions: 8192}", "game={size: 4, brief: true}"
    config = load_config(None, [model, rules, "game.private_reasoning=true"])
    instances = generated(TRAIN, game=config.game, seed=config.seed, start=0, num=6)
    tables = scripted_games(instances, spec=f"honest:tell=all,think={think}", game=config.game)
    episodes = play_scripted(tables, limits=limits_of(config.rollout))
    records = [game_record(e, step=step) for step, e in enumerate(episodes, start=1)]
    first = next(turn for turn in records[0]["turns"] if "[propose]" in turn["text"])
    level = first["text"].split()[2]
    first["text"] = first["text"].replace(level, str((int(level) + 1) % 10), 1)
    last = next(turn for turn in records[5]["turns"] if "[propose]" in turn["text"])
    last["text"] = last["text"].partition("\n")[2]
    (tmp_path / "config.yaml").write_text(dump(config))
    (tmp_path / "games.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    readings.main([str(tmp_path)])
    *_, altered, whole, short, _, left_out = capsys.readouterr().out.splitlines()
    assert altered.startswith("| 1–2 | 2 |") and altered.endswith(f"| {(15 / 16 + 1) / 2:.3f} |")
    assert whole.startswith("| 3–4 | 2 |") and whole.endswith("| 1.000 |")
    assert whole.split("|")[3] == whole.split("|")[4]
    assert short.startswith("| 5–6 | 1 |")
    assert left_out.startswith("1 of 6 games")


def test_levels_beside_their_values_are_read_back() -> None:
    settings = ["game={size: 4, private_reasoning: true}", "model.scratch={max_positions: 8192}"]
    config = load_config(None, settings)
    [board] = generated(TRAIN, game=config.game, seed=0, start=0, num=1)
    [setup] = scripted_games([board], spec="honest:think=swaps", game=config.game)
    [episode] = play_scripted([setup], limits=limits_of(config.rollout))
    figures = readings.first_plan(game_record(episode, step=1))
    assert figures is not None and figures[4] == 1.0
    assert figures[0] == figures[1] and 0.8 < figures[3] <= 1.0


def test_a_load_may_have_more_games_than_a_step_of_the_config() -> None:
    """3 groups of 2 games where a step has 1 group; each repeat has boards of its own."""
    words = [
        "rollout={instances: 1, group_size: 2, max_game_tokens: 1024}",
        "game={size: 3, brief: true}",
    ]
    config = load_config(None, [*words, "model.scratch.tokenizer_games=20"])
    rendering = make_rendering(scratch_tokenizer(config))
    drawn = [rollout.own_games(config, rendering, 6, repeat) for repeat in range(2)]
    boards = [[setup.instance for setup in setups] for setups in drawn]
    assert [len(keys) for keys in boards] == [6, 6] and len({*boards[0], *boards[1]}) == 6


@pytest.mark.parametrize("split", [False, True])
def test_the_loss_of_a_player_that_knows_nothing_is_that_of_uniform_tokens(
    split: bool, tmp_path: Path
) -> None:
    """Weights of 0 give every token the same probability: a line costs ln V a token, and the k-th
    line of a plan gives (k - 1) / 3 to reviewers who are taken."""
    shape = (
        "model.scratch={width: 8, layers: 1, heads: 1, kv_heads: 1, mlp_width: 8, vocab_size: 320"
    )
    config = load_config(
        None,
        [
            f"{shape}, tokenizer_games: 20, max_positions: 512}}",
            f"model.scratch.split_lines={str(split).lower()}",
            "game={size: 3, brief: true, private_reasoning: true}",
            'warm_start={num_games: 1, teachers: ["honest:think=trial,stray=0.5,slip=0.5"]}',
            "rollout={max_new_tokens: 8, max_game_tokens: 400}",
        ],
    )
    tokenizer = scratch_tokenizer(config)
    model = scratch_model(config.model.scratch, vocab_size=len(tokenizer), seed=0)
    for parameter in model.parameters():
        parameter.data.zero_()
    export(model, tokenizer, tmp_path / "warm_start")
    (tmp_path / "config.yaml").write_text(dump(config))
    found = imitation_loss.examine(tmp_path / "warm_start", num=6, device="cpu", temperatures=[1.0])
    token = math.log(len(tokenizer))
    near = {"rel": 1e-5}
    assert found["loss"]["token"] == pytest.approx(token, **near)
    assert found["loss"]["table"] == pytest.approx(2 * token, **near)  # a name and a level
    for kind in ("trial first", "trial last", "plan first", "plan middle"):
        assert found["loss"][kind] == pytest.approx((1 + split) * token, **near), kind
    for part in ("trial", "plan"):
        for shares in found[f"taken in {part}"].values():
            assert shares == pytest.approx([0.0, 1 / 3, 2 / 3], rel=1e-5)
    assert found["play at 1"]["games"] == 6 and found["play at 1"]["score"] == 0.0


def test_a_warm_start_is_trained_and_watched_for_taken_reviewers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a learning rate of 0 the random weights know nothing: on 3 lines (1/3 + 2/3) / 2."""
    config = tmp_path / "config.yaml"
    words = ["warm_start.lr=0", "threads=1", f"out={tmp_path / 'run'}"]
    config.write_text(
        "model: {scratch: {tokenizer_games: 20, width: 32, layers: 1, heads: 2, kv_heads: 2,"
        " init_range: 0.001, split_lines: true}}\n"
        "game: {size: 3, brief: true, private_reasoning: true}\n"
        "rollout: {max_new_tokens: 8, max_game_tokens: 400}\n"
        "warm_start: {num_games: 16, keep: all, batch_size: 8, first_games: 8, teachers:"
        " ['honest:think=trial,trials=2'], first_teachers: ['random:think=trial,trials=2']}\n"
    )
    imitation_loss.main(["--train", str(config), "--every", "2", "--num", "4", *words])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    measured = [json.loads(line) for line in lines]
    assert [row["step"] for row in measured] == [2, 4]
    for row in measured:
        assert row["trial"] == pytest.approx(0.5, abs=0.01)
        assert row["plan"] == pytest.approx(0.5, abs=0.01)
    assert (tmp_path / "run" / "warm_start" / "config.json").exists()


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_ends_as_one_that_is_not() -> None:
    """Six SIGKILLs; `make soak` has 25, in every stage."""
    said = run_bench("soak", "--kills", "6", dry_run=False)
    assert "6 kills: " in said and "are the same bit for bit" in said
