"""`python -m dialop`: begin a game, check it, generate instances, rescore recorded games."""

from __future__ import annotations

import sys

from dialop.terminal import open_terminal

# Worker processes import this module again and must not run the command a second time.
if __name__ == "__main__":
    open_terminal("python -m dialop")  # before the imports that need packages
    from dialop.cli import main

    sys.exit(main())
