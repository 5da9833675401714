"""The page of a run: what it holds, that no text of a game becomes markup, that it needs nobody."""

import base64
import hashlib
import json
import os
import random
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from dialop.kit import load_kit
from dialop.matching.board import best_pairs
from dialop.matching.generate import MatchingRecipe
from dialop.matching.kit import lost
from selfplay.api.run import load_run
from selfplay.apps.report import refresh_report
from selfplay.apps.report.__main__ import main
from selfplay.apps.report.compare import runs_table
from selfplay.apps.report.games import Texts, drawn_game, safe_json, seat_names, viewer_data
from selfplay.apps.report.page import (
    compared_charts,
    health_charts,
    metric_lines,
    page_html,
    run_charts,
    scores_table,
    times_of,
)
from selfplay.apps.report.run_files import read_run, with_unique_names
from selfplay.config import load_config
from selfplay.evaluation.evaluate import evaluate_scripted
from selfplay.evaluation.tables import paired_change
from selfplay.metrics.run_folder import hold_run
from tests.helpers import run_folders
from tests.helpers.casts import trained
from tests.helpers.run_folders import make_run, step_line, write_lines
from tests.helpers.tiny_run import RUNS, finished, run_tiny

ROOT = Path(__file__).resolve().parents[3]

generate = load_kit("matching").generate

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31m\u202e"


class Parts(HTMLParser):
    """The elements of a page with their attributes, and the text of each script."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self._in_script = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._in_script = tag == "script"
        if self._in_script:
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._in_script = False

    def handle_data(self, data: str) -> None:
        if self._in_script:
            self.scripts[-1] += data


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("report") / "run")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two games, only to read."""
    return make_run(tmp_path_factory.mktemp("small") / "run", num_games=2)


@pytest.fixture
def folder(small: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return shutil.copytree(small, tmp_path / "run")


def data_of(html: str) -> dict[str, Any]:
    return json.loads(Parts(html).scripts[0])


def test_losses_add_up_to_what_the_proposal_loses() -> None:
    rng = random.Random(0)
    for instance in generate(MatchingRecipe(size=4), seed=0, num=20):
        reviewers = rng.sample(range(4), 4)
        pairs = tuple(sorted(zip(reviewers, range(4), strict=True)))
        best, losses = lost(instance, pairs)
        assert sum(losses) == instance.best - instance.value(pairs)
        assert sum(instance.table[r][p] for r, p in best) == instance.best
        assert lost(instance, best_pairs(instance.table))[1] == [0, 0, 0, 0]


def test_no_text_of_a_game_becomes_markup(tmp_path: Path) -> None:
    folder = make_run(tmp_path / EVIL[:20].replace("/", "_"), num_games=3)
    games = read_run(folder).games
    games[0]["turns"][0]["text"] = f"[message] {EVIL}"
    games[0]["turns"][0]["error"] = EVIL
    games[0]["seats"][0] |= {"player": EVIL, "user": EVIL, "system": EVIL}
    games[0] |= {"instance": EVIL, "judge": EVIL}
    write_lines(folder / "games.jsonl", games)
    html = page_html([read_run(folder)])
    parts = Parts(html)
    assert len(parts.scripts) == 2 and "\x1b" not in html and "\u202e" not in html
    assert not any(
        tag == "img" or any(a.startswith("on") for a in attrs) for tag, attrs in parts.elements
    )
    (shown,) = (g for g in data_of(html)["games"] if "alert" in g["instance"])
    assert shown["turns"][0]["text"] == f"[message] {EVIL}".replace("\x1b", "·").replace(
        "\u202e", "·"
    )
    assert json.loads(safe_json({"a": EVIL})) == {"a": EVIL} and "<" not in safe_json(EVIL)


def test_the_page_loads_nothing_and_runs_only_its_own_script(run: Path) -> None:
    parts = Parts(page_html([read_run(run)]))
    for _, attributes in parts.elements:
        for name in ("src", "href", "xlink:href", "action"):
            assert (attributes.get(name) or "#").startswith("#")
    policy = next(a["content"] for t, a in parts.elements if t == "meta" and "http-equiv" in a)
    digest = base64.b64encode(hashlib.sha256(parts.scripts[1].encode()).digest()).decode()
    assert policy and policy.startswith("default-src 'none'") and "http" not in policy
    assert f"script-src 'sha256-{digest}'" in policy


def test_what_the_page_shows_of_a_run(run: Path) -> None:
    files = read_run(run)
    before, after = files.row("before", "sampled"), files.row("after", "sampled")
    assert before and after
    change = paired_change(before, after)
    assert change and change[0] == pytest.approx(after.interval[0] - before.interval[0])
    html = page_html([files])
    assert f"{before.interval[0]:.3f} → {after.interval[0]:.3f}" in html
    assert "<code>game.options.size</code>" in html and "<code>seed</code>" not in html
    names = [(row["source"], row["name"]) for row in scores_table([files])["rows"]]
    # The scripted row of both stages stands once.
    assert names == [("before", "sampled"), ("after", "sampled"), ("held-out", "scripted:random")]
    (score,) = (
        line
        for chart in data_of(html)["charts"]
        for line in chart["lines"]
        if line["name"] == "validation games"
    )
    assert [point[0] for point in score["points"]] == [0, 4, 8, 12]
    assert score["band"][1] == pytest.approx([4, 0.775, 0.975])


def test_the_viewer_pairs_the_games_before_and_after(run: Path) -> None:
    games = viewer_data([read_run(run)])["games"]
    after = [game for game in games if game["source"] == "after"]
    assert len(after) == 12
    for game in after:
        twin = games[game["twin"]]
        assert (twin["source"], twin["instance"]) == ("before", game["instance"])
        assert game["change"] == game["score_norm"] - twin["score_norm"]
        assert game["board"]["note"] == f"best {game['facts']['value of the best assignment']:g}"
    assert any(game["num_errors"] for game in games if game["source"] == "training")


def test_a_turn_shows_its_thoughts_apart_and_its_statements(run: Path) -> None:
    record = read_run(run).games[0]
    own = record["state"]["instance"]["table"][0][0]
    said = {"seat": 0, "kind": "message", "text": f"Ava BLEU {own + 900}", "pairs": None}
    record["state"]["play"]["log"] = [said]
    record["turns"] = [
        {
            "seat": 0,
            "text": f"Lie.</think>[message] Ava BLEU {own + 900}",
            "action": "message",
            "error": None,
            "observations": ["", "x"],
            "tokens": [["Lie.", -0.5]],
        }
    ]
    game = drawn_game(record, "training", 0, Texts(), kit=load_kit("matching"))
    (turn,) = game["turns"]
    assert turn["thought"] == "Lie.</think>" and turn["text"] == f"[message] Ava BLEU {own + 900}"
    ((said, piece),) = turn["notes"]
    assert said == "states " and piece["wrong"].startswith(f"Ava BLEU {own + 900} ✗")
    assert game["num_false"] == 1
    assert turn["tokens"] == [["Lie.", -0.5]] and turn["read"] == ["", "x"]


def test_a_game_without_a_picture_keeps_its_talk(run: Path) -> None:
    """A game of another kind, with three seats, and one of an older version."""
    record = read_run(run).games[0]
    seats = [{"player": f"p{i}", "system": "rules", "user": f"view {i}"} for i in range(3)]
    record |= {"seats": seats, "turns": [run_folders.turn(2, "0: [message] hi")]}
    for state in ({"game": "other", "x": 1}, {"game": "matching", "instance": {}}, None):
        game = record | {"state": state}
        shown = drawn_game(game, "training", 0, Texts(), kit=load_kit("matching"))
        assert "board" not in shown and len(shown["seats"]) == 3
        assert shown["turns"][0]["text"] == "0: [message] hi"


ROW = {"interval": [1, 1, 1], "scores": [1], "measures": {}}
ODD_ROWS = [
    ("after", {"interval": [2, 1, 0]}, "must be a mean, a low and a high number, got [2, 1, 0]"),
    ("after", {"interval": [1, True, 1]}, "interval.1 must be a valid number, got True"),
]
ODD = [
    ("config.yaml", "\udcff", "config.yaml: cannot be read"),
    ("games.jsonl", '{"instance": "i7", "step": 1}\n', "training game i7: KeyError"),
    ("eval_x/evaluation.json", "{", "eval_x/evaluation.json: Expecting"),
    ("metrics.jsonl", '{"step": 1, "\\u001b[2J": true}\n', "step 1: ·[2J must be a number"),
    *((f"held_out_{s}.json", json.dumps({"sampled": ROW | p}), told) for s, p, told in ODD_ROWS),
]


@pytest.mark.parametrize(("file", "text", "told"), ODD)
def test_an_odd_file_costs_only_itself(
    file: str, text: str, told: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / file).parent.mkdir(exist_ok=True)
    (folder / file).write_bytes(text.encode(errors="surrogateescape"))
    assert main([str(folder)]) == 0
    said = capsys.readouterr().err
    assert told in said and said.count("\n") == 1
    assert data_of((folder / "report.html").read_text())["games"]


def test_a_page_is_not_replaced_by_one_without_settings(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(folder)]) == 0
    page = (folder / "report.html").read_bytes()
    (folder / "config.yaml").write_text("game: {name: gone.py}\n")
    capsys.readouterr()
    assert main([str(folder)]) == 2
    said = capsys.readouterr().err
    assert "gone.py" in said and "is unchanged" in said and said.count("\n") == 1
    assert (folder / "report.html").read_bytes() == page
    assert main([str(folder), "--out", str(tmp_path / "other.html")]) == 0


def test_a_pipe_in_a_files_place_is_not_waited_for(folder: Path) -> None:
    for name in ("held_out_after.json", "metrics.jsonl", "games.jsonl"):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
    assert "held_out_after.json must be a file" in read_run(folder).problems
    assert load_run(folder).metrics == load_run(folder).games == []


def test_the_limit_of_a_page_counts_the_texts_of_its_games(run: Path) -> None:
    files = read_run(run)
    whole = viewer_data([files])
    for record in files.games:
        record["seats"][0] |= {"user": f"{record['instance']} {'x' * 200_000}"}
    most = len(json.dumps(whole)) + 450_000
    data = viewer_data([files], max_bytes=most)
    assert data["num_left_out"] == len(files.games) - 2
    assert sum("xxx" in text for text in data["texts"]) == 2
    assert len(json.dumps(data)) <= most + 1000


def test_a_page_has_240_training_games_from_all_over_the_run(folder: Path) -> None:
    write_lines(folder / "games.jsonl", [{"step": step} for step in range(1, 601)])
    steps = [game["step"] for game in read_run(folder).games]
    assert len(steps) == 240 and steps[-1] == 600
    assert max(b - a for a, b in zip([0, *steps], steps, strict=False)) == 3  # 600 / 240 is 2.5


def test_runs_of_one_name_are_told_apart(small: Path) -> None:
    paths = ("/a/s1/tiny", "/a/s2/tiny", "/b/s2/tiny", "/a/other")
    runs = with_unique_names([replace(read_run(small), folder=Path(path)) for path in paths])
    assert [run.name for run in runs] == ["s1/tiny", "a/s2/tiny", "b/s2/tiny", "other"]
    assert [run.name for run in with_unique_names([runs[0], runs[0]])] == ["tiny", "tiny"]


def test_a_games_own_measures_have_curves_and_orders(folder: Path) -> None:
    """As counted move by move; shares that have a curve of their own have no second one."""
    known = {"statements": 2.0, "true_statements": 1.0, "mark": 0.5, "judged": 1.0}
    lies = [{**known, "lies_told": float(i)} for i in range(3)]
    steps = [{"step": i + 1, "score": 0.5, **lies[i]} for i in range(3)]
    games = [run_folders.record() | {"episode": i, "measures": lies[i]} for i in range(3)]
    write_lines(folder / "metrics.jsonl", steps)
    write_lines(folder / "games.jsonl", games)
    run = read_run(folder)
    drawn = {chart.title: chart for chart in run_charts(run)}
    assert [y for _, y in drawn["Lies told"].lines[0]["points"]] == [0.0, 1.0, 2.0]
    assert not {"Statements", "True statements", "Mark", "Judged"} & drawn.keys()
    assert "Lies told" in {chart.title for chart in compared_charts([run, run])}
    games = [g for g in data_of(page_html([run]))["games"] if g["source"] == "training"]
    assert [game["measures"]["lies_told"] for game in games] == [0.0, 1.0, 2.0]


def test_a_page_is_drawn_from_where_its_settings_name_files(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(ROOT / "examples/meeting/meeting.py", tmp_path / "my_game.py")
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config |= {"game": {"name": "my_game.py", "options": {"num_days": 3}}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.chdir(tmp_path)
    refresh_report(folder, rank=0)
    page = (folder / "report.html").read_text()
    assert "my_game" in page and "must be an existing .py file" not in page


def test_a_page_that_cannot_be_written_is_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "report.html").mkdir()
    refresh_report(folder, rank=1)
    assert capsys.readouterr().err == ""
    refresh_report(folder, rank=0)
    said = capsys.readouterr().err
    assert (
        said.count("\n") == 1
        and "report.html" in said
        and not any((folder / "report.html").iterdir())
    )


def test_several_runs_in_one_page(
    tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = make_run(tmp_path / "other", "seed=3", num_games=2)
    assert main([str(run), str(other), "--out", str(tmp_path / "both.html")]) == 0
    data = data_of((tmp_path / "both.html").read_text())
    assert data["runs"] == ["run", "other"] and {game["run"] for game in data["games"]} == {0, 1}
    assert [line["name"] for line in data["charts"][0]["lines"]] == ["run (2 seeds)"]
    (tmp_path / "talk.html").write_text("<title>my talk</title>")
    assert main([str(run), "--out", str(tmp_path / "talk.html")]) == 2
    assert "--out must be a new file or an earlier page" in capsys.readouterr().err
    assert main([str(tmp_path / "nothing")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "other" in said and not (tmp_path / "nothing").exists()


def test_seeds_of_one_configuration_are_a_mean_with_a_band_and_other_runs_lines(
    tmp_path: Path,
) -> None:
    """Entropies of 1 and 3 in two seeds: the mean 2, from the lowest to the highest; a third run
    with another learning rate has its own line. The table shows that rate and the seeds."""
    folders = {"a": ("seed=1",), "b": ("seed=2",), "c": ("optim.lr=0.1",)}
    for name, words in folders.items():
        make_run(tmp_path / name, *words, num_games=2)
        lines = [step_line(n) | {"entropy": 3.0 if name == "b" else 1.0} for n in range(1, 13)]
        write_lines(tmp_path / name / "metrics.jsonl", lines[: 10 if name == "b" else 12])
    runs = [read_run(tmp_path / name) for name in folders]
    (entropy,) = (c for c in compared_charts(runs) if c.title.startswith("Entropy"))
    (score,) = (chart for chart in compared_charts(runs) if chart.title == "Score")
    before = runs[0].row("before", "sampled")
    assert before is not None
    for line in score.lines:  # each begins with the held-out games before self-play
        assert line["points"][0] == [0, pytest.approx(before.interval[0], rel=1e-4)]
    seeds, alone = entropy.lines
    assert (seeds["name"], alone["name"]) == ("a (2 seeds)", "c")
    assert seeds["points"] == [[n, 2.0] for n in range(1, 11)]
    assert seeds["band"] == [[n, 1.0, 3.0] for n in range(1, 11)] and len(alone["points"]) == 12
    rows = {name: (cells, differs) for name, cells, differs in runs_table(runs)}
    assert rows["optim.lr"] == (["1.0e-06", "1.0e-06", "0.1"], True)
    assert rows["seed"] == (["1", "2", "0"], True)
    assert rows["state"] == (["finished"] * 3, False) and rows["step"][0] == ["12", "10", "12"]
    table = [(row["source"], row["name"], row["run"]) for row in scores_table(runs)["rows"]]
    assert table[:3] == [("before", "sampled", name) for name in folders]
    assert [name for name, _ in times_of(runs)] == ["play", "update", "other"]


def test_a_seed_that_has_not_begun_takes_no_line_away_and_evaluations_are_not_smoothed(
    tmp_path: Path,
) -> None:
    """Scores of 0, 1, 0 with a fixed partner stay so; a moving mean of five would be 1/3 thrice."""
    partner = "eval_score/scripted:honest"
    for name in ("a", "b"):
        folder = make_run(tmp_path / name, f"seed={int(name == 'b')}", num_games=2)
        own = {"reward": 0.5}
        lines = [step_line(n) | own | {partner: n % 2.0, "reward_std": n % 2.0} for n in (2, 3, 4)]
        write_lines(folder / "metrics.jsonl", lines if name == "b" else [])
    runs = [read_run(tmp_path / name) for name in ("a", "b")]
    found = {chart.title: chart for chart in compared_charts(runs)}
    for title in ("Score", "Reward", f"Score with {partner[11:]}, validation games"):
        assert [line["name"] for line in found[title].lines] == ["b"], title
    both = {chart.title: chart for chart in compared_charts([runs[1], replace(runs[1], name="c")])}
    for charts in (found, both):
        (line,) = charts["Score with scripted:honest, validation games"].lines
        assert line["points"] == [[2, 0.0], [3, 1.0], [4, 0.0]]
    assert line["name"] == "b (2 seeds)"
    alone = {chart.title: chart for chart in run_charts(runs[1])}
    (spread,) = (one for one in alone["Reward"].lines if one["name"].startswith("standard"))
    assert spread["points"] == [[2, 0.0], [3, 1.0], [4, 0.0]], "under the pointer: the steps' own"


def test_each_of_several_policies_has_its_own_curves_seats_and_games(tmp_path: Path) -> None:
    """Two policies in seats of equal roles: alone on a page, and beside a run of one policy."""
    run = read_run(trained())
    charts = {chart.title: chart for chart in (*health_charts(run), *run_charts(run))}
    for title in ("Entropy", "Gradient norm", "Learning rate", "Clip share"):
        assert [line["name"] for line in charts[title].lines] == ["one", "other"], title
    named = ["mean, one", "mean, other", "largest, one", "largest, other"]
    assert [line["name"] for line in charts["Mismatch"].lines] == named
    assert {"seat 0 (one)", "seat 1 (other)"} <= {one["name"] for one in charts["Reward"].lines}
    assert ("policies", "one, other") in run.about
    games = viewer_data([run])["games"]
    players = [{game["seats"][seat]["player"] for game in games} for seat in range(2)]
    assert "policy one" in players[0] and "policy other" in players[1]
    assert "policy" not in players[0] | players[1] and "policy one" not in players[1]
    single = make_run(tmp_path / "single", num_games=2)
    compared = {chart.title: chart for chart in compared_charts([run, read_run(single)])}
    assert [line["name"] for line in compared["Entropy, nats per token"].lines] == ["single"]
    for name in ("one", "other"):
        (line,) = compared[f"Entropy of {name}, nats per token"].lines
        assert [y for _, y in line["points"]] == [
            pytest.approx(step[f"entropy/{name}"], rel=1e-4) for step in run.steps
        ]


def test_the_curve_of_a_policy_has_gaps_where_it_does_not_train(folder: Path) -> None:
    """One rests in step 2; the other trains in all."""
    own = {"entropy/other": 1.0, "num_trained_tokens/other": 9.0, "num_trained_tokens/one": 9.0}
    lines = [step_line(step) | own | {"entropy/one": 1.0} for step in (1, 2, 3)]
    lines[1] |= {"entropy/one": None, "num_trained_tokens/one": 0.0}
    write_lines(folder / "metrics.jsonl", lines)
    one, other = metric_lines(
        read_run(folder), [("entropy/one", "one"), ("entropy/other", "other")]
    )
    assert [step for step, _ in one.points] == [1, 3] and one.gaps == [2] and not other.gaps


def test_tokens_of_branches_are_none_of_a_game_or_a_turn(tmp_path: Path) -> None:
    """300 tokens, 100 of them in branches, in 10 games of 4 turns: 20 a game, 5 a turn."""
    folder = make_run(tmp_path / "run", num_games=2)
    counts = {"num_generated_tokens": 300.0, "num_games": 10.0, "turns": 4.0}
    lines = [step_line(1) | counts | {"num_branch_tokens": 100.0}, step_line(2) | counts]
    write_lines(folder / "metrics.jsonl", lines)
    (tokens,) = (c for c in health_charts(read_run(folder)) if c.title == "Tokens")
    assert {line["name"]: line["points"] for line in tokens.lines} == {
        "a turn": [[1, 5.0], [2, 7.5]],
        "a game": [[1, 20.0], [2, 30.0]],
    }


def test_a_step_has_tokens_only_of_the_games_and_turns_that_it_counts(tmp_path: Path) -> None:
    """300 tokens in 10 games of 4 turns: with those of 2 aborted games; with a script, whose turns
    are counted; of the policy alone."""
    folder = make_run(tmp_path / "run", num_games=2)
    counts = {"num_generated_tokens": 300.0, "num_games": 10.0, "turns": 4.0}
    own = ({"num_void": 2.0}, {"score/scripted:user/1": 0.5}, {"num_void": 0.0})
    lines = [step_line(step) | counts | more for step, more in enumerate(own, start=1)]
    write_lines(folder / "metrics.jsonl", lines)
    (tokens,) = (c for c in health_charts(read_run(folder)) if c.title == "Tokens")
    assert {line["name"]: line["points"] for line in tokens.lines} == {
        "a turn": [[3, 7.5]],
        "a game": [[2, 30.0], [3, 30.0]],
    }


def test_an_evaluation_of_another_step_says_which(folder: Path) -> None:
    """The run ends at step 12."""
    rows = {"policy": json.loads((folder / "held_out_after.json").read_text())["sampled"]}
    for name, step in (("eval_a", {"step": 4}), ("eval_b", {"step": 12}), ("eval_c", {})):
        (folder / name).mkdir()
        (folder / name / "evaluation.json").write_text(json.dumps({"rows": rows} | step))
    shown = [row["source"] for row in scores_table([read_run(folder)])["rows"]]
    assert shown[-3:] == ["eval_a, step 4", "eval_b", "eval_c"]


def test_only_the_loops_own_stages_take_parts_of_a_step(folder: Path) -> None:
    """Of 3.5 s, 2 of play and 1 of update; an observer and a game have seconds of their own."""
    own = {"observed/wait_s": 8.0, "thinking_s": 9.0, "engine_s": 1.9}
    write_lines(folder / "metrics.jsonl", [step_line(1) | own])
    shown = [(name, part) for name, ((_, part, _),) in times_of([read_run(folder)])]
    assert shown == [("play", "57.1%"), ("update", "28.6%"), ("other", "14.3%")]


def test_seats_that_are_paid_apart_are_compared_by_their_roles(tmp_path: Path) -> None:
    """A buyer and a seller: curves of both rewards and of the score with a fixed partner, and both
    rewards after self-play in the table of runs, whose scripts have one row."""
    (tmp_path / "haggle.py").write_text(
        (ROOT / "examples/split/split.py")
        .read_text()
        .replace('("player", "player")', '("seller", "buyer")')
    )
    runs = []
    for seed in range(2):
        folder = make_run(tmp_path / f"s{seed}", f"seed={seed}", num_games=2)
        config = yaml.safe_load((folder / "config.yaml").read_text())
        config |= {"game": {"name": str(tmp_path / "haggle.py")}}
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        after = json.loads((folder / "held_out_after.json").read_text())
        after["sampled"]["measures"] |= {"reward/0": 0.25, "reward/1": 0.5 + seed}
        (folder / "held_out_after.json").write_text(json.dumps(after))
        own = {"reward/0": 0.5, "reward/1": 1.0, "eval_score/scripted:fair": 0.75}
        write_lines(folder / "metrics.jsonl", [step_line(1) | own, step_line(2) | own])
        games = [record | {"rewards": [0.5, 1.0]} for record in read_run(folder).games]
        write_lines(folder / "games.jsonl", games)
        runs.append(read_run(folder))
    drawn = {chart.title: chart.lines[0]["points"] for chart in compared_charts(runs)}
    assert drawn["Reward of seller"] == [[1, 0.5], [2, 0.5]]
    assert drawn["Reward of buyer"] == [[1, 1.0], [2, 1.0]]
    assert drawn["Score with scripted:fair, validation games"] == [[1, 0.75], [2, 0.75]]
    table = {name: cells for name, cells, _ in runs_table(runs)}
    assert table["reward of seller after"] == ["0.250", "0.250"]
    assert table["reward of buyer after"] == ["0.500", "1.500"]
    scores = scores_table(runs)
    assert {"reward of seller", "reward of buyer"} <= {
        heading for _, heading, _ in scores["columns"]
    }
    scripts = [row["run"] for row in scores["rows"] if row["name"] == "scripted:random"]
    assert scripts == ["all"]
    other = read_run(make_run(tmp_path / "other", num_games=2))
    titles = {chart.title for chart in compared_charts([*runs, other])}
    assert {"Reward of seat 0", "Reward of seat 1"} <= titles and "Reward of seller" not in titles


def test_a_finished_run_has_its_page(tmp_path: Path) -> None:
    folder = shutil.copytree(finished(*RUNS["branches"]), tmp_path / "run")
    assert run_tiny(folder, *RUNS["branches"], "observers=[console,page]") == 0
    data = data_of((folder / "report.html").read_text())
    turns = [turn for game in data["games"] for turn in game["turns"]]
    branches = [turn["branch"] for turn in turns if "branch" in turn]
    assert branches and all(len(point["siblings"]) == 3 for point in branches)
    # The tokens are those of the policy: their texts make up the turn, each with a log-prob.
    for turn in turns:
        if "tokens" in turn:
            assert turn["text"] in "".join(piece for piece, _ in turn["tokens"])
            assert all(nats <= 0 for _, nats in turn["tokens"])
    assert sum("tokens" in turn for turn in turns) > len(turns) / 2


@pytest.mark.parametrize("name", ["planning", "mediation"])
def test_a_proposal_shows_what_it_is_worth(name: str) -> None:
    """The agreed proposal's points are the game's score; seats are called by their roles."""
    config = load_config(None, ["model.path=x", f"game.name={name}"])
    kit = config.game.kit
    instances = kit.generate(config.game.options, seed=5, start=0, num=4)
    row = evaluate_scripted(
        instances, spec=kit.BASELINES[0], game=config.game, rollout=config.rollout
    )
    for record in row.games:
        record = json.loads(json.dumps(record))
        game = drawn_game(record, "training", 0, Texts(), kit=kit)
        worth = [note for turn in game["turns"] for (note,) in turn.get("notes", ())]
        assert game["agreed"] and f", {record['score_norm']:.3f} of the way" in worth[-1]
        assert len(worth) == sum(turn.get("action") == "propose" for turn in game["turns"])
        assert [seat["role"] for seat in game["seats"]] == seat_names(kit.ROLES)


def test_both_players_scores_stand_before_and_after_self_play(folder: Path) -> None:
    """Also where both scored the same before, and where no file has a difference: then neither."""

    def shown(after: float) -> list[tuple[str, str, bool, str]]:
        for stage, other in (("before", 0.25), ("after", after)):
            path = folder / f"held_out_{stage}.json"
            rows = json.loads(path.read_text())
            row = {**rows["scripted:random"], "scores": [0.25] * 4, "interval": [0.25, 0.0, 0.5]}
            partner = {**row, "scores": [other] * 4, "interval": [other, other - 0.1, other + 0.1]}
            rows |= {"greedy": row, "sampled with scripted:fair": {**row, "partner": partner}}
            path.write_text(json.dumps(rows))
        table = scores_table([read_run(folder)])["rows"]
        keys = ("source", "name", "policy", "score")
        return [tuple(line[k] for k in keys) for line in table if "fair" in line["name"]]

    name, low, high = "sampled with scripted:fair", "0.250 [0.000, 0.500]", "0.750 [0.650, 0.850]"
    other, own = f"{name} (the other player)", [(s, name, True, low) for s in ("before", "after")]
    assert shown(0.75) == [
        own[0], ("before", other, False, "0.250 [0.150, 0.350]"),
        own[1], ("after", other, False, high),
    ]  # fmt: skip
    assert shown(0.25) == own


def test_the_page_says_whose_run_it_is_and_whether_it_goes_on(folder: Path) -> None:
    (folder / "held_out_after.json").unlink()
    start = "started 2026-11-26 09:00:00 +0000\ncommit a\ncommand python train.py seed=3\n\n"
    (folder / "code.txt").write_text(start + start.replace("09:", "11:").replace("=3", "=4"))
    about = dict(read_run(folder).about)
    assert about["started"].startswith("2026-11-26 09") and about["command"].endswith("seed=4")
    assert read_run(folder).state == "stopped"
    with hold_run(folder):
        assert read_run(folder).state == "running"
        assert data_of(page_html([read_run(folder)]))["running"]
    (folder / "held_out_after.json").write_text("{}")
    assert read_run(folder).state == "finished"


def test_a_page_is_late_after_three_times_a_minute_and_the_longest_step(folder: Path) -> None:
    lines = [
        step_line(step) | {"step_s": seconds} for step, seconds in enumerate((2.0, 3.5, 40.0), 1)
    ]
    write_lines(folder / "metrics.jsonl", lines)
    assert read_run(folder).redrawn_s == 3 * (60 + 40) + 120
    write_lines(folder / "metrics.jsonl", [])
    assert read_run(folder).redrawn_s == 3600


def test_the_games_of_a_group_have_what_they_were_worth_and_stand_once(folder: Path) -> None:
    first, *others = read_run(folder).games
    group: list[dict[str, Any]] = json.loads(json.dumps([first, first | {"episode": 1}]))
    for number, game in enumerate(group):
        game["seats"][0] |= {"reward": 0.5 + number, "return": 0.5 + number, "advantage": None}
    record = {"step": first["step"], "instance": first["instance"], "games": group}
    write_lines(folder / "groups.jsonl", [record, {"step": 1, "games": 3}])
    run = read_run(folder)
    assert len(run.games) == 2 + len(others)
    assert run.problems == ["groups.jsonl: games must be a list of objects, got 3"]
    shown = [game for game in viewer_data([run])["games"] if game["source"] == "training"]
    credit = [game["seats"][0].get("reward") for game in shown]
    assert credit == [0.5, 1.5, *[None] * len(others)]
    assert all("advantage" not in seat for game in shown for seat in game["seats"])
