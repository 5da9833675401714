"""What holds for every test: the same draws each time, one core, no network."""

from __future__ import annotations

import os

from hypothesis import settings

# Set before any library is imported that reads them.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("house", deadline=None, derandomize=True)
settings.load_profile("house")
