"""Cut the tokens of a block-diagonal sketch into blocks."""

from __future__ import annotations

import torch
from torch import Tensor


def block_rows(tokens: int, rows: int, block: int | None) -> tuple[int, int, int]:
    """Return tokens per block, number of blocks, and rows per block K_b; blocks · K_b is at least ``rows``."""
    block = min(block or tokens, tokens)
    blocks = -(-tokens // block)
    return block, blocks, -(-rows // blocks)


def even_blocks(tokens: int, size: int, blocks: int, count: Tensor) -> tuple[Tensor, Tensor]:
    """Cut the first n tokens into ``blocks`` blocks of ⌈n / blocks⌉, so that every block has tokens."""
    place = torch.arange(size, device=count.device)
    length = (count + blocks - 1) // blocks
    index = torch.arange(blocks, device=count.device).unsqueeze(1) * length + place
    return index.clamp_max(tokens - 1), (place < length) & (index < count)
