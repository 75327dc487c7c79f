"""Choose an option for every block of a sequence: the least cost within a memory budget.

Block i has options o that save k(i, o) bytes in its forward pass, have the peak q(i, o) and cost c(i, o):

    min Σ c(i, o(i))  such that  Σ_{j<i} k(j, o(j)) + q(i, o(i)) ≤ budget for all i.

Infeasible options are removed first, so saving the least is always feasible; the solvers distribute the memory that is
left. Options may put bytes h(i, o) elsewhere, Σ h(i, o(i)) ≤ host: a price for them is found that keeps this (Everett
1963), so the choice is the best one for some limit a little below.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from rmm_linear._support.installing import INSTALL_PLANNING
from rmm_linear._support.validation import did_you_mean

SOLVERS = ("auto", "milp", "rounded")
_LEVELS = 20_000  # steps of bytes in the dynamic program: a table of 200 blocks is 8 MB
_SECONDS = 20.0  # of the integer program
_OCTAVES, _HALVINGS = 20.0, 12  # of the price of a byte that waits elsewhere
_TOLERANCE = 10**6  # what HiGHS takes for an integer may be off by a millionth


@dataclass(frozen=True)
class Option:
    """A choice for a block."""

    name: str
    kept: int  # bytes that remain after the block's forward pass
    worst: int  # peak in bytes of its forward, recomputation or backward pass, without what the blocks before it save
    seconds: float  # time that is added
    noise: float = 0.0  # variance ratio that is added
    host: int = 0  # bytes that wait elsewhere


Blocks = Sequence[Sequence[Option]]
Prices = Sequence[Sequence[float]]


def choose(
    options: Sequence[Sequence[Option]],
    budget: int,
    cost: Callable[[Option], float] | None = None,
    *,
    solver: str = "auto",
    host: int | None = None,
) -> list[int] | None:
    """Choose an option for every block, so that their costs (the time that they add, if None) have the least sum.

    ``host`` limits the bytes that wait elsewhere. None is returned where nothing is within the limits.

    "milp" is the optimum to a millionth, by scipy's HiGHS, or the best after 20 seconds; "rounded" that of a budget
    smaller by at most a 20,000th per block, by a dynamic program; "auto" the first where scipy is installed. Both find
    something wherever anything fits, and never exceed the budget.
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
    found: list[int] | None = {"milp": by_milp, "rounded": by_rounded}[solver](blocks, prices, budget)
    if host is not None and host_of(blocks, found) > host:
        found = _within_host(blocks, prices, budget, host)
    return None if found is None else [some[index] for some, index in zip(usable, found, strict=True)]


def host_of(options: Sequence[Sequence[Option]], chosen: Sequence[int]) -> int:
    return sum(block[index].host for block, index in zip(options, chosen, strict=True))


def _within_host(blocks: Blocks, prices: Prices, budget: int, host: int) -> list[int] | None:
    """Choose by prices to which a price per byte that waits elsewhere is added, the least one that keeps the limit."""

    def at(price: float, share: float = 1.0) -> list[int]:
        rows = zip(blocks, prices, strict=True)
        added = [[share * one + price * each.host for each, one in zip(block, row, strict=True)] for block, row in rows]
        return by_rounded(blocks, added, budget)

    best = at(1.0, 0.0)
    if host_of(blocks, best) > host:
        return None
    unit = sum(max(row) - min(row) for row in prices) / sum(max(one.host for one in block) for block in blocks)
    low, high = -_OCTAVES, _OCTAVES
    for _ in range(_HALVINGS if unit else 0):
        middle = (low + high) / 2
        found = at(unit * 2**middle)
        if host_of(blocks, found) <= host:
            best, high = found, middle
        else:
            low = middle
    return best


def peak_of(options: Sequence[Sequence[Option]], chosen: Sequence[int]) -> int:
    """Return the peak in any block, with what the blocks before it save."""
    return max(peaks(options, chosen), default=0)


def least(options: Sequence[Sequence[Option]], host: int | None = None) -> int:
    """Return the least budget for which :func:`choose` finds something; to a thousandth, where ``host`` binds."""
    low, high = 0, sum(max(option.kept for option in block) for block in options)
    high += max(option.worst for block in options for option in block)
    most = high
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if _usable(options, middle) is None else (low, middle)

    def fits(budget: int) -> bool:
        return choose(options, budget, _host, solver="rounded", host=host) is not None

    if host is None or fits(low):
        return low
    high = most
    while high - low > max(high // 1000, 1):
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _host(option: Option) -> float:
    return float(option.host)


def _usable(options: Sequence[Sequence[Option]], budget: int) -> list[list[int]] | None:
    """Indices of the options that fit if the blocks before save as little as they can; None if a block has none."""
    # A block that saves less never harms those after it, so only its own peak may speak against it: the choice
    # of what saves least among these options fits.
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
            raise ValueError(f"cost must be finite, got {found} for {option.name!r}. Leave the option out.")
        return found

    return price


def peaks(blocks: Blocks, chosen: Sequence[int]) -> list[int]:
    """Return the peak in each block, with what the blocks before it save."""
    rows = [block[index] for block, index in zip(blocks, chosen, strict=True)]
    before = accumulate((row.kept for row in rows), initial=0)
    return [kept + row.worst for kept, row in zip(before, rows, strict=False)]


def has_scipy() -> bool:
    """Say whether :func:`by_milp` can run."""
    try:
        import scipy.optimize  # noqa: F401
    except ImportError:
        return False
    return True


def by_milp(blocks: Blocks, prices: Prices, budget: int) -> list[int]:
    """Solve the integer program with HiGHS; what it returns is checked in integers."""
    for target in (budget, budget - budget // _TOLERANCE - 1):
        chosen = _milp(blocks, prices, target)
        if chosen is not None and max(peaks(blocks, chosen)) <= budget:
            return chosen
    return by_rounded(blocks, prices, budget)


def _milp(blocks: Blocks, prices: Prices, budget: int) -> list[int] | None:
    """Return what HiGHS finds, which may exceed the budget by its tolerance; None if it finds nothing."""
    try:
        import numpy as np
        from scipy.optimize import Bounds, LinearConstraint, milp
    except ImportError as missing:
        raise ImportError(
            f"solver='milp' needs the package scipy, which is not installed. Run {INSTALL_PLANNING}, or use "
            "solver='rounded'."
        ) from missing
    ends = list(accumulate(map(len, blocks), initial=0))
    spans = [slice(begin, end) for begin, end in pairwise(ends)]
    # Memory in millionths of the budget, costs in shares of the largest difference: tolerances and gaps are absolute.
    one, rows, costs = np.zeros((len(blocks), ends[-1])), np.zeros((len(blocks), ends[-1])), np.zeros(ends[-1])
    for number, (block, span) in enumerate(zip(blocks, spans, strict=True)):
        one[number, span] = 1
        rows[number, span] = [option.worst for option in block]
        rows[number + 1 :, span] = [option.kept for option in block]
        costs[span] = [price - min(prices[number]) for price in prices[number]]
    unit = max(budget, 1) / 10**6
    rules = [LinearConstraint(one, 1, 1), LinearConstraint(rows / unit, -np.inf, budget / unit)]
    # Of two neighbours that are alike, the one that needs more beyond what it saves comes first: the other order has no
    # lower peak, and HiGHS would search both.
    for number, block in enumerate(blocks[:-1]):
        if len(block) > 1 and block == blocks[number + 1] and prices[number] == prices[number + 1]:
            ranks = np.argsort(np.argsort([option.kept - option.worst for option in block], kind="stable"))
            comes_later = ranks >= np.arange(1, len(block))[:, None]
            order = np.zeros((len(comes_later), ends[-1]))
            order[:, spans[number]], order[:, spans[number + 1]] = comes_later, -1.0 * comes_later
            rules.append(LinearConstraint(order, -np.inf, 0))
    found = milp(
        costs / (costs.max() or 1.0),
        integrality=np.ones(ends[-1]),
        bounds=Bounds(0, 1),
        constraints=rules,
        options={"time_limit": _SECONDS, "mip_rel_gap": 1e-6},
    )
    return None if found.x is None else [int(found.x[span].argmax()) for span in spans]


def by_rounded(blocks: Blocks, prices: Prices, budget: int) -> list[int]:
    """Solve a dynamic program over what blocks save beyond the least, rounded up to a grid of bytes.

    It takes about a millisecond per block. Exact where at most 20,000 bytes are free; else what rounding leaves of the
    budget is spent on options that cost less.
    """
    floors = [min(option.kept for option in block) for block in blocks]
    bases = list(accumulate(floors, initial=0))
    free = budget - bases[-2] - min(option.worst for option in blocks[-1])  # no block can make use of more
    grid = max(1, -(-free // _LEVELS))
    levels = free // grid + 1
    best = torch.full((levels,), torch.inf, dtype=torch.float64, device="cpu")
    best[0] = 0
    steps, tables = list[list[int]](), list[torch.Tensor]()
    for number, block in enumerate(blocks):
        after, table = torch.full_like(best, torch.inf), torch.zeros_like(best, dtype=torch.int16)
        is_last = number == len(blocks) - 1  # what it saves comes after every peak
        steps.append([0 if is_last else -((floors[number] - option.kept) // grid) for option in block])
        for index, (option, price, step) in enumerate(zip(block, prices[number], steps[-1], strict=True)):
            # The peak is not rounded: level * grid + base + worst <= budget.
            fitting = min((budget - bases[number] - option.worst) // grid + 1, levels - step)
            if fitting > 0:
                made, part = best[:fitting] + price, slice(step, step + fitting)
                table[part].masked_fill_(made < after[part], index)
                after[part] = torch.minimum(after[part], made)
        best = after
        tables.append(table)
    level = int((best == best.min()).nonzero()[0])
    chosen = list[int]()
    for step, table in zip(reversed(steps), reversed(tables), strict=True):
        chosen.append(int(table[level]))
        level -= step[chosen[-1]]
    return _improved(blocks, prices, budget, chosen[::-1])


def _improved(blocks: Blocks, prices: Prices, budget: int, chosen: list[int]) -> list[int]:
    """Spend what is left of the budget on options that cost less, the greatest gain first."""
    gains = sorted(
        (price - prices[number][chosen[number]], number, index)
        for number, row in enumerate(prices)
        for index, price in enumerate(row)
        if price < prices[number][chosen[number]]
    )
    for _, number, index in gains:
        changed = [*chosen[:number], index, *chosen[number + 1 :]]
        if prices[number][index] < prices[number][chosen[number]] and max(peaks(blocks, changed)) <= budget:
            chosen = changed
    return chosen
