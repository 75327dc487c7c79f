"""Choose an option for every block of a sequence: least cost within a memory budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rmm_linear._support.validation import did_you_mean
from rmm_linear.planning.blocks.solvers import Option, by_milp, by_rounded, has_scipy, peaks

SOLVERS = ("auto", "milp", "rounded")


def choose(
    options: Sequence[Sequence[Option]],
    budget: int,
    cost: Callable[[Option], float] | None = None,
    *,
    solver: str = "auto",
) -> list[int] | None:
    """Choose an option for every block, so that their costs have the least sum.

    A block's worst moment comes on top of what the blocks before it keep. Every solver finds something wherever
    anything fits, and never exceeds the budget; they differ in how close to the least sum they come:

    - "milp": the optimum to a millionth, by scipy's solver of mixed-integer programs, HiGHS. After 20 seconds, the best
      that was found until then.
    - "rounded": the optimum of a budget that is smaller by at most a 20,000th per block, by a dynamic program.

    Args:
        options: Of every block, in the order of the forward pass.
        budget: Bytes.
        cost: Of an option, finite; it may be negative. None: the time that it adds.
        solver: "milp", "rounded", or "auto": the first where scipy can be imported, else the second.

    Example:
        >>> keep, again = Option("keep", 5, 6, 0.0), Option("recompute", 1, 6, 1.0)
        >>> choose([[keep, again], [keep, again]], 8, solver="rounded")  # 1 + 6 bytes
        [1, 0]
    """
    if solver not in SOLVERS:
        raise ValueError(f"solver must be one of {', '.join(SOLVERS)}, got {solver!r}.{did_you_mean(solver, SOLVERS)}")
    price = _checked(cost or (lambda option: option.seconds))
    usable = _usable(options, budget)
    if usable is None:
        return None
    if not usable:
        return []
    blocks = [[block[index] for index in some] for block, some in zip(options, usable, strict=True)]
    prices = [[price(option) for option in block] for block in blocks]
    if solver == "auto":
        solver = "milp" if has_scipy() else "rounded"
    solve = {"milp": by_milp, "rounded": by_rounded}[solver]
    return [some[index] for some, index in zip(usable, solve(blocks, prices, budget), strict=True)]


def peak_of(options: Sequence[Sequence[Option]], chosen: Sequence[int]) -> int:
    """Return the peak of a choice.

    Args:
        options: Of every block, in the order of the forward pass.

    Returns:
        Bytes at the worst moment of any block, with what the blocks before it keep.

    Example:
        >>> peak_of([[Option("keep", 5, 6, 0.0)], [Option("keep", 5, 6, 0.0)]], [0, 0])
        11
    """
    return max(peaks(options, chosen), default=0)


def least(options: Sequence[Sequence[Option]]) -> int:
    """Return the least budget for which :func:`choose` finds something.

    Returns:
        Bytes.
    """
    low, high = 0, sum(max(option.kept for option in block) for block in options)
    high += max(option.worst for block in options for option in block)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if _usable(options, middle) is None else (low, middle)
    return low


def _usable(options: Sequence[Sequence[Option]], budget: int) -> list[list[int]] | None:
    """Indices of the options that fit if the blocks before keep as little as they can; None if a block has none."""
    # A block that keeps less never harms those after it, so only its own worst moment may speak against it: the choice
    # of what keeps least among these options fits.
    kept, usable = 0, list[list[int]]()
    for block in options:
        usable.append([index for index, option in enumerate(block) if kept + option.worst <= budget])
        if not usable[-1]:
            return None
        kept += min(block[index].kept for index in usable[-1])
    return usable


def _checked(cost: Callable[[Option], float]) -> Callable[[Option], float]:
    def price(option: Option) -> float:
        found = float(cost(option))
        if not math.isfinite(found):
            raise ValueError(f"cost must be finite, got {found} for {option.name!r}. Leave out what is not to be.")
        return found

    return price
