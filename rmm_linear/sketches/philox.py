"""Counter-based random numbers: Philox 4x32-10 in plain torch.

A counter-based generator maps (seed, counter) to random words without state, so any element of a sketch can be made
anywhere and in any order: on CPU here, in registers inside a kernel, again in the backward pass. The words equal those
of Triton's ``tl.philox(seed, offset_lo, offset_hi, stream, 0)``; with ``stream=0`` they are ``tl.randint4x(seed,
offset)``, and :func:`uniform` and :func:`normal` follow ``tl.rand`` and ``tl.randn4x``.

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

# Maps (seed, offset, stream) to four words. Callers may pass a faster generator of the same words than `philox`.
Generator: TypeAlias = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor, Tensor]]

_WORD = 0xFFFFFFFF
_KEY_A, _KEY_B = 0x9E3779B9, 0xBB67AE85
_ROUND_A, _ROUND_B = 0xD2511F53, 0xCD9E8D57
_ROUNDS = 10
_CHUNK = 1 << 14


def philox(seed: Tensor, offset: Tensor, stream: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four independent 32-bit words per counter: int64 in [0, 2**32), of the shape of ``offset``.

    Costs about a hundred elementwise integer operations on that shape.

    seed: int64 with one element, any value. It is not copied to the host. offset: Counters, int64, any shape. stream:
    Number of an independent stream under the same seed, in [0, 2**32).
    """
    if offset.device.type == "cpu" and offset.numel() > _CHUNK:
        # Hundreds of passes over a vector cost a third of the time when it stays in the cache.
        chunks = [philox(seed, part, stream) for part in offset.reshape(-1).split(_CHUNK)]
        c0, c1, c2, c3 = (torch.cat(words).view(offset.shape) for words in zip(*chunks, strict=True))
        return c0, c1, c2, c3
    c0, c1 = offset & _WORD, (offset >> 32) & _WORD
    return philox4x32(seed, c0, c1, torch.full_like(c0, stream & _WORD), torch.zeros_like(c0))


def philox4x32(seed: Tensor, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the four words of counters of four words, lowest first, all int64 in [0, 2**32)."""
    seed = seed.reshape(())
    rounds = torch.arange(_ROUNDS, device=seed.device)
    keys_a = ((seed & _WORD) + rounds * _KEY_A) & _WORD
    keys_b = (((seed >> 32) & _WORD) + rounds * _KEY_B) & _WORD
    for key_a, key_b in zip(keys_a.unbind(), keys_b.unbind(), strict=True):
        # The 64-bit product may wrap into the sign bit; its bits, and so both halves, stay right.
        product_a, product_b = c0 * _ROUND_A, c2 * _ROUND_B
        c0 = (product_b >> 32).bitwise_and_(_WORD).bitwise_xor_(c1) ^ key_a
        c2 = (product_a >> 32).bitwise_and_(_WORD).bitwise_xor_(c3) ^ key_b
        c1, c3 = product_b.bitwise_and_(_WORD), product_a.bitwise_and_(_WORD)
    return c0, c1, c2, c3


def uniform(words: Tensor) -> Tensor:
    """Convert 32-bit words, as int64, to float32 numbers in [0, 1), as Triton's ``tl.rand`` does."""
    signed = torch.where(words >= 2**31, words - 2**32, words)
    return torch.where(signed < 0, -signed - 1, signed).to(torch.float32) * 4.6566127342e-10


def normal(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Convert two words to two standard normal numbers by the Box-Muller transform, as Triton's ``tl.randn``."""
    radius = torch.sqrt(-2.0 * torch.log(uniform(first).clamp_min(1.0e-7)))
    angle = (2 * math.pi) * uniform(second)
    return radius * torch.cos(angle), radius * torch.sin(angle)


def signs(seed: Tensor, count: int, stream: int = 0, generator: Generator = philox) -> Tensor:
    """Return ``count`` random signs, int8; sign i is bit i % 32 of word i // 32."""
    words = generator(seed, torch.arange((count + 31) // 32, device=seed.device), stream)[0]
    return unpack_signs(words).reshape(-1)[:count]


def unpack_signs(words: Tensor) -> Tensor:
    """Convert every 32-bit word to 32 signs, int8 (*, 32), lowest bit first; a set bit is -1."""
    bits = (words.unsqueeze(-1) >> torch.arange(32, device=words.device)) & 1
    return 1 - 2 * bits.to(torch.int8)
