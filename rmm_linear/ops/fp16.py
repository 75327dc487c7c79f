"""The range of float16: sums of a sketch must stay below 65504."""

from __future__ import annotations

import math

import torch


def fp16_scale(dtype: torch.dtype, tokens: int, rows: int) -> float:
    """Return the power of two that keeps sums of a sketch within float16; 1 for all other dtypes.

    SᵀX is divided by it before it is stored, SᵀY multiplied by it. Every row of SᵀX is a sum of tokens: on average
    √(N/K) times as large as a token, and hardly ever four times more than that. So where one channel is large in all
    tokens, SᵀX would be infinite in every step although X is finite. A loss scale would not help: it scales Y alone.

    Args:
        dtype: Of X and Y.
        tokens: N.
        rows: K.

    Returns:
        A power of two, 4√(N/K) at least for float16.
    """
    if dtype != torch.float16 or rows >= tokens:
        return 1.0
    return 2.0 ** math.ceil(math.log2(4 * math.sqrt(tokens / max(rows, 1))))
