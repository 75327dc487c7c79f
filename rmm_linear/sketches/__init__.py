"""Families of sketches S (N, K): unbiased, drawn from one seed, with their exact variance.

A sketch is a linear map M (N, D) → SᵀM (K, D). As a rule it follows from its seed alone, through counter-based random
numbers, so the forward pass can sketch X, the backward pass Y, and a kernel on another device either, all with the same
S. These kinds are :data:`FAMILIES`. The kinds of :data:`SAMPLERS` draw rows by what X weighs, so that S is drawn once,
for X, and stored.

Source: Bershatsky et al. 2022, arXiv 2201.13195 (gaussian, rademacher, dct, dft), Liu et al. 2023, arXiv 2305.15265
(norm_rows, wta). The variances are derived in each family's module; they differ from the ones stated by the first.
"""

from rmm_linear.sketches.apply import sketch, sketch_parts, variance
from rmm_linear.sketches.family import Family, Moments
from rmm_linear.sketches.masks import TokenMask
from rmm_linear.sketches.registry import FAMILIES, KINDS, SAMPLERS, check_kind, has_blocks, kept_rows
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
