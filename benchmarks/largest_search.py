"""The search for the largest batch that fits, in few trials: each may take seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

NO_TIME = "no more time"
_PRECISION, _MOST = 16, 64  # the least batch that does not fit is at most a 16th larger; a guess at most 64 times


def largest(peak: Callable[[int], int | None], memory: int, first: int, end: float) -> tuple[int, str]:
    """Search for the largest batch that fits.

    Args:
        peak: Tries a batch; the bytes at its peak, None if they are too many. One that raises ends the search.
        memory: Bytes that there are.
        first: The first batch; smaller ones are tried if it does not fit.
        end: By ``time.time``; no batch is tried that would take longer.

    Returns:
        The batch, less than a 16th too small; 0 if none fits. And "ok", or why the search ended early.
    """
    known, high, failures, size, pace = [(0, 0)], None, 0, first, 0.0
    while high is None or high - known[-1][0] > max(1, known[-1][0] // _PRECISION):
        begin, low = time.time(), known[-1][0]
        if begin + pace * size > end:
            return low, f"{NO_TIME}: at least {low}" + ("" if high is None else f", less than {high}")
        try:
            found = peak(size)
        except RuntimeError as error:
            return low, f"with {size}: {first_line(error)}"
        pace = (time.time() - begin) / size
        if found is None:
            high, failures = size, failures + 1
        else:
            known.append((size, found))
        size = _next(known, high, failures, memory)
    return known[-1][0], "ok"


def _next(known: Sequence[tuple[int, int]], high: int | None, failures: int, memory: int) -> int:
    """The batch to try next, of batches that fit with their bytes, and the least that does not."""
    low, least = known[-1][0], known[-1][0] + max(1, known[-1][0] // _PRECISION)
    if high is not None:
        # What should have fitted did not: just below it, and if that does not fit either, halfway.
        return high - max(1, high // (_PRECISION + 1)) if failures == 1 and len(known) > 2 else (low + high) // 2
    if len(known) < 3:
        return 4 * low
    (smaller, fewer), (_, more) = known[-2:]
    slope = (more - fewer) / (low - smaller)
    guess = low + int((memory - more) / slope) if slope > 0 else _MOST * low
    return max(least, min(guess, _MOST * low))


def first_line(error: BaseException) -> str:
    """Return what an error says in one line.

    Args:
        error: The error.

    Returns:
        The first line of its text, or its name.
    """
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def is_full(error: RuntimeError) -> bool:
    """Say whether memory was too small: libraries beside PyTorch's allocator have words of their own for it.

    Args:
        error: What a step raised.

    Returns:
        Whether a smaller batch may do.
    """
    text = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in text or "alloc_failed" in text
