"""The code sandbox: honest answers pass, wrong ones do not, and the wall holds.

The abuses are in sandbox_abuses.py. These tests fail on a machine where no wall is available.
"""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dialop.collab import sandbox
from dialop.collab.sandbox import NoWall, available_wall, passes
from dialop.collab.store import write_instances
from dialop.collab.task import CollabInstance
from dialop.kit import load_kit
from selfplay.config import GameConfig
from selfplay.data.instances import read_instances
from tests.helpers.sandbox_abuses import FAKES, HONEST, PROBES
from tests.helpers.shared_work import slow_except

ROOT = Path(__file__).resolve().parents[2]
KINDS = sorted({name.partition(":")[0] for name in PROBES})
# One fake of each way to pass; the slow tests try them all.
FAST = (
    *("wrong", "wrong, unittest", "wrong, check", "no code", "equal object", "equal integer"),
    *("exec replaced", "all shadowed", "isclose patched", "assertEqual patched", "skips"),
    *("exits at once", "tests read from frames", "verdict written by its name"),
    *("module in the working folder", "pickle that equals all", "forged message of a class"),
)
ENTRIES = ("square", "both", "ordered", "apply", "saved")
# Left out of the control without a wall: what a host may refuse by itself (by its rules on tracing,
# or to a user with few rights), and what cannot be detected without a wall.
REFUSED_ELSEWHERE = {
    "reads: the parent's keys in its own",
    "reads: the parent's memory",
    "reads: the parent's memory by ptrace",
    "reads: the grader's memory",
    "writes: an attribute",
    "writes: Python's library",
    "takes: a namespace of its own",
}


def entry_of(tests: str) -> str:
    """The name of the function that these tests test."""
    return next((name for name in ENTRIES if name in tests), "square")


@pytest.fixture(scope="module")
def walls() -> list[str]:
    """The available walls, the strongest first. Fails on a machine without one."""
    found = []
    for kind in sandbox.WALLS:
        try:
            found.append(available_wall(kind))
        except NoWall:
            continue
    assert found, "no wall stands on this machine: see docs/collab.md for what it needs"
    return found


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which answers' folders are made."""
    (tmp_path / "answers").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "answers"))
    return tmp_path / "answers"


class Outside:
    """The things outside the wall that a probe tries to reach."""

    def __init__(self, folder: Path) -> None:
        self.secret, self.folder = folder / "kept" / "secret.txt", folder / "outside"
        self.tcp = socket.create_server(("127.0.0.1", 0))
        self.port = self.tcp.getsockname()[1]
        self.files = socket.socket(socket.AF_UNIX)
        self.files.bind(str(folder / "s"))
        self.files.listen()
        self.names = socket.socket(socket.AF_UNIX)
        self.names.bind(f"\0answer-{self.port}")
        self.names.listen()
        self.address = str(folder / "s")

    def renew(self) -> None:
        """Restore the secret and the folder."""
        for folder in (self.secret.parent, self.folder):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        self.secret.write_text("KEPT")
        self.secret.chmod(0o600)
        os.utime(self.secret, (0, 0))

    def untouched(self) -> bool:
        """Whether both are unchanged."""
        seen = self.secret.stat()
        return (
            self.secret.read_text() == "KEPT"
            and (seen.st_mode & 0o777, seen.st_mtime) == (0o600, 0)
            and not any(self.folder.iterdir())
        )

    def code(self, probe: str) -> str:
        """A probe's code with the values that it needs."""
        known = {
            "SECRET": str(self.secret),
            "OUTSIDE": str(self.folder),
            "PARENT": os.getpid(),
            "PORT": self.port,
            "ADDRESS": self.address,
        }
        return "\n".join(f"{name} = {value!r}" for name, value in known.items()) + "\n" + probe


@pytest.fixture(scope="module")
def outside() -> Iterator[Outside]:
    # Not pytest's folder, whose path is too long for the address of a socket.
    folder = Path(tempfile.mkdtemp(prefix="outside-"))
    os.environ["PLANTED_KEY"] = "PLANTED"
    found = Outside(folder)
    yield found
    for listener in (found.tcp, found.files, found.names):
        listener.close()
    del os.environ["PLANTED_KEY"]
    shutil.rmtree(folder)


def through(outside: Outside, name: str, *, wall: str) -> bool:
    """Whether the probe reports success."""
    outside.renew()
    code = outside.code(PROBES[name])
    return passes(code, tests="assert through() is True", entry_point="through", wall=wall)


def hold_all(outside: Outside, kind: str, *, wall: str) -> None:
    """One answer tries all probes of this kind and tells which of them got through: none."""
    outside.renew()
    code, names = "", [name for name in PROBES if name.startswith(f"{kind}: ")]
    for number, name in enumerate(names):
        code += PROBES[name].replace("def through()", f"def probe_{number}()")
    code += f"""
def through():
    got = []
    for number in range({len(names)}):
        try:
            if globals()[f"probe_{{number}}"]() is True: got.append(number)
        except BaseException: pass
    return got
"""
    tests, entry = "assert through() == []", "through"
    held = passes(outside.code(code), tests=tests, entry_point=entry, wall=wall, limit_s=30)
    assert held, (wall, [name for name in names if through(outside, name, wall=wall)])
    assert outside.untouched()


@pytest.mark.parametrize("tests", list(HONEST))
def test_an_honest_answer_passes(tests: str) -> None:
    """The control of the next test: each form of tests can pass."""
    answer, entry = HONEST[tests]
    assert passes(answer, tests=tests, entry_point=entry)


@pytest.mark.parametrize("name", slow_except(FAKES, *FAST))
def test_a_wrong_answer_does_not_pass(name: str) -> None:
    answer, tests = FAKES[name]
    assert not passes(answer, tests=tests, entry_point=entry_of(tests))


@pytest.mark.parametrize("kind", KINDS)
def test_the_wall_holds(kind: str, outside: Outside, walls: list[str]) -> None:
    hold_all(outside, kind, wall=walls[0])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_each_other_wall_holds(kind: str, outside: Outside, walls: list[str]) -> None:
    for wall in walls[1:]:
        hold_all(outside, kind, wall=wall)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PROBES if name not in REFUSED_ELSEWHERE])
def test_a_probe_gets_through_without_a_wall(name: str, outside: Outside) -> None:
    """The control of the two tests above: without a wall, the probes succeed on this machine."""
    assert through(outside, name, wall="none")


# Answers that exceed a limit, and the seconds that they get.
GREEDY = {
    "sleep": ("import time\ndef f(): time.sleep(99)", 0.5),
    "time in one call": ("def f(): return 7 ** 10 ** 9", 0.5),
    "time while it is read": ("while True: pass\ndef f(): return 0", 0.5),
    "time, with signals ignored": (
        "import signal, time\nfor n in (1, 2, 14, 15, 24): signal.signal(n, signal.SIG_IGN)\n"
        "def f():\n    while True: pass",
        0.5,
    ),
    "memory": ("def f(): return len(bytearray(2 ** 31)) > 0", 5.0),
    "memory by mmap": ("import mmap\ndef f(): return len(mmap.mmap(-1, 2 ** 31)) > 0", 5.0),
    "memory in small parts": (
        "def f():\n    a = []\n    while True: a.append(bytes(2 ** 20))",
        5.0,
    ),
    "endless output": ("def f():\n    while True: print('x' * 10 ** 6)", 0.5),
    "endless output to a descriptor": (
        "import os\ndef f():\n    while True: os.write(1, b'x' * 10 ** 6)",
        0.5,
    ),
    "a long result": ("def f(): return 'x' * 10 ** 8", 5.0),
    "a deep result": (
        "def f():\n    a = []\n    for _ in range(10 ** 5): a = [a]\n    return a",
        5.0,
    ),
    "a result that holds itself": ("def f():\n    a = []\n    a.append(a)\n    return a", 5.0),
    "an endless iterator": ("import itertools\ndef f(): return itertools.count()", 0.5),
    "deep recursion": ("def f(): return f() + 1", 5.0),
    "640 MB of files": (
        "def f():\n    for n in range(40):\n"
        "        with open(str(n), 'wb') as file: file.write(bytes(16 * 2 ** 20))\n    return True",
        10.0,
    ),
    "a large file": (
        "def f():\n    with open('a', 'wb') as file: file.write(bytes(17 * 2 ** 20))\n"
        "    return True",
        5.0,
    ),
    "many files": (
        "def f():\n    for n in range(10 ** 5): open(str(n), 'w').close()\n    return True",
        10.0,
    ),
    "a deep folder": (
        "import os\ndef f():\n    for n in range(10 ** 4):\n"
        "        os.mkdir('a'); os.chdir('a')\n    return True",
        10.0,
    ),
    "open files": ("def f(): return len([open('a', 'w') for _ in range(1000)])", 5.0),
    "a thread that goes on": (
        "import threading\ndef on():\n    while True: pass\n"
        "threading.Thread(target=on).start()\ndef f(): return None",
        5.0,
    ),
}


def takes_too_much(name: str, wall: str, folders: Path) -> None:
    code, limit_s = GREEDY[name]
    # A test that exhausts an iterator, and passes for any value except None.
    tests = "got = f()\nassert got is not None\nif hasattr(got, '__next__'): list(got)"
    started = time.perf_counter()
    assert not passes(code, tests=tests, entry_point="f", limit_s=limit_s, wall=wall)
    assert time.perf_counter() - started < limit_s + 30
    assert not any(folders.iterdir())
    assert processes_in(folders) == []


def processes_in(folders: Path) -> list[str]:
    """The processes whose TMPDIR lies in this folder."""
    marked = f"TMPDIR={folders}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if marked in (entry / "environ").read_bytes():
                    found.append(entry.name)
            except OSError:  # ended, or owned by another user
                continue
    return found


@pytest.mark.parametrize("name", list(GREEDY))
def test_an_answer_has_its_share_and_leaves_nothing(
    name: str, folders: Path, walls: list[str]
) -> None:
    takes_too_much(name, walls[0], folders)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(GREEDY))
def test_an_answer_has_its_share_behind_each_other_wall(
    name: str, folders: Path, walls: list[str]
) -> None:
    for wall in walls[1:]:
        takes_too_much(name, wall, folders)


def test_a_grading_that_is_cut_off_leaves_no_process(folders: Path, walls: list[str]) -> None:
    """The answer tries to outlive its parent. No process of it is left after the time limit."""
    code = (
        "import ctypes, os, time\nc = ctypes.CDLL(None)\nc.prctl(1, 0, 0, 0, 0)\n"
        "for call in (c.setsid, lambda: c.setpgid(0, 0), c.fork): call()\ntime.sleep(60)"
    )
    for wall in walls:
        assert not passes(code, tests="x = 1", limit_s=0.5, wall=wall)
        assert processes_in(folders) == [] and not any(folders.iterdir())


def test_plain_values_cross_as_they_are() -> None:
    """Results and arguments arrive with the same value and type."""
    values = (
        "None, True, -3, 2 ** 70, 1.5, float('inf'), 'é\\udc80', b'\\0x', (1, [2], {'a': {3}}), "
        "frozenset({1}), {1: {(2, 3): None}}, 1 + 2j, range(1, 9, 2), Decimal('1.20'), "
        "Fraction(1, 3), datetime(2020, 1, 2, 3), date(2020, 1, 2), timedelta(1, 2, 3), "
        "Counter('aab'), OrderedDict(a=1), deque([1, 2], 3), bytearray(b'x')"
    )
    imports = (
        "from collections import *\nfrom datetime import *\nfrom decimal import Decimal\n"
        "from fractions import Fraction\n"
    )
    tests = (
        f"{imports}for value in ({values}):\n    got = same(value)\n"
        "    assert got == value and type(got) is type(value), value\n"
        "    if type(value) is deque: assert got.maxlen == 3\n"
        "nan = same(float('nan'))\nassert nan != nan\n"
    )
    assert passes("def same(x): return x", tests=tests, entry_point="same")


def test_arrays_cross_as_arrays() -> None:
    tests = (
        "import numpy as np\n"
        "for value in (np.arange(6).reshape(2, 3), np.array(['a', 'bc']), np.zeros((0, 2)),\n"
        "              np.array([1, None, 'x'], dtype=object), np.array([1.5, np.nan], '>f4')):\n"
        "    got = same(value)\n"
        "    assert got.dtype == value.dtype and got.shape == value.shape\n"
        "    np.testing.assert_array_equal(got, value)\n"
        "assert type(same(np.float32(2))) is np.float32 and same(np.int64(2)) == 2\n"
    )
    assert passes("def same(x): return x", tests=tests, entry_point="same", limit_s=20)


@pytest.mark.parametrize("to", ["the folder", "a folder above it", "another link"])
def test_packages_are_found_if_a_symlink_leads_to_python(tmp_path: Path, to: str) -> None:
    link, first, prefix = tmp_path / "link", tmp_path / "first", Path(sys.prefix)
    first.symlink_to(prefix)
    link.symlink_to({"the folder": prefix, "another link": first}.get(to, prefix.parent))
    python = (link / prefix.name if to == "a folder above it" else link) / "bin" / "python"
    script = (
        "from dialop.collab.sandbox import passes\n"
        "tests = 'import numpy as np\\nassert np.allclose(square(3), 9)'\n"
        "assert passes('def square(x): return x * x', tests=tests, entry_point='square')\n"
    )
    subprocess.run([python, "-c", script], check=True, cwd=ROOT)


def test_frames_cross_as_frames() -> None:
    pytest.importorskip("pandas")
    tests = (
        "import pandas as pd\n"
        "frame = pd.DataFrame({'a': [1, 2], 'b': ['x', None], 'c': [1.5, None],\n"
        "    'd': pd.to_datetime(['2020-01-01', '2020-01-02'])}, index=['p', 'q'])\n"
        "pd.testing.assert_frame_equal(same(frame), frame)\n"
        "pd.testing.assert_series_equal(same(frame['b']), frame['b'])\n"
        "sums = frame[['a', 'c']].groupby('a').sum()\n"
        "pd.testing.assert_frame_equal(same(sums), sums)\n"
        "kinds = pd.Series(['u', 'v', 'u'], dtype='category', name='kind')\n"
        "pd.testing.assert_series_equal(same(kinds), kinds)\n"
        "assert same(pd.Timestamp('2020-01-01')) == pd.Timestamp('2020-01-01')\n"
    )
    assert passes(
        "def same(x): return x", tests=tests, entry_point="same", limit_s=60, memory_bytes=4 * 2**30
    )


# Tests in the forms of published data sets, each with an answer that passes.
FORMS = {
    "an exception": (
        "import json\ndef f(text): return json.loads(text)",
        "import json\nfor wrong, kind in (('{', json.JSONDecodeError), (3, TypeError)):\n"
        "    try: f(wrong)\n    except kind: continue\n    assert False",
    ),
    "an exception of the answer's own": (
        "class Wrong(ValueError): pass\ndef f(x): raise Wrong('no', x)",
        "try: f(1)\nexcept ValueError as error: assert error.args == ('no', 1)\nelse: assert False",
    ),
    "a generator": (
        "def f(n):\n    for i in range(n): yield i * i",
        "g = f(3)\nassert next(g) == 0 and list(g) == [1, 4]",
    ),
    "a closure": ("def f(n):\n    return lambda x: x + n", "assert f(3)(4) == 7"),
    "a function of the tests": (
        "def f(g, xs): return sorted(xs, key=g)",
        "seen = []\ndef key(x):\n    seen.append(x)\n    return -x\n"
        "assert f(key, [1, 3, 2]) == [3, 2, 1] and len(seen) == 3\n"
        "assert f(abs, [-2, 1]) == [1, -2]",
    ),
    "printed text": (
        "def f(x): print('got', x)",
        "import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()) as out: f(3)\n"
        "assert out.getvalue() == 'got 3\\n'",
    ),
    "a seed": (
        "import random\ndef f(): return random.random()",
        "import random\nrandom.seed(5)\nwanted = random.random()\nfor _ in range(2):\n"
        "    random.seed(5)\n    assert f() == wanted",
    ),
    "a file for the answer": (
        "def f(path): return open(path).read().upper()",
        "import os, tempfile\nfolder = tempfile.mkdtemp()\npath = os.path.join(folder, 'a')\n"
        "with open(path, 'w') as file: file.write('word')\nassert f(path) == 'WORD'",
    ),
    "a file of the answer": (
        "import os\ndef f():\n    os.makedirs('b/c')\n    open('b/c/d', 'w').write('x')",
        "f()\nassert open('b/c/d').read() == 'x'",
    ),
    "a named tuple": (
        "from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f(): return P(1, 2)",
        "assert f() == (1, 2) and f().y == 2",
    ),
    "a constant": ("LIMITS = [1, 2]\ndef f(): return LIMITS[0]", "assert f() == min(LIMITS)"),
    "a recursion of its own": (
        "def f(n): return n if n < 2 else f(n - 1) + f(n - 2)",
        "assert f(15) == 610",
    ),
    "threads and asyncio": (
        "import asyncio\nfrom concurrent.futures import ThreadPoolExecutor\n"
        "async def g(x): return x\n"
        "def f(x):\n    with ThreadPoolExecutor(2) as pool:\n"
        "        return list(pool.map(asyncio.run, [g(x)]))",
        "assert f(3) == [3]",
    ),
    "a copied file": (
        "import shutil\ndef f():\n    open('a', 'w').write('x')\n    shutil.copy2('a', 'b')",
        "f()\nassert open('b').read() == 'x'",
    ),
}


@pytest.mark.parametrize("name", list(FORMS))
def test_a_form_of_published_tests_is_gradable(name: str, walls: list[str]) -> None:
    answer, tests = FORMS[name]
    assert passes(answer, tests=tests, entry_point="f", wall=walls[-1], limit_s=20)


@pytest.mark.parametrize(
    ("answer", "tests"),
    [
        ("class f:\n    def g(self): return 1", "assert f().g() == 1"),
        ("def f(xs): xs.sort()", "xs = [2, 1]\nf(xs)\nassert xs == [1, 2]"),
        ("import time\ndef f(): return time.time()",
         "from unittest.mock import patch\nwith patch('time.time', return_value=1.0):\n"
         "    assert f() == 1.0"),
        ("def f(): 'says so'", "assert f.__doc__ == 'says so'"),
    ],
    ids=["class", "argument changed in place", "mock", "documentation"],
)  # fmt: skip
def test_a_form_that_is_not_gradable_fails(answer: str, tests: str) -> None:
    """docs/collab.md lists these forms; it must change when one of them passes."""
    assert not passes(answer, tests=tests, entry_point="f")


def test_no_wall_is_an_error_and_not_a_grade(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(code: str, *, wall: str, **_: object) -> bool:
        raise NoWall(f"{wall}: not here")

    monkeypatch.setattr(sandbox, "_run", none)
    available_wall.cache_clear()
    try:
        with pytest.raises(NoWall, match=r"game\.options\.code_wall.*libseccomp"):
            available_wall("auto")
        with pytest.raises(NoWall, match="landlock"):
            available_wall("landlock")
        assert available_wall("none") == "none"
        with pytest.raises(NoWall, match="auto"):
            available_wall("paper")
    finally:
        available_wall.cache_clear()


def test_the_setting_reaches_the_grade_and_the_wall_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    task = CollabInstance("k", "code", "Write.", "f gives 1.", "", "assert f() == 1", "f")
    path = tmp_path / "tasks.parquet"
    write_instances(path, [task])
    game = GameConfig(name="collab", options=load_kit("collab").Options(code_wall="none"))
    kit = game.kit
    assert read_instances(path, game) == [task]
    assert "none" in capfd.readouterr().err
    seen = []
    monkeypatch.setattr(sandbox, "available_wall", lambda wall: seen.append(wall) or "none")
    played = kit.new_game(task, game.rules())
    played.step(1, "[answer] def f(): return 1")
    assert played.outcome().score == 1.0 and seen == ["none"]


@pytest.mark.slow
def test_a_user_without_rights_has_a_wall(tmp_path: Path) -> None:
    """Root runs this as the user nobody. For any other user, all tests here show it."""
    if os.getuid() != 0:
        assert available_wall("auto") in sandbox.WALLS
        return
    # A Python that the user nobody can read, and a copy of the code.
    python = next((p for p in ("/usr/bin/python3", sys.executable) if Path(p).exists()), "")
    place = Path(tempfile.mkdtemp(prefix="nobody-"))
    try:
        shutil.copytree(ROOT / "dialop", place / "dialop")
        place.chmod(0o755)
        script = (
            "from dialop.collab.sandbox import WALLS, passes\n"
            "for wall in WALLS:\n"
            "    good = passes('def f(): return 1', tests='assert f() == 1', wall=wall)\n"
            "    bad = passes('def f(): return open(\"/etc/passwd\").read()', tests='assert f()', "
            "wall=wall)\n"
            "    print(wall, good, bad)\n"
            "many = 'import threading, time\\ndef f():\\n    threading.stack_size(2 ** 16)\\n' "
            "'    for _ in range(99): threading.Thread(target=time.sleep, args=(3,)).start()\\n' "
            "'    return True'\n"
            "print('threads', passes(many, tests='assert f()', wall='namespaces'))\n"
        )
        done = subprocess.run(
            [python, "-B", "-c", script],
            cwd=place,
            user=65534,
            group=65534,
            extra_groups=[],
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(place)},
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        shutil.rmtree(place)
    assert done.returncode == 0, done.stderr
    found = done.stdout.split("\n")
    assert found[:2] == [f"{wall} True False" for wall in sandbox.WALLS]
    assert found[2] == "threads False"  # limited to 64, which the kernel does not enforce for root
