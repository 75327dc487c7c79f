"""Random gradients against exact ones, and variances that were drawn against closed forms.

Draws have fixed seeds, so a check passes always or never. Three statements are checked, each at z = 4 (p = 6e-5 by
chance for one check):

* Scale: an estimate projected on the exact gradient, ⟨dŴ, dW⟩ / ‖dW‖², is one number per draw with the mean 1. The mean
  of M of them lies within z of its own standard error, their standard deviation / √M. An estimator that is off by a
  factor has another mean, and one that is noise (Z of one S with Y of another, or nothing at all) has the mean 0.
* Mean: if the estimator is unbiased with covariance C, M·‖mean error‖² is Σ λᵢ χ²₁ with Σ λᵢ = tr C, the variance.
  Divided by it, its tail beyond 1.54 is at most that of one χ²₁ (Székely and Bakirov 2003), so it stays below z² = 16.
* Variance: ‖error‖² is one number per draw, or one per group of draws; its mean lies within z of its own standard
  error of the closed form.

A band as wide as its own standard error would hide a wrong formula among few or wild draws, so every check also states
the widest standard error that it accepts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import torch
from helpers import heavy_tailed
from torch import Tensor

from rmm_linear.variance.simulation import Simulation

Z = 4.0
TOKENS, ROWS = 40, 8

Gradient = Tensor | Mapping[str, Tensor]


def padded() -> tuple[Tensor, Tensor, Tensor]:
    """Heavy-tailed, correlated X and Y in two groups of columns, of which 40 % of the rows are padding."""
    x, y = heavy_tailed(TOKENS, 70, 3)
    mask = torch.rand(TOKENS, generator=torch.Generator().manual_seed(2)) < 0.6
    return x, y * mask.unsqueeze(1), mask


def counterexample(second: float = 0.5) -> tuple[Tensor, Tensor]:
    """Two tokens, x = (1, 2) and y = (1, ½): both give the same gradient, so minibatches have no noise. Sketches do."""
    return torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0], [second]])


def z_scores(values: Tensor, expected: float = 0.0) -> Tensor:
    """How many of its own standard errors the mean over the first dimension lies above what is expected."""
    return (values.mean(0) - expected) / (values.std(0) / math.sqrt(len(values)))


def projections(estimates: Iterable[Gradient], exact: Gradient) -> Tensor:
    """Of every estimate on the exact gradient, in float64: of one tensor, or of all tensors that ``exact`` names."""
    wanted = exact if isinstance(exact, Mapping) else {"": exact}
    squared = sum(value.double().square().sum() for value in wanted.values())

    def projection(estimate: Gradient) -> Tensor:
        found = estimate if isinstance(estimate, Mapping) else {"": estimate}
        return sum((found[name].double() * value.double()).sum() for name, value in wanted.items()) / squared

    return torch.stack([projection(estimate) for estimate in estimates]).detach().cpu()


def assert_projections(values: Tensor, *, widest: float, z: float = Z, room: float = 0.0) -> None:
    """Check that the mean of projections is 1, by its own standard error; ``room`` is for rounding."""
    mean, error = float(values.mean()), float(values.std()) / math.sqrt(len(values))
    figures = f"projection {mean:.5g} of {len(values)} draws, stated 1, standard error {error:.2g}"
    assert abs(mean - 1) < z * error + room, figures
    assert error < widest, figures


def assert_unbiased(
    draw: Callable[[int], Gradient], exact: Gradient, *, draws: int, widest: float, z: float = Z, room: float = 0.0
) -> Tensor:
    """Check that estimates have the mean ``exact``, by their projections on it.

    Args:
        draw: Makes an estimate; called with 0 … draws − 1, which is its seed unless it takes one elsewhere.
        exact: The gradient that is estimated, a tensor or several by name.
        draws: How many estimates are made.
        widest: What the standard error of the mean projection must stay below: 0 is at least 1 / ``widest`` standard
            errors away from 1.
        z: Standard errors that the mean may be away; more than 4 where many checks are tried.
        room: What the mean may be away besides, for the rounding of half types.

    Returns:
        The projections, of shape (draws,).
    """
    values = projections(map(draw, range(draws)), exact)
    assert_projections(values, widest=widest, z=z, room=room)
    return values


def assert_variance(found: Simulation, stated: float | Tensor, *, widest: float, whole: float | None = None) -> None:
    """Check that a variance that was drawn is the one of a closed form.

    Args:
        found: Mean of ‖error‖² and its standard error, from the spread of draws or of groups of them.
        stated: What the closed form says.
        widest: What the standard error must stay below, relative to ``whole``.
        whole: The variance that ``found`` is a part of, if an exactly known part was taken off every draw before.
    """
    width = found.standard_error / (found.variance if whole is None else whole)
    figures = f"{found.variance:.5g} / stated {float(stated):.5g}, z {found.z_score(stated):+.2f}, error {width:.2%}"
    print(f"M={found.draws}: {figures}")
    assert abs(found.z_score(stated)) < Z, figures
    assert width < widest, figures


def assert_moments(
    errors: Tensor, exact: Tensor, stated: float | Tensor, *, widest: float, roundings: Tensor | None = None
) -> None:
    """Check that estimates have the mean ``exact`` and the variance that is stated: scale, mean and variance.

    Args:
        errors: dŴ − dW of every draw, shape (M, O, I).
        exact: dW, shape (O, I).
        stated: The variance of S, by its closed form.
        widest: What the standard error of the mean of ‖error‖² must stay below, relative to the whole variance.
        roundings: The exact variance of every draw's rounding given its S, shape (M,), if its sketch is packed. For
            every S it adds to ‖error‖², so it is taken off each draw before the rest is compared with ``stated``.
    """
    count = len(errors)
    roundings = torch.zeros(count, dtype=errors.dtype) if roundings is None else roundings
    whole = float(stated) + float(roundings.mean())
    bias = float(count * errors.mean(0).square().sum()) / whole
    scale = float(z_scores((errors * exact).sum((1, 2))))
    figures = f"M={count}: bias {bias:.2f} (expected 1, below {Z**2:.0f}), projection z {scale:+.2f}"
    assert bias < Z**2, figures
    assert abs(scale) < Z, figures
    excess = errors.square().sum((1, 2)) - roundings
    spread = Simulation(float(excess.mean()), float(excess.std()) / math.sqrt(count), count)
    assert_variance(spread, stated, widest=widest, whole=whole)
