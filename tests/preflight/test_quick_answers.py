"""What needs no model answers at once: `--help`, `--list`, a typo, and loading the settings."""

import importlib
import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from selfplay import __version__
from selfplay.preflight.command_line import Parser, parse_eval, refused

ROOT = Path(__file__).resolve().parents[2]
HERE = os.environ | {"PYTHONPATH": str(ROOT)}
SLOW = ("torch", "transformers", "pyarrow", "scipy")  # the game's options need numpy, 0.1 s
CPU_S = 5.0  # on a busy machine


def answer(*words: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """What Python answers to these words, and the CPU seconds that it took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, env=HERE
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_a_word_that_the_locale_lacks_is_named_with_the_way_out() -> None:
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    words = [sys.executable, "eval.py", "out=runs/ü"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env=HERE | plain)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "'out=runs/\\udcc3\\udcbc'" in done.stderr and "PYTHONUTF8=1" in done.stderr


# Words of a program or an installed command, its exit status, and what it says.
QUICK = [
    ("train.py --help", 0, "rollout.group_size"),
    ("train.py --help rollout", 0, "rollout.options.siblings"),
    ("train.py --help game --config tiny_planning", 0, "game.options.sites"),
    ("train.py --help policies.agent", 0, "policies.NAME.rest"),
    ("train.py --help policies.agent.optim", 0, "optim.schedule"),
    ("train.py --list", 0, "tiny_ppo"),
    ("train.py --version", 0, f"selfplay {__version__}\n"),
    ("train.py --config tiny rollout.group_sise=4", 2, "nearest is rollout.group_size"),
    ("/bin/selfplay-train --help", 0, "usage: selfplay-train "),
    ("/bin/selfplay-eval --confg", 2, "selfplay-eval: "),
]
ASKED = f"""
import contextlib, io, json, runpy, sys
from selfplay.preflight.command_line import evaluate, parse_train, train
import selfplay.apps.report.__main__
_, config = parse_train(["--config", "tiny", "steps=3"], "")
print(config.steps, [name for name in {SLOW} if name in sys.modules])
installed = {{"/bin/selfplay-train": train, "/bin/selfplay-eval": evaluate}}
for words in sys.argv[1:]:
    sys.argv, said, status = words.split(), io.StringIO(), 0
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            command = installed.get(sys.argv[0])
            command() if command else runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as ended:
            status = ended.code
    print(json.dumps([status or 0, said.getvalue(), "torch" in sys.modules]))
"""


def test_a_question_or_a_typo_is_answered_before_a_slow_library_is_imported() -> None:
    """Settings are loaded, and what draws a page is imported, without any of them."""
    done, cpu_s = answer("-c", ASKED, *(words for words, *_ in QUICK))
    loaded, *lines = done.stdout.splitlines()
    assert loaded == "3 []", done.stderr
    for (words, status, said), line in zip(QUICK, lines, strict=True):
        ended, shown, with_torch = json.loads(line)
        assert (ended, with_torch) == (status, False) and said in shown, words
    assert cpu_s < CPU_S


EVAL = ["runs/a", "--games", "generated"]


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
