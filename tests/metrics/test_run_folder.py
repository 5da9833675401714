"""A run's folder: its saved settings and code, and the lock against a second trainer."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import train
from selfplay.atomic import atomic_folder
from selfplay.config import Config, load_config
from selfplay.config.load import load
from selfplay.errors import RunEnds, SettingsError
from selfplay.metrics.run_folder import (
    FILES,
    FOLDERS,
    check_lock,
    check_names,
    check_run_folder,
    hold_run,
    note_start,
    open_run,
)
from selfplay.warm_start.imitation import scratch_tokenizer
from tests.helpers import processes
from tests.helpers.chat_server import Answer, chat_server
from tests.helpers.tiny_run import RUNS, finished, run_tiny, write_tiny

ROOT = Path(__file__).resolve().parents[2]
SCRATCH = ["model.scratch={}", "rollout.max_game_tokens=512"]


def begin(folder: Path, config: Config) -> None:
    open_run(check_run_folder(folder, config))


def test_a_run_folder_holds_settings_and_code(tmp_path: Path) -> None:
    config, folder = load(Config, None, SCRATCH), tmp_path / "runs" / "a"
    begin(folder, config)
    assert load(Config, folder / "config.yaml") == config
    code = (folder / "code.txt").read_text()
    assert "commit " in code and "torch " in code and "python " in code
    begin(folder, config)
    assert (folder / "code.txt").read_text().count("started ") == 2


def test_each_start_notes_how_long_it_took_until_its_first_game() -> None:
    code = (finished() / "code.txt").read_text()
    said = re.findall(r"^start: (.+) s until the first game$", code, re.MULTILINE)
    assert len(said) == code.count("started ") > 0 and all(float(age) > 0 for age in said)


def test_a_start_notes_the_parts_of_its_engine_s(tmp_path: Path) -> None:
    for rank in (0, 1):
        note_start(tmp_path, rank, {"import": 3.04, "first answer": 0.5})
    (line,) = (tmp_path / "code.txt").read_text().splitlines()
    assert line.endswith(" s until the first game; the engine's start import 3.0, first answer 0.5")


def test_a_file_of_ones_own_that_was_edited_since_needs_another_python(tmp_path: Path) -> None:
    """As in a notebook: the module that was imported stays, so its digest would not be its own."""
    own = tmp_path / "edited_since.py"
    own.write_text("def reward(episode):\n    return episode.outcome.rewards, ()\n")
    config = load(Config, None, [*SCRATCH, f"reward.function={own}:reward"])
    begin(tmp_path / "a", config)
    own.write_text("def reward(episode):\n    return [0.0, 0.0], ()\n")
    with pytest.raises(SettingsError, match=r"edited_since\.py must not change after its import"):
        begin(tmp_path / "b", config)
    assert not (tmp_path / "b").exists()


def test_a_resumed_run_may_be_longer_but_not_have_other_settings(tmp_path: Path) -> None:
    begin(tmp_path, load(Config, None, SCRATCH))
    begin(tmp_path, load(Config, None, [*SCRATCH, "steps=999"]))
    assert load(Config, tmp_path / "config.yaml").steps == 999
    (tmp_path / "held_out_before.json").write_text("{}")
    with pytest.raises(SettingsError, match=r"rollout\.group_size: 8 -> 4"):
        begin(tmp_path, load(Config, None, [*SCRATCH, "rollout.group_size=4", "steps=5"]))
    assert load(Config, tmp_path / "config.yaml").steps == 999


def test_a_start_that_trained_nothing_leaves_no_run_to_agree_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Out of memory in the first step: any setting may change. What was prepared for the old ones,
    teachers' games among it, stays if only self-play reads them; otherwise it is made again, and a
    line says so."""
    begin(tmp_path, load(Config, None, SCRATCH))
    prepared = [tmp_path / "tokenizer", tmp_path / "warm_start_progress" / "games_00000000"]
    for place in prepared:
        place.mkdir(parents=True)
    words = [*SCRATCH, "optim.lr=1", "algorithm.kl=0.1", "rollout.group_size=2"]
    begin(tmp_path, load(Config, None, words))
    assert all(place.exists() for place in prepared) and capsys.readouterr().out == ""
    begin(tmp_path, load(Config, None, [*words, "optim.lr=2", "model.dtype=bfloat16"]))
    assert load(Config, tmp_path / "config.yaml").model.dtype == "bfloat16"
    assert not any(place.exists() for place in prepared)
    assert capsys.readouterr().out == (
        f"{tmp_path} begins anew with other settings (saved -> given): model.dtype: float32 -> "
        "bfloat16; optim.lr: 1.0 -> 2.0; deletes tokenizer, warm_start_progress\n"
    )


def test_data_that_changed_since_the_last_start_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file, each file of a folder and of FOLDER/SPLIT; not what `datasets` caches beside it."""
    places = {
        "data.train": ("z.parquet", "z.parquet"),
        "data.validation": ("folder", "folder/a.parquet"),
        "data.test": ("splits/test", "splits/data/test-0.parquet"),
        "warm_start.recorded": ("games.jsonl", "games.jsonl"),
        "warm_start.chats": ("chats", "chats/data-0.arrow"),
    }
    others = ("splits/data/train-0.parquet", "chats/cache-1.arrow")
    out, files = tmp_path / "run", [file for _, file in places.values()]

    def start(*changed: str) -> list[str]:
        for file in changed:
            (tmp_path / file).write_text((tmp_path / file).read_text() + ".")
        begin(out, config)
        return capsys.readouterr().out.splitlines()

    for file in (*files, *others):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    config = load(
        Config, None, [*SCRATCH, *(f"{k}={tmp_path / v}" for k, (v, _) in places.items())]
    )
    assert start() == []
    assert start(*files) == [], "nothing was trained"
    (out / "checkpoints").mkdir()
    for key, (named, file) in places.items():
        assert start(file) == [f"{out} continues with a changed {key} {tmp_path / named}"]
    assert start(*others) == start() == []


WHERE = (
    *("threads=2", "device=cpu", "data.processes=2", "parallel.tp=2", "parallel.fsdp=2"),
    *("parallel.offload=optimizer", "parallel.checkpointing=full", "model.liger=false"),
    *("engine.tp_size=2", "engine.mem_fraction=0.3"),
    *("engine.max_cache_tokens=9999", "engine.max_batch=64", "engine.attention=triton"),
    *("engine.prefill_graphs=true", "engine.timeout_s=9", "engine.max_mismatch=0.1"),
    *("optim.tokens_per_microbatch=4096", "optim.share_prefixes=false", "endpoint.concurrency=2"),
)
WHAT = (
    *("seed=1", "game.options.size=3", "data.train=x.parquet", "model.dtype=bfloat16"),
    "model.lora={}",
    *("warm_start.num_games=7", "rollout.instances=3", "rollout.temperature=0.9", "optim.lr=1"),
    *("policy_pool.every=3", "reward.error_penalty=0.3", "algorithm.kl=0.1"),
    *("optim.schedule=linear", "endpoint.max_new_tokens=7"),
)


def test_where_a_run_is_computed_may_change_and_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sglang = [*SCRATCH, "engine.kind=sglang"]
    begin(tmp_path, load(Config, None, sglang))
    (tmp_path / "warm_start_progress" / "checkpoints" / "step_000050").mkdir(parents=True)
    begin(tmp_path, load(Config, None, sglang))
    assert capsys.readouterr().out == ""
    moved = load(Config, None, [*sglang, *WHERE])
    begin(tmp_path, moved)
    assert load(Config, tmp_path / "config.yaml") == moved
    (line,) = capsys.readouterr().out.splitlines()
    assert "parallel.tp: 1 -> 2; " in line and "no longer match" in line
    assert set(re.findall(r" ([\w.]+): \S+ -> ", line)) == {word.split("=")[0] for word in WHERE}
    plain = [word for word in WHERE if "graphs" not in word and "attention" not in word]
    begin(tmp_path, load(Config, None, [*SCRATCH, *plain]))
    assert "(saved -> given): engine.kind: sglang -> hf; " in capsys.readouterr().out


def test_a_policy_of_a_run_may_change_where_it_is_computed_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each line names a key of the policy, also where it has had no section of its own."""
    two = [*SCRATCH, "policies={a: {seats: [0]}, b: {seats: [1], optim: {lr: 1e-3}}}"]
    begin(tmp_path, load(Config, None, two))
    (tmp_path / "checkpoints").mkdir()
    begin(tmp_path, load(Config, None, [*two, "policies.a.engine.max_batch=9"]))
    (line,) = capsys.readouterr().out.splitlines()
    assert "policies.a.engine.max_batch: null -> 9; its results" in line
    begin(tmp_path, load(Config, None, two))
    assert "policies.a.engine.max_batch: 9 -> null; its results" in capsys.readouterr().out
    for words, told in (
        (["policies.b.optim.lr=1e-4"], "policies.b.optim.lr: 0.001 -> 0.0001; "),
        (["policies.a.optim.lr=1e-4"], "policies.a.optim.lr: null -> 0.0001; "),
        (["policies.a.methods={}"], "policies.a.methods: null -> {}; "),
        (["policies.a.rest=[1, 1]"], "policies.a.rest: [] -> [1, 1]; "),
        (["policies.a.model.lora={}"], "policies.a.model.lora: null -> {}; "),
        (["policies.a.partners=[self, pool]"], "policies.a.partners: [self] -> [self, pool]; "),
        (["policies={c: {seats: []}}"], "policies: a, b -> a, b, c; "),
    ):
        with pytest.raises(SettingsError) as refusal:
            begin(tmp_path, load(Config, None, [*two, *words]))
        assert f"(saved -> given): {told}" in str(refusal.value)
    mediation = [*SCRATCH, "game.name=mediation", "policies={user: {}, agent: {}}"]
    begin(tmp_path / "roles", load_config(None, mediation))
    (tmp_path / "roles/checkpoints").mkdir()
    with pytest.raises(
        SettingsError, match=r"given\): policies: user, agent -> none; use the saved"
    ):
        begin(tmp_path / "roles", load_config(None, mediation[:-1]))


def test_what_a_run_computes_may_not_change(tmp_path: Path) -> None:
    begin(tmp_path, load(Config, None, SCRATCH))
    (tmp_path / "warm_start").mkdir()
    for word in WHAT:
        with pytest.raises(SettingsError) as refusal:
            begin(tmp_path, load(Config, None, [*SCRATCH, word, "threads=2"]))
        told = str(refusal.value)
        assert f" {word.split('=')[0]}" in told and "threads" not in told, word
    assert load(Config, tmp_path / "config.yaml").threads == 0


def test_a_run_of_another_game_is_named_first(tmp_path: Path) -> None:
    begin(tmp_path, load(Config, None, SCRATCH))
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(SettingsError) as refusal:
        begin(tmp_path, load_config("tiny_mediation"))
    told = str(refusal.value)
    assert "(saved -> given): game.name: matching -> mediation; " in told


def test_other_versions_of_packages_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the newest start: one that went back to the first versions has two differences again."""
    begin(tmp_path, load(Config, None, SCRATCH))
    code = tmp_path / "code.txt"
    here = metadata.version("torch")
    other = code.read_text().replace(f"torch {here}", "torch 2.0").replace(", numpy ", ", numba ")
    code.write_text(code.read_text() + other)
    begin(tmp_path, load(Config, None, SCRATCH))
    assert capsys.readouterr().out == ""  # nothing was trained
    code.write_text(code.read_text() + other)
    (tmp_path / "held_out_before.json").write_text("{}")
    begin(tmp_path, load(Config, None, SCRATCH))
    numpy = metadata.version("numpy")
    assert capsys.readouterr().out == (
        f"{tmp_path} continues with other versions (before -> now): torch 2.0 -> {here}; "
        f"numba {numpy} -> absent; numpy absent -> {numpy}\n"
    )
    begin(tmp_path, load(Config, None, SCRATCH))
    assert capsys.readouterr().out == ""


HOLD = """
import pathlib, sys, time
from selfplay.metrics.run_folder import hold_run
held = hold_run(pathlib.Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


def test_a_second_trainer_is_refused_until_the_first_is_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first trainer is a process that holds the lock as a trainer does."""
    folder = tmp_path / "run"
    words = ["--config", str(write_tiny(folder)), f"out={folder}"]
    first = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    processes.read_until(first, "held")
    assert train.main(words) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and "train.py: out" in line
    assert str(folder) in line and f"pid {first.pid} on" in line
    assert list(folder.iterdir()) == [folder / ".lock"]
    first.kill()
    first.wait()
    hold_run(folder).close()


@pytest.mark.parametrize(
    ("schedule", "steps", "told"),
    [("linear", 50, True), ("cosine", 200, True), ("linear", 100, False), ("constant", 50, False)],
)
def test_another_length_under_a_schedule_is_told(
    schedule: str, steps: int, told: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The learning rate of the steps to come is that of a run of the new length."""
    words = [*SCRATCH, f"optim.schedule={schedule}"]
    begin(tmp_path, load(Config, None, words))
    begin(tmp_path, load(Config, None, [*words, "steps=70"]))
    assert not capsys.readouterr().out, "nothing was trained yet"
    begin(tmp_path, load(Config, None, [*words, "steps=100"]))
    (tmp_path / "checkpoints").mkdir()
    begin(tmp_path, load(Config, None, [*words, f"steps={steps}"]))
    said = capsys.readouterr().out
    assert said.count("\n") == told
    assert not told or (f"steps: 100 -> {steps}" in said and "learning rate differs" in said)


def tree_of(folder: Path) -> dict[Path, bytes | None]:
    """Everything in a folder, hidden files too, with what the files hold."""
    paths = (path for path in folder.rglob("*"))
    return {path: path.read_bytes() if path.is_file() else None for path in paths}


OTHERS = ("x.new", "metrics.jsonl.new", ".partial-x/a", ".partial-final/a", ".old-final/a")


@pytest.mark.parametrize("name", [*FILES, *(f"{name}/a" for name in FOLDERS)])
def test_a_name_that_a_run_would_write_is_not_taken_from_its_owner(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a folder that holds no run; nothing there changes."""
    folder = tmp_path / "mine"
    for each in (name, *OTHERS):
        (folder / each).parent.mkdir(parents=True, exist_ok=True)
        (folder / each).write_text("mine")
    before = tree_of(folder)
    assert train.main(["--config", str(write_tiny(folder)), f"out={folder}"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"got {name.partition('/')[0]}, which a run would" in said
    assert tree_of(folder) == before


@pytest.mark.parametrize("kind", ["pipe", "other", "link"])
def test_a_name_of_a_run_that_is_no_file_or_no_folder_is_refused(kind: str, tmp_path: Path) -> None:
    """In a run's folder and in a new one. A pipe would be waited for without an end."""
    for number, name in enumerate((*FILES, *FOLDERS)):
        folder = tmp_path / str(number)
        place, what = folder / name, "file" if name in FILES else "folder"
        if number % 2 and name != ".lock":
            hold_run(folder).close()
        folder.mkdir(exist_ok=True)
        other = Path.mkdir if name in FILES else Path.touch
        {"pipe": os.mkfifo, "other": other, "link": lambda p: p.symlink_to("gone")}[kind](place)
        rule = f"out: {place} must be a {what} if it exists; move"
        with pytest.raises(SettingsError, match=re.escape(rule)):
            check_names(folder)


LATE = {
    "judge": ("methods.judge.model", "methods={judge: {model: 'endpoint:m@URL', rubric: RUBRIC}}"),
    "partner": ("rollout.partners", "rollout.partners=['endpoint:m@URL']"),
    "room": ("rollout.max_game_tokens", "rollout={max_game_tokens: 16, max_new_tokens: 8}"),
    "adapters": ("model.lora.targets", "model.lora.targets=[nothing]"),
}


@pytest.mark.parametrize(
    ("kind", "holds"),
    [*((kind, "this run") for kind in LATE), ("judge", "nothing"), ("room", "other settings")],
)
def test_a_start_that_is_refused_late_changes_nothing(
    kind: str, holds: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By an endpoint that does not answer or by the model, when all else was checked: what was
    prepared, what a kill left, the settings and the lock of a run before its first step stay as
    they are, and a new folder is not made."""
    folder, rubric = tmp_path / "runs" / "a", tmp_path / "rubric.md"
    rubric.write_text("Rate it.")
    folder.parent.mkdir()
    with chat_server(lambda *_: Answer(status=401)) as server:
        key, text = LATE[kind]
        word = text.replace("URL", server.url).replace("RUBRIC", str(rubric))
        words = ["--config", str(write_tiny(folder)), f"out={folder}", word]
        if holds != "nothing":
            saved = [word, *(["rollout.group_size=6"] if holds == "other settings" else [])]
            hold_run(folder).close()
            begin(folder, load(Config, folder.parent / "tiny.yaml", [f"out={folder}", *saved]))
            with atomic_folder(folder / "tokenizer") as made:
                scratch_tokenizer(load(Config, folder.parent / "tiny.yaml")).save_pretrained(made)
            for name in (".partial-final/a", "config.yaml.new", ".old-code/a"):
                (folder / name).parent.mkdir(exist_ok=True)
                (folder / name).touch()
            (folder / ".lock").write_text("pid 1 on another\n")
        before = tree_of(folder.parent)
        assert train.main(words) == 2
    said = capsys.readouterr().err
    assert said.splitlines()[-1].startswith("train.py: ") and key in said
    assert tree_of(folder.parent) == before


@pytest.mark.parametrize(
    "kind", ["pool", "adapters", pytest.param("recomputed", marks=pytest.mark.slow)]
)
def test_a_resume_that_is_refused_changes_nothing(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """For a member of the pool with a changed byte; for adapters, and for the reference of a KL,
    on other weights, whole ones."""
    folder = tmp_path / "run"
    shutil.copytree(finished(*RUNS[kind]), folder)
    if kind == "pool":
        file = max((folder / "policy_pool").glob("step_*/model.safetensors"))
        file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1]))
        rule = f"{file.parent} must be undamaged, because the policy pool draws from it, got model"
    else:
        shutil.rmtree(folder / "warm_start")
        shutil.copytree(finished() / "final", folder / "warm_start")
        what = "base weights of" if kind == "adapters" else "reference of algorithm.kl at"
        rule = f"{folder / 'warm_start'} must hold the {what} {folder}/checkpoints/step_"
    (folder / "checkpoints" / "progress.json.new").touch()
    before = tree_of(folder)
    words = [word for word in RUNS[kind] if not word.startswith("steps=")]
    assert run_tiny(folder, *words, "steps=9") == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"train.py: {rule}")
    assert tree_of(folder) == before


@pytest.mark.slow
def test_a_start_that_is_refused_late_changes_nothing_on_two_ranks(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "a"
    folder.parent.mkdir()
    with chat_server(lambda *_: Answer(status=401)) as server:
        partners = LATE["partner"][1].replace("URL", server.url)
        words = ("--config", str(write_tiny(folder)), f"out={folder}", partners)
        before = tree_of(folder.parent)
        start = processes.start(ROOT / "train.py", *words, forked=2)
        said, _ = start.communicate(timeout=processes.HANG_S)
    assert start.returncode != 0 and "rollout.partners must answer before the run" in said
    assert tree_of(folder.parent) == before


def test_a_new_folder_in_which_another_run_has_begun_meanwhile_is_left_to_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"

    def answer(*_: object) -> Answer:
        hold_run(folder).close()
        return Answer()

    with chat_server(answer) as server:
        partners = LATE["partner"][1].replace("URL", server.url)
        words = ["--config", str(write_tiny(folder)), f"out={folder}", partners]
        assert train.main(words) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"out: {folder} was new, but another process" in said
    assert list(folder.iterdir()) == [folder / ".lock"]


def test_the_first_weights_may_come_from_another_run(tmp_path: Path) -> None:
    """With what tells of their imitation, but without a manifest they are of no run."""
    for name in ("tokenizer", "random_start", "warm_start"):
        with atomic_folder(tmp_path / name):
            pass
    (tmp_path / "warm_start.jsonl").touch()
    check_names(tmp_path)
    (tmp_path / "warm_start" / "manifest.json").unlink()
    with pytest.raises(SettingsError, match=r"got warm_start\.jsonl, which a run"):
        check_names(tmp_path)


@pytest.mark.parametrize("record", [".lock", "code.txt"])
def test_either_record_of_a_start_tells_a_run(record: str, tmp_path: Path) -> None:
    """A run that was copied without hidden files, one that was killed before it wrote code.txt."""
    hold_run(tmp_path).close()
    begin(tmp_path, load(Config, None, SCRATCH))
    for name in {".lock", "code.txt"} - {record}:
        (tmp_path / name).unlink()
    check_names(tmp_path)
    (tmp_path / record).write_text("mine")
    with pytest.raises(SettingsError, match="which a run would overwrite and no run wrote"):
        check_names(tmp_path)


def test_the_page_of_run_folders_names_all_that_a_run_writes() -> None:
    table = (ROOT / "docs" / "run_folder.md").read_text().partition("## A game")[0]
    assert all(f"`{name}`" in table or f"`{name}/" in table for name in (*FILES, *FOLDERS))


def test_a_lock_that_is_anothers_and_a_folder_that_moved_end_a_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with hold_run(folder) as held:
        check_lock(folder, held)
        (folder / ".lock").unlink()
        check_lock(folder, held)
        with hold_run(folder), pytest.raises(RunEnds, match="was removed, and pid"):
            check_lock(folder, held)
        folder.rename(tmp_path / "moved")
        with pytest.raises(RunEnds, match=f"{folder} must stay in place during its run"):
            check_lock(folder, held)
    assert not folder.exists()
