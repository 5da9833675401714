"""What is asked of an evaluation, by the options of eval.py or in Python."""

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
    """The options of eval.py, by their names. `runs` are folders of policies.

    Raises:
        ValueError: for a value of another type, and for options that contradict each other.
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
            raise ValueError(f"partner must be a text, as in scripted:honest, got {self.partner!r}")
        listed = isinstance(self.partners, Sequence) and not isinstance(self.partners, str)
        if not (listed and all(isinstance(one, str) and one.strip() for one in self.partners)):
            raise ValueError(f"partners must be a list of texts, got {self.partners!r}")
        for run in self.runs:
            if run.suffix in YAML and not run.is_dir():
                raise ValueError(
                    f"a settings file must be given as --config {run}, got it as a RUN"
                )
        if len(self.runs) != 1 and not self.partners:
            matrix = f"; for a matrix of them write --partners {','.join(map(str, self.runs))}"
            raise ValueError(
                f"RUN must be given once without --partners, got {len(self.runs)}"
                f"{matrix if self.runs else ''}"
            )
        if self.partners and (self.partner or len(self.temperature) > 1):
            raise ValueError("--partners needs no --partner and at most one --temperature")
        for temperature in self.temperature:
            check_temperature(temperature, what="--temperature")

    @property
    def options(self) -> list[str]:
        """The options that change the result, for the name of its folder."""
        return [
            *([f"config={self.config.stem}"] if self.config else []),
            *([] if self.num is None else [f"num={self.num}"]),
            *([f"start={self.start}"] if self.start != FROM_FIRST_MOVE else []),
            *(f"temperature={each:g}" for each in self.temperature),
            *self.overrides,
        ]
