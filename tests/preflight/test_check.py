"""Functions of one's own: what settings accept, what the check says of right and wrong ones, the
examples by hand, and a run with them."""

from pathlib import Path

import pytest
import torch

from selfplay.check import findings, main
from selfplay.config import Config
from selfplay.config.load import load
from selfplay.config.plugins import PLUGINS, function_of
from tests.helpers.small_updates import batch_of

METHOD = Path(__file__).resolve().parents[2] / "examples" / "method"
LOSS = f"{METHOD / 'squared_ratio.py'}:loss"

LOSSES = """
import torch

def scalar(logprobs_M, batch, algorithm):
    return (-batch.advantages_M * logprobs_M).mean(), {}

def alone(logprobs_M, batch, algorithm):
    return -batch.advantages_M * logprobs_M

def overflows(logprobs_M, batch, algorithm):
    return -batch.advantages_M * (logprobs_M - batch.old_logprobs_M).exp(), {}

def constant(logprobs_M, batch, algorithm):
    return -batch.advantages_M * logprobs_M.detach(), {}

def random(logprobs_M, batch, algorithm):
    return -batch.advantages_M * logprobs_M * torch.rand(len(logprobs_M)), {}

def of_the_batch(logprobs_M, batch, algorithm):
    return -(batch.advantages_M - batch.advantages_M.mean()) * logprobs_M, {}

def writes(logprobs_M, batch, algorithm):
    return -batch.advantages_M.clamp_(min=0) * logprobs_M, {}

def raises(logprobs_M, batch, algorithm):
    return -batch.advantage_M * logprobs_M, {}

def other(logprobs, batch):
    return -logprobs, {}
"""


@pytest.fixture(scope="module")
def own_losses(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("own") / "own_losses.py"
    path.write_text(LOSSES)
    return path


def settings(*overrides: str) -> Config:
    return load(Config, None, overrides)


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("scalar", r"losses_M must have the shape \[M\] of logprobs_M, \(8,\), got \(\)"),
        ("alone", r"must return \(losses_M, metrics\), got Tensor"),
        ("overflows", "losses must be finite"),
        ("constant", "must depend on logprobs_M, got no gradient"),
        ("random", "must be deterministic"),
        ("of_the_batch", "must not depend on other samples"),
        ("writes", "must not change its batch"),
        ("raises", "AttributeError: .*advantage_M"),
    ],
)
def test_a_loss_that_cannot_train_is_refused_in_one_line(
    own_losses: Path, name: str, rule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([f"{own_losses}:{name}"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"selfplay.check: error: algorithm.loss {own_losses}:{name}: ")
    assert said.count("\n") == 1
    with pytest.raises(ValueError, match=rule):
        list(findings("algorithm.loss", f"{own_losses}:{name}", settings()))


@pytest.mark.parametrize("key", PLUGINS)
def test_the_built_in_functions_pass_the_checks_of_ones_own(key: str) -> None:
    for name in PLUGINS[key].built_in:
        assert len(list(findings(key, name, settings()))) >= 3


def test_a_name_that_is_no_function_is_refused_before_a_run(own_losses: Path) -> None:
    for name, rule in {
        "cisp": "must be one of clip, gspo, cispo, reinforce, or .*nearest is cispo",
        "own_losses.py": "my_file.py:name, got 'own_losses.py'",
        ":loss": "my_file.py:name, got ':loss'",
    }.items():
        with pytest.raises(ValueError, match=f"algorithm.loss .*{rule}"):
            settings(f"algorithm.loss={name}")
    for name, rule in {
        f"{own_losses}:scaler": "a function of own_losses, got 'scaler'; nearest is scalar",
        f"{own_losses.with_name('own_loses.py')}:scalar": "existing .py file.*nearest is own_loss",
        "no_such_module:loss": "there is no module no_such_module",
        f"{own_losses}:other": r"of \(logprobs_M, batch, algorithm\), got other\(logprobs, batch\)",
    }.items():
        with pytest.raises(ValueError, match=f"algorithm.loss .*{rule}"):
            function_of("algorithm.loss", settings(f"algorithm.loss={name}").algorithm.loss)
    assert main([f"{own_losses}:other"]) == 2


# --- the examples, by hand ------------------------------------------------------------------------


def test_the_example_loss(capsys: pytest.CaptureFixture[str]) -> None:
    """Log-ratios 0 and 2 under tau 0.1: losses -A log pi + 0.05 x^2, gradients -A + 0.1 x."""
    logprobs_M = torch.tensor([-1.0, -1.0], requires_grad=True)
    batch = batch_of(torch.tensor([-1.0, -3.0]), torch.tensor([1.0, -0.5]))
    config = settings("algorithm.options.tau=0.1")
    losses_M, metrics = function_of("algorithm.loss", LOSS)(logprobs_M, batch, config.algorithm)
    losses_M.sum().backward()
    assert losses_M.tolist() == pytest.approx([1.0, -0.3])
    assert logprobs_M.grad is not None
    assert logprobs_M.grad.tolist() == pytest.approx([-1.0, 0.7])
    assert metrics["squared_log_ratio"].tolist() == [0.0, 4.0]
    assert main([LOSS, "algorithm.options.tau=0.1"]) == 0
    assert capsys.readouterr().out.endswith(f"use it as algorithm.loss={LOSS}\n")
    assert main([LOSS]) == 2 and "KeyError: 'tau'" in capsys.readouterr().err
