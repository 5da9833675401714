"""`python -m dialop`: start a game, check it, generate instances, rescore recorded games."""

from __future__ import annotations

from dialop.terminal import open_terminal

if __name__ == "__main__":  # before the imports that need packages
    open_terminal("python -m dialop")

# isort: split

import sys

from dialop.cli import main

# Worker processes import this module again and must not run the command a second time.
if __name__ == "__main__":
    sys.exit(main())
