"""How far two right answers may lie apart, from the number format and the length of the sum."""

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

SIGMAS = 8.0


def tolerance(num_terms: int, *, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> float:
    """The absolute bound on the difference of two evaluations of one sum, in any order.

    Each of the n roundings in a sum errs by at most u = eps / 2 of what it holds, and nothing that
    it holds is larger than S, the sum of the terms' magnitudes. So one evaluation errs by at most
    n * u * S (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., eq. 4.4) and two
    differ by at most n * eps * S. Roundings go up as often as down: they add up like a random walk,
    to at most l * sqrt(n) * u * S but for a chance of 2 * exp(-l^2 / 2) (Higham and Mary 2019,
    eq. 2.2), which for l = 8 is under 1e-13. The smaller of the two bounds is taken.

    Signs that cancel make a sum smaller and its error not: `scale` stands for S and is never the
    result of one element. For a tensor it is the largest magnitude in it. For a chain of sums (a
    forward and backward pass) n is all their lengths together, since relative errors add up.
    """
    return min(num_terms, SIGMAS * math.sqrt(num_terms)) * torch.finfo(dtype).eps * scale


def assert_near(
    found: Tensor, expected: Tensor, num_terms: int, *, held: float = 0.0, what: str = ""
) -> None:
    """Each element within the tolerance of sums of `num_terms`, at the scale of the largest.

    `held` is the magnitude of numbers that both were read off as a difference.
    """
    scale = float(expected.detach().abs().max())
    bound = tolerance(num_terms, scale=scale) + tolerance(1, scale=held)
    worst = float((found - expected).detach().abs().max())
    assert worst <= bound, f"{what or 'a tensor'}: {worst:.3g} apart, bound {bound:.3g}"


def assert_all_near(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], num_terms: int, held: float = 0.0
) -> None:
    """`assert_near` for every tensor of a model, each at its own scale."""
    for name, tensor in expected.items():
        assert_near(found[name], tensor, num_terms, held=held, what=name)


def near(expected: Any, num_terms: int, *, scale: float = 1.0) -> Any:
    """What equals a number, a list or a dictionary of them that single precision summed.

    The terms of each sum together are at least as large as the sum and as `scale`.
    """
    if isinstance(expected, Mapping):
        return {name: near(value, num_terms, scale=scale) for name, value in expected.items()}
    if isinstance(expected, list):
        return [near(value, num_terms, scale=scale) for value in expected]
    bound = tolerance(num_terms, scale=max(scale, abs(float(expected))))
    return pytest.approx(expected, rel=0.0, abs=bound)


def drawn_share(share: float, num: int) -> Any:
    """What equals the share of `num` independent draws that came up, within four standard errors
    sqrt(share * (1 - share) / num): one seed in 16,000 is further off."""
    return pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / num))
