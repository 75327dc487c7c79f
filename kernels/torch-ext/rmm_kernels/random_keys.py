"""random_keys: the keys by which rows are sampled without replacement."""

import torch
import triton
import triton.language as tl

from .draws import as_int64, known_seed, words
from .launch import Seed, cdiv, given, launch

_STREAM = tl.constexpr(2)
_LAST = tl.constexpr(2**63 - 1)


@triton.jit(do_not_specialize=["seed", "n_fresh", "n_tokens"])
def _random_keys_kernel(
    p_seed, seed: tl.int64, n_fresh, p_count, p_keys, n_tokens, MASKED: tl.constexpr, B_N: tl.constexpr
):
    """B_N keys.

    p_seed, seed, n_fresh: see known_seed. p_count: int64 (1,). p_keys: int64 (N,).
    """
    o_n = tl.program_id(0).to(tl.int64) * B_N + tl.arange(0, B_N)
    first, second, _, _ = words(known_seed(p_seed, seed, n_fresh), o_n, _STREAM)
    b_keys = (first.to(tl.int64) << 31) | (second >> 1).to(tl.int64)
    if MASKED:
        b_keys = tl.where(o_n < tl.load(p_count), b_keys, o_n - n_tokens + as_int64(_LAST))
    tl.store(p_keys + o_n, b_keys, mask=o_n < n_tokens)


def random_keys(seed: Seed, tokens: int, count: torch.Tensor | None = None) -> torch.Tensor:
    """Return a random 63-bit key for every row; the rows with the smallest keys are a sample.

    Args:
        seed: int64, shape (1,); or to be written there, see ``given``.
        tokens: N.
        count: n, int64, shape (1,): the rows from n on get the largest keys, in order. None is N.

    Returns:
        int64, shape (N,).
    """
    seeds = given(seed, tokens > 0)
    keys = torch.empty(tokens, dtype=torch.int64, device=seeds[0].device)
    if tokens:
        launch(
            _random_keys_kernel, (cdiv(tokens, 1024),),
            *seeds, count, keys, tokens, MASKED=count is not None, B_N=1024,
        )  # fmt: skip
    return keys
