"""`python -m dialop`: generate instances, rescore recorded games, check a game."""

from __future__ import annotations

import sys

from dialop.cli import main

# Worker processes import this module again and must not run the command a second time.
if __name__ == "__main__":
    sys.exit(main())
