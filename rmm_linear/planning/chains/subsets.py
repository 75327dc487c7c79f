"""Find the outputs of a chain to save for the least peak, in linear time.

A chain has outputs of d_0, …, d_{n-1} bytes; the first and the last are always saved. Between saved neighbours i < j,
the backward pass computes the outputs i+1, …, j-1 again and holds, above all that is saved up to i,

    U(i, j) = Σ_{i<k<j} d_k + max_{i≤k<j} d_k + d_j        the outputs, the gradient being computed, the gradient of j

so that the least peak M(0) follows from M(n-1) = d_{n-1}, M(i) = d_i + min_{j>i} max(M(j), U(i, j)).

Why that takes O(n): U(i, j) never falls in j. With m(i, j) = min_{i<k≤j} M(k), which never rises in j, the minimum is
min_j max(m(i, j), U(i, j)): where m is smaller than M(j), an earlier k has the same M and no larger U. One side falls
and the other rises, so the best j is the first one with U ≥ m, or the one with the least M before it. When i falls,
U(i, j) rises and m(i, j) falls, hence that first j never moves to the right: one pointer, and two queues whose ends are
the largest d between i and the pointer, and the least M.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, ClassVar

from rmm_linear._support.reports import Report
from rmm_linear._support.saved_settings import SavedSettings
from rmm_linear._support.tables import wrapped
from rmm_linear._version import __version__


@dataclass(frozen=True, repr=False)
class ChainPlan(Report, SavedSettings):
    """The outputs of a chain that are saved. :meth:`save` and :meth:`load` store the plan as JSON.

    Attributes:
        peak: Peak in bytes of the backward pass, as the model above counts it: outputs and their
            gradients, without parameters, their gradients, and what an operator needs for itself.
        kept: Indices of the outputs that are saved, from 0 to the last one. The others are computed again.
    """

    peak: int
    kept: tuple[int, ...]

    version: ClassVar[str] = __version__

    def __post_init__(self) -> None:
        if any(isinstance(number, bool) for number in (self.peak, *self.kept)):
            raise TypeError(f"peak and kept must be integers, got {self.peak!r} and {self.kept!r}.")
        kept = tuple(operator.index(place) for place in self.kept)
        object.__setattr__(self, "kept", kept)
        object.__setattr__(self, "peak", operator.index(self.peak))
        if self.peak < 0:
            raise ValueError(f"peak must not be negative, got {self.peak}. Take a plan of minimum_peak.")
        if not kept or kept[0] != 0 or any(i >= j for i, j in pairwise(kept)):
            raise ValueError(f"kept must begin with 0 and rise, got {kept}. Take a plan of minimum_peak.")

    def summary(self) -> str:
        """Return the peak, and how many outputs are saved."""
        return f"peak of {self.peak:,} bytes, saves {len(self.kept)} of {self.kept[-1] + 1} outputs"

    def __str__(self) -> str:
        few = (
            [*map(str, self.kept)]
            if len(self.kept) < 13
            else [*map(str, self.kept[:6]), "…", *map(str, self.kept[-5:])]
        )
        return wrapped(f"{self.summary()}: {', '.join(few)}", 2)

    def table(self) -> str:
        """Return the same with every output that is saved.

        Returns:
            Text.
        """
        return wrapped(f"{self.summary()}: {', '.join(map(str, self.kept))}", 2)

    def _records(self) -> list[dict[str, Any]]:
        return [{"output": place} for place in self.kept]


def minimum_peak(sizes: Iterable[int]) -> ChainPlan:
    """Find the outputs of a chain to save so that the peak of its backward pass is the least possible.

    It takes O(n) time and memory: a million outputs take seconds. Only memory counts; each output that is not saved is
    computed once more.

    Args:
        sizes: Bytes of the outputs in the chain's order. For :func:`checkpoint_chain`, the chain's input is the first
            of them: :func:`chain_sizes` measures them.

    Returns:
        The plan. Of several with the least peak, any one.

    Raises:
        TypeError: If a size is not an integer.
        ValueError: If there is none, or one is negative.

    Example:
        >>> print(minimum_peak([1] * 16))
        peak of 7 bytes, saves 6 of 16 outputs: 0, 5, 9, 12, 14, 15

    The objective is that of Hong et al. 2025; how it is solved is this module's own.
    """
    d = _checked(sizes)
    last = len(d) - 1
    prefix = [0, *accumulate(d)]  # prefix[k] = d_0 + … + d_{k-1}
    best, following = [0] * len(d), [last] * len(d)
    best[last] = d[last]
    pointer = last + 1  # the first j with U(i, j) ≥ m(i, j); last + 1 while there is none
    # Indices, newest first. The last one of each is the extreme of its window: M over (i, pointer), d from i on.
    least, largest = deque([last]), deque()
    for i in range(last - 1, -1, -1):
        while largest and d[largest[0]] <= d[i]:
            largest.popleft()
        largest.appendleft(i)
        while pointer - 1 > i:
            j = pointer - 1
            while largest[-1] >= j:
                largest.pop()
            if prefix[j] - prefix[i + 1] + d[largest[-1]] + d[j] < best[least[-1]]:
                break
            pointer = j
            if least[-1] == pointer:
                least.pop()
        # Left of the pointer M is the larger one; at the pointer U is, and no M up to it is above that.
        value, at = (best[least[-1]], least[-1]) if least else (None, pointer)
        if pointer <= last:
            while largest[-1] >= pointer:
                largest.pop()
            top = max(d[largest[-1]], d[pointer - 1])
            used = prefix[pointer] - prefix[i + 1] + top + d[pointer]
            if value is None or used < value:
                at = pointer if value is None or best[pointer] < value else at
                value = used
        best[i], following[i] = d[i] + (value or 0), at
        while least and best[least[0]] >= best[i]:
            least.popleft()
        least.appendleft(i)
    kept = [0]
    while kept[-1] != last:
        kept.append(following[kept[-1]])
    return ChainPlan(best[0], tuple(kept))


def _checked(sizes: Iterable[int]) -> list[int]:
    found = []
    for place, size in enumerate(sizes):
        try:
            found.append(operator.index(size))
        except TypeError:
            raise TypeError(
                f"sizes must be integers, got {size!r} at {place}. Sizes are bytes: round them up, or count elements."
            ) from None
        if found[-1] < 0:
            raise ValueError(f"sizes must not be negative, got {size} at {place}.")
    if not found:
        raise ValueError("sizes must name at least one output, got none.")
    return found
