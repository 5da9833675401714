"""Check your own function before a run, with hand-made inputs (docs/your_method.md).

    python -m selfplay.check my_loss.py:loss [--config FILE] [key=value ...]

The parameters show which setting the function is for. Prints one line per check, and stops at the
first that fails. A run with the function makes the same checks before it starts.
"""

from __future__ import annotations

from dialop.shown import on_one_line
from dialop.terminal import open_terminal

if __name__ == "__main__":  # before the imports that need packages
    open_terminal("selfplay.check")

# isort: split

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from selfplay.config import Config
from selfplay.config.load import load, read_value
from selfplay.config.plugins import as_setting, key_of
from selfplay.preflight.command_line import Parser, refused
from selfplay.preflight.functions import findings

PROGRAM = "selfplay.check"


def main(words: Sequence[str] | None = None) -> int:
    parser = Parser(PROGRAM, __doc__)
    add = parser.add_argument
    add("name", metavar="FUNCTION", help="my_file.py:name, my_module:name or a built-in name")
    add("--config", type=Path, help="settings file (default: the defaults)")
    about = "settings that override the file's"
    add("overrides", nargs="*", default=[], metavar="key=value", help=about)
    try:
        args = parser.parse_intermixed_args(words)
        parser.check_settings(args.overrides)
        key = key_of(args.name)
        is_named = args.name in str(read_value(args.config, args.overrides, key))
        use = [*([] if is_named else [as_setting(key, args.name)]), *args.overrides]
        config = load(Config, args.config, use)
        for line in map(on_one_line, findings(key, args.name, config)):
            print(line if line.startswith(("warning: ", "note: ")) else f"ok  {line}", flush=True)
    except ValueError as error:
        return refused(PROGRAM, error)
    given = [f"--config {args.config}"] if args.config else []
    print("use it as", *given, *map(shlex.quote, use))
    return 0


if __name__ == "__main__":
    sys.exit(main())
