"""Dense families: gaussian and rademacher, whole or block-diagonal.

S has independent entries of mean 0 and variance 1/K, so E[S Sᵀ] = 1. With ``block=b`` S is block-diagonal: every b
consecutive tokens have their own K_b = ⌈K·b/N⌉ rows, which makes the cost of SᵀX linear in N; tokens of two blocks
never mix.

Variance of dŴ = (SᵀY)ᵀ(SᵀX), from the fourth moments of the entries: (P + g)/K for gaussian, (P + g − 2d)/K for
rademacher; with blocks, the sum over blocks of the same with K_b.

Entry (i, k) is made from the words of token i alone, so a kernel can make any tile of S in registers.
"""

from __future__ import annotations

from collections.abc import Callable
from math import log2, sqrt

import torch
from torch import Tensor

from rmm_linear.sketches.blocks import block_rows, even_blocks
from rmm_linear.sketches.family import Family, Moments
from rmm_linear.sketches.philox import Generator, normal, philox, unpack_signs


def _gaussian_entries(seed: Tensor, first: int, tokens: int, rows: int, generator: Generator) -> Tensor:
    groups = -(-rows // 4)
    counters = torch.arange(first * groups, (first + tokens) * groups, device=seed.device)
    words = generator(seed, counters, 0)
    lanes = (*normal(words[0], words[1]), *normal(words[2], words[3]))
    return torch.stack(lanes, dim=-1).view(tokens, groups * 4)[:, :rows]


def _rademacher_entries(seed: Tensor, first: int, tokens: int, rows: int, generator: Generator) -> Tensor:
    groups = -(-rows // 32)
    counters = torch.arange(first * groups, (first + tokens) * groups, device=seed.device)
    return unpack_signs(generator(seed, counters, 0)[0]).view(tokens, groups * 32)[:, :rows]


def _family(
    name: str, summary: str, entries: Callable[[Tensor, int, int, int, Generator], Tensor], diagonal: float
) -> Family:
    def sketch(
        matrix: Tensor,
        seed: Tensor,
        rows: int,
        block: int | None,
        count: Tensor | None = None,
        generator: Generator = philox,
    ) -> Tensor:
        tokens, columns = matrix.shape
        size, blocks, rows_per_block = block_rows(tokens, rows, block)
        # A power of two is exact in every dtype. The result gets the rest of 1/√K: rounded to a half type, it would
        # scale dW.
        power = 2.0 ** -round(log2(rows_per_block) / 2)

        def scaled_entries(first: int, length: int) -> Tensor:
            return (entries(seed, first, length, rows_per_block, generator) * power).to(matrix.dtype)

        def multiply(first: int, times: int, length: int) -> Tensor:
            s = scaled_entries(first, times * length).view(times, length, rows_per_block)
            return torch.bmm(s.transpose(1, 2), matrix[first : first + times * length].view(times, length, columns))

        matrix = matrix.contiguous()
        if count is None or blocks == 1:
            whole = tokens // size
            parts = [multiply(0, whole, size)]
            if whole < blocks:
                parts.append(multiply(whole * size, 1, tokens - whole * size))
            result = torch.cat(parts)
        else:
            index, valid = even_blocks(tokens, size, blocks, count)
            s = torch.where(valid.unsqueeze(-1), scaled_entries(0, tokens)[index], 0)
            result = torch.bmm(s.transpose(1, 2), matrix[index])
        return result.view(blocks * rows_per_block, columns).mul_(1 / (power * sqrt(rows_per_block)))

    def variance(x: Tensor, y: Tensor, rows: int, block: int | None, count: Tensor | None = None) -> Tensor:
        size, blocks, rows_per_block = block_rows(x.shape[0], rows, block)
        if count is not None:
            size = -(-int(count) // blocks)
        parts = [Moments.of(*pair) for pair in zip(x.split(size), y.split(size), strict=True)]
        return torch.stack([(m.p + m.g - diagonal * m.d) / rows_per_block for m in parts]).sum()

    return Family(name, summary, sketch, variance, blocks=True, local=True)


GAUSSIAN = _family("gaussian", "independent normal entries (the published method)", _gaussian_entries, diagonal=0.0)
RADEMACHER = _family("rademacher", "independent random signs", _rademacher_entries, diagonal=2.0)
