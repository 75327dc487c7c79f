"""Subsampled orthogonal transforms: hadamard, dct, dft.

Sᵀ = √(N/K) · R T D: random signs D, an orthonormal real transform T, K of its N rows R, uniform and without
replacement. D and T are orthogonal and every row is sampled with probability K/N, so E[S Sᵀ] = 1.

Write q_ac = Σ_k t_ka² t_kc² for two tokens a, c. The fourth moments of the signs give

    Var = (N−K)/(K(N−1)) · [ P + g − 2d + N · Σ_ac (q_ac − 1/N) · (‖x_a‖²‖y_c‖² + 2 x_a·x_c y_a·y_c − 2 [a=c] d_a) ].

Hadamard's entries are ±1/√N, so q_ac = 1/N and the last sum vanishes; N is the next power of two there (the padding
rows are zero). For the cosine transform q_ac − 1/N = ([c=a] + [c=N−1−a])/2N − 1/N², for the Hartley transform
([2(a−c)≡0] − [2(a+c)≡0])/2N modulo N: a few mirrored tokens, a relative error of order 1/N if it were left out.

With ``block=b``, hadamard transforms every b consecutive tokens by themselves, and samples the same K_b = ⌈K·b/N⌉ rows
of each. Whichever these are, S Sᵀ has ones on its diagonal, and each other entry has the random signs of two tokens as
factors. So the errors of two blocks are uncorrelated, and the variance is the sum over blocks.

dft is the discrete Fourier transform in its real, Hartley form (cos + sin), so that Z stays real.

Cost: O(N·D·log N) by fast transforms; memory for one copy of the matrix while it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from math import pi, sqrt

import torch
from torch import Tensor

from rmm_linear.sketches.blocks import block_rows, even_blocks
from rmm_linear.sketches.family import Family, Moments, accumulator_dtype
from rmm_linear.sketches.philox import Generator, philox, signs
from rmm_linear.sketches.rows import sample


def next_power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least ``number``."""
    return 1 << (number - 1).bit_length()


def _identity(tokens: int) -> int:
    return tokens


def _hadamard_rows(matrix: Tensor, index: Tensor) -> Tensor:
    """Rows of the orthonormal Walsh-Hadamard transform, natural order: entry (k, i) is (−1)^popcount(k & i) / √M."""
    tokens, columns = matrix.shape
    padded = next_power_of_two(tokens)
    work = torch.nn.functional.pad(matrix, (0, 0, 0, padded - tokens))
    half = 1
    while half < padded:
        pairs = work.view(-1, 2, half, columns)
        work = torch.stack((pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]), dim=1)
        half *= 2
    return work.view(padded, columns).index_select(0, index) / sqrt(padded)


def _dct_rows(matrix: Tensor, index: Tensor) -> Tensor:
    """Return the rows ``index`` of the orthonormal DCT-II of ``matrix`` (N, D), by one FFT (Makhoul 1980)."""
    tokens = matrix.shape[0]
    folded = torch.cat((matrix[::2], matrix[1::2].flip(0)))
    spectrum = _fourier_rows(folded, index)
    angle = (pi / (2 * tokens)) * index.to(matrix.dtype).unsqueeze(1)
    rows = spectrum[..., 0] * torch.cos(angle) + spectrum[..., 1] * torch.sin(angle)
    return torch.where(index.unsqueeze(1) == 0, rows * sqrt(1 / tokens), rows * sqrt(2 / tokens))


def _dft_rows(matrix: Tensor, index: Tensor) -> Tensor:
    """Return the rows ``index`` of the orthonormal Hartley transform of ``matrix`` (N, D): entries (cos + sin)/√N."""
    spectrum = _fourier_rows(matrix, index)
    return (spectrum[..., 0] - spectrum[..., 1]) / sqrt(matrix.shape[0])


def _fourier_rows(matrix: Tensor, index: Tensor) -> Tensor:
    """Rows ``index`` of the Fourier transform of a real matrix, (K, D, 2); half of them follow by conjugation."""
    tokens = matrix.shape[0]
    mirrored = index > tokens // 2
    spectrum = torch.fft.rfft(matrix, dim=0).index_select(0, torch.where(mirrored, tokens - index, index))
    # Not Tensor.conj: inside an operator that a compiler calls, a lazy conjugate is never resolved.
    sign = torch.where(mirrored, -1, 1).unsqueeze(1)
    parts = torch.view_as_real(spectrum)
    return torch.stack((parts[..., 0], parts[..., 1] * sign), dim=-1)


def _no_mirrors(tokens: int) -> list[tuple[Tensor, float]]:
    return []


def _dct_mirrors(tokens: int) -> list[tuple[Tensor, float]]:
    index = torch.arange(tokens, device="cpu")
    return [(index, 0.5), (index.flip(0), 0.5)]


def _dft_mirrors(tokens: int) -> list[tuple[Tensor, float]]:
    """Return the tokens c with 2(a−c) ≡ 0 or 2(a+c) ≡ 0 modulo N, each with N times its part of q_ac − 1/N."""
    index = torch.arange(tokens, device="cpu")
    shifts = (0, tokens // 2) if tokens % 2 == 0 else (0,)
    return [((sign * index + shift) % tokens, 0.5 * sign) for shift in shifts for sign in (1, -1)]


def _mirrored(x: Tensor, y: Tensor, mirror: Tensor) -> Tensor:
    """Return the sum over a of the factor of q_ac in the variance, for c = mirror(a)."""
    x, y, mirror = x.double(), y.double(), mirror.to(x.device)
    x_norms, y_norms = x.square().sum(1), y.square().sum(1)
    products = (x * x[mirror]).sum(1) * (y * y[mirror]).sum(1)
    same = mirror == torch.arange(len(mirror), device=x.device)
    return (x_norms * y_norms[mirror] + 2 * products - 2 * same * x_norms * y_norms).sum()


def _family(
    name: str,
    summary: str,
    transform: Callable[[Tensor, Tensor], Tensor],
    mirrors: Callable[[int], list[tuple[Tensor, float]]] = _no_mirrors,
    uniform: float = 0.0,
    length: Callable[[int], int] = _identity,
    has_blocks: bool = False,
) -> Family:
    """Make a family; ``mirrors`` and ``uniform`` are N · (q_ac − 1/N) on some pairs and, times 1/N, on all."""

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
        dtype, whole = accumulator_dtype(matrix.dtype), length(size)
        signed = matrix.to(dtype) * signs(seed, tokens, generator=generator).to(dtype).unsqueeze(1)
        if blocks > 1:  # side by side, so that one transform handles all
            signed = _side_by_side(signed, size, blocks, count)
        result = transform(signed, sample(seed, whole, rows_per_block, generator=generator)) * sqrt(
            whole / rows_per_block
        )
        result = result.view(rows_per_block, blocks, columns).transpose(0, 1)
        return result.reshape(blocks * rows_per_block, columns).to(matrix.dtype)

    def variance(x: Tensor, y: Tensor, rows: int, block: int | None, count: Tensor | None = None) -> Tensor:
        size, blocks, rows_per_block = block_rows(x.shape[0], rows, block)
        whole, total = length(size), x.new_zeros((), dtype=torch.float64)
        cut = size if count is None or blocks == 1 else -(-int(count) // blocks)
        for part in zip(x.split(cut), y.split(cut), strict=True):
            m = Moments.of(*part)
            total = total + m.signed + uniform / whole * (m.p + 2 * m.g - 2 * m.d)
        for mirror, weight in mirrors(x.shape[0]):
            total = total + weight * _mirrored(x, y, mirror)
        return (whole - rows_per_block) / (rows_per_block * max(whole - 1, 1)) * total

    return Family(name, summary, sketch, variance, blocks=has_blocks)


def _side_by_side(matrix: Tensor, size: int, blocks: int, count: Tensor | None) -> Tensor:
    """Return every block's tokens one below the other, (size, blocks · D), zero rows where it has fewer."""
    tokens, columns = matrix.shape
    if count is None:
        parts = torch.nn.functional.pad(matrix, (0, 0, 0, blocks * size - tokens)).view(blocks, size, columns)
    else:
        index, valid = even_blocks(tokens, size, blocks, count)
        parts = torch.where(valid.unsqueeze(-1), matrix[index], 0)
    return parts.transpose(0, 1).reshape(size, blocks * columns)


HADAMARD = _family(
    "hadamard", "subsampled Walsh-Hadamard transform", _hadamard_rows, length=next_power_of_two, has_blocks=True
)
DCT = _family("dct", "subsampled cosine transform", _dct_rows, _dct_mirrors, uniform=-1.0)
DFT = _family("dft", "subsampled Fourier transform in its real, Hartley form", _dft_rows, _dft_mirrors)
