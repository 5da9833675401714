"""eval.py: what it plays, measures, refuses and writes."""

import json
import re
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dialop.matching.kit import read as read_instances
from dialop.matching.kit import write as write_instances
from dialop.matching.recorded import instance_from_record
from dialop.rows import read_records
from eval import main as run_eval
from selfplay.api.evaluation import _roles_of
from selfplay.config import GameConfig, load_config
from selfplay.config.text import dump
from selfplay.data.instances import HELD_OUT, generated
from selfplay.evaluation.asked import EvalPlan
from selfplay.evaluation.evaluate import evaluate_people, example_games
from selfplay.evaluation.games import find_games
from selfplay.evaluation.held_out import EvaluationContext, held_out
from selfplay.evaluation.plan import find_config, find_matches, place, report_folder
from selfplay.evaluation.rows import Row
from selfplay.partners.checkpoints import Source, find_source
from tests.helpers.dialop_boards import SMALL, human_games, record_of
from tests.helpers.family_models import random_folder
from tests.helpers.processes import largest_file
from tests.helpers.run_folders import context_of, evaluated, untrained_run

SETTINGS = """
threads: 1
device: cpu
game:
  options: {size: 2, p_observed: 0.5, scale: false, max_value: 10, keep: exactly_one, brief: true}
model: {scratch: {width: 32, layers: 2, heads: 2, kv_heads: 2, mlp_width: 48,
                  max_positions: 1024, vocab_size: 400, tokenizer_games: 40}}
rollout: {max_turns: 4, max_retries: 1, max_new_tokens: 6, max_game_tokens: 160}
eval: {final_games: 12}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder whose policy has random weights."""
    return untrained_run(tmp_path_factory.mktemp("runs") / "tiny", SETTINGS)


# --- games and measures -------------------------------------------------------------------------


@pytest.fixture
def context(run: Path) -> EvaluationContext:
    return context_of(run)


def test_a_damaged_file_of_before_costs_its_sentence_and_not_the_policy(
    context: EvaluationContext, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is read after the last step and before the export."""
    few = replace(context.config.eval, final_games=1)
    context = replace(context, config=replace(context.config, eval=few))
    for text in ("{", '{"sampled": {"interval": 1}}'):
        (tmp_path / "held_out_before.json").write_text(text)
        (tmp_path / "held_out_after.json").unlink(missing_ok=True)
        held_out("after", context, folder=tmp_path)
        assert "held_out_before.json cannot be read" in capsys.readouterr().err


def test_it_measures_what_the_run_measured(
    context: EvaluationContext, run: Path, tmp_path: Path
) -> None:
    held_out("after", context, folder=tmp_path)
    saved = json.loads((tmp_path / "held_out_after.json").read_text(encoding="utf-8"))

    words = [str(run), "--games", "generated", "--out", str(tmp_path / "out")]
    assert run_eval([*words, "--temperature", "1", "--temperature", "0"]) == 0
    page = evaluated(tmp_path / "out")

    assert page["num_games"] == 12
    rows = page["rows"]
    scripts = ["scripted:honest", "scripted:solo", "scripted:random"]
    assert list(rows) == ["policy", "policy, greedy", *scripts]
    for here, there in (("policy", "sampled"), ("policy, greedy", "greedy"), (scripts[1],) * 2):
        assert rows[here]["scores"] == saved[there]["scores"]
        assert rows[here]["measures"] == saved[there]["measures"]
    # Random weights make no legal move: two tries, both refused, each with its kind of error.
    ceiling = 1 - 0.025 ** (1 / 12)
    assert rows["policy"]["interval"] == pytest.approx([0.0, 0.0, ceiling], abs=1e-3)
    assert rows["policy"]["measures"]["errors"] == 2.0
    kinds = [v for name, v in rows["policy"]["measures"].items() if name.startswith("errors_")]
    assert sum(kinds) == pytest.approx(2.0)
    assert load_config(tmp_path / "out" / "config.yaml").game == context.config.game


def test_with_a_partner_it_has_each_seat_as_often_while_it_begins(
    run: Path, tmp_path: Path
) -> None:
    words = [str(run), "--games", "generated", "--num", "8"]
    assert run_eval([*words, "--out", str(tmp_path), "--partner", "scripted:honest"]) == 0
    games = evaluated(tmp_path)["rows"]["policy with scripted:honest"]["games"]
    seats = [[seat["player"] for seat in game["seats"]].index("policy") for game in games]
    assert seats == [0, 1, 1, 0] * 2
    begins = [game["turns"][0]["seat"] == seat for game, seat in zip(games, seats, strict=True)]
    assert Counter(zip(seats, begins, strict=True)) == {
        (seat, first): 2 for seat in (0, 1) for first in (False, True)
    }


def test_it_tells_who_has_which_role_beside_a_script_of_one_role() -> None:
    small = ["model.scratch={}", "rollout.max_game_tokens=1000"]
    config = load_config(None, ["game.name=collab", *small])
    games = [["policy", "scripted:ask"], ["scripted:user", "policy"], ["policy", "policy"]]
    seated = tuple({"seats": [{"player": player} for player in game]} for game in games)
    row = Row("policy with scripted:user", (), (0.0, 0.0, 0.0), {}, seated, {})
    assert _roles_of([row], config.game) == {
        "roles": ["user policy + assistant scripted:ask", "user scripted:user + assistant policy"]
    }
    alike = load_config(None, ["game.name=matching", *small])
    assert _roles_of([row], alike.game) == {}


def test_overrides_are_told_and_replace_no_other_answer(run: Path) -> None:
    words = [str(run), "--games", "generated", "--num", "2"]
    assert run_eval(words) == 0
    assert run_eval([*words, "game.options.p_observed=1.0"]) == 0
    assert "overrides" not in evaluated(run / "eval_generated_num=2")
    out = run / "eval_generated_num=2_game.options.p_observed=1.0"
    assert evaluated(out)["overrides"] == ["game.options.p_observed=1.0"]
    long = report_folder(find_source(run), "generated", "self", ["seed=" + "1" * 300])
    other = report_folder(find_source(run), "generated", "self", ["seed=" + "1" * 301])
    assert long != other and len(long.name) < 200


def test_a_report_replaces_no_other_of_its_name(run: Path, tmp_path: Path) -> None:
    """Files of one name in two folders, of games and of settings; a partner as a row and as a
    column. The first report keeps the plain name, and the same command replaces its own."""
    shutil.copytree(run, own := tmp_path / "own", ignore=shutil.ignore_patterns("eval_*"))
    game = load_config(run / "given.yaml").game
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        shutil.copy(run / "given.yaml", tmp_path / name / "b.yaml")
        boards = game.kit.generate(game.options, seed=5, start=0, num=2)
        write_instances(tmp_path / name / "test.parquet", boards)

    def placed(*runs: Path, **asked: Any) -> str:
        plan = EvalPlan(runs, **asked)
        found = find_matches(plan)
        if not (folder := place(plan, found)).exists():
            folder.mkdir()
            (folder / "evaluation.json").write_text(json.dumps({"asked": found.asked}))
        return folder.name

    test = {name: str(tmp_path / name / "test.parquet") for name in ("x", "y")}
    assert placed(own, games=test["x"]) == "eval_test"
    assert run_eval([str(own), "--games", test["y"]]) == 0
    (report,) = own.glob("eval_test_????????")
    assert evaluated(report)["games"] == test["y"] and len(evaluated(own / "eval_test")) == 1
    assert "asked" not in (report / "evaluation.md").read_text()
    assert placed(own, games=test["y"]) == report.name

    names = [placed(own, config=tmp_path / name / "b.yaml") for name in ("x", "y")]
    shutil.copytree(run, b := tmp_path / "b")
    names.append(placed(own, b, partners=["scripted:solo"]))
    names.append(placed(own, partners=[str(b), "scripted:solo"]))
    assert names[0] == placed(own, config=tmp_path / "x" / "b.yaml")
    assert names[1] == placed(own, config=tmp_path / "y" / "b.yaml")
    first = ("eval_generated_config=b", "crossplay_generated_own_b_scripted_solo")
    assert names[::2] == [*first]
    assert all(
        re.fullmatch(f"{a}_[0-9a-f]{{8}}", b) for a, b in zip(first, names[1::2], strict=True)
    )


def test_it_plays_the_instances_that_people_played(run: Path, tmp_path: Path) -> None:
    words = [str(run), "--games", str(human_games()), "--num", "18"]
    assert run_eval([*words, "--out", str(tmp_path), "rollout.max_game_tokens=1000"]) == 0
    page = evaluated(tmp_path)
    assert (page["num_games"], page["board_sizes"]) == (18, [8])
    records = list(read_records(human_games()))[:18]
    people = page["rows"]["people"]
    # Line 17 has another roster of reviewers; its table and its recorded score still count.
    assert people["scores"] == [record["result"]["norm"] for record in records]
    texts = [
        entry["message"]["data"]
        for record in records
        for entry in record["action_log"]
        if entry["type"] == "message"
    ]
    assert people["measures"]["messages"] == pytest.approx(len(texts) / 18)
    assert people["measures"]["words"] == pytest.approx(sum(len(t.split()) for t in texts) / 18)
    assert page["rows"]["scripted:honest"]["interval"][0] > 0.9


def test_measures_of_people_by_hand() -> None:
    rows = (((1, 1), (0, 0)), ((0, 0), (1, 1)))
    board = replace(SMALL, table=((9, 5), (1, 4)), masks=rows, best=13)
    said = ((0, "message", "Ava BLEU 9"), (1, "message", "Daniel BLEU 8, and you?"))
    record = record_of(board, *said, (0, "propose", ""), (1, "accept", ""))
    given_up = {**record, "action_log": record["action_log"][:2]}
    games = [record, given_up]
    instances = [instance_from_record(game, key=str(i)) for i, game in enumerate(games)]
    people = evaluate_people(games, instances, GameConfig())
    assert people.scores == (1.0, 0.0)
    assert people.interval[0] == 0.5
    measures = people.measures
    assert (measures["agreement"], measures["optimal"]) == (0.5, 0.5)
    assert (measures["messages"], measures["turns"], measures["words"]) == (2.0, 3.0, 8.0)
    assert not {"errors", "honesty"} & set(measures)


def test_examples_are_the_best_the_typical_and_the_worst() -> None:
    assert example_games([0.5, 1.0, 0.0, 1.0, 0.7]) == {"best": 1, "typical": 4, "worst": 2}
    # No game is shown twice, even if all scores are equal.
    assert example_games([1.0, 1.0, 1.0]) == {"best": 0, "typical": 2, "worst": 1}
    assert example_games([1.0]) == {"best": 0}


def test_a_file_of_instances_is_played_in_its_order(run: Path, tmp_path: Path) -> None:
    config = load_config(run / "config.yaml")
    instances = generated(HELD_OUT, game=config.game, seed=config.seed, start=0, num=5)
    write_instances(tmp_path / "some.parquet", instances)
    games = find_games(str(tmp_path / "some.parquet"), 3, config)
    assert games.instances == read_instances(tmp_path / "some.parquet")[:3] == instances[:3]
    assert games.records == []


# --- finding the policy -------------------------------------------------------------------------


def test_a_run_gives_its_final_model_else_its_newest_checkpoint_else_its_warm_start(
    run: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    assert find_source(folder).weights == folder / "final"
    assert report_folder(find_source(folder), "generated", "self") == folder / "eval_generated"
    for step in (1, 12):
        part = folder / "checkpoints" / f"step_{step:06d}"
        shutil.copytree(run / "final", part / "hf")
        (part / "progress.json").write_text(json.dumps({"step": step}))
    shutil.move(folder / "final", folder / "warm_start")
    newest = find_source(folder)
    assert newest.weights == folder / "checkpoints" / "step_000012" / "hf"
    name = report_folder(newest, "a/matching.jsonl", "scripted:honest").name
    assert name == "eval_step_000012_matching_scripted_honest"
    # A part of a run finds its run; the hf folder of a checkpoint need not be named.
    assert find_source(folder / "checkpoints" / "step_000001").settings == folder / "config.yaml"
    shutil.rmtree(folder / "checkpoints")
    assert find_source(folder).weights == folder / "warm_start"


def test_a_folder_outside_a_run_takes_its_game_from_config(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no report goes into it."""
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "elsewhere" / "model"
    shutil.copytree(run / "final", model)
    words = [str(model), "--games", "generated", "--num", "2"]
    assert run_eval(words) == 2
    assert run_eval([*words, "--config", str(run / "given.yaml"), "game.options.size=3"]) == 0
    report = "eval_generated_config=given_num=2_game.options.size=3"
    page = evaluated(Path("runs") / "elsewhere_model" / report)
    assert page["config"] == f"{run.name}/given.yaml"
    assert (page["weights"], page["board_sizes"]) == (str(model), [3])


def test_an_evaluation_ignores_the_number_of_ranks_in_training(run: Path) -> None:
    folder = run.parent / "wide"
    folder.mkdir()
    shutil.copytree(run / "final", folder / "final")
    config = load_config(
        run / "given.yaml", ["parallel.tp=2", "parallel.fsdp=4", "algorithm.kl=0.1"]
    )
    (folder / "config.yaml").write_text(dump(config), encoding="utf-8")
    settings = find_config(find_source(folder), None, [])
    assert (settings.parallel.tp, settings.parallel.fsdp) == (1, None)
    assert settings.model.path == str(folder / "final")


def test_a_model_outside_a_run_is_a_baseline_of_the_full_game(tmp_path: Path) -> None:
    """`eval.py ORG/NAME --games generated` needs neither settings nor a folder."""
    source = Source(tmp_path, tmp_path, None, hub="Qwen/Qwen2.5-0.5B-Instruct")
    config = find_config(source, None, ["rollout.max_turns=9"])
    rules = config.game.options
    assert (config.game.name, rules.size, rules.brief) == ("matching", 8, False)
    assert (config.model.path, config.rollout.max_turns) == (str(tmp_path), 9)
    folder = report_folder(source, "generated", "self")
    assert folder == Path("runs/Qwen_Qwen2.5-0.5B-Instruct/eval_generated")


# --- what is written ----------------------------------------------------------------------------


def test_results_that_cannot_be_written_are_printed(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No file may grow beyond 5 kB, as on a full disk: the tables are printed, then one line."""
    words = [str(run), "--games", "generated", "--num", "2", "--out", str(tmp_path)]
    with largest_file(5_000):
        assert run_eval(words) == 1
    shown = capsys.readouterr()
    assert "\nscripted:honest " in shown.out
    assert shown.err.startswith("eval.py: [Errno 27] File too large")
    assert shown.err.count("\n") == 1


def test_a_family_that_the_engine_cannot_play_is_refused_in_one_line(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """StableLM's layers do not tell attention where packed texts begin."""
    folder = tmp_path / "stable"
    shutil.copytree(run / "final", folder, ignore=shutil.ignore_patterns("*.safetensors", "*.yaml"))
    words = json.loads((folder / "config.json").read_text("utf-8"))["vocab_size"]
    random_folder("stablelm", folder, vocab_size=words)
    command = [str(folder), "--games", "generated", "--config"]
    assert run_eval([*command, str(run / "config.yaml")]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert f"{folder} is a stablelm, which engine.kind=hf cannot play: " in line
