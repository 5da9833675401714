"""The code sandbox: honest answers pass, wrong ones do not, and nothing gets out or too large."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

import train
from dialop.collab.grading import grade
from dialop.collab.kit import read, write
from dialop.collab.task import CollabInstance
from selfplay.config import Config, GameConfig
from selfplay.data.instances import read_file
from selfplay.errors import SettingsError
from selfplay.extras import sandbox
from selfplay.extras.published import instances_of
from selfplay.extras.sandbox import NoSandbox, check_tests, passes
from tests.helpers.bwrap import needs_bwrap

ROOT = Path(__file__).resolve().parents[2]
ASSERTS = "assert f(3) == 9\nassert f(-2) == 4"
CASE = """
import unittest
class Test(unittest.TestCase):
    def test_f(self):
        self.assertEqual(f(3), 9)
        self.assertEqual(f(-2), 4)
"""
ALL = "assert all(map(lambda x: f(x) == x * x, (1, 2, 3)))"
MATH = "assert math.isclose(f(3), 9)"
SQUARE = "def f(x): return x * x"
WRONG = "def f(x): return 0\n"

# Tests in their several forms, each with an answer that they are right to pass.
HONEST = {
    "asserts": (SQUARE, ASSERTS),
    "unittest": (SQUARE, CASE),
    "check": (SQUARE, "def check(g):\n    assert g(3) == 9"),
    "all": (SQUARE, ALL),
    "a library that is not imported": (f"import math\n{SQUARE}", MATH),
    "numpy": (
        "import numpy as np\ndef f(x): return np.asarray(x) ** 2",
        "assert np.allclose(f(np.arange(3.0)), [0, 1, 4])",
    ),
    "plain values": (
        "def f(x): return x",
        "for v in (None, True, -3, 2 ** 70, 10 ** 5000, 1.5, float('inf'), 'é\\n', b'\\0x',\n"
        "          (1, [2], {'a': {3}}), frozenset({1}), {1: {(2, 3): None}}, 1 + 2j, [], {}):\n"
        "    assert f(v) == v and type(f(v)) is type(v), v\n"
        "assert f(float('nan')) != f(float('nan'))",
    ),
    "derived classes and iterators": (
        "import collections\ndef f(x): return collections.Counter(x), (c for c in x), iter(x)",
        "assert f('aab') == ({'a': 2, 'b': 1}, ['a', 'a', 'b'], ['a', 'a', 'b'])",
    ),
    "exceptions": (
        "class Own(KeyError): pass\ndef f(x): raise Own('no', x) if x else SystemExit(3)",
        "try: f(1)\nexcept KeyError as e: assert e.args == ('no', 1)\nelse: assert False\n"
        "try: f(0)\nexcept SystemExit as e: assert e.code == 3",
    ),
    "a constant and keywords": (
        "LIMITS = [1, 2]\nseen = []\ndef f(x, *, y=0): seen.append(x); return len(seen) + y",
        "assert f(1) + f(1, y=min(LIMITS)) == 4",
    ),
    "threads, asyncio and files of its own": (
        "import asyncio, os, tempfile\nfrom concurrent.futures import ThreadPoolExecutor\n"
        "async def g(x): return x\ndef f(x):\n    with tempfile.TemporaryFile() as file:\n"
        "        file.write(b'x'); os.makedirs('a/b')\n    with ThreadPoolExecutor(2) as pool:\n"
        "        return list(pool.map(asyncio.run, [g(x)]))",
        "assert f(3) == [3]",
    ),
}
# Forms that cannot be graded. docs/code_grading.md lists them.
UNGRADED = {
    "class": ("class f:\n    def g(self): return 1", "assert f().g() == 1"),
    "argument changed in place": ("def f(x): x.sort()", "x = [2, 1]\nf(x)\nassert x == [1, 2]"),
    "function as an argument": ("def f(g): return g(1)", "assert f(lambda x: x) == 1"),
    "function as a result": ("def f(): return abs", "assert f()(-1) == 1"),
    "date": ("import datetime as d\ndef f(): return d.date(2020, 1, 2)", "assert f().year == 2020"),
}

ANY = """
class Any:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __contains__(self, other): return True
    def __bool__(self): return True
    __hash__ = object.__hash__
    __class__ = property(lambda self: int)
"""
LYING = """
class Lying({base}):
    def __eq__(s, o): return True
    def __len__(s): return 2
    __hash__ = object.__hash__
def f(x): return Lying()
"""
SEARCH = """
import re, sys
def f(x):
    frame = sys._getframe()
    while frame := frame.f_back:
        for text in [*frame.f_locals.values(), *frame.f_globals.values()]:
            if type(text) is str and (hit := re.search(rf'f\\({x}\\)(?: ==|,) (\\d+)', text)):
                return int(hit[1])
"""
DESCRIPTORS = """
import os
def f(x):
    for number in range(64):
        try: os.write(number, {data!r})
        except OSError: pass
    os._exit(0)
"""
# Wrong answers, each with tests that it must not pass.
FAKES = {
    **{f"wrong, {form}": (WRONG, HONEST[form][1]) for form in ("asserts", "unittest", "check")},
    "no code": ("def f(", ASSERTS),
    "equal object": (f"{ANY}\ndef f(x): return Any()", ASSERTS),
    "a mock": ("from unittest.mock import MagicMock\nf = MagicMock()", "assert f(3).equals(9)"),
    **{
        f"lying {base}": (LYING.format(base=base), f"assert f(3) == {wanted} and len(f(3)) == 2")
        for base, wanted in (("list", [1, 2]), ("dict", {1: 1, 2: 2}), ("str", "'ab'"))
    },
    "lying int": ("class I(int):\n    __eq__ = lambda s, o: True\ndef f(x): return I(0)", ASSERTS),
    "builtins patched": (f"{WRONG}import builtins\nbuiltins.all = lambda v: True", ALL),
    "assert patched": (f"{WRONG}import builtins\nbuiltins.AssertionError = int", ASSERTS),
    "unittest patched": (
        f"{WRONG}import unittest\nunittest.TestResult.wasSuccessful = lambda s: True",
        CASE,
    ),
    "library patched": (f"{WRONG}import math\nmath.isclose = lambda *a: True", MATH),
    "library shadowed": (f"{WRONG}class math:\n    isclose = lambda *a: True", MATH),
    "helper taken over": (f"{WRONG}same = lambda a, b: True", "assert same(f(3), 9)"),
    "tests' name taken over": (f"{WRONG}__name__ = 'x'\n__builtins__ = {{}}", ASSERTS),
    "skips": ("import unittest\ndef f(x): raise unittest.SkipTest", CASE),
    "ends the tests' loop": ("def f(x): raise StopIteration", ALL),
    "exits at once": ("import os\nos._exit(0)", ASSERTS),
    "exits at the end": (f"{WRONG}import atexit, os\natexit.register(os._exit, 0)", ASSERTS),
    "tests searched": (SEARCH, ASSERTS),
    "verdict printed": (f"{WRONG}print('ready\\npassed', flush=True)", ASSERTS),
    "verdict written": (DESCRIPTORS.format(data=b"passed\nready\npassed\n"), ASSERTS),
    **{
        f"forged line, {line[:24]!r}": (DESCRIPTORS.format(data=line), ASSERTS)
        for line in (
            *(b'[{"eval": ["9"]}, null, []]\n', b'[null, "KeyboardInterrupt", []]\n'),
            *(b"[" * 10**5 + b"\n", b"9" * 10**5),
        )
    },
    "argument emptied": ("def f(x): x.clear(); return x", "x = [2]\nassert f(x) == sorted(x)"),
}


@needs_bwrap
@pytest.mark.parametrize("name", list(HONEST))
def test_an_honest_answer_passes(name: str) -> None:
    answer, tests = HONEST[name]
    assert passes(answer, tests=tests, entry_point="f", limit_s=20)
    if name != "check":
        assert passes(answer, tests=tests, limit_s=20)


@needs_bwrap
@pytest.mark.parametrize("name", list(UNGRADED))
def test_a_form_that_cannot_be_graded_fails(name: str) -> None:
    answer, tests = UNGRADED[name]
    assert not passes(answer, tests=tests, entry_point="f")


@needs_bwrap
@pytest.mark.parametrize("name", list(FAKES))
def test_a_wrong_answer_does_not_pass(name: str) -> None:
    answer, tests = FAKES[name]
    assert not passes(answer, tests=tests, entry_point="f")


# What an answer must not reach. Each is true if it worked.
PROBES = {
    "reads a file": "open(SECRET).read() == 'KEPT'",
    "reads a folder": "'secret' in os.listdir(os.path.dirname(SECRET))",
    "reads the users": "'root' in open('/etc/passwd').read()",
    "reads the parent's environment": "len(open(f'/proc/{PARENT}/environ', 'rb').read()) > 0",
    "reads its own environment": "os.environ['PLANTED_KEY'] == 'PLANTED'",
    "reads the parent's memory": "open(f'/proc/{PARENT}/mem', 'rb').fileno() > 0",
    "writes a file": "open(SECRET + '.new', 'w').write('x') == 1",
    "removes a file": "os.remove(SECRET) is None",
    "writes shared memory": "c.shmget(0, 4096, 0o1600) >= 0",
    "writes memory without a limit": "c.memfd_create(b'm', 0) >= 0",
    "connects": "socket.create_connection(('127.0.0.1', PORT), 1).fileno() > 0",
    "connects without a network": "socket.socket(1).connect('\\0answer-' + str(PORT)) is None",
    "signals the parent": "os.kill(PARENT, 0) is None",
    "signals all": "os.path.exists('/proc/1') and c.kill(PARENT, 0) == 0",
    "changes the parent": "os.getpriority(os.PRIO_PROCESS, PARENT) is not None",
    "starts a process": "os.fork() or os._exit(0)",
    "starts a program": "subprocess.run(['true']).returncode == 0",
    "starts a program by C": "c.system(b'true') == 0",
    "makes a namespace": "c.unshare(0x10000000) == 0",
    "reads keys": "c.syscall(250, 0, -3, 1) > 0 or c.syscall(219, 0, -3, 1) > 0",
}


# What a host may refuse by itself, so that outside the sandbox it need not work.
REFUSED_ELSEWHERE = {"reads the parent's memory", "makes a namespace", "reads keys"}


@needs_bwrap
def test_an_answer_reaches_nothing_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One answer tries all probes and gives the names of those that worked: none. The control does
    the same without a sandbox."""
    monkeypatch.setenv("PLANTED_KEY", "PLANTED")
    secret = tmp_path / "secret"
    secret.write_text("KEPT")
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        port = tcp.getsockname()[1]
        unix.bind(f"\0answer-{port}")
        unix.listen()
        code = f"""
import ctypes, os, socket, subprocess
c = ctypes.CDLL(None)
SECRET, PARENT, PORT = {str(secret)!r}, {os.getpid()}, {port}
def f():
    worked = []
    for name, probe in {PROBES}.items():
        try:
            if eval(probe): worked.append(name)
        except Exception: pass
    return worked
"""
        assert passes(code, tests="assert f() == []", entry_point="f", limit_s=20)
        assert list(tmp_path.iterdir()) == [secret]
        control = f"{code}print(*f(), sep='\\n')"
        done = subprocess.run([sys.executable, "-c", control], capture_output=True, text=True)
    assert set(done.stdout.splitlines()) >= PROBES.keys() - REFUSED_ELSEWHERE


# Answers that take too much. Each ends in failure, the first ones when their time is over.
ENDLESS = {
    "sleep": "import time\ndef f(): time.sleep(10 ** 6)",
    "time while it is read": "while True: pass\ndef f(): return 0",
    "time with signals ignored": (
        "import signal\nfor n in (1, 2, 14, 15, 24): signal.signal(n, signal.SIG_IGN)\n"
        "def f():\n    while True: pass"
    ),
    "timers": (
        "import signal\nsignal.signal(signal.SIGALRM, lambda *a: print('x' * 99, flush=True))\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)\ndef f():\n    while True: pass"
    ),
    "output": "import os\ndef f():\n    while True: os.write(1, b'x' * 10 ** 6)",
    "an endless result": "import itertools\ndef f(): return itertools.count()",
}
GREEDY = {
    "memory": "def f(): return len(bytearray(2 ** 30))",
    "memory by mmap": "import mmap\ndef f(): return len(mmap.mmap(-1, 2 ** 30))",
    "a long result": "def f(): return 'x' * 10 ** 8",
    "a deep result": "def f():\n    a = []\n    for _ in range(10 ** 5): a = [a]\n    return a",
    "a fork bomb": "import os\ndef f():\n    while True: os.fork()",
    "threads that go on": (
        "import threading\ndef on():\n    while True: pass\n"
        "for _ in range(9): threading.Thread(target=on).start()\ndef f(): pass"
    ),
}
# Answers that write until they cannot. Each gives the bytes that it wrote.
WRITERS = {
    "files": "open(str(n), 'wb')",
    "unlinked files": "tempfile.TemporaryFile(dir='.', buffering=0)",
    "nameless files": "os.fdopen(os.open('.', os.O_TMPFILE | os.O_RDWR), 'wb', buffering=0)",
    "pipes": "os.fdopen((os.pipe2(os.O_NONBLOCK))[1], 'wb', buffering=0)",
    "sockets": "(lambda p: (p[0].setblocking(0), kept.append(p), p[0].makefile('wb', 0))[2])"
    "(socket.socketpair())",
}


@needs_bwrap
@pytest.mark.parametrize(
    "answers",
    [ENDLESS, *({name: code} for name, code in GREEDY.items())],
    ids=["endless", *GREEDY],
)
def test_an_answer_has_its_share_and_leaves_no_process(
    answers: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Those without an end side by side: each has half a second."""
    mark = f"{tmp_path}"
    monkeypatch.setattr(sandbox, "_OPTIONS", f"{sandbox._OPTIONS} --setenv MARK {mark}")

    def passed(code: str) -> bool:
        return passes(code, tests="assert f() is not None", entry_point="f", limit_s=0.5)

    with ThreadPoolExecutor(len(answers)) as pool:
        found = dict(zip(answers, pool.map(passed, answers.values()), strict=True))
    assert found == dict.fromkeys(answers, False)
    until_s = time.monotonic() + 60  # the kernel ends what is inside after bwrap
    while [pid for pid in Path("/proc").glob("[0-9]*") if mark in environment(pid)]:
        assert time.monotonic() < until_s
        time.sleep(0.05)


def environment(process: Path) -> str:
    """The environment of a process, "" for one that ended."""
    with suppress(OSError):
        return (process / "environ").read_bytes().decode(errors="replace")
    return ""


@needs_bwrap
@pytest.mark.parametrize("name", list(WRITERS))
def test_what_an_answer_writes_is_bounded(name: str) -> None:
    code = f"""
import os, socket, tempfile
kept = []
def f():
    total = 0
    for n in range(10 ** 6):
        try:
            kept.append({WRITERS[name]})
            for _ in range(100): total += kept[-1].write(bytes(2 ** 20)) or 0
        except OSError as error:
            if error.errno in (24, 28): return total  # too many files, no space
"""
    assert passes(code, tests="assert 0 < f() <= 64 * 2**20", entry_point="f", limit_s=30)


# Attempts to hold memory of the kernel. Each takes one piece and gives its size; none may give more
# than the limit in all.
KERNEL = {
    "timers": ("c.timer_create(1, event, ctypes.byref(ctypes.c_void_p())) == 0", 64),
    "pending signals": ("c.sigqueue(os.getpid(), 40, None) == 0", 64),
    "inotify": ("c.inotify_init() >= 0", 0),
    "requests of aio": ("c.syscall(206, 9, ctypes.byref(ctypes.c_void_p())) == 0", 0),
    "attributes of files": ("os.setxattr('.', f'user.{n}', bytes(60000)) is None", 0),
    "large socket buffers": ("pair().setsockopt(1, 7, 2 ** 30) is None", 0),
    "full sockets": ("fill(pair())", 32 * 2**20),
    "sockets in flight": ("fly(pair())", 32 * 2**20),
}


@needs_bwrap
@pytest.mark.parametrize("name", list(KERNEL))
def test_memory_of_the_kernel_is_bounded(name: str) -> None:
    piece, most = KERNEL[name]
    code = f"""
import array, ctypes, os, signal, socket, time
c, kept = ctypes.CDLL(None), []
event = (ctypes.c_byte * 80)(*bytes(12), 1)  # at its end nothing happens
signal.pthread_sigmask(0, [40])
def pair():
    kept.append(socket.socketpair())
    return kept[-1][0]
def fill(end):
    end.setblocking(False)
    total = 0
    while True:
        try: total += end.send(bytes(2 ** 16))
        except BlockingIOError: return total
def fly(end):
    total = fill(end)
    ends = [each.fileno() for each in kept.pop()]
    kept.append(socket.socketpair())
    kept[-1][0].sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', ends))])
    end.close()
    return total
def f():
    total, until = 0, time.monotonic() + 2
    for n in range(10 ** 5):
        try: total += {piece}
        except OSError: break
        if time.monotonic() > until: break
    return total
"""
    assert passes(code, tests=f"assert 0 <= f() <= {most}", entry_point="f", limit_s=20)


# Tests that check nothing or do not parse, with and without an entry point.
EMPTY = {
    "comments": "# f(1) is 2",
    "pytest-style": "def test_f():\n    assert f(1) == 2",
    "a guard": "if __name__ == '__main__':\n    assert f(1) == 2",
    "skipped": CASE.replace("    def", "    @unittest.skip('later')\n    def"),
    "any error": "try: f(1)\nexcept Exception: pass",
}


GOOD = [("row 0", ASSERTS, "f"), ("row 1", CASE, ""), ("row 2", MATH, "f")]


@needs_bwrap
def test_tests_that_check_something_are_taken() -> None:
    check_tests(GOOD)


@needs_bwrap
@pytest.mark.parametrize("entry_point", ["f", ""])
@pytest.mark.parametrize("name", list(EMPTY))
def test_tests_that_check_nothing_are_refused(name: str, entry_point: str) -> None:
    with pytest.raises(ValueError, match=r"row 3: its tests pass an answer that raises"):
        check_tests([*GOOD, ("row 3", EMPTY[name], entry_point)])


@needs_bwrap
def test_rows_are_checked_one_by_one_where_they_disturb_each_other() -> None:
    """A row that changes Python, one that ends its process and one that hangs accuse no other row,
    and hide none: the first bad row is told, and it is the last."""
    changes = "import math\nmath.isclose = lambda *a: True\nassert f(1)"
    rows = [changes, "assert math.isclose(1, 2)", "import os\nos._exit(0)", "while True: pass"]
    placed = [(f"row {i}", tests, "f") for i, tests in enumerate([*rows, "x = 1"])]
    with pytest.raises(ValueError, match="row 4: its tests pass"):
        check_tests(placed, limit_s=1)


@needs_bwrap
def test_a_bad_row_is_refused_with_its_place_and_grades_zero(tmp_path: Path) -> None:
    good = CollabInstance("a", "code", "Write.", "f gives 1.", "", "assert f() == 1", "f")
    bad = CollabInstance("b", "code", "Write.", "f gives 2.", "", "assert f(", "f")
    assert [grade(task, "def f(): return 1") for task in (good, bad)] == [1.0, 0.0]
    path = tmp_path / "tasks.parquet"
    write(path, [good])
    assert read(path) == [good]
    write(path, [good, bad])
    with pytest.raises(
        ValueError, match=r"tasks\.parquet row 1: its tests do not parse: .* line 1"
    ):
        read(path)
    row = {"prompt": "Write f.", "completion": "def f(): return 1", "test": "def test(): f()"}
    with pytest.raises(ValueError, match="row 7: its tests pass"):
        instances_of([("row 7", row)], name="set")


def test_nothing_is_graded_without_bubblewrap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run is refused in one line that names the package, and no code is executed."""
    task = CollabInstance("k", "code", "Write.", "f gives 1.", "", "assert f() == 1", "f")
    write(tmp_path / "tasks.parquet", [task])
    code = f"open({str(tmp_path / 'executed')!r}, 'w')\ndef f(): return 1"
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sandbox, "_WAITS_S", (0.0, 0.0))
    with pytest.raises(NoSandbox, match="apt-get install bubblewrap"):
        passes(code, tests="assert f() == 1")
    stand_in = tmp_path / "bwrap"
    stand_in.write_text("#!/bin/sh\necho 'bwrap: No permissions to create namespace' >&2\nexit 1\n")
    stand_in.chmod(0o755)
    with pytest.raises(SettingsError, match=r"data\.train: .*No permissions.*bubblewrap, 0\.8"):
        read_file(GameConfig(name="collab"), "data.train", str(tmp_path / "tasks.parquet"))
    with pytest.raises(NoSandbox):
        passes(code, tests="assert f() == 1")
    assert not (tmp_path / "executed").exists()


@needs_bwrap
def test_a_sandbox_that_starts_at_last_gives_the_grade(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that has no process or file left for a moment changes no grade."""
    monkeypatch.setattr(sandbox, "_WAITS_S", (0.0, 0.0))
    bwrap, tries = shutil.which("bwrap"), tmp_path / "tries"
    stand_in = tmp_path / "bwrap"
    stand_in.write_text(f"""#!/bin/sh
echo >> {tries}
[ $(wc -l < {tries}) -gt 4 ] && exec {bwrap} "$@"
echo 'bwrap: Resource temporarily unavailable' >&2; exit 1
""")
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert passes(SQUARE, tests=ASSERTS, entry_point="f")  # two sandboxes in each try
    tries.unlink()
    assert not passes(WRONG, tests=ASSERTS, entry_point="f")

    def full(*args: object, **kwargs: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", full)
    with pytest.raises(NoSandbox, match=r"did not start: .*temporarily unavailable"):
        passes(SQUARE, tests=ASSERTS, entry_point="f")


def test_a_run_whose_sandbox_no_longer_starts_ends_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def graded(*args: object) -> None:
        raise NoSandbox("no sandbox")

    monkeypatch.setattr(train, "PARSED", (SimpleNamespace(dry_run=False), Config()))
    monkeypatch.setattr(train, "start", graded)
    assert train.main() == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("train.py: no sandbox; ") and "save" in line


@needs_bwrap
def test_packages_are_found_if_a_symlink_leads_to_python(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(Path(sys.prefix).parent)
    python = tmp_path / "link" / Path(sys.prefix).name / "bin" / "python"
    script = (
        "from selfplay.extras.sandbox import passes\n"
        "assert passes('def f(): return 1', tests='import numpy\\nassert f() == 1')"
    )
    subprocess.run([python, "-c", script], check=True, cwd=ROOT)


@needs_bwrap
def test_a_user_without_rights_has_the_sandbox() -> None:
    """Root runs this as the user nobody, who also gets a limit of threads. For any other user all
    tests here show it."""
    if os.getuid() != 0 or not Path("/usr/bin/python3").exists():
        pytest.skip("needs root and a Python that the user nobody can read")
    script = """
        from selfplay.extras.sandbox import passes
        good = passes("def f(): return 1", tests="assert f() == 1")
        bad = passes("def f(): return open('/etc/passwd').read()", tests="assert f()")
        many = "import threading, time\\ndef f():\\n"
        many += "    for _ in range(99): threading.Thread(target=time.sleep, args=(3,)).start()"
        print(good, bad, passes(many, tests="f()"))
    """
    with tempfile.TemporaryDirectory(prefix="nobody-") as place:
        for package in ("dialop", "selfplay"):
            shutil.copytree(ROOT / package, Path(place) / package)
        Path(place).chmod(0o755)
        done = subprocess.run(
            ["/usr/bin/python3", "-B", "-c", textwrap.dedent(script)],
            cwd=place,
            user=65534,
            group=65534,
            extra_groups=[],
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": place},
            capture_output=True,
            text=True,
            check=False,
        )
    assert (done.stdout, done.stderr) == ("True False False\n", "")
