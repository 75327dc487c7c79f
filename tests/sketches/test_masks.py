"""Padding leaves every sketch: masked rows are never read, and tokens that fit are stored themselves."""

import math

import pytest
import torch
from cases import KIND_AND_BLOCK
from helpers import chances
from statistical import ROWS, TOKENS, padded

from rmm_linear.sketches import FAMILIES, TokenMask, kept_rows, sketch, variance


@pytest.mark.parametrize(("kind", "block"), KIND_AND_BLOCK)
def test_masked_rows_never_reach_the_sketch(kind, block):
    x, _, mask = padded()
    ranks = TokenMask.of(mask)
    poisoned = torch.where(mask.unsqueeze(1), x, math.nan)
    shape = {"kind": kind, "seed": torch.tensor(4), "rows": ROWS, "block": block, "mask": ranks}
    clean = sketch(x, p=chances(kind, x, ranks), **shape)
    assert torch.equal(sketch(poisoned, p=chances(kind, poisoned, ranks), **shape), clean)


@pytest.mark.parametrize(("kind", "block"), KIND_AND_BLOCK)
def test_tokens_that_fit_are_stored_themselves(kind, block):
    x, y, mask = padded()
    ranks, count = TokenMask.of(mask), int(mask.sum())
    z = sketch(x, kind=kind, seed=torch.tensor(4), rows=count, block=block, mask=ranks, p=chances(kind, x, ranks))
    assert torch.equal(z[:count], x[mask])
    assert not z[count:].any()
    assert float(variance(x, y, kind=kind, rows=count, block=block, mask=ranks)) == 0


@pytest.mark.parametrize("rows", [ROWS, 30])
@pytest.mark.parametrize(("kind", "block"), [case for case in KIND_AND_BLOCK if case[0] in FAMILIES])
def test_the_static_path_of_accelerators_makes_the_same_sketch(kind, block, rows):
    """What runs where the count cannot be read on the host: compact with a zero tail, then choose by the count."""
    x, _, mask = padded()
    ranks, kept = TokenMask.of(mask), kept_rows(TOKENS, rows, block)
    compact = ranks.compact(x)
    drawn = FAMILIES[kind].sketch(compact, torch.tensor([4]), rows, block, ranks.count)[:kept]
    static = torch.where(ranks.count <= kept, compact[:kept], drawn)
    direct = sketch(x, kind=kind, seed=torch.tensor([4]), rows=rows, block=block, mask=ranks)
    assert torch.allclose(static, direct, rtol=1e-12, atol=1e-12)
