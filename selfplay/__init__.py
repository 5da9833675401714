"""The trainer: two language-model agents learn to talk by playing with themselves."""

import os

# OpenMP's threads sleep while they wait for each other. By default they spin, and where other work
# has a core, two threads then take several times as long as one. torch reads this when it is first
# imported, so train.py and eval.py import this package before it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

__version__ = "0.1.0"
