"""Skips tests of graded code where bubblewrap is missing or does not work, with the reason."""

import pytest

from selfplay.extras.sandbox import NoSandbox, check_tests


def _why_not() -> str:
    try:
        check_tests([("a row", "assert f()", "f")])
    except NoSandbox as error:
        return str(error)
    return ""


WHY_NOT = _why_not()
needs_bwrap = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
