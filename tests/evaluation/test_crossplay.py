"""The cross-play matrix: every player with every other, in both seats, on the same instances."""

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eval import main as run_eval
from selfplay.config import load_config
from selfplay.config.text import dump
from selfplay.evaluation.asked import EvalPlan
from selfplay.evaluation.plan import find_config, find_matches, pair_name
from selfplay.evaluation.report import Evaluated, lost_together, matrix_text
from selfplay.evaluation.rows import Row
from selfplay.partners.checkpoints import Source
from selfplay.preflight.command_line import split_list
from tests.helpers.run_folders import bare_weights, evaluated, untrained_run
from tests.helpers.tiny_run import finished, warm_started, write_tiny


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`a`, a tiny warm start, `b`, a run from it, and `twin`, a copy of `a`'s weights."""
    home = tmp_path_factory.mktemp("runs")
    shutil.copytree(warm_started(), home / "a")
    shutil.copytree(finished(), home / "b")
    shutil.copytree(home / "a" / "final", home / "twin")
    return home


def played(out: Path) -> tuple[dict[str, Any], dict[tuple[str, str], dict[str, Any]]]:
    """The matrix, and the row of each pair of seats."""
    page = evaluated(out)
    cells = page["matrix"]["cells"]
    return page["matrix"], {(c["seat_0"], c["seat_1"]): page["rows"][c["row"]] for c in cells}


def cell(*scores: float) -> Row:
    mean = sum(scores) / len(scores)
    return Row("pair", scores, (mean, mean, mean), {}, (), {})


# --- the players --------------------------------------------------------------------------------


def test_a_comma_inside_script_options_does_not_split() -> None:
    assert split_list("scripted:honest:tell=top,slip=0.1, runs/a,scripted:solo") == [
        "scripted:honest:tell=top,slip=0.1",
        "runs/a",
        "scripted:solo",
    ]


def test_each_policy_keeps_the_chat_template_of_its_training(tmp_path: Path) -> None:
    """The other settings come from the first run or --config. An override is for all."""
    names = ["a", "b🙂"]  # the second needs more than one JSON escape
    for name, thinking in zip(names, (None, False), strict=True):
        (tmp_path / name / "final").mkdir(parents=True)
        words = ["model.path=x", f"out={tmp_path / name}", "rollout.temperature=0.7"]
        if thinking is not None:
            words += [f"model.chat_template.enable_thinking={thinking}", "rollout.temperature=0.9"]
        (tmp_path / name / "config.yaml").write_text(dump(load_config(None, words)))
    first, second = (
        Source(tmp_path / name / "final", tmp_path / name, tmp_path / name / "config.yaml")
        for name in names
    )
    own = find_config(second, first.settings, [])
    assert own.model.chat_template == {"enable_thinking": False}
    assert own.model.path == str(second.weights) and own.rollout.temperature == 0.7
    assert find_config(first, second.settings, []).model.chat_template == {}
    words = ["model.chat_template.enable_thinking=true"]
    assert find_config(second, None, words).model.chat_template == {"enable_thinking": True}
    bare = Source(tmp_path / "a" / "final", tmp_path / "a" / "final", None)
    assert find_config(bare, second.settings, []).model.chat_template == {"enable_thinking": False}


def test_scripted_players_score_as_their_rules_imply(tmp_path: Path) -> None:
    """Two honest players find the best plan, other pairs lose value; without a RUN the list
    gives rows and columns."""
    config = write_tiny(tmp_path / "run")
    names = ["scripted:honest", "scripted:solo", "scripted:random"]
    words = ["--partners", ",".join(names), "--games", "generated", "--num", "40"]
    assert run_eval([*words, "--config", str(config), "--out", str(tmp_path)]) == 0
    matrix, cells = played(tmp_path)
    assert matrix["rows"] == matrix["columns"] == names
    assert set(cells) == {(one, other) for one in names for other in names}
    honest, solo, random = ({n: cells[row, n]["interval"][0] for n in names} for row in names)
    assert honest["scripted:honest"] == 1.0
    assert all(value < 1.0 for value in (*solo.values(), *random.values()))
    for one in names:
        for other in names:
            seats = [seat["player"] for seat in cells[one, other]["examples"]["best"]["seats"]]
            assert seats == [one, other]
    assert cells["scripted:honest", "scripted:random"] != cells["scripted:random", names[0]]


def test_runs_that_learnt_both_roles_of_a_collaboration_meet_in_both(tmp_path: Path) -> None:
    """Others are refused, as a row and in the list, unless an override names the roles for all."""
    both, users = "rollout.policy_seats=[user,assistant]", "rollout.policy_seats=[user]"
    for name, *words in (("a", both), ("b", both), ("alone",), ("users", users)):
        bare_weights(tmp_path / name / "final")
        config = load_config(None, ["model.path=x", "game.name=collab", *words])
        (tmp_path / name / "config.yaml").write_text(dump(config))

    def pairs(row: str, column: str, *overrides: str) -> list[tuple[str, str, int | None]]:
        plan = EvalPlan([tmp_path / row], partners=[str(tmp_path / column)], overrides=overrides)
        found = find_matches(plan).matches
        return [(match.one.label, match.other.label, match.seat) for match in found]

    assert pairs("a", "b") == [("a", "a", None), ("a", "b", 0), ("a", "b", 1)]
    folders = [
        find_matches(EvalPlan([tmp_path / "a"], partners=[other], overrides=[both])).out
        for other in (str(tmp_path / "b"), "scripted:ask")
    ]
    assert folders[0] != folders[1], "no report replaces that of other players"
    assert pairs("a", "alone", both)[1:] == [("a", "alone", 0), ("a", "alone", 1)]
    for *names, got in (("a", "alone", ""), ("alone", "a", ""), ("a", "users", "user")):
        rule = rf"policy_seats must be \[user,assistant\] .*, got \[{got}\] in .*/(alone|users)/c"
        with pytest.raises(ValueError, match=rule):
            pairs(*names)


# --- the games ----------------------------------------------------------------------------------


def test_policies_play_in_both_seats_on_the_games_of_a_plain_evaluation(
    runs: Path, tmp_path: Path
) -> None:
    games = ["--games", "generated", "--num", "8", "eval.final_games=8"]
    rows = [str(runs / "a"), str(runs / "b")]
    partners = ["--partners", f"{runs / 'twin'},scripted:honest", "--out", str(tmp_path)]
    assert run_eval([*rows, *partners, *games]) == 0
    matrix, cells = played(tmp_path)
    assert matrix["rows"] == ["a", "b"]
    assert matrix["columns"] == ["a", "b", "twin", "scripted:honest"]
    # Partners have columns only: they do not play with each other.
    assert len(cells) == 2 + 2 + 2 * 2 * 2
    assert ("twin", "twin") not in cells and ("twin", "scripted:honest") not in cells
    # The same weights under another name play the same games: seeds depend on game and seat.
    alone = cells["a", "a"]["scores"]
    assert 0.0 < sum(alone) < 8.0
    assert cells["a", "twin"]["scores"] == cells["twin", "a"]["scores"] == alone
    assert cells["b", "b"]["scores"] != alone

    plain = [str(runs / "a"), *games, "--out", str(tmp_path / "plain")]
    assert run_eval(plain) == 0
    assert run_eval([*plain[:-1], str(tmp_path / "honest"), "--partner", "scripted:honest"]) == 0
    rows = {name: evaluated(tmp_path / name)["rows"] for name in ("plain", "honest")}
    assert rows["plain"]["policy"]["scores"] == alone
    seats = [cells["a", "scripted:honest"]["scores"], cells["scripted:honest", "a"]["scores"]]
    assert rows["honest"]["policy with scripted:honest"]["scores"] == [
        seats[seat][number] for number, seat in enumerate([0, 1, 1, 0] * 2)
    ]


def test_the_loss_of_a_pair_by_hand() -> None:
    cells = {
        ("a", "a"): cell(1.0, 1.0),
        ("b", "b"): cell(1.0, 0.0),
        ("a", "b"): cell(0.0, 0.0),
        ("b", "a"): cell(1.0, 0.0),
        ("a", "c"): cell(0.5, 0.5),
        ("c", "a"): cell(0.25, 0.25),
        ("b", "c"): cell(0.0, 0.0),
        ("c", "b"): cell(0.0, 0.0),
    }
    rows = {pair_name(*pair): row for pair, row in cells.items()}
    report = Evaluated("t", {"games": "by hand"}, rows, (("a", "b"), ("a", "b", "c")))
    # (1 + 1 - 0 - 1) / 2 and (1 + 0 - 0 - 0) / 2; c never played with itself.
    # Two equal values from -1 to 1 leave 1 - 0.025^(1/2) = 0.842 of the way to each limit open.
    lost = lost_together(report)
    assert list(lost) == [("a", "b")]
    assert lost["a", "b"] == pytest.approx((0.5, 0.5 - 0.842 * 1.5, 0.5 + 0.842 * 0.5), abs=1e-3)
    # The means of a's rows, in seat 0 and in seat 1: with itself once, then with b and c.
    means = [re.findall(r" (\d\.\d+) \[", row) for row in matrix_text(report).splitlines()[2:4]]
    assert means == [["1.000", "0.000", "0.500"], ["0.500", "0.250"]]


def test_players_with_scores_of_their_own_have_a_cell_each(tmp_path: Path) -> None:
    """Of a split: who asks for more gets more in either seat, and the other one less."""
    names = ["scripted:greedy", "scripted:soft"]
    words = ["--partners", ",".join(names), "--games", "generated", "--num", "40"]
    split = "examples/split/split.yaml"
    assert run_eval([*words, "--config", split, "--out", str(tmp_path)]) == 0
    _, cells = played(tmp_path)
    for greedy_seat, pair in enumerate([names, names[::-1]]):
        row = cells[tuple(pair)]
        by_seat = [row["scores"], row["partner"]["scores"]]
        assert row["examples"]["best"]["seat_scores"][0] == max(row["scores"])
        for seat, scores in enumerate(by_seat):
            paid = [game["seat_scores"][seat] for game in row["examples"].values()]
            assert set(paid) <= set(scores)
            assert row["measures"][f"reward/{seat}"] == pytest.approx(sum(scores) / len(scores))
        greedy, soft = by_seat[greedy_seat], by_seat[1 - greedy_seat]
        assert sum(greedy) > 1.5 * sum(soft)


def test_the_other_player_s_row_has_its_moves(tmp_path: Path) -> None:
    """A policy that has learnt nothing with a script, in each seat: all refused moves are the
    policy's."""
    split = "game: {name: examples/split/split.py}\nrollout: {max_game_tokens: 300}\n"
    shape = "{width: 32, layers: 1, heads: 2, kv_heads: 2, mlp_width: 48, tokenizer_games: 40}"
    untrained_run(tmp_path / "run", f"{split}model: {{scratch: {shape}}}\ndevice: cpu\n")
    asked = [str(tmp_path / "run"), "--partners", "scripted:fair", "--games", "generated"]
    assert run_eval([*asked, "--num", "4", "--out", str(tmp_path / "out")]) == 0
    _, cells = played(tmp_path / "out")
    (own, script), (script_first, own_second) = (
        (row, row["partner"])
        for row in (cells["run", "scripted:fair"], cells["scripted:fair", "run"])
    )
    for row in (script, script_first):
        assert row["measures"]["errors"] == 0.0
    for row in (own, own_second):
        assert row["measures"]["errors"] > 0.0
    assert own["partner"]["examples"] == {} and own["partner"]["games"] == []


def test_the_loss_of_players_with_scores_of_their_own_is_that_of_both() -> None:
    """With itself each has 0.5; together one has 0.9 and the other 0.1, in both seats."""
    takes, gives = cell(0.9, 0.9), cell(0.1, 0.1)
    rows = {
        "a": cell(0.5, 0.5),
        "b": cell(0.5, 0.5),
        "a with b": replace(takes, partner=gives),
        "b with a": replace(gives, partner=takes),
    }
    report = Evaluated("t", {}, rows, (("a", "b"), ("a", "b")))
    assert lost_together(report)["a", "b"][0] == pytest.approx(0.0)
    lines = [re.findall(r" (\d\.\d+) \[", line) for line in matrix_text(report).splitlines()[2:6]]
    assert lines == [["0.500", "0.900"], ["0.900"], ["0.100", "0.500"], ["0.100"]]


# --- what is refused ----------------------------------------------------------------------------


def test_runs_of_two_games_are_refused(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As rows, in the list, as a single policy's partner; unless an override sets the same game."""
    b = tmp_path / "b"
    shutil.copytree(runs / "b", b)
    saved = b / "config.yaml"
    saved.write_text(re.sub(r"(?m)^( +)messages: .*", r"\1messages: false", saved.read_text()))
    games = ["--games", "generated", "--num", "2", "--out", str(tmp_path / "out")]
    for second in (
        [str(b), "--partners", "scripted:solo"],
        ["--partners", str(b)],
        ["--partner", f"checkpoint:{b}"],
    ):
        capsys.readouterr()
        assert run_eval([str(runs / "a"), *second, *games]) == 2
        message = capsys.readouterr().err
        assert message.count("\n") == 1 and "game.options.messages must be the same" in message
        assert f"got false in {b}" in message and str(runs / "a" / "config.yaml") in message
    same = ["game.options.messages=true"]
    assert find_matches(EvalPlan([runs / "a"], partners=[str(b)], overrides=same)).matches
