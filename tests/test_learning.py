"""The whole path learns: a run that fits in half a minute earns more at its end than before."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest
from tiny_run import metrics_of, run_tiny
