"""What holds for every test: the same draws each time, one core, no network, one shared folder."""

from __future__ import annotations

import gc
import os
import pickle
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from hypothesis import settings

# Set before any library is imported that reads them.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.helpers.shared_work import HOME

if TYPE_CHECKING:
    from selfplay.chat.rendering import Rendering

SECONDS = 2  # of a test without a mark
MEMORY = Path("/dev/shm")
OTHER_SETS = ("tests/sglang", "tests/vllm", "tests/gpu")

gc.set_threshold(100_000, 20, 20)  # rarer collections save a twentieth of all time
settings.register_profile("house", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("house")


def composed_once(compose: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """PyYAML's `get_single_node`, that composes a text once and gives each reader a copy: the files
    of tests are few, one evaluation reads its run's settings nine times, and PyYAML is slow."""
    known: dict[tuple[type, str], bytes] = {}

    def get_single_node(loader: Any) -> Any:
        if loader.stream is not None:  # a file, read in parts
            return compose(loader)
        key = type(loader), loader.buffer
        if key not in known:
            known[key] = pickle.dumps(compose(loader))
        return pickle.loads(known[key])

    return get_single_node


Composer = yaml.composer.Composer
Composer.get_single_node = composed_once(Composer.get_single_node)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--shuffle", type=int, help="run files, and tests in each, in this seed's order"
    )


def pytest_configure(config: pytest.Config) -> None:
    """The first process makes the folder; those of pytest-xdist inherit its name."""
    if not hasattr(config, "workerinput"):
        # A run syncs each file that it saves, which a disk takes milliseconds for.
        if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 4 << 30:
            os.environ.setdefault("TMPDIR", str(MEMORY))
            tempfile.tempdir = None  # asks for the variable again
        os.environ[HOME] = tempfile.mkdtemp(prefix="selfplay-tests-")
        # No other machine is asked, and each HTTP client reads all certificates for 30 ms: of this
        # folder, which has none.
        os.environ.pop("SSL_CERT_FILE", None)
        os.environ["SSL_CERT_DIR"] = os.environ[HOME]
    if "ATEN_CPU_CAPABILITY" in os.environ:
        # torch's fused attention in bf16 asks the processor and not this variable whether it can
        # pack for AVX-512, and fails where the variable says no ("pack_vnni2 is only supported").
        import torch  # not above: the process that only deals tests out needs none

        torch.backends.cuda.enable_flash_sdp(False)


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ[HOME], ignore_errors=True)


@pytest.fixture(scope="module", autouse=True)
def module_path() -> Iterator[None]:
    """Leave no folder of a file's tests on the module path: each slows every later import, and
    every search for an installed package."""
    before = list(sys.path)
    yield
    sys.path[:] = before


def pytest_collection_finish() -> None:
    gc.freeze()  # no collection looks again at what was imported


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seed = config.getoption("--shuffle")
    # Else the longest file would begin last, while the other process has no more to do.
    items.sort(key=lambda item: item.path.parent != Path(__file__).parent)
    if seed is not None:
        rng = random.Random(seed)
        files = sorted({item.path for item in items})
        place = {path: rng.random() for path in files}
        items.sort(key=lambda item: (place[item.path], rng.random()))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the tests that are long for their mark. What they made for others counts, too."""
    for report in chain.from_iterable(terminalreporter.stats.values()):
        is_call = getattr(report, "when", "") == "call" and not report.nodeid.startswith(OTHER_SETS)
        if is_call and report.duration > SECONDS and not {"slow", "load"} & report.keywords.keys():
            terminalreporter.write_line(f"{report.duration:.1f} s without a mark: {report.nodeid}")


@pytest.fixture(scope="session")
def rendering() -> Rendering:
    """Transcripts of a tokenizer without a chat template."""
    from selfplay.chat.rendering import make_rendering
    from tests.helpers.chat_families import tokenizer_of

    return make_rendering(tokenizer_of("no template"))
