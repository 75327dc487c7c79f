"""Families of sketches S (N, K): unbiased, random by one seed, with their exact variance.

A sketch is a linear map M (N, D) → SᵀM (K, D). For the kinds of :data:`FAMILIES`, S follows from its seed alone, by
counter-based random numbers: the forward pass can sketch X, the backward pass Y, and a kernel on another device either
one, all with the same S. The kinds of :data:`SAMPLERS` sample rows by the norms of X's rows, so that S is sampled once,
for X, and saved.

Source: Bershatsky et al. 2022, arXiv 2201.13195 (gaussian, rademacher, dct, dft), Liu et al. 2023, arXiv 2305.15265
(norm_rows, wta). The variances are derived in each family's module; they differ from those stated in the first paper.
"""

from rmm_linear.sketches.apply import sketch, sketch_parts, variance
from rmm_linear.sketches.family import Family, Moments
from rmm_linear.sketches.masks import TokenMask
from rmm_linear.sketches.registry import FAMILIES, KINDS, SAMPLERS, check_block, check_kind, has_blocks, kept_rows
from rmm_linear.sketches.rows import random_keys
from rmm_linear.sketches.sampling import UNIFORM_MIX, RowSample, Sampler, gather, probabilities, row_norms, sample_rows

__all__ = [
    "FAMILIES",
    "KINDS",
    "SAMPLERS",
    "UNIFORM_MIX",
    "Family",
    "Moments",
    "RowSample",
    "Sampler",
    "TokenMask",
    "check_block",
    "check_kind",
    "gather",
    "has_blocks",
    "kept_rows",
    "probabilities",
    "random_keys",
    "row_norms",
    "sample_rows",
    "sketch",
    "sketch_parts",
    "variance",
]
