"""The benches run: each on its tiny shape on a CPU, by the path that the true shapes take."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import loop, readings, rollout, table
from bench.chat_templates import main as judge_templates
from bench.chat_templates import outcome
from bench.readings import mediation, planning
from bench.rows import STAGES
from selfplay.chat.rendering import make_rendering
from selfplay.config import load_config
from selfplay.config.text import dump
from selfplay.data.instances import TRAIN, generated
from selfplay.metrics.step import game_record
from selfplay.rollout.driver import play_scripted
from selfplay.rollout.episode import limits_of
from selfplay.rollout.seating import scripted_games
from selfplay.warm_start import scratch_tokenizer
from tests.helpers.chat_families import TEMPLATES
from tests.helpers.processes import HANG_S

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
    stages = [row[f"{stage}_s"] for stage in STAGES]
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
    warm_up = dict.fromkeys([f"{stage}_s" for stage in (*STAGES, "step")], 1.0)
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
def test_shared_prefixes_compute_fewer_tokens_for_the_same_loss(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    run_bench("update", "--groups", "4", "--checkpointing", "none", "--out", str(out))
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    for plain, shared in zip(rows[::2], rows[1::2], strict=True):
        assert not plain["share_prefixes"] and shared["share_prefixes"]
        # A prompt of 64 tokens once a row instead of once a transcript.
        saved = plain["computed_tokens"] - shared["computed_tokens"]
        assert 0 < saved <= (32 - 4) * 64 and saved % 64 == 0
        assert abs(plain["loss"] - shared["loss"]) < 1e-5


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
    model, rules = "model.scratch={max_positions: 8192}", "game={options: {size: 4, brief: true}}"
    config = load_config(None, [model, rules, "game.options.private_reasoning=true"])
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
    settings = [
        "game={options: {size: 4, private_reasoning: true}}",
        "model.scratch={max_positions: 8192}",
    ]
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
        "game={options: {size: 3, brief: true}}",
    ]
    config = load_config(None, [*words, "model.scratch.tokenizer_games=20"])
    rendering = make_rendering(scratch_tokenizer(config))
    drawn = [rollout.own_games(config, rendering, 6, repeat) for repeat in range(2)]
    boards = [[setup.instance for setup in setups] for setups in drawn]
    assert [len(keys) for keys in boards] == [6, 6] and len({*boards[0], *boards[1]}) == 6


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_ends_as_one_that_is_not() -> None:
    """Six SIGKILLs; `make soak` has 25, in every stage."""
    said = run_bench("soak", "--kills", "6", dry_run=False)
    assert "6 kills: " in said and "are the same bit for bit" in said


def record_of(game: str, spec: str, *words: str) -> dict[str, Any]:
    """A scripted game. Numbers and the sites of a plan are tokens of 1 nat, all others have 0."""
    config = load_config(
        None, [f"game={{name: {game}, options: {{brief: true}}}}", "model.path=x", *words]
    )
    instances = generated("test", game=config.game, seed=3, start=0, num=1)
    setups = scripted_games(instances, spec=spec, game=config.game)
    (episode,) = play_scripted(setups, limits=limits_of(config.rollout))
    record = game_record(episode, step=1)
    for turn in record["turns"]:
        pieces = re.split(
            r"(\|-?\d+|(?<=id )\d|(?<= \[)[^],]+|(?<=, )[^],]+(?=[],]))", turn["text"]
        )
        turn["tokens"] = [(piece, -float(place % 2)) for place, piece in enumerate(pieces)]
    return record


def test_a_teachers_points_are_right_and_other_points_are_not() -> None:
    words = ("game.options.private_reasoning=true", "rollout.max_turns=20")
    record = record_of("planning", "searcher:legs=1,think=points", *words)
    num = len(record["state"]["instance"]["sites"])
    head, right, *_ = planning({"before": [record]})
    assert head == f"1 of 1 games, {num} points"
    assert right.startswith("equal to the teacher's 1.00,") and "correlation 1.00" in right
    for turn in record["turns"]:
        turn["text"] = re.sub(r"\|(-?\d+)$", r"|9\1", turn["text"], flags=re.MULTILINE)
        turn["text"] = turn["text"].replace("|9-", "|-9")
    _, wrong, *_ = planning({"before": [record]})
    assert wrong.startswith("equal to the teacher's 0.00,")


def test_ids_are_read_from_plans_and_costs_against_the_best_pair() -> None:
    record = record_of("mediation", "honest", "rollout.max_turns=20")
    first = next(mediation({"after": [record]}))
    assert first.startswith("after: 1 games; an id 1.") or "an id 2." in first
    best = record["state"]["play"]
    best["agreed"] = best_pair(record)
    lines = list(mediation({"after": [record]}))
    assert lines[2].endswith("calendar, price, arrival: 0.0, 0.0, 0.0")
    assert not lines[3].endswith("0.0, 0.0, 0.0")


def best_pair(record: dict[str, Any]) -> list[int]:
    """The pair with the highest score, by trying all of them."""
    from dialop.mediation.game import MediationGame
    from dialop.mediation.score import pair_costs

    instance = MediationGame.from_state(record["state"]).instance
    sizes = [range(len(user.flights)) for user in instance.users]
    pairs = [(a, b) for a in sizes[0] for b in sizes[1]]
    return list(max(pairs, key=lambda pair: sum(c.total for c in pair_costs(instance, pair))))


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


def test_odd_files_cost_only_themselves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(TEMPLATES / "qwen25.jinja", tmp_path)
    (tmp_path / "a.py").mkdir()
    (tmp_path / "old.py").write_text("print 'Python 2'\n")
    judge_templates([str(tmp_path), "--names"])
    said = capsys.readouterr()
    assert "1 | extended" in said.out
    assert said.err.startswith(f"{tmp_path / 'old.py'}: left out") and said.err.count("\n") == 1
    with pytest.raises(SystemExit) as ended:
        judge_templates([str(tmp_path / "nothing")])
    assert ended.value.code == 2 and "FOLDER must be a folder" in capsys.readouterr().err
