"""How far two right answers may lie apart, from the number format and the length of the sum."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor


def tolerance(num_terms: int, *, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> float:
    """The absolute bound on the difference of two evaluations of one sum, in any order.

    Each of the n - 1 additions (and the rounding of each product) errs by at most u = eps / 2 of
    what it holds, and nothing that it holds is larger than the sum of the terms' magnitudes S. So
    one evaluation errs by at most n * u * S to first order (Higham, Accuracy and Stability of
    Numerical Algorithms, 2nd ed., eq. 4.4), and two of them differ by at most n * eps * S. Signs
    that cancel make the sum smaller and not the error: `scale` is S, never the result of one
    element. For a tensor it is the largest magnitude in it: roundings are as often up as down, so
    that their sum grows with the square root of n, as the cancelled part of S does.

    For a chain of sums (a forward and backward pass) n is the sum of their lengths: relative
    errors of successive steps add up.
    """
    return num_terms * torch.finfo(dtype).eps * scale


def assert_near(
    found: Tensor, expected: Tensor, num_terms: int, *, scale: float | None = None, what: str = ""
) -> None:
    """Each element within the tolerance of sums of `num_terms`, at the scale of the largest."""
    if scale is None:
        scale = float(expected.detach().abs().max())
    bound = tolerance(num_terms, scale=scale, dtype=expected.dtype)
    torch.testing.assert_close(
        found, expected, rtol=0.0, atol=bound, msg=lambda said: f"{what}: {said}"
    )


def assert_all_near(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], num_terms: int
) -> None:
    """`assert_near` for every tensor of a model, each at its own scale."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_near(found[name], tensor, num_terms, what=name)


def near(expected: object, num_terms: int, *, scale: float = 1.0) -> object:
    """`pytest.approx` for numbers that single precision summed; `scale` bounds their terms."""
    return pytest.approx(expected, rel=0.0, abs=tolerance(num_terms, scale=scale))
