"""SaveSpec: how one tensor is saved for the backward pass."""

from __future__ import annotations

from dataclasses import dataclass

from rmm_linear.packing.codes import encoded_bytes
from rmm_linear.packing.rounding import WIDTHS
from rmm_linear.sketches import SAMPLERS, check_block, kept_rows

ROW_SAMPLE_BYTES = 8  # the index of a sampled row, int32, and its scale, float32
_SEED_BYTES = 8
COORDINATE_BITS = 8  # of the coordinates of fixed directions


@dataclass(frozen=True)
class SaveSpec:
    """How one input is saved."""

    kind: str
    rows: int
    block: int | None = None  # tokens per block, or None
    bits: float | None = None  # bits per stored element; None stores the dtype itself
    # Share of the uniform distribution in the probabilities of the tokens, for kinds that sample rows by them; 0 for
    # others
    uniform_mix: float = 0.0

    def __post_init__(self) -> None:
        """Refuse a block for a kind without blocks."""
        check_block(self.kind, self.block)

    def kept_rows(self, tokens: int) -> int:
        """Return how many rows are saved: K; with ``block``, rounded up to whole blocks. At most N."""
        return kept_rows(tokens, self.rows, self.block)

    def samples_rows(self, tokens: int) -> bool:
        """Say whether rows are sampled by the norms of the input, so that their indices must be saved too."""
        return self.kind in SAMPLERS and self.rows < tokens

    def rounds_all(self, tokens: int) -> bool:
        """Say whether all rows are saved in codes whose noise is known from what is stored."""
        return self.kind == "countsketch" and self.rows >= tokens and self.bits in WIDTHS

    def bytes(self, tokens: int, features: int, itemsize: int, directions: int = 0) -> int:
        """Return the bytes saved for an input: the sketch, and the seed or the indices and scales of the sampled rows.

        K·I·itemsize + 8, or K times the bytes of a row's code + 8 (:func:`rmm_linear.packing.encoded_bytes`); fixed
        directions add their coordinates in 8 bits. Sampled rows add 8·K, and the 8 bytes of the seed only when they are
        packed.
        """
        rows = self.kept_rows(tokens)
        stored = rows * features * itemsize if self.bits is None else encoded_bytes(rows, features, self.bits)
        if self.bits is not None and directions:
            stored += encoded_bytes(rows, directions, COORDINATE_BITS)
        if not self.samples_rows(tokens):
            return stored + _SEED_BYTES
        return stored + rows * ROW_SAMPLE_BYTES + (0 if self.bits is None else _SEED_BYTES)
