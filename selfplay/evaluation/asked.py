"""The options of an evaluation, from eval.py's command line or from Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from selfplay.config.play import check_temperature
from selfplay.data.instances import GENERATED

YAML = (".yaml", ".yml")
FROM_FIRST_MOVE = "0"  # of --start


@dataclass(frozen=True, slots=True)
class EvalPlan:
    """The options of eval.py, by name. `runs` are folders of policies.

    Raises:
        ValueError: for a value of the wrong type, and for options that contradict each other.
    """

    runs: Sequence[Path] = ()
    games: str = GENERATED
    num: int | None = None
    partner: str | None = None
    partners: Sequence[str] = ()
    temperature: Sequence[float] = ()
    start: str = FROM_FIRST_MOVE
    config: Path | None = None
    out: Path | None = None
    overrides: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.partner, str | None):
            raise ValueError(f"partner must be a string, e.g. scripted:honest, got {self.partner}")
        listed = isinstance(self.partners, Sequence) and not isinstance(self.partners, str)
        if not (listed and all(isinstance(one, str) and one.strip() for one in self.partners)):
            raise ValueError(f"partners must be a list of strings, got {self.partners!r}")
        for run in self.runs:
            if run.suffix in YAML and not run.is_dir():
                raise ValueError(
                    f"RUN must be a folder or a model, got the settings file {run}; "
                    f"write --config {run}"
                )
        if not self.runs and not self.partners:
            raise ValueError("RUN must name a policy, such as runs/talk, got none")
        if len(self.runs) > 1 and not self.partners:
            homes = {run.parent for run in self.runs}
            near = f"a matrix of them write --partners {','.join(map(str, self.runs))}"
            if len(homes) == 1 and (home := homes.pop()).name == "final":
                near = f"the policies of a run together write {home}"
            raise ValueError(
                f"RUN must be a single one without --partners, got {len(self.runs)}; for {near}"
            )
        if self.partners and (self.partner or len(self.temperature) > 1):
            raise ValueError("--partners allows no --partner and at most one --temperature")
        for temperature in self.temperature:
            check_temperature(temperature, what="--temperature")

    @property
    def options(self) -> list[str]:
        """The options that change the result, for the name of the report's folder."""
        return [
            *([f"config={self.config.stem}"] if self.config else []),
            *([] if self.num is None else [f"num={self.num}"]),
            *([f"start={self.start}"] if self.start != FROM_FIRST_MOVE else []),
            *(f"temperature={each:g}" for each in self.temperature),
            *self.overrides,
        ]
