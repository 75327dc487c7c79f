"""gaussian and rademacher: entries, and blocks."""

import math

import pytest
import torch
from helpers import sketch_matrix


def test_gaussian_blocks_do_not_mix():
    s = sketch_matrix("gaussian", 10, 6, 1, block=4)
    assert s.shape == (6, 10)
    expected = torch.block_diag(torch.ones(2, 4), torch.ones(2, 4), torch.ones(2, 2)).bool()
    assert torch.equal(s != 0, expected)


def test_rademacher_entries_are_signs():
    assert torch.allclose(
        sketch_matrix("rademacher", 30, 7, 2).abs(), torch.tensor(1 / math.sqrt(7), dtype=torch.float64)
    )


@pytest.mark.parametrize("kind", ["gaussian", "rademacher"])
def test_blocks_have_entries_of_their_own(kind):
    s = sketch_matrix(kind, 12, 6, 1, block=4)
    blocks = [s[2 * i : 2 * i + 2, 4 * i : 4 * i + 4] for i in range(3)]
    assert not torch.equal(blocks[0], blocks[1])
    assert not torch.equal(blocks[1], blocks[2])
