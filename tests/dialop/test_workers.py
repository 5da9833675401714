"""Started processes do not import the program that started them."""

import os
import subprocess
import sys
from pathlib import Path
from threading import Thread

import dialop.workers
from dialop.workers import without_main
from tests.helpers.processes import HANG_S

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from dialop.workers import Spawn

print("imported as", __name__, flush=True)
if __name__ == "__main__":
    with ProcessPoolExecutor(1, Spawn()) as pool:
        print(*pool.map(abs, [-1, -2]), __spec__ and __spec__.name, Path(__file__).name)
"""


def test_workers_leave_the_main_module_alone_whether_a_file_or_a_module(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    for words, name in ((["program.py"], "None"), (["-m", "program"], "program")):
        done = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True,
            text=True, check=True, timeout=HANG_S,
        )  # fmt: skip
        assert done.stdout.splitlines() == ["imported as __main__", f"1 2 {name} program.py"]


def test_blocks_that_overlap_restore_the_main_module_when_the_last_one_ends() -> None:
    main = vars(sys.modules["__main__"])
    before = main["__spec__"], main.get("__file__")
    first, second = without_main(), without_main()
    first.__enter__()
    thread = Thread(target=second.__enter__)
    thread.start()
    thread.join()
    first.__exit__(None, None, None)
    assert main["__spec__"] is None and "__file__" not in main
    second.__exit__(None, None, None)
    assert (main["__spec__"], main.get("__file__")) == before
    assert not dialop.workers._hidden
