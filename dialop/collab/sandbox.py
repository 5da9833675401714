"""Where a code answer meets its tests: a Python process of its own, with limits.

Seconds end in `_s`. The process (`sandbox_child.py`) has limits on CPU and wall-clock time, memory
and file size, an empty environment and an empty working folder, and refuses network, further
processes and files outside that folder. That stops accidents and cheap tricks, not an attacker who
breaks the interpreter: run untrusted models in a container as well.
"""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path

LIMIT_S = 5.0
MEMORY_BYTES = 2**30
_CHILD = Path(__file__).with_name("sandbox_child.py")


def passes(
    code: str,
    *,
    tests: str,
    entry_point: str = "",
    limit_s: float = LIMIT_S,
    memory_bytes: int = MEMORY_BYTES,
) -> bool:
    """Whether the tests pass after the code, both in one namespace.

    Tests are statements that raise (asserts), unittest cases, or a function `check` that takes what
    `entry_point` names. A run that leaves no verdict (time, memory, a crash, an exit) has failed.
    """
    # The verdict is the file of this name; a seeded name could be learnt by the one being graded.
    verdict = secrets.token_hex(16)
    job = {
        "code": code,
        "tests": tests,
        "entry_point": entry_point,
        "verdict": verdict,
        "limit_s": limit_s,
        "memory_bytes": memory_bytes,
    }
    with tempfile.TemporaryDirectory(prefix="answer-") as folder:
        try:
            subprocess.run(
                [sys.executable, "-I", "-B", str(_CHILD)],
                input=json.dumps(job).encode(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env={"TMPDIR": folder, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                timeout=limit_s,
                start_new_session=True,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False
        return (Path(folder) / verdict).exists()
