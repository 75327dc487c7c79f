"""The kinds of sketches by name, and how many rows their sketches have."""

from __future__ import annotations

from rmm_linear._support.validation import did_you_mean
from rmm_linear.sketches.blocks import block_rows
from rmm_linear.sketches.countsketch import COUNTSKETCH
from rmm_linear.sketches.dense import GAUSSIAN, RADEMACHER
from rmm_linear.sketches.family import Family
from rmm_linear.sketches.rows import ROWS
from rmm_linear.sketches.sampling import NORM_ROWS, WTA, Sampler
from rmm_linear.sketches.transforms import DCT, DFT, HADAMARD

FAMILIES: dict[str, Family] = {
    family.name: family for family in (COUNTSKETCH, ROWS, RADEMACHER, GAUSSIAN, HADAMARD, DCT, DFT)
}
SAMPLERS: dict[str, Sampler] = {sampler.name: sampler for sampler in (WTA, NORM_ROWS)}
KINDS: tuple[str, ...] = (*FAMILIES, *SAMPLERS)


def has_blocks(kind: str) -> bool:
    return kind in FAMILIES and FAMILIES[kind].blocks


def kept_rows(tokens: int, rows: int, block: int | None = None) -> int:
    """Return how many rows a sketch has: K, with ``block`` rounded up to whole blocks; at most N."""
    if rows >= tokens or block is None:
        return min(rows, tokens)
    _, blocks, rows_per_block = block_rows(tokens, rows, block)
    return min(blocks * rows_per_block, tokens)


def check_kind(kind: object) -> None:
    """Raise if a value is not a kind of sketch."""
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}.{did_you_mean(kind, KINDS)}")


def check_block(kind: str, block: int | None) -> None:
    """Refuse a block where it means nothing."""
    if block is not None and not has_blocks(kind):
        able = ", ".join(name for name in KINDS if has_blocks(name))
        raise ValueError(f"block is for {able} only, got block={block} with kind={kind!r}. Use block=None.")
