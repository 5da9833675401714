"""The table of scripted players, for every kind of instance that the command takes."""

import pytest

from bench.scripted_figures import INSTANCES, main


@pytest.mark.parametrize("kind", INSTANCES)
def test_every_kind_of_instance_has_its_table(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two games a team; teams that think privately play where that is allowed."""
    main(["--of", kind, "--num", "2"])
    rows = [line for line in capsys.readouterr().out.splitlines() if " ± " in line]
    assert len(rows) >= 5 and all(line.count("|") == 10 for line in rows)
    thinks = "private_reasoning" in INSTANCES[kind][1]
    assert thinks or not any("think=" in line for line in rows)
    if kind == "tiny_calendar":
        assert rows[-1].startswith("| solo:strict=5 |")
        assert any(line.startswith("| honest | 1.000 ± 0.000 | 1.00 | 5.00 |") for line in rows)
