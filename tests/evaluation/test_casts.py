"""A run with several policies is played by role, each seat by the policy that learned it: in an
evaluation, as a partner, in a matrix of roles. No reader takes its warm start instead."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from eval import main as run_eval
from selfplay.config import load_config
from selfplay.errors import SettingsError
from selfplay.evaluation.asked import EvalPlan
from selfplay.evaluation.plan import find_config, find_matches
from selfplay.evaluation.report import Evaluated, lost_with_strangers, matrix_text
from selfplay.evaluation.rows import Row
from selfplay.evaluation.tables import paired_interval
from selfplay.partners.checkpoints import find_policies, find_source, seated, template_of
from selfplay.preflight.run import check_run
from tests.helpers.casts import TWO, casts, trained
from tests.helpers.run_folders import bare_weights, evaluated
from tests.helpers.tiny_run import same_weights

GAMES = ("--games", "generated", "--num", "8")
ROLES = ("caller", "caller", "clerk")


@pytest.fixture(scope="module")
def runs() -> Path:
    return casts()


def texts(row: dict[str, Any]) -> list[list[str]]:
    """What was said in each game of a row."""
    return [[turn["text"] for turn in game["turns"]] for game in row["games"]]


def policy_of(out: Path, *words: str) -> dict[str, Any]:
    """The policy's row of an evaluation with these words."""
    assert run_eval([*words, *GAMES, "--out", str(out)]) == 0
    rows = evaluated(out)["rows"]
    return dict(next(row for name, row in rows.items() if name.startswith("policy")))


def test_a_cast_of_equal_weights_plays_as_one_policy(runs: Path, tmp_path: Path) -> None:
    twins, one = (policy_of(tmp_path / n, str(runs / n)) for n in ("twins", "one"))
    assert texts(twins) == texts(one) and twins["scores"] == one["scores"]
    assert {seat["player"] for game in twins["games"] for seat in game["seats"]} == {"policy"}


def test_each_seat_is_played_by_the_policy_of_its_role(runs: Path, tmp_path: Path) -> None:
    """As the callers' policy with the clerk's as its partner, and unlike the warm start."""
    cast = policy_of(tmp_path / "cast", str(runs / "a"))
    caller, clerk = (str(runs / "a/final" / name) for name in ("caller", "clerk"))
    pair = policy_of(tmp_path / "pair", caller, "--partner", f"checkpoint:{clerk}")
    players = [seat["player"] for seat in pair["games"][0]["seats"]]
    assert players == ["policy", "policy", f"checkpoint:{clerk}"]
    assert texts(cast) == texts(pair)
    start = policy_of(tmp_path / "start", str(runs / "a/warm_start"))
    assert texts(cast) != texts(start)
    assert evaluated(tmp_path / "cast")["weights"] == {"caller": caller, "clerk": clerk}


def test_an_evaluation_repeats_the_held_out_games_of_the_run(tmp_path: Path) -> None:
    """Of its end and of its last checkpoint, which hold the same policies."""
    run = trained()
    own = json.loads((run / "held_out_after.json").read_text())["sampled"]
    for place in (run, run / "checkpoints/step_000003"):
        row = policy_of(tmp_path / place.name, str(place))
        assert texts(row)[:4] == texts(own) and row["scores"][:4] == own["scores"]
    left, right = find_policies(run).values()
    earlier, _ = find_policies(run / "checkpoints/step_000002").values()
    assert not same_weights(left.weights, right.weights)
    assert not same_weights(left.weights, earlier.weights)


def test_a_run_as_a_partner_plays_the_roles_that_are_left(runs: Path, tmp_path: Path) -> None:
    words = [str(runs / "one"), "rollout.policy_seats=[caller]", "--partner"]
    whole, clerk = (
        policy_of(tmp_path / name, *words, f"checkpoint:{runs / name}")
        for name in ("a", "a/final/clerk")
    )
    assert texts(whole) == texts(clerk)
    in_turn = [str(runs / "one"), "--partner", f"checkpoint:{runs / 'twins'}"]
    alone = policy_of(tmp_path / "alone", str(runs / "one"))
    assert texts(policy_of(tmp_path / "in_turn", *in_turn)) == texts(alone)


def test_a_policy_alone_is_a_model_folder(runs: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(runs / "a/final/clerk", tmp_path / "copy")
    config = ["--config", str(runs / "one/config.yaml")]
    inside = policy_of(tmp_path / "inside", str(runs / "a/final/clerk"))
    assert texts(inside) == texts(policy_of(tmp_path / "outside", str(copy), *config))


def test_a_policy_alone_in_all_seats_says_so(runs: Path, tmp_path: Path) -> None:
    policy_of(tmp_path, str(runs / "a/final/clerk"))
    assert evaluated(tmp_path)["roles"] == ["caller policy + caller policy + clerk policy"]


# --- the matrix of roles ------------------------------------------------------------------------


def test_every_cell_of_a_matrix_of_roles_is_a_cast(runs: Path, tmp_path: Path) -> None:
    words = [str(runs / "a"), "--partners", f"{runs / 'b'},{runs / 'one'}", *GAMES]
    assert run_eval([*words, "--out", str(tmp_path)]) == 0
    page = evaluated(tmp_path)
    matrix = page["matrix"]
    assert (matrix["rows"], matrix["columns"]) == (["a"], ["a", "b", "one"])
    assert matrix["roles"] == ["caller", "clerk"]
    cells = {(c["caller"], c["clerk"]): page["rows"][c["row"]] for c in matrix["cells"]}
    # Only pairs with the row's run: b is never with one.
    assert {*cells} == {("a", "a"), ("a", "b"), ("b", "a"), ("a", "one"), ("one", "a")}
    # The callers of a and the clerk of b are the twins, and so are those of a and one.
    plain = {n: policy_of(tmp_path / n, str(runs / n)) for n in ("a", "twins", "zero")}
    same = {("a", "a"): "a", ("one", "a"): "a", ("a", "b"): "twins", ("a", "one"): "twins"}
    for pair, name in (same | {("b", "a"): "zero"}).items():
        for what in ("scores", "measures", "examples"):
            assert cells[pair][what] == plain[name][what]
    assert cells["a", "b"]["scores"] != cells["a", "a"]["scores"]
    assert page["players"]["a/clerk"] == str(runs / "a/final/clerk")
    text = (tmp_path / "evaluation.md").read_text()
    assert "| caller, below; clerk, right" in text and "\n| b " in text


def test_the_sides_of_two_equal_seats_are_the_seats(tmp_path: Path) -> None:
    for name in ("a", "b"):
        for policy in ("x", "y"):
            bare_weights(tmp_path / name / "final" / policy)
        own = "policies: {x: {seats: [1]}, y: {seats: [0]}}\nmodel: {path: x}\ngame: {}\n"
        (tmp_path / name / "config.yaml").write_text(own)
    found = find_matches(EvalPlan([tmp_path / "a"], partners=[str(tmp_path / "b")]))
    assert found.roles == ("seat 0", "seat 1") and found.rows == ("a",)
    casts = {match.name: match.one.cast for match in found.matches}
    parts = {n: [str(s.weights.relative_to(tmp_path)) for s in c] for n, c in casts.items()}
    assert parts == {
        "a": ["a/final/y", "a/final/x"],
        "a with b": ["a/final/y", "b/final/x"],
        "b with a": ["b/final/y", "a/final/x"],
    }


def row(*scores: float) -> Row:
    mean = sum(scores) / len(scores)
    return Row("cast", scores, (mean, mean, mean), {})


def test_what_strangers_lose_is_the_diagonal_less_the_rest() -> None:
    """Instance by instance: (1 + 0.8) / 2 - (0.6 + 0.4) / 2 = 0.4, and (1 + 1) / 2 - 1 = 0."""
    rows = {"a": row(1, 1), "b": row(0.8, 1), "a with b": row(0.6, 1), "b with a": row(0.4, 1)}
    report = Evaluated("x", {}, rows, (["a", "b"], ["a", "b"]), roles=("caller", "clerk"))
    assert lost_with_strangers(report) == paired_interval([0.4, 0.0])
    assert "Lost with strangers" in matrix_text(report) and "+" not in matrix_text(report)
    alone = Evaluated("x", {}, {"a": row(1, 1)}, (["a"], ["a"]), roles=("caller", "clerk"))
    assert lost_with_strangers(alone) is None


def test_a_partner_without_self_play_is_no_stranger_of_the_diagonal() -> None:
    """`c` never plays with itself, so its cells say nothing of what a and b lose."""
    names = ("a", "b", "c")
    rows = {"a": row(1.0), "b": row(0.5), "a with b": row(0.5), "b with a": row(0.0)}
    rows |= {f"{x} with c": row(0.1) for x in "ab"} | {f"c with {x}": row(0.9) for x in "ab"}
    report = Evaluated("x", {}, rows, (names[:2], names), roles=("caller", "clerk"))
    found = lost_with_strangers(report)
    assert found is not None and np.isclose(found[0], 0.5)


# --- folders ------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A run as far as its files go: two policies and their start."""
    run = tmp_path / "run"
    for part in ("final/caller", "final/clerk", "warm_start"):
        bare_weights(run / part)
    for name in ("caller", "clerk"):
        (run / "final" / name / "progress.json").write_text('{"step": 4}')
    (run / "config.yaml").write_text(f"{TWO}out: run\n")
    return run


def weights_of(place: Path) -> dict[str, Path]:
    return {name: source.weights for name, source in find_policies(place).items()}


def test_the_newest_weights_of_each_policy_are_found(saved: Path) -> None:
    final = {name: saved / "final" / name for name in ("caller", "clerk")}
    assert weights_of(saved) == weights_of(saved / "final") == final
    for name in final:
        for step in (2, 6):
            bare_weights(saved / f"checkpoints/step_{step:06d}/policies/{name}/hf")
    for step in (2, 6):
        (saved / f"checkpoints/step_{step:06d}/progress.json").write_text(f'{{"step": {step}}}')
    steps = {
        step: {name: saved / f"checkpoints/step_{step:06d}/policies/{name}/hf" for name in final}
        for step in (2, 6)
    }
    assert weights_of(saved) == steps[6], "the run went on after its end"
    assert weights_of(saved / "checkpoints/step_000002") == steps[2]
    alone = find_source(steps[2]["clerk"])
    assert (alone.policy, alone.home, alone.settings) == ("clerk", saved, saved / "config.yaml")
    assert find_source(saved / "warm_start").policy == ""
    seats = seated(find_policies(saved), ROLES, what="RUN")
    assert [seats[seat].policy for seat in range(3)] == ["caller", "caller", "clerk"]


def test_one_policy_of_several_is_named_never_guessed(saved: Path) -> None:
    listed = f"{saved}/final/caller, {saved}/final/clerk"
    for place in (saved, saved / "final"):
        with pytest.raises(SettingsError, match=f"must name one policy .* {listed}"):
            find_source(place)
    shutil.rmtree(saved / "final/clerk")
    for place in (saved, saved / "final"):
        with pytest.raises(SettingsError, match="no weights of the policy clerk yet"):
            find_policies(place)
    with pytest.raises(SettingsError, match=r"must have a policy for seat 1 \(judge\), got"):
        bare_weights(saved / "final/clerk")
        seated(find_policies(saved), ("caller", "judge"), what="RUN")


def test_a_changed_policy_of_a_checkpoint_is_refused(saved: Path) -> None:
    checkpoint = saved / "checkpoints/step_000006"
    for name in ("caller", "clerk"):
        bare_weights(checkpoint / "policies" / name / "hf")
    size = (checkpoint / "policies/caller/hf/model.safetensors").stat().st_size
    manifest = {"sizes": {f"policies/{n}/hf/model.safetensors": size for n in ("caller", "clerk")}}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    (checkpoint / "progress.json").write_text('{"step": 6}')
    assert len(find_policies(checkpoint)) == 2
    (checkpoint / "policies/clerk/hf/model.safetensors").unlink()
    save_file({"w": np.zeros(9)}, checkpoint / "policies/clerk/hf/model.safetensors")
    for place in (saved, checkpoint, checkpoint / "policies/clerk/hf"):
        with pytest.raises(SettingsError, match=r"undamaged, got policies/clerk/hf/model"):
            find_policies(place)


def test_a_changed_policy_of_final_is_refused(saved: Path) -> None:
    """One manifest holds all: the exports are complete together."""
    size = (saved / "final/clerk/model.safetensors").stat().st_size
    sizes = {f"{name}/model.safetensors": size for name in ("caller", "clerk")}
    (saved / "final/manifest.json").write_text(json.dumps({"sizes": sizes}))
    assert len(find_policies(saved)) == 2
    (saved / "final/clerk/model.safetensors").unlink()
    save_file({"w": np.zeros(9)}, saved / "final/clerk/model.safetensors")
    for place in (saved, saved / "final", saved / "final/clerk"):
        with pytest.raises(SettingsError, match=r"undamaged, got clerk/model.safetensors has"):
            find_policies(place)
    assert find_source(saved / "final/caller").policy == "caller"


def test_a_policy_plays_under_its_own_settings(saved: Path) -> None:
    own = "policies: {caller: {}, clerk: {model: {chat_template: {name: bob}, dtype: bfloat16}}}\n"
    shared = "model: {path: x, chat_template: {enable_thinking: false}}\n"
    (saved / "config.yaml").write_text(f"{own}{shared}out: run\n")
    caller, clerk = find_policies(saved).values()
    assert template_of(caller) == {"enable_thinking": False}
    assert template_of(clerk) == {"enable_thinking": False, "name": "bob"}
    config = find_config(clerk, None, ["model.dtype=float32"])
    assert (config.model.path, config.model.dtype) == (str(clerk.weights), "bfloat16")
    assert config.model.chat_template == template_of(clerk) and not config.policies
    assert find_config(caller, None, []).model.dtype == "float32"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("{run}", "--partners", "scripted:honest"), "models on disk in a matrix of roles, got"),
        (
            ("{run}/final/caller", "--partners", "{run}"),
            "policy caller alone; nearest is {run}",
        ),
        (("{run}/final/caller",), None),
        (("{run}", "--partner", "self"), None),
        (("{run}", "--partner", "pool"), "--partner must name a single policy, got pool"),
    ],
)
def test_who_cannot_play_is_refused(saved: Path, words: tuple[str, ...], said: str | None) -> None:
    run, *rest = (word.format(run=saved) for word in words)
    options = dict(zip(("partner", "partners"), (None, ()), strict=True))
    options |= {rest[0].strip("-"): rest[1]} if rest else {}
    options["partners"] = [options["partners"]] if rest[:1] == ["--partners"] else []
    plan = EvalPlan([Path(run)], **options)
    if said is None:
        assert len(find_matches(plan).matches) == 1
        return
    with pytest.raises(ValueError, match=said.format(run=saved)):
        find_matches(plan)


def test_a_policy_of_a_seat_that_plays_equal_roles_in_turn_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One learned seat 0 of two players; with a partner it has seat 1 in half of the games."""
    folder = trained() / "final/one"
    find_matches(EvalPlan([folder], partner="scripted:honest"))
    assert capsys.readouterr().err == (
        f"warning: RUN: {folder} plays seat 1 (player), which it has not learned; its policy one "
        "learned seat 0 (player)\n"
    )


LEARNED = {"caller": "0 (caller), 1 (caller)", "clerk": "2 (clerk)"}


@pytest.mark.parametrize(
    ("words", "warned"),
    [
        ("eval {run}/final/caller --partner {run}/final/clerk", ""),
        ("eval {run}/final/caller --partner {run}", ""),
        ("eval {run}/final/caller", ""),
        ("eval {run}/final/clerk --partner {run}/final/clerk", "--partner: clerk 0 1"),
        ("eval {run} --partner {run}/final/caller", "--partner: caller 2"),
        ("train policies.clerk.partners=[self,checkpoint:{run}/final/clerk]", ""),
        (
            "train policies.clerk.partners=[self,checkpoint:{run}/final/caller]",
            "policies.clerk.partners: caller 2",
        ),
        ("train eval.partners=[checkpoint:{run}]", ""),
        ("train eval.partners=[checkpoint:{run}/final/clerk]", "eval.partners: clerk 0 1"),
        (
            "train policies={{}} rollout.policy_seats=[clerk] "
            "rollout.partners=[checkpoint:{run}/final/clerk]",
            "rollout.partners: clerk 0 1",
        ),
    ],
)
@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_policy_in_a_seat_that_it_has_not_learned_is_told_before_the_start(
    rank: str,
    words: str,
    warned: str,
    saved: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One line of the first rank: who plays which seats, and which ones it learned."""
    monkeypatch.setenv("RANK", rank)
    command, *rest = words.format(run=saved).split()
    if command == "eval":
        partner = f"checkpoint:{rest[2]}" if rest[1:] else None
        find_matches(EvalPlan([Path(rest[0])], partner=partner))
    else:
        given = [*rest, "warm_start.teachers=[clerk]", "eval.every=1"]
        check_run(load_config(saved / "config.yaml", given), here=False)
    lines = [line for line in capsys.readouterr().err.splitlines() if "learned" in line]
    assert len(lines) == bool(warned and rank == "0")
    for line in lines:
        key, name, *seats = warned.replace(":", "").split()
        strange = ", ".join(f"{seat} ({ROLES[int(seat)]})" for seat in seats)
        folder = saved / "final" / name
        assert line.startswith(f"warning: {key}") and f"checkpoint:{folder}: " in line
        assert f"{folder} plays seat {strange}, which it has not learned; " in line
        assert line.endswith(f"its policy {name} learned seat {LEARNED[name]}")
