"""What needs no model answers at once: `--help`, `--list`, a typo, and loading the settings."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SLOW = ("torch", "transformers", "pyarrow", "scipy")  # the game's options need numpy, 0.1 s
CPU_S = 5.0  # on a busy machine; an idle one takes 0.4 s, and importing torch alone more than 2 s


def answer(*words: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """What Python answers to these words, and the CPU seconds that it took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_settings_are_loaded_without_a_slow_library() -> None:
    code = f"""
import sys
from selfplay.preflight.command_line import parse_train
_, config = parse_train(["--config", "tiny", "steps=3"], "")
print(config.steps, [name for name in {SLOW} if name in sys.modules])
"""
    done, cpu_s = answer("-c", code)
    assert (done.stdout, done.stderr) == ("3 []\n", "")
    assert cpu_s < CPU_S


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ("--help", 0, "rollout.group_size"),
        ("--help rollout", 0, "rollout.branch.siblings"),
        ("--help game --config tiny_planning", 0, "game.options.sites"),
        ("--list", 0, "tiny_ppo"),
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
