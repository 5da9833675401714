"""What needs no model answers at once: `--help`, `--list`, a typo, and loading the settings."""

import importlib
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from selfplay import __version__
from selfplay.preflight.command_line import Parser, parse_eval, parse_train, refused

ROOT = Path(__file__).resolve().parents[2]
HERE = os.environ | {"PYTHONPATH": str(ROOT)}
SLOW = ("torch", "transformers", "pyarrow", "scipy")  # the game's options need numpy, 0.1 s
CPU_S = 5.0  # on a busy machine; an idle one takes 0.4 s, and importing torch alone more than 2 s


def answer(*words: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """What Python answers to these words, and the CPU seconds that it took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, env=HERE
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_settings_are_loaded_and_a_page_is_drawn_without_a_slow_library() -> None:
    code = f"""
import sys
from selfplay.preflight.command_line import parse_train
_, config = parse_train(["--config", "tiny", "steps=3"], "")
import selfplay.apps.report.__main__
print(config.steps, [name for name in {SLOW} if name in sys.modules])
"""
    done, cpu_s = answer("-c", code)
    assert (done.stdout, done.stderr) == ("3 []\n", "")
    assert cpu_s < CPU_S


def test_a_word_that_the_locale_lacks_is_named_with_the_way_out() -> None:
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for program in ("train.py", "eval.py", "selfplay/apps/report/__main__.py"):
        words = [sys.executable, program, "out=runs/ü"]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env=HERE | plain)
        assert done.returncode == 2 and done.stderr.count("\n") == 1
        assert "'out=runs/\\udcc3\\udcbc' has letters that the locale's" in done.stderr
        assert done.stderr.endswith("lacks; set PYTHONUTF8=1\n")


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ("--help", 0, "rollout.group_size"),
        ("--help rollout", 0, "rollout.branch.siblings"),
        ("--help game --config tiny_planning", 0, "game.options.sites"),
        ("--list", 0, "tiny_ppo"),
        ("--version", 0, f"selfplay {__version__}\n"),
        ("--config tiny rollout.group_sise=4", 2, "nearest is rollout.group_size"),
    ],
)
def test_a_question_or_a_typo_is_answered_before_torch_is_imported(
    words: str, status: int, said: str
) -> None:
    done, cpu_s = answer("-X", "importtime", "train.py", *words.split())
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert done.returncode == status and said in done.stdout + done.stderr
    assert "selfplay.config" in imported and "torch" not in imported
    assert cpu_s < CPU_S


EVAL = ["runs/a", "--games", "generated"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--partner", ""], "--partner must have a value, got ''"),
        (["--partner="], "--partner must have a value, got ''"),
        (["--partners", ""], "--partners must have a value, got ''"),
        (["--partners=,"], "--partners: must name a folder or a player, got ','"),
        (["--partners", " , "], "--partners: must name a folder or a player, got ' , '"),
        (["--out", ""], "--out must have a value, got ''"),
        (["--start="], "--start must have a value, got ''"),
        (["--num", "3", "--num=4"], "--num is given twice"),
        (["--games", "x.jsonl"], "--games is given twice"),
        (["steps=3"], "steps has no effect without training"),
        (["optim.lr=1"], r"optim\.lr has no effect"),
        (["warm_start={num_games: 3}"], "warm_start has no effect"),
        (["reward.error_penalty=0.1"], "reward.error_penalty has no effect"),
        (["track=wandb"], "track has no effect"),
        (["seed=5", "seed=6"], "seed is given 2 times"),
        (["seed=5", "engine.kind=hf", "seed=5"], "seed is given 2 times"),
    ],
)
def test_what_would_have_no_effect_on_an_evaluation_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_eval([*EVAL, *words], "")


@pytest.mark.parametrize(
    "words", [["--config", "tiny", "--config", "tiny3"], ["--config", "tiny", "steps=1", "steps=2"]]
)
def test_what_would_have_no_effect_on_a_run_is_refused(words: list[str]) -> None:
    with pytest.raises(ValueError, match=r"is given (twice|2 times)"):
        parse_train(words, "")


def test_what_may_be_repeated_or_refined_is_taken() -> None:
    words = ["--temperature", "1", "--temperature", "0", "seed=3", "game.options.size=2"]
    args = parse_eval([*EVAL, *words, "game={name: matching}", "data.start=null"], "")
    assert args.temperature == [1.0, 0.0] and len(args.overrides) == 4


@pytest.mark.parametrize(
    ("typed", "usage", "error"),
    [
        ("/venv/bin/selfplay-play", "selfplay-play", "selfplay-play"),
        ("selfplay/apps/play/__main__.py", "python -m selfplay.apps.play", "selfplay.apps.play"),
    ],
)
def test_usage_and_errors_name_the_command_that_was_typed(
    typed: str,
    usage: str,
    error: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", [typed])
    parser = Parser("selfplay.apps.play", "Play.\n\n    python -m selfplay.apps.play runs/a\n")
    said = parser.format_help()
    assert said.startswith(f"usage: {usage} [-h]") and f"\n    {usage} runs/a\n" in said
    refused("selfplay.apps.play", ValueError("no"))
    assert capsys.readouterr().err == f"{error}: no\n"


PAGES = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
TYPED = {word for page in PAGES for word in re.findall(r"python -m ([\w.]+\w)", page.read_text())}


@pytest.mark.parametrize("module", sorted(m for m in TYPED if m.startswith(("dialop", "selfplay"))))
def test_every_command_of_the_pages_answers_version(
    module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    is_package = (ROOT / module.replace(".", "/")).is_dir()
    program = importlib.import_module(f"{module}.__main__" if is_package else module)
    try:
        status = program.main(["--version"])
    except SystemExit as ended:  # of argparse
        status = ended.code
    name = module.partition(".")[0]
    assert (status or 0, capsys.readouterr().out) == (0, f"{name} {__version__}\n")


@pytest.mark.parametrize(("name", "function"), [("train", "train"), ("eval", "evaluate")])
def test_an_installed_command_goes_by_its_own_name(
    name: str, function: str, tmp_path: Path
) -> None:
    script = tmp_path / f"selfplay-{name}"  # as pip writes it
    module = "selfplay.preflight.command_line"
    script.write_text(f"import sys\nfrom {module} import {function}\nsys.exit({function}())\n")
    done, _ = answer(str(script), "--help")
    assert done.stdout.startswith(f"usage: selfplay-{name} "), done.stdout + done.stderr
    done, _ = answer(str(script), "--confg")
    assert done.returncode == 2 and done.stderr.startswith(f"selfplay-{name}: "), done.stderr


@pytest.mark.parametrize(
    ("program", "begun", "wanted"),
    [
        ("train.py", "rollout.gr", ["rollout.group_size="]),
        ("train.py", "--dry", ["--dry-run"]),
        ("train.py", "mediation_", ["mediation_h200", "mediation_h200_protocol"]),
        ("eval.py", "rollout.gr", ["rollout.group_size="]),
        ("eval.py", "optim.", []),
    ],
)
def test_bash_completes_what_is_begun(program: str, begun: str, wanted: list[str]) -> None:
    """bash itself reads the line, and its `compgen` completes by it."""
    done, _ = answer(program, "--completion")
    line = done.stdout.strip()
    assert line.endswith(f"selfplay-{program.removesuffix('.py')}")
    words = line[line.index("'") : line.rindex("'") + 1]
    script = f"{line}\ncomplete -p {line.split()[-1]} >/dev/null && compgen -W {words} -- {begun}"
    shell = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert (shell.stdout.split(), shell.stderr) == (wanted, "")
