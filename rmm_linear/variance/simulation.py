"""Simulate the variances by Monte Carlo, to check the closed forms on one's own data.

For a sketch, S is drawn M times and ‖(SᵀY)ᵀ unpack(pack(SᵀX)) − YᵀX‖² is averaged. For minibatches, n sequences are
drawn with replacement from the n of the batch; the squared distance of their gradient to YᵀX has the mean
(n−1)/n · D²_SGD, as in the bootstrap.

Draws are made in groups. Sketches of one group that are made at the same time share the seed of the rounding; groups
are independent. The interval is that of the mean of the group means, by the central limit theorem.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from rmm_linear._support.autocast import without_autocast
from rmm_linear._support.validation import check_integer
from rmm_linear.ops.sketches import DECODE, ENCODE, SKETCH
from rmm_linear.packing import is_normal
from rmm_linear.sketches import FAMILIES, TokenMask
from rmm_linear.variance.arguments import check_pair, check_sketch, sampling_probabilities
from rmm_linear.variance.closed_forms import rows_by_length

_GROUP, _GROUPS = 50, 40  # at most draws per group; at least groups, to estimate their spread
_ELEMENTS = 1 << 22  # limit of numbers in sketches that are made at the same time
_READ_THEIR_SEED = {name for name, family in FAMILIES.items() if family.reads_seed}


@dataclass(frozen=True)
class Simulation:
    """A variance estimated by simulation.

    Attributes:
        variance: Mean of ‖error‖², in squared units of the weight gradient.
        standard_error: Standard error of ``variance``, from the spread of the group means.
        draws: M.
    """

    variance: float
    standard_error: float
    draws: int

    @classmethod
    def of(cls, squares: Sequence[Tensor]) -> Simulation:
        """Make the result from the ‖error‖² of all draws.

        Args:
            squares: One tensor per group, each of the same length.

        Returns:
            The mean and its standard error.
        """
        means = torch.stack([group.double().mean() for group in squares])
        draws = sum(len(group) for group in squares)
        return cls(float(means.mean()), float(means.std()) / math.sqrt(len(means)), draws)

    def interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """Return a confidence interval of the variance; the group means are taken as normal.

        Args:
            confidence: Coverage probability, in (0, 1).

        Returns:
            Lower and upper bound.
        """
        z = NormalDist().inv_cdf((1 + confidence) / 2)
        return self.variance - z * self.standard_error, self.variance + z * self.standard_error

    def z_score(self, stated: float | Tensor) -> float:
        """Return how many standard errors the simulation lies above a stated variance.

        Args:
            stated: A closed form's value.

        Returns:
            (variance − stated) / standard_error; 0 where the two agree to the precision of float32.
        """
        distance = self.variance - float(stated)
        if math.isclose(self.variance, float(stated), rel_tol=1e-7):
            return 0.0  # the standard error may be 0: all draws can have one error, as with two tokens and random signs
        return distance / self.standard_error if self.standard_error else math.copysign(math.inf, distance)


@without_autocast
def simulate_variance(
    x: Tensor,
    grad_output: Tensor,
    *,
    kind: str,
    rows: int,
    bits: float | None = None,
    block: int | None = None,
    mask: Tensor | None = None,
    probabilities: Tensor | None = None,
    draws: int = 2_000,
    seed: int = 0,
) -> Simulation:
    """Draw sketches of one layer and batch and average ‖dŴ − dW‖², to check :func:`sketch_variance`.

    Time: ``draws`` sketches of X and Y. Memory: a few million numbers at a time (four times that for hadamard, dct and
    dft), or one sketch if that is more.

    Args:
        x: Layer input, shape (N, I).
        grad_output: Gradient with respect to the layer's output, shape (N, O); zero where ``mask`` is false.
        kind: One of :data:`rmm_linear.sketches.KINDS`.
        rows: K.
        bits: 8, 4, 3, 2, 1.6, 1, or None for the dtype itself.
        block: Tokens per block, or None.
        mask: True for valid tokens, shape (N,); None is all.
        probabilities: As for :func:`sketch_variance`, shape (N,).
        draws: M, at least 40, rounded up to whole groups.
        seed: Seed of the first draw; the following draws use the following integers.

    Returns:
        The mean, with its standard error and interval.

    Raises:
        ValueError: As :func:`sketch_variance`.

    Example:
        >>> x, y = torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0], [0.5]])
        >>> found = simulate_variance(x, y, kind="gaussian", rows=1)  # exact: 10.25
        >>> low, high = found.interval(0.99)
        >>> low < 10.25 < high
        True
    """
    _check_single(x, grad_output)
    check_sketch(x, kind=kind, rows=rows, block=block, mask=mask)
    check_integer("draws", draws)
    x, grad_output = x.detach(), grad_output.detach()
    ranks = None if mask is None else TokenMask.of(mask)
    p = sampling_probabilities(x, kind, rows, probabilities, ranks)
    both, exact = torch.cat((x, grad_output), dim=1), grad_output.double().T @ x.double()
    at_once = max(1, _ELEMENTS // max(1, both.shape[0] * (both.shape[1] + rows)))

    def squares(seeds: Tensor) -> list[Tensor]:
        sketched = draw_sketches(both, seeds, kind=kind, rows=rows, block=block, mask=ranks, p=p)
        z, y = sketched.split((x.shape[1], grad_output.shape[1]), dim=2)
        if bits is not None:
            # The rows of symmetric codes have random numbers of their own, those of normal codes one rotation.
            parts, own = (z, seeds) if is_normal(bits) else (z.reshape(1, -1, x.shape[1]), seeds[:1])
            decoded = [
                DECODE(*ENCODE(part, bits, one), one, bits, x.shape[1], z.dtype)
                for part, one in zip(parts, own.split(1), strict=True)
            ]
            z = torch.stack(decoded).view(z.shape)
        errors = (b.double().T @ a.double() - exact for a, b in zip(z, y, strict=True))
        return [error.square().sum() for error in errors]

    def group(seeds: Tensor) -> Tensor:
        return torch.stack([square for part in seeds.split(at_once) for square in squares(part)])

    size, count = _groups(draws)
    groups = torch.arange(seed, seed + size * count, device=x.device).split(size)
    return Simulation.of([group(seeds) for seeds in groups])


def draw_sketches(
    matrix: Tensor,
    seeds: Tensor,
    *,
    kind: str,
    rows: int,
    block: int | None = None,
    mask: TokenMask | None = None,
    p: Tensor | None = None,
) -> Tensor:
    """Return SᵀM of M (N, D) for several seeds, int64 (M,)."""

    def one(seed: Tensor) -> Tensor:
        return SKETCH(matrix, kind=kind, seed=seed, rows=rows, block=block, mask=mask, p=p)

    if kind in _READ_THEIR_SEED:
        return torch.stack([one(seed) for seed in seeds.split(1)])
    return torch.vmap(one)(seeds)


@without_autocast
def simulate_sgd_variance(
    x: Tensor,
    grad_output: Tensor,
    *,
    samples: tuple[int, int] | Tensor | None = None,
    draws: int = 2_000,
    seed: int = 0,
) -> Simulation:
    """Draw minibatches from the sequences of a batch and average ‖error‖², to check :func:`sgd_variance`.

    Time: ``draws`` products of N·I·O in float64.

    Args:
        x: Layer input, shape (N, I).
        grad_output: Gradient with respect to the layer's output, shape (N, O).
        samples: As for :func:`sgd_variance`.
        draws: M, at least 40, rounded up to whole groups.
        seed: Seed of the random generator.

    Returns:
        The mean, with its standard error and interval.

    Example:
        >>> x = torch.tensor([[1.0], [2.0], [4.0]])
        >>> found = simulate_sgd_variance(x, torch.ones(3, 1))  # exact: 3 · sample variance = 7
        >>> low, high = found.interval()
        >>> low < 7 < high
        True
    """
    _check_single(x, grad_output)
    check_integer("draws", draws)
    sequences = [rows for group in rows_by_length(samples, x.shape[0]) for rows in group]
    count = len(sequences)
    owners = torch.empty(x.shape[0], dtype=torch.int64)
    for number, rows in enumerate(sequences):
        owners[rows.cpu()] = number
    generator = torch.Generator().manual_seed(seed)
    x, y = x.detach().double(), grad_output.detach().double()

    def square() -> Tensor:
        multiplicity = torch.randint(count, (count,), generator=generator).bincount(minlength=count)
        weight = (multiplicity - 1)[owners].to(x)
        return (y.T @ (x * weight.unsqueeze(1))).square().sum() * count / (count - 1)

    size, groups = _groups(draws)
    return Simulation.of([torch.stack([square() for _ in range(size)]) for _ in range(groups)])


def _groups(draws: int) -> tuple[int, int]:
    size = min(_GROUP, max(1, draws // _GROUPS))
    return size, max(_GROUPS, -(-draws // size))


def _check_single(x: Tensor, grad_output: Tensor) -> None:
    check_pair(x, grad_output)
    if x.dim() != 2:
        raise ValueError(f"Layers are simulated one by one, got x of shape {tuple(x.shape)}. Pass x[i].")
