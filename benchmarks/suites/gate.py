"""The correctness gate: nothing that computes something else is timed.

Exact parts must equal the reference's up to rounding. A random gradient G must have the exact one, g, as its mean: over
a few seeds, the mean of ⟨G, g⟩ / ‖g‖² must be 1 as far as a t-test can tell. Wrong scales, lost tokens and a backward
pass that draws another S all show there, and on thousands of tokens one value hardly varies by a percent.

Source of the tolerances: rounding of the dtypes, as in the tests.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import torch
from rmm_kernels_checks import relative_error
from torch import Tensor

from benchmarks.suites.case import Setup

LIMIT = 12.0  # Student's t with 5 degrees of freedom, those of 6 draws, passes it once in 14,000 times
ROUNDING = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 5e-3}
_SCALE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 5e-3}


def failure(setup: Setup, dtype: torch.dtype, draws: int = 6) -> str:
    """Return what is wrong with a provider that computes in ``dtype``, the first thing found in some draws, or ""."""
    shares, tolerance = [], ROUNDING[dtype] if setup.tolerance is None else setup.tolerance
    for seed in range(draws):
        found, expected = setup.outcome(seed), setup.expected(seed)
        if found.exact.keys() != expected.exact.keys() or len(found.random) != len(expected.random):
            return f"makes {', '.join(found.exact)} where {', '.join(expected.exact)} is expected"
        for name, value in found.exact.items():
            error = relative_error(value, expected.exact[name])
            if not error <= tolerance:
                return f"{name} is off by {error:.1e}, where rounding allows {tolerance:.0e}"
        if not expected.random:
            return ""  # nothing depends on the seed
        shares.append(projection(found.random, expected.random))
    error, score = t_score(shares, _SCALE[dtype] if setup.slack is None else setup.slack)
    return "" if score <= LIMIT else f"mean of the estimate is off by {error:+.2%}, {score:.0f} standard errors"


def projection(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return ⟨found, expected⟩ / ‖expected‖², 1 on average for an unbiased estimate of all these gradients."""
    # Not by a product of vectors, whose float32 sum of ten million elements is off by a thousandth.
    inner = sum(float((a.float() * b.float()).sum(dtype=torch.float64)) for a, b in zip(found, expected, strict=True))
    return inner / sum(float(b.float().square().sum(dtype=torch.float64)) for b in expected)


def t_score(values: Sequence[float], slack: float) -> tuple[float, float]:
    error = statistics.fmean(values) - 1
    if not math.isfinite(error):
        return error, math.inf
    beyond = max(0.0, abs(error) - slack)
    deviation = statistics.stdev(values) / math.sqrt(len(values))
    return error, beyond / deviation if deviation else math.inf if beyond else 0.0
