"""Blocks: how many rows they keep."""

import pytest
import torch

from rmm_linear.sketches import kept_rows, sketch


@pytest.mark.parametrize(("tokens", "rows", "block"), [(5, 4, 2), (65, 64, 4), (10, 9, 3)])
@pytest.mark.parametrize("kind", ["gaussian", "rademacher", "hadamard"])
def test_blocks_never_keep_more_rows_than_tokens(kind, tokens, rows, block):
    """A row per block too many would cost more than the input itself; then the input itself is kept."""
    assert kept_rows(tokens, rows, block) <= tokens
    m = torch.randn(tokens, 3)
    result = sketch(m, kind=kind, seed=torch.tensor(0), rows=rows, block=block)
    assert result.shape[0] == kept_rows(tokens, rows, block)
    if result.shape[0] == tokens:
        assert torch.equal(result, m)
