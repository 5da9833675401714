"""A finished run as a folder for the hub: its card, its settings, and what is refused."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import huggingface_hub
import numpy as np
import pytest
import yaml
from huggingface_hub.errors import HfHubHTTPError
from safetensors.numpy import save_file

from selfplay.apps.publish import __main__ as publish
from selfplay.apps.publish.card import public_value
from selfplay.atomic import atomic_folder
from selfplay.config import load_config
from selfplay.config.text import dump
from selfplay.partners.checkpoints import find_source
from tests.helpers.run_folders import record, turn

MEETING = Path(__file__).parents[3] / "examples" / "meeting" / "meeting.py"
HOSTILE = "[message] ```\n# a heading <script>alert(1)</script> \x1b[2J ![x](http://x)"


def row(mean: float, text: str = "[message] hi") -> dict[str, Any]:
    example = record() | {"turns": [turn(0, text)]}
    return {
        "name": "x",
        "scores": [mean] * 4,
        "interval": [mean, mean - 0.1, mean + 0.1],
        "measures": {"agreement": 1.0, "messages": 2.0, "errors": 0.25},
        "games": [],
        "examples": dict.fromkeys(("best", "typical", "worst"), example),
    }


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run as far as its files go."""
    run = tmp_path / "a_run"
    (run / "final").mkdir(parents=True)
    words = [f"out={run}", f"data.train={tmp_path}/secret/boards.parquet", "steps=9"]
    words.append(f"rollout.partners=[self, checkpoint:{tmp_path}/secret/other*0.5]")
    config = load_config(None, ["model.path=Qwen/Qwen2.5-0.5B-Instruct", *words])
    (run / "config.yaml").write_text(dump(config))
    (run / "imitated_boards.json").write_text('["abc"]')
    typed = f"--config {tmp_path}/my.yaml '{words[-1]}' steps=9 endpoint.body={{}} \"out={run}\""
    own = f"game.name {tmp_path}/my games/my_game.py sha256 cd"
    code = f"started 2\ncommit b\ncommand python train.py {typed}\ntorch 2, numpy 2\n{own}\n"
    (run / "code.txt").write_text(f"started 1\ncommit a\n\n{code}")
    save_file({"weight": np.zeros(1)}, run / "final" / "model.safetensors")
    files = {"config.json": "{}", "tokenizer.json": "{}"}
    for name, text in (files | {"progress.json": '{"step": 7}', "notes.pt": "x"}).items():
        (run / "final" / name).write_text(text)
    before = {"sampled": row(0.5), "greedy": row(0.52), "scripted:honest": row(0.9)}
    after = {"sampled": row(0.8, HOSTILE), "greedy": row(0.82), "scripted:honest": row(0.9)}
    (run / "held_out_before.json").write_text(json.dumps(before))
    (run / "held_out_after.json").write_text(json.dumps(after))
    people = row(0.87) | {"measures": {"agreement": 1.0}, "examples": {}}  # as eval.py writes them
    page = {"games": "/x/optimization.jsonl", "num_games": 4, "rows": {"people": people}}
    (run / "eval_optimization").mkdir()
    (run / "eval_optimization" / "evaluation.json").write_text(json.dumps(page))
    return run


def change_settings(run: Path, *words: str) -> None:
    (run / "config.yaml").write_text(dump(load_config(run / "config.yaml", words)))


def test_the_folder_holds_a_policy_its_settings_and_a_card(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert publish.main([str(run), "me/pair"]) == 0
    assert publish.main([str(run), "me/pair"]) == 0, "an earlier copy is replaced"
    out = run / "hub"
    assert sorted(path.name for path in out.iterdir()) == [
        *("README.md", "config.json", "imitated_boards.json", "manifest.json"),
        *("model.safetensors", "selfplay.yaml", "tokenizer.json"),
    ]
    text = "".join((out / name).read_text() for name in ("README.md", "selfplay.yaml"))
    assert str(tmp_path) not in text and "boards.parquet" in text
    assert load_config(out / "selfplay.yaml").rollout.partners == ("self", "checkpoint:other*0.5")
    assert load_config(out / "selfplay.yaml").out == "runs/pair"
    assert "game.name my_game.py sha256 cd\n" in text and "train.py --config my.yaml " in text
    partners = json.dumps(["self", "checkpoint:other*0.5"])
    assert f"'rollout.partners={partners}' steps=9 'endpoint.body={{}}' out=a_run\n" in text
    source = find_source(out)
    assert (source.weights, source.settings) == (out, out / "selfplay.yaml")
    assert "--push" in capsys.readouterr().out


def test_the_card_tells_what_a_server_must_know(run: Path) -> None:
    """As the run's end has written it beside the weights; older runs have written nothing."""
    told = {"step": 7, "served": ["it keeps '<think>'", "it prints a date"]}
    (run / "final" / "progress.json").write_text(json.dumps(told))
    assert publish.main([str(run), "me/pair"]) == 0
    text = (run / "hub" / "README.md").read_text()
    assert "To serve it: it prints a date.\n" in text and "<think>" not in text


def test_each_of_several_policies_is_published_with_its_role(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Never the run as one, nor its start; seats by number have their role's name. Of seven steps
    one rests in the first, fourth and seventh."""
    (run / "final").rename(run / "one")
    for name in ("travellers", "agent"):
        shutil.copytree(run / "one", run / "final" / name)
    shutil.copytree(run / "one", run / "warm_start")
    own = (
        "policies: {travellers: {seats: [0, user], rest: [2, 1, 2]}, agent: {optim: {lr: 3.0e-5}}}"
    )
    (run / "config.yaml").write_text(f"game: {{name: mediation}}\nmodel: {{path: x}}\n{own}\n")
    assert publish.main([str(run), "me/pair"]) == 2
    assert f"{run}/final/travellers, {run}/final/agent" in capsys.readouterr().err
    said = {}
    for name in ("travellers", "agent"):
        assert publish.main([str(run / "final" / name), f"me/{name}"]) == 0
        folder = run / "hub" / name
        said[name] = (folder / "README.md").read_text()
        config = load_config(folder / "selfplay.yaml")
        role = {"travellers": "user"}.get(name, name)
        assert config.rollout.policy_seats == (role,) and not config.policies
        assert config.optim.lr == {"agent": 3.0e-5}.get(name, 1.0e-6)
        source = find_source(folder)
        assert (source.weights, source.settings) == (folder, folder / "selfplay.yaml")
    assert "One policy for the seat of the user of" in said["travellers"]
    assert "(policy agent). In the scores below the *cast* is all" in said["travellers"]
    assert "| cast, sampled, after " in said["travellers"]
    assert "mean score of the cast, 95 %" in said["travellers"]
    assert " --out me/travellers --partner scripted:honest\n" in said["travellers"]
    assert "One policy for the seat of the agent of" in said["agent"]
    assert "(policy travellers)" in said["agent"]
    assert "(7 steps of grpo, at rest in 3 of them)" in said["travellers"]
    assert "(7 steps of grpo)" in said["agent"]


PLACES = {
    **{f"{name} at the end": f"/x/a_run/final/{name}" for name in ("user", "agent")},
    "user at step 7": "a_run/checkpoints/step_000007/policies/user/hf",
    "user at step 3": "a_run/checkpoints/step_000003/policies/user/hf",
    "start": "a_run/warm_start",
    "only policy": "a_run/final",
    "only policy at step 3": "a_run/checkpoints/step_000003/hf",
}


SEES = {"system": "", "user": ""}


def judged(run: Path, name: str, weights: Any, *policy_seats: str, **facts: Any) -> None:
    """An evaluation that the run holds, with the policy in each of these seatings, as "0 2"."""
    games = [
        {
            **record(),
            "seats": [{"player": "policy" if str(s) in own else "x"} | SEES for s in (0, 1, 2)],
        }
        for own in policy_seats
    ]
    rows = {"policy": {**row(0.5), "games": games, "examples": {}}}
    page = {"games": "generated", "num_games": 4, "rows": rows, "weights": weights, **facts}
    (run / f"eval_{name}").mkdir()
    (run / f"eval_{name}" / "evaluation.json").write_text(json.dumps(page))


def headings(folder: Path) -> list[str]:
    lines = (folder / "README.md").read_text().splitlines()
    return [line.partition("`eval.py`")[2] for line in lines if "by `eval.py`" in line]


def test_a_card_has_only_evaluations_of_what_is_published(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of seven steps: the own policy and the cast after as many, each told apart from the others by
    who sat where; another role, step or length of the run is left out, and a file without names."""
    (run / "final").rename(run / "one")
    for name in ("user", "agent"):
        shutil.copytree(run / "one", run / "final" / name)
    text = "game: {name: mediation}\nmodel: {path: x}\npolicies: {user: {}, agent: {}}\n"
    (run / "config.yaml").write_text(text)
    cast = {name: PLACES[f"{name} at the end"] for name in ("user", "agent")}
    judged(run, "a", cast, "012", step=7)
    judged(run, "b", cast, "0", "1", "2", partner="checkpoint:runs/b")
    judged(run, "c", PLACES["user at the end"], "01", partner="checkpoint:/jane/b/final/agent")
    judged(run, "d", PLACES["user at the end"], "01", partner="checkpoint:/joe/c/final/agent")
    judged(run, "e", PLACES["user at step 7"], "012", temperatures=[0.0])
    judged(run, "f", PLACES["user at step 7"], "012")
    for name in ("agent at the end", "user at step 3", "start"):
        judged(run, name.replace(" ", "_"), PLACES[name], "012")
    judged(run, "shorter", cast, "012", step=5)
    judged(run, "mixed", cast | {"agent": "a_run/checkpoints/step_000003/policies/agent/hf"}, "012")
    assert publish.main([str(run / "final/user"), "me/user"]) == 0
    at_the_end = ": the policy user of step 7 in "
    with_agent = f"{at_the_end}seat 0 (user), 1 (user), with checkpoint:agent"
    assert headings(run / "hub/user") == [
        ": the cast of step 7 in all seats",
        ": the cast of step 7, the seats in turn, with checkpoint:runs/b",
        *(with_agent, f"{with_agent} (2)"),
        *(f"{at_the_end}all seats, at temperature 0", f"{at_the_end}all seats"),
    ]
    left_out = {path.name for path in run.glob("eval_*")} - {f"eval_{name}" for name in "abcdef"}
    (line,) = [each for each in capsys.readouterr().out.splitlines() if "not in the card" in each]
    assert {*line.partition(": ")[2].split(", ")} == left_out
    assert publish.main([str(run / "final/agent"), "me/agent"]) == 0
    of_the_cast = {*headings(run / "hub/user")[:2]}
    assert {*headings(run / "hub/agent")} == {
        *(": the policy agent of step 7 in all seats", *of_the_cast)
    }


def test_the_only_policy_of_a_run_has_no_evaluation_of_another_step(run: Path) -> None:
    judged(run, "end", PLACES["only policy"], "012", step=7)
    for name in ("only policy at step 3", "start"):
        judged(run, name.replace(" ", "_"), PLACES[name], "012")
    judged(run, "shorter", PLACES["only policy"], "012", step=5)
    assert publish.main([str(run), "me/pair"]) == 0
    assert headings(run / "hub") == [": the policy of step 7 in all seats", ": the policy"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("README.md", r"README\.md has \d+ bytes instead of"),
        ("NOTES.md", r"NOTES\.md is new there"),
        (".git/config", r"\.git/config is new there"),
    ],
)
def test_what_was_written_into_a_copy_is_not_replaced(
    name: str, said: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert publish.main([str(run), "me/pair"]) == 0
    (run / "hub" / name).parent.mkdir(exist_ok=True)
    (run / "hub" / name).write_text("mine")
    assert publish.main([str(run), "me/pair"]) == 2
    assert re.search(
        f"--out must be a new folder or an unchanged .*{said}", capsys.readouterr().err
    )
    assert (run / "hub" / name).read_text() == "mine"


def test_code_of_ones_own_is_published_only_when_asked_and_never_imported(
    run: Path, tmp_path: Path
) -> None:
    (run / "config.yaml").write_text("game: {name: my_game.py}\nmodel: {path: me/base}\n")
    for name in ("code/my_game.py", "code/pkg/beside.py", "my_game.py"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text("raise SystemError('imported')\n")
    each = {"sha256": "0", "from": f"{tmp_path}/my_game.py"}
    index = {
        "named": {"game.name my_game.py": "my_game.py"},
        "files": {"my_game.py": each, "pkg/beside.py": each},
    }
    (run / "code" / "own_files.json").write_text(json.dumps(index))
    assert publish.main([str(run), "me/pair"]) == 2 and not (run / "hub").exists()
    assert publish.main([str(run), "me/pair", "--code"]) == 0
    there = (run / "hub" / "code").rglob("*.*")
    assert sorted(path.name for path in there) == ["beside.py", "my_game.py"]
    assert "of my_game, trained from" in (run / "hub" / "README.md").read_text()
    texts = [path.read_bytes() for path in (run / "hub").rglob("*") if path.is_file()]
    assert not any(str(tmp_path).encode() in text for text in texts)
    change = index | {"files": {"../secret": each}}
    (run / "code" / "own_files.json").write_text(json.dumps(change))
    assert publish.main([str(run), "me/pair", "--code"]) == 2, "a name outside the folder"


def test_the_card_has_the_scores_beside_scripts_and_people(run: Path) -> None:
    assert publish.main([str(run), "me/pair"]) == 0
    text = (run / "hub" / "README.md").read_text()
    head = yaml.safe_load(text.split("---\n")[1])
    assert head["base_model"] == "Qwen/Qwen2.5-0.5B-Instruct" and "selfplay" in head["tags"]
    metric = head["model-index"][0]["results"][0]["metrics"][0]
    assert metric["value"] == 0.8 and "[0.700, 0.900]" in metric["name"]
    rows = {line.split("|")[1].strip(): line for line in text.splitlines() if "|" in line}
    assert "0.500 [0.400, 0.600]" in rows["sampled, before self-play"]
    assert "0.800 [0.700, 0.900]" in rows["sampled, after"]
    assert "0.900 [0.800, 1.000]" in rows["scripted:honest"]
    assert "0.870 [0.770, 0.970]" in rows["people"]
    assert not any(name.startswith("honest") for name in rows), "each script has one row"
    assert "4 instances of the held-out stream" in text
    assert "(7 steps of grpo)" in text and "commit b" in text and "commit a" not in text
    assert "data.train=boards.parquet" in text and "steps=9" in text
    own = "data.test=/home/jane/mine.parquet"
    change_settings(run, "model={path: null, scratch: {}}", "rollout.max_game_tokens=512", own)
    assert publish.main([str(run), "me/pair"]) == 0
    text = (run / "hub" / "README.md").read_text()
    assert "random weights" in text and "4 instances of the file mine.parquet" in text


def test_an_evaluation_on_the_card_says_how_many_of_its_games_were_aborted(run: Path) -> None:
    """Of 40 games 9 have no score, so the mean is of 31."""
    rows = {"policy": row(0.5), "scripted:honest": row(0.9)}
    rows["policy"]["measures"] |= {"num_void": 9.0, "void_share": 0.225}
    (run / "eval_generated_endpoint").mkdir()
    page = json.dumps({"games": "generated", "num_games": 40, "rows": rows})
    (run / "eval_generated_endpoint" / "evaluation.json").write_text(page)
    assert publish.main([str(run), "me/pair"]) == 0
    text = (run / "hub" / "README.md").read_text()
    assert "### 40 games of generated (9 aborted), by `eval.py`" in text
    assert "### 4 games of optimization.jsonl, by `eval.py`" in text, "none aborted"


def test_no_folder_and_no_address_of_this_machine_is_published(run: Path) -> None:
    partners = [f"checkpoint:{p}*0.5" for p in ("/jane/a", "../../jane/b", "~/jane/c/", "me/tiny")]
    address = "endpoint:small@http://10.1.2.3:8000/v1"
    change_settings(run, f"rollout.partners=[{', '.join(partners)}, {address}*0.5]")
    names = ("checkpoint:/jane/x/d", address, f"{address}, greedy")
    rows = {f"policy with {name}": row(0.5) for name in names}
    words = ["game.options.p_observed=1.0", "data={train: /home/jane/boards.parquet}"]
    page = {"games": "generated", "num_games": 4, "rows": rows, "overrides": words}
    (run / "eval_generated_checkpoint_jane_x_d").mkdir()
    (run / "eval_generated_checkpoint_jane_x_d" / "evaluation.json").write_text(json.dumps(page))
    assert publish.main([str(run), "me/pair"]) == 0
    text = "".join((run / "hub" / name).read_text() for name in ("README.md", "selfplay.yaml"))
    assert "jane" not in text and "10.1.2.3" not in text
    assert re.search(r"by `eval.py`.* under game\.options\.p\\?_observed=1\.0 data=.*boards", text)
    assert "| policy with checkpoint:d " in text and "| policy with endpoint:small@" in text
    assert "://an-endpoint, greedy |" in text
    assert load_config(run / "hub" / "selfplay.yaml").rollout.partners == (
        *("checkpoint:a*0.5", "checkpoint:b*0.5", "checkpoint:c/*0.5", "checkpoint:me/tiny*0.5"),
        "endpoint:small@http://an-endpoint*0.5",
    )


def test_what_a_model_wrote_stays_text(run: Path) -> None:
    """Every line of a player is inside a code block that nothing in it can close."""
    assert publish.main([str(run), "me/pair"]) == 0
    text = (run / "hub" / "README.md").read_text()
    assert "\x1b" not in text
    outside, fence = [], ""
    for line in text.splitlines():
        mark = re.match(r"`{3,}", line)
        if not fence and mark:
            fence = mark.group()
        elif fence:
            fence = "" if line == fence else fence
        else:
            outside.append(line)
    assert not fence and "<script>" in text
    assert not any("<script>" in line or "a heading" in line for line in outside)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("{run} tiny", "ORG/NAME must be a hub name"),
        ("{run} me/pair --push", "--push needs a token"),
        ("{run}/final me/pair", "RUN must be a run folder with a config.yaml"),
        ("{run} me/pair --out {run}/final", "--out must be apart from"),
        (
            "{run} me/pair --out {copy}",
            "unchanged earlier --out, got {copy}: selfplay.yaml is missing",
        ),
        ("{unfinished} me/pair", "RUN must be finished"),
        ("{own} me/pair", "use a module"),
        ("{own} me/pair --code", "--code needs copies of custom code, got no "),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(
    words: str,
    said: str,
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    unfinished, own = (shutil.copytree(run, run.parent / name) for name in ("a", "b"))
    with atomic_folder(copy := run.parent / "c") as made:
        shutil.copytree(run / "final", made, dirs_exist_ok=True)
    (unfinished / "held_out_after.json").unlink()
    (own / "config.yaml").write_text(f"game: {{name: {MEETING}}}\nmodel: {{path: x}}\n")
    before = sorted(run.parent.rglob("*"))
    assert (
        publish.main(words.format(run=run, unfinished=unfinished, own=own, copy=copy).split()) == 2
    )
    error = capsys.readouterr().err
    assert said.format(copy=copy) in error and error.count("\n") == 1
    assert sorted(run.parent.rglob("*")) == before


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("code.txt", "", "code.txt must say when the run started, got ''"),
        ("final/progress.json", "[7]", "progress.json must hold the number of finished steps"),
        ("eval_x/evaluation.json", "[" * 100_000, "evaluation.json must have the games"),
        ("eval_x/evaluation.json", '{"rows": {}}', "no games, num_games"),
        ("held_out_before.json", '{"sampled": {}}', "no greedy"),
    ],
)
def test_an_odd_file_is_named(
    file: str, text: str, said: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / file).parent.mkdir(exist_ok=True)
    (run / file).write_text(text)
    assert publish.main([str(run), "me/pair"]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("link", name) for name in ("final/notes.json", "final/tokenizer.json", "code.txt")),
        *((kind, "code.txt") for kind in ("link to nothing", "folder", "pipe")),
    ],
)
def test_only_files_of_the_run_are_published(
    kind: str, name: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A link would publish what it points to, and a pipe would be read for ever."""
    secret, file = tmp_path / "secret.json", run / name
    secret.write_text("started {}")
    file.unlink(missing_ok=True)
    if kind == "folder":
        file.mkdir()
    elif kind == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to(secret if kind == "link" else tmp_path / "nothing")
    assert publish.main([str(run), "me/pair"]) == 2
    assert f"{file} must be a file of this run" in capsys.readouterr().err
    assert not (run / "hub").exists()


@pytest.mark.parametrize(
    "path",
    [
        *("/home/jane/x", "~/jane/x", "~jane/x", "~jane/y/x/", "$HOME/jane/x", "file:///jane/x"),
        *("../jane/x", "./jane/x", "a/../jane/x", "//host/jane/x"),
        *("\\\\host\\jane\\x", "C:\\jane\\x"),
    ],
)
def test_every_form_of_a_path_is_cut_to_its_last_part(path: str) -> None:
    assert public_value({"a": [path]}) == {"a": ["x"]}
    if "\\" not in path and not path.startswith("file:"):
        assert "jane" not in public_value(f"checkpoint:{path}*0.5")


def test_a_path_in_a_list_is_cut_and_another_users_home_has_no_name() -> None:
    assert public_value("self,~jane/x,/home/jane/y,runs/a") == "self,x,y,runs/a"
    assert public_value("~jane") == public_value("~jane/") == "~"
    assert public_value("scripted:honest:tell=top,slip=0.1") == "scripted:honest:tell=top,slip=0.1"


@pytest.mark.parametrize("text", ["me/tiny", "data/boards.parquet", "scripted:honest", "~", "a: b"])
def test_what_is_no_path_of_this_machine_stays(text: str) -> None:
    assert public_value(text) == text


class Hub:
    """The two calls of `HfApi` that a push makes; `refuses` makes the second one fail."""

    refuses = False

    def create_repo(self, name: str, *, private: bool, exist_ok: bool) -> str:
        assert exist_ok
        self.created = name, private
        return f"https://hub/{name}"

    def upload_folder(self, *, repo_id: str, folder_path: Path, commit_message: str) -> None:
        if self.refuses:
            raise HfHubHTTPError("403 Forbidden", response=Mock())
        self.files = sorted(path.name for path in folder_path.iterdir())


def test_a_push_creates_the_repository_and_uploads_the_folder(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub = Hub()
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    assert publish.main([str(run), "me/pair", "--push", "--private"]) == 0
    assert hub.created == ("me/pair", True)
    assert hub.files == sorted(path.name for path in (run / "hub").iterdir())
    out = capsys.readouterr()
    assert "pushed to https://hub/me/pair" in out.out and "hf_secret" not in out.out + out.err
    hub.refuses = True
    assert publish.main([str(run), "me/pair", "--push"]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("selfplay.apps.publish: ") and "403" in error
