"""Answers that would earn a grade, a secret or a side effect that is not theirs.

`FAKES` are wrong answers, each with tests that it must not pass. `PROBES` define `through()`, which
is true where the abuse worked. A probe knows, as globals: SECRET, a file with the word KEPT;
OUTSIDE, a folder; PARENT, the process that grades; PORT and ADDRESS, where that process listens.
"""

# The form of tests, by name, and an answer that they are right to pass.
ASSERTS = "assert square(3) == 9\nassert square(-2) == 4"
CASE = """
import unittest
class Test(unittest.TestCase):
    def test_square(self):
        self.assertEqual(square(3), 9)
        self.assertEqual(square(-2), 4)
"""
CHECK = "def check(f):\n    assert f(3) == 9\n    assert f(-2) == 4"
TYPED = "assert isinstance(square(3), int) and square(3) == 9"
CLOSE = "import math\nassert math.isclose(square(3), 9) and math.isclose(square(-2), 4)"
CLOSE_NAME = "from math import isclose\nassert isclose(square(3), 9) and isclose(square(-2), 4)"
CLOSE_LEFT_OUT = "assert math.isclose(square(3), 9)"
NUMPY = (
    "import numpy as np\nnp.testing.assert_allclose(square(3), 9)\nassert np.allclose(square(3), 9)"
)
NUMPY_LEFT_OUT = "assert np.allclose(square(3), 9)"
NEAR = "assert abs(square(3) - 9) < 1e-6"
ALL = "assert all(square(x) == x * x for x in (1, 2, 3))"
ALL_MAP = "assert all(map(lambda x: square(x) == x * x, (1, 2, 3)))"
HELPED = "def same(a, b):\n    return a == b\nassert same(square(3), 9)"
JSON = "import json\nassert json.loads(json.dumps(square(3))) == 9"
SIZES = "assert len(both(9)) == 2 and sorted(both(9)) == [-3, 3]"
MEMBER = """
import unittest
class Test(unittest.TestCase):
    def test_both(self):
        self.assertIn(3, both(9))
        self.assertIn(-3, both(9))
"""
METHOD = "assert square(3).equals(9)"
CONTEXT = "with square(3) as got:\n    assert got == 9"
ATTRIBUTE = "assert square(3).value == 9"
SORTED = "xs = [3, 1, 2]\ngot = ordered(xs)\nassert got == sorted(xs) and len(got) == 3"
APPLIED = "assert apply(lambda x: x * 7 + 1, 3) == 22"
PICKLE = "import pickle\nassert pickle.load(open(saved(3), 'rb')) == {'square': 9}"
RAISES = """
import unittest
class Test(unittest.TestCase):
    def test_square(self):
        with self.assertRaises(TypeError):
            square("a")
        self.assertEqual(square(3), 9)
"""

SQUARE = "def square(x):\n    return x * x"
BOTH = "def both(x):\n    return [-round(x ** 0.5), round(x ** 0.5)]"
HONEST: dict[str, tuple[str, str]] = {
    tests: (answer, entry)
    for answer, entry, forms in (
        (SQUARE, "square", (ASSERTS, CASE, CHECK, TYPED, CLOSE, CLOSE_NAME, CLOSE_LEFT_OUT)),
        (SQUARE, "square", (NUMPY, NUMPY_LEFT_OUT, NEAR, ALL, ALL_MAP, HELPED, JSON)),
        ("def square(x):\n    return x ** 2 + 0", "square", (RAISES,)),
        (BOTH, "both", (SIZES, MEMBER)),
        ("def ordered(xs):\n    return sorted(xs)", "ordered", (SORTED,)),
        ("def apply(f, x):\n    return f(x)", "apply", (APPLIED,)),
        (
            "import pickle\ndef saved(x):\n    with open('a.pickle', 'wb') as file:\n"
            "        pickle.dump({'square': x * x}, file)\n    return 'a.pickle'",
            "saved",
            (PICKLE,),
        ),
    )
    for tests in forms
}

_ANY = """
class Any:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __hash__ = object.__hash__
"""
_WRONG = "def square(x):\n    return 0\n"


def _patched(target: str, value: str, *, imports: str = "builtins") -> str:
    return f"{_WRONG}import {imports}\n{target} = {value}\n"


_FRAMES = """
import re, sys
def square(x):
    frame = sys._getframe()
    while frame:
        for value in list(frame.f_locals.values()) + list(frame.f_globals.values()):
            texts = value.values() if isinstance(value, dict) else [value]
            for text in list(texts):
                if isinstance(text, str) and 'square' in text:
                    found = re.search(r'square\\(' + str(x) + r'\\)(?: ==|,) (\\d+)', text)
                    if found and int(found[1]):
                        return int(found[1])
        frame = frame.f_back
    return 0
"""
_COLLECTOR = """
import gc, re
def square(x):
    for value in gc.get_objects():
        if isinstance(value, dict):
            for text in list(value.values()):
                if isinstance(text, str) and 'square' in text:
                    found = re.search(r'square\\(' + str(x) + r'\\) == (\\d+)', text)
                    if found: return int(found[1])
    return 0
"""
_CONSTANTS = """
import sys
def square(x):
    frame = sys._getframe(1)
    numbers = [c for c in frame.f_code.co_consts if isinstance(c, int)]
    return numbers[numbers.index(x) + 1] if x in numbers else numbers[-1]
"""
_VERDICT = """
import os, pathlib, sys
def square(x):
    frame = sys._getframe()
    while frame:
        name = frame.f_locals.get('verdict')
        if isinstance(name, str): pathlib.Path(name).touch()
        if isinstance(name, int): os.write(name, b'passed')
        frame = frame.f_back
    os._exit(0)
"""
_DESCRIPTORS = """
import os
def square(x):
    for number in range(256):
        try: os.write(number, b'passed')
        except OSError: pass
    os._exit(0)
"""
_OPEN_TESTS = """
import os, re
def square(x):
    for number in range(256):
        try: text = os.pread(number, 100000, 0).decode()
        except (OSError, ValueError): continue
        found = re.search(r'square\\(' + str(x) + r'\\) == (\\d+)', text)
        if found: return int(found[1])
    return 0
"""
_TRACE = """
import sys
def trace(frame, event, arg):
    if frame.f_code.co_filename == 'tests.py': frame.f_lineno = 2
    return trace
sys.settrace(trace)
frame = sys._getframe()
while frame:
    frame.f_trace = trace
    frame = frame.f_back
def square(x): return 0
"""
_FORGED = """
import gc
from builtins import *
def pipe():
    for value in gc.get_objects():
        if type(value).__name__ == 'Pipe': return value
def square(x):
    pipe().send({message})
    return 0
"""

# Answers that must not pass: to the asserts, to the unittest case, to other tests.
_TO_ASSERTS = {
    "wrong": _WRONG,
    "no code": "def square(",
    "equal object": _ANY + "def square(x): return Any()",
    "equal integer": (
        "class I(int):\n    def __eq__(s, o): return True\n    __hash__ = int.__hash__\n"
        "def square(x): return I(0)"
    ),
    "a mock": (
        "from unittest.mock import MagicMock\ndef square(x):\n    m = MagicMock()\n"
        "    m.__eq__ = lambda s, o: True\n    return m"
    ),
    "ends the tests' loop, generator exit": "def square(x): raise GeneratorExit",
    "exec replaced": _patched("builtins.exec", "lambda *a, **k: None"),
    "exits": "import sys\ndef square(x): sys.exit(0)",
    "exits at once": "import os\ndef square(x): os._exit(0)",
    "exits when it ends": _WRONG + "import atexit, os\natexit.register(os._exit, 0)",
    "tests read from frames": _FRAMES,
    "tests read from the collector": _COLLECTOR,
    "constants read from the caller": _CONSTANTS,
    "tests read from open files": _OPEN_TESTS,
    "verdict written by its name": _VERDICT,
    "verdict written to open files": _DESCRIPTORS,
    "main's function replaced by its frame": (
        _WRONG + "import sys\nframe = sys._getframe()\nwhile frame:\n"
        "    frame.f_globals['passed'] = lambda *a, **k: True\n    frame = frame.f_back"
    ),
    "forged message of a class": _FORGED.format(message="['value', {'eval': ['9']}, '']"),
    "forged call of a test's function": _FORGED.format(message="['function', [-1, [[], {}]], '']"),
    "forged message too deep": (
        _FORGED.format(message="0") + "import struct\ndef square(x):\n"
        "    data = b'[' * 10 ** 6\n    w = pipe()._writing\n"
        "    w.write(struct.pack('I', len(data)) + data)\n    w.flush()\n"
    ),
    "forged length": (
        _FORGED.format(message="0")
        + "def square(x):\n    w = pipe()._writing\n    w.write(b'\\xff' * 8)\n    w.flush()\n"
    ),
}
_TO_CASE = {
    "wrong, unittest": _WRONG,
    "class building replaced": _patched("builtins.__build_class__", "lambda *a, **k: object"),
    "assertEqual patched": _patched(
        "unittest.TestCase.assertEqual", "lambda *a, **k: None", imports="unittest"
    ),
    "TestCase.run patched": _patched(
        "unittest.TestCase.run", "lambda *a, **k: None", imports="unittest"
    ),
    "result patched": _patched(
        "unittest.TestResult.wasSuccessful", "lambda s: True", imports="unittest"
    ),
    "unittest replaced": (
        _WRONG + "import sys, types\nm = types.ModuleType('unittest')\nm.TestCase = object\n"
        "sys.modules['unittest'] = m"
    ),
    "skips": "import unittest\ndef square(x): raise unittest.SkipTest('no')",
    "skips by a class of its own": (
        "import unittest\nclass Skip(unittest.SkipTest): pass\ndef square(x): raise Skip('no')"
    ),
    "stops the outcome": "import unittest.case\ndef square(x): raise unittest.case._ShouldStop",
}
FAKES: dict[str, tuple[str, str]] = {
    **{name: (answer, ASSERTS) for name, answer in _TO_ASSERTS.items()},
    **{name: (answer, CASE) for name, answer in _TO_CASE.items()},
    "wrong, check": (_WRONG, CHECK),
    "equal object of a lying class": (
        _ANY + "Any.__class__ = property(lambda self: int)\ndef square(x): return Any()",
        TYPED,
    ),
    "equal float": (
        "class F(float):\n    def __eq__(s, o): return True\n    def __sub__(s, o): return 0.0\n"
        "    __rsub__ = __sub__\n    __hash__ = float.__hash__\ndef square(x): return F(0)",
        NEAR,
    ),
    "equal list": (
        "class L(list):\n    def __eq__(s, o): return True\n    def __len__(s): return 2\n"
        "def both(x): return L()",
        "assert len(both(9)) == 2 and both(9) == [-3, 3]",
    ),
    "equal text": (
        "class S(str):\n    def __eq__(s, o): return True\n    __hash__ = str.__hash__\n"
        "def square(x): return S('')",
        "assert square(3) == 'nine'",
    ),
    "equal dict": (
        "class D(dict):\n    def __eq__(s, o): return True\ndef square(x): return D()",
        "assert square(3) == {'square': 9}",
    ),
    "equal array": (
        "import numpy\nclass A(numpy.ndarray):\n    def __eq__(s, o): return numpy.array(True)\n"
        "def square(x): return numpy.zeros(1).view(A)",
        "assert square(3) == 9",
    ),
    "contains all": (
        "class B:\n    def __contains__(s, o): return True\ndef both(x): return B()",
        MEMBER,
    ),
    "says that it equals": (
        "class B:\n    def equals(s, o): return True\ndef square(x): return B()",
        METHOD,
    ),
    "function in a named tuple": (
        "from collections import namedtuple\nB = namedtuple('B', 'equals')\n"
        "def square(x): return B(lambda o: True)",
        METHOD,
    ),
    "array that says that it equals": (
        "import numpy\nclass A(numpy.ndarray):\n    def equals(s, o): return True\n"
        "def square(x): return numpy.zeros(1).view(A)",
        METHOD,
    ),
    "context that hides failures": (
        "class C:\n    def __enter__(s): return 0\n    def __exit__(s, *e): return True\n"
        "def square(x): return C()",
        CONTEXT,
    ),
    "attribute equal to all": (
        _ANY + "class C:\n    value = Any()\ndef square(x): return C()",
        ATTRIBUTE,
    ),
    "ends the tests' loop": ("def square(x): raise StopIteration", ALL_MAP),
    "all replaced": (_patched("builtins.all", "lambda values: True"), ALL),
    "import replaced": (
        _WRONG + "import builtins, types\nreal = builtins.__import__\n"
        "class Fake:\n    isclose = staticmethod(lambda *a, **k: True)\n"
        "builtins.__import__ = lambda n, *a, **k: Fake if n == 'math' else real(n, *a, **k)",
        CLOSE,
    ),
    "all shadowed": (_WRONG + "all = lambda values: True", ALL),
    "math shadowed": (
        _WRONG + "class math:\n    isclose = staticmethod(lambda *a, **k: True)",
        CLOSE_LEFT_OUT,
    ),
    "builtins of the namespace": (
        _WRONG + "import builtins\n__builtins__ = dict(vars(builtins), all=lambda v: True)",
        ALL,
    ),
    "isclose patched": (_patched("math.isclose", "lambda *a, **k: True", imports="math"), CLOSE),
    "numpy patched": (
        _WRONG + "import numpy\nnumpy.allclose = lambda *a, **k: True\n"
        "numpy.testing.assert_allclose = lambda *a, **k: None",
        NUMPY,
    ),
    "json patched": (_WRONG + _ANY + "import json\njson.loads = lambda text, *a, **k: Any()", JSON),
    "helper taken over": (_WRONG + "same = lambda a, b: True", HELPED),
    "jumps over the asserts": (_TRACE, "x = 1\nx = 2\n" + ASSERTS),
    "integer overwritten": (
        "import ctypes\nctypes.c_uint32.from_address(id(9) + 24).value = 0\n"
        "def square(x): return 0",
        "assert square(3) == 9",
    ),
    "module in the working folder": (
        _WRONG + "open('math.py', 'w').write('isclose = lambda *a: True')\n"
        "import sys\nsys.modules.pop('math', None)\nsys.path.insert(0, '.')",
        CLOSE,
    ),
    "finder of modules": (
        _WRONG + "import importlib.abc, importlib.util, sys\n"
        "class F(importlib.abc.MetaPathFinder, importlib.abc.Loader):\n"
        "    def find_spec(s, n, p=None, t=None):\n"
        "        return importlib.util.spec_from_loader(n, s) if n == 'math' else None\n"
        "    def create_module(s, spec): return None\n"
        "    def exec_module(s, m): m.isclose = lambda *a, **k: True\n"
        "sys.modules.pop('math', None)\nsys.meta_path.insert(0, F())",
        CLOSE,
    ),
    "argument emptied": ("def ordered(xs):\n    xs[:] = [1, 1, 1]\n    return xs", SORTED),
    "pickle that equals all": (
        "import pickle\nclass P:\n    def __reduce__(s):\n"
        "        return eval, (\"type('E', (), {'__eq__': lambda a, b: True})()\",)\n"
        "def saved(x):\n    with open('a.pickle', 'wb') as file:\n"
        "        pickle.dump(P(), file)\n    return 'a.pickle'",
        PICKLE,
    ),
    "globals of a test's function": (
        _ANY + "def apply(f, x):\n"
        "    f.__globals__['__builtins__']['AssertionError'] = Any\n    return Any()",
        APPLIED,
    ),
    "assert in a thread": (
        _WRONG + "import builtins, threading\n"
        "def later():\n    builtins.all = lambda v: True\n"
        "t = threading.Thread(target=later)\nt.start()\nt.join()",
        ALL,
    ),
    "forged array of objects": (
        _FORGED.format(message="['value', {'array': ['|O8', [1], 'AAAAAAAAAAA=']}, '']"),
        "import numpy\n" + ASSERTS,
    ),
}

_LIBC = "import ctypes\nc = ctypes.CDLL(None, use_errno=True)\n"


def _probe(body: str, imports: str = "os") -> str:
    lines = "\n".join("    " + line for line in body.strip().splitlines())
    return f"import {imports}\n{_LIBC}def through():\n{lines}\n"


_GC_GUARD = """
for value in gc.get_objects():
    if type(value).__name__ == 'function' and value.__name__ == 'watch' and value.__closure__:
        for name, cell in zip(value.__code__.co_freevars, value.__closure__):
            if name == 'busy': cell.cell_contents = True
"""

READS: dict[str, str] = {
    "a file": _probe("return 'KEPT' in open(SECRET).read()"),
    "a file by ctypes": _probe(
        "fd = c.open(SECRET.encode(), 0)\nb = ctypes.create_string_buffer(99)\n"
        "return c.read(fd, b, 99) > 0 and b'KEPT' in b.raw"
    ),
    "a file by a directory's handle": _probe(
        "folder, name = os.path.split(SECRET)\nd = os.open(folder, os.O_RDONLY)\n"
        "return b'KEPT' in os.read(os.open(name, os.O_RDONLY, dir_fd=d), 99)"
    ),
    "a file by the root's handle": _probe(
        "d = os.open('/', os.O_RDONLY)\n"
        "return b'KEPT' in os.read(os.open(SECRET[1:], os.O_RDONLY, dir_fd=d), 99)"
    ),
    "a file with the guard off": _probe(
        _GC_GUARD + "return 'KEPT' in open(SECRET).read()", imports="gc"
    ),
    "a file by a symbolic link": _probe(
        "os.symlink(SECRET, 'link')\nreturn 'KEPT' in open('link').read()"
    ),
    "a file by a hard link": _probe(
        "os.link(SECRET, 'hard')\nreturn 'KEPT' in open('hard').read()"
    ),
    "a file by the parent's folder": _probe(
        "return 'KEPT' in open(os.path.relpath(SECRET)).read()"
    ),
    "a folder's names": _probe("return 'secret.txt' in os.listdir(os.path.dirname(SECRET))"),
    "a folder's names by ctypes": _probe(
        "c.opendir.restype = ctypes.c_void_p\n"
        "return bool(c.opendir(os.path.dirname(SECRET).encode()))"
    ),
    "the users of the machine": _probe("return 'root' in open('/etc/passwd').read()"),
    "the parent's environment": _probe(
        "return len(open(f'/proc/{PARENT}/environ', 'rb').read()) > 0"
    ),
    "the parent's environment by ctypes": _probe(
        "fd = c.open(f'/proc/{PARENT}/environ'.encode(), 0)\n"
        "return c.read(fd, ctypes.create_string_buffer(9), 9) > 0"
    ),
    "the parent's keys in its own": _probe(
        "c.getenv.restype = ctypes.c_char_p\n"
        "return 'PLANTED_KEY' in os.environ or c.getenv(b'PLANTED_KEY') is not None"
    ),
    "the parent's words": _probe("return bool(open(f'/proc/{PARENT}/cmdline').read())"),
    "the parent's folder": _probe("return bool(os.readlink(f'/proc/{PARENT}/cwd'))"),
    "other processes": _probe("return len([n for n in os.listdir('/proc') if n.isdigit()]) > 3"),
    "the parent's memory": _probe("return open(f'/proc/{PARENT}/mem', 'rb').fileno() > 0"),
    "the parent's memory by ptrace": _probe("return c.ptrace(0x4206, PARENT, 0, 0) == 0"),
    "the grader's memory": _probe(
        "b = ctypes.create_string_buffer(8)\n"
        "v = (ctypes.c_void_p * 2)(ctypes.addressof(b), 8)\n"
        "return c.process_vm_readv(PARENT, v, 1, v, 1, 0) >= 0 or ctypes.get_errno() == 14"
    ),
}
WRITES: dict[str, str] = {
    "a file": _probe("open(OUTSIDE + '/new', 'w').write('x')\nreturn True"),
    "a file by ctypes": _probe("return c.creat((OUTSIDE + '/new').encode(), 0o644) >= 0"),
    "a file by a directory's handle": _probe(
        "d = os.open(OUTSIDE, os.O_RDONLY)\n"
        "os.open('new', os.O_CREAT | os.O_WRONLY, dir_fd=d)\nreturn True"
    ),
    "a file with the guard off": _probe(
        _GC_GUARD + "open(OUTSIDE + '/new', 'w').write('x')\nreturn True", imports="gc"
    ),
    "a folder": _probe("os.mkdir(OUTSIDE + '/new')\nreturn True"),
    "a folder by a handle": _probe(
        "d = os.open(OUTSIDE, os.O_RDONLY)\nos.mkdir('new', dir_fd=d)\nreturn True"
    ),
    "a link": _probe("os.symlink('/', OUTSIDE + '/new')\nreturn True"),
    "a file moved out": _probe(
        "open('own', 'w').close()\nos.rename('own', OUTSIDE + '/new')\nreturn True"
    ),
    "a file removed": _probe("os.remove(SECRET)\nreturn True"),
    "a file removed by a handle": _probe(
        "d = os.open(os.path.dirname(SECRET), os.O_RDONLY)\n"
        "os.remove('secret.txt', dir_fd=d)\nreturn True"
    ),
    "a file cut": _probe("os.truncate(SECRET, 0)\nreturn os.path.getsize(SECRET) == 0"),
    "a file cut by ctypes": _probe("return c.truncate(SECRET.encode(), 0) == 0"),
    "a file's mode": _probe(
        "os.chmod(SECRET, 0o777)\nreturn os.stat(SECRET).st_mode & 0o777 == 0o777"
    ),
    "a file's time": _probe("os.utime(SECRET, (1, 1))\nreturn os.stat(SECRET).st_mtime == 1"),
    "a file's time by ctypes": _probe(
        "return c.utimes(SECRET.encode(), None) == 0 and os.stat(SECRET).st_mtime > 2"
    ),
    "an attribute": _probe("os.setxattr(SECRET, 'user.a', b'x')\nreturn True"),
    "shared memory": _probe(
        "fd = c.shm_open(b'/answer-left', 0o102, 0o600)\n"
        "return fd >= 0 and c.shm_unlink(b'/answer-left') == 0"
    ),
    "System V memory": _probe(
        "place = c.shmget(0, 4096, 0o1600)\nreturn place >= 0 and c.shmctl(place, 0, None) == 0"
    ),
    "Python's library": _probe("open(os.__file__, 'a').close()\nreturn True"),
}
NETWORK: dict[str, str] = {
    "a connection": _probe(
        "socket.create_connection(('127.0.0.1', PORT), 1)\nreturn True", imports="socket"
    ),
    "a connection by ctypes": _probe(
        "fd = c.socket(2, 1, 0)\na = struct.pack('<H', 2) + struct.pack('>H', PORT) "
        "+ bytes([127, 0, 0, 1]) + bytes(8)\nreturn c.connect(fd, a, 16) == 0",
        imports="struct",
    ),
    "a datagram": _probe(
        "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "return s.sendto(b'x', ('127.0.0.1', PORT)) == 1",
        imports="socket",
    ),
    "a datagram by ctypes": _probe(
        "fd = c.socket(2, 2, 0)\na = struct.pack('<H', 2) + struct.pack('>H', PORT) "
        "+ bytes([127, 0, 0, 1]) + bytes(8)\nreturn c.sendto(fd, b'x', 1, 0, a, 16) == 1",
        imports="struct",
    ),
    "a listener": _probe("fd = c.socket(2, 1, 0)\nreturn fd >= 0 and c.listen(fd, 1) == 0"),
    "a raw device": _probe("return c.socket(16, 3, 0) >= 0"),
    "a socket of the file system": _probe(
        "s = socket.socket(socket.AF_UNIX)\ns.connect(ADDRESS)\nreturn True", imports="socket"
    ),
    "a socket of the file system by ctypes": _probe(
        "fd = c.socket(1, 1, 0)\na = struct.pack('H', 1) + ADDRESS.encode() + bytes(1)\n"
        "return c.connect(fd, a, len(a)) == 0",
        imports="struct",
    ),
    "a socket without a file": _probe(
        "fd = c.socket(1, 1, 0)\na = struct.pack('H', 1) + b'\\0answer-' + str(PORT).encode()\n"
        "return c.connect(fd, a, len(a)) == 0",
        imports="struct",
    ),
    "a pair that sends elsewhere": _probe(
        "p = (ctypes.c_int * 2)()\nreturn c.socketpair(1, 2, 0, p) == 0"
    ),
}
RIGHTS: dict[str, str] = {
    "a process": _probe(
        "pid = os.fork()\nif not pid: os._exit(0)\nos.waitpid(pid, 0)\nreturn True"
    ),
    "a process by ctypes": _probe("pid = c.fork()\nif pid == 0: os._exit(0)\nreturn pid > 0"),
    "a program": _probe("return subprocess.run(['true']).returncode == 0", imports="subprocess"),
    "a program by the shell": _probe("return os.system('true') == 0"),
    "a program by ctypes": _probe("return c.system(b'true') == 0"),
    "a program spawned": _probe("return os.posix_spawn('/usr/bin/env', ['env', 'true'], {}) > 0"),
    "another program in its place": _probe(
        "pid = c.fork()\nif pid == 0: os.execv('/usr/bin/env', ['env', 'true'])\nreturn pid > 0"
    ),
    "a pool of processes": _probe(
        "with multiprocessing.get_context('fork').Pool(1) as p: return p.map(abs, [-1]) == [1]",
        imports="multiprocessing",
    ),
    "a signal to the parent": _probe("os.kill(PARENT, 0)\nreturn True"),
    "a signal to the parent by ctypes": _probe("return c.kill(PARENT, 0) == 0"),
    "a signal to the group": _probe("return c.killpg(0, 0) == 0"),
    "a signal to all": _probe("return c.kill(-1, 0) == 0 and os.path.exists('/proc/1')"),
    "a signal in the queue": _probe("return c.sigqueue(PARENT, 0, 0) == 0"),
    "a signal by a descriptor's owner": _probe(
        "r, w = os.pipe()\nfcntl.fcntl(r, 8, PARENT)\nreturn True", imports="fcntl, os"
    ),
    "a handle of the parent": _probe("os.pidfd_open(PARENT)\nreturn True"),
    "the parent's priority": _probe(
        "os.setpriority(os.PRIO_PROCESS, PARENT, os.getpriority(os.PRIO_PROCESS, PARENT))\n"
        "return True"
    ),
    "the parent's processors": _probe(
        "os.sched_setaffinity(PARENT, os.sched_getaffinity(PARENT))\nreturn True"
    ),
    "the parent's limits": _probe(
        "resource.prlimit(PARENT, resource.RLIMIT_CORE)\nreturn True", imports="resource"
    ),
    "a session of its own": _probe("pid = c.getpid()\nreturn c.setpgid(0, 0) == 0 and pid > 0"),
    "life after its parent": _probe("return c.prctl(1, 0, 0, 0, 0) == 0"),
    "a namespace of its own": _probe("return c.unshare(0x10000000) == 0"),
    "memory in a file without a name": _probe("return c.memfd_create(b'm', 0) >= 0"),
    "a watch of files": _probe("return c.inotify_init() >= 0"),
}
PROBES: dict[str, str] = {
    f"{kind}: {name}": code
    for kind, group in (
        ("reads", READS),
        ("writes", WRITES),
        ("reaches", NETWORK),
        ("takes", RIGHTS),
    )
    for name, code in group.items()
}
