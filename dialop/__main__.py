"""`python -m dialop`: begin a game, check it, generate instances, rescore recorded games."""

from __future__ import annotations

import sys

from dialop.cli import main

# Worker processes import this module again and must not run the command a second time.
if __name__ == "__main__":
    sys.exit(main())
