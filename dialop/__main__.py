"""`python -m dialop`: generate instances, replay recorded games, step one game by hand."""

from __future__ import annotations

import sys

from dialop.cli import main

# The guard keeps worker processes, which import this module again, from starting over.
if __name__ == "__main__":
    sys.exit(main())
