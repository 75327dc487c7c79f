"""Estimate beforehand how long a fit takes: by the exact step that was measured, and by what will be run."""

from __future__ import annotations

from rmm_linear.fitting import noise, times
from rmm_linear.fitting.options import Candidates
from rmm_linear.planning.blocks.find import alike
from rmm_linear.planning.blocks.measure import expect_steps, step_seconds
from rmm_linear.planning.blocks.plan import CONVERT
from rmm_linear.planning.step.resize import sequences_of

_JUDGED = 3.0  # plans that are solved for and simulated
_OVERHEAD = 0.3  # of a step, in a pass over few of its sequences


def expect_fit(candidates: Candidates, *, again: float = 0.0, larger: float = 0.0) -> None:
    """Say about how long a fit takes."""
    names = candidates.singles()
    converted = sum(name.startswith(CONVERT) for name in names)
    steps = _JUDGED + again + len(names) * (2 if candidates.is_meta else 1)  # with their compositions
    real = converted + larger + _timed(candidates, len(names)) + (_noise(candidates, converted) if converted else 0)
    expect_steps(steps, real)


def _timed(candidates: Candidates, options: int) -> float:
    """Return the steps in which a block of each kind is timed with its options."""
    blocks, step = candidates.costs.blocks, step_seconds()
    total = sum(block.seconds for block in blocks) or 1.0
    shares = {alike(candidates.model, block.name): block.seconds / total for block in blocks}
    rounds = times.ROUNDS + times.MORE_ROUNDS / 2
    calls = (1 + max(1, min(times.REPEATS, int(times.LONG / max(share * step, 1e-6)))) for share in shares.values())
    return sum(
        share * rounds * (1 + 1.2 * options) * count for share, count in zip(shares.values(), calls, strict=True)
    )


def _noise(candidates: Candidates, settings: int) -> float:
    """Return the steps that measure the variance of the minibatch, and of settings."""
    try:
        passes = min(noise.PASSES, sequences_of(candidates.example))
    except ValueError:  # a function
        return 0.0
    return 3 + _OVERHEAD * passes + noise.DRAWS * settings
