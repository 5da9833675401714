"""Released weights take real steps: SmolLM2-135M-Instruct, its own tokenizer and template."""

from pathlib import Path

import pytest

import train
from tests.helpers.real_models import check_two_steps, two_steps


@pytest.mark.slow
@pytest.mark.nightly
def test_smollm2_takes_two_steps_on_the_transformers_engine(tmp_path: Path) -> None:
    assert train.main(two_steps(tmp_path / "run")) == 0
    check_two_steps(tmp_path / "run")
