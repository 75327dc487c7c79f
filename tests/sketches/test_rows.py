"""rows: distinct tokens, all alike likely, scaled."""

import math

import torch
from helpers import sketch_matrix

from rmm_linear.sketches.rows import sample


def test_rows_are_distinct_tokens_scaled():
    s = sketch_matrix("rows", 20, 6, 3)
    assert torch.allclose(s[s != 0], torch.tensor(math.sqrt(20 / 6), dtype=torch.float64))
    assert (s != 0).sum(1).tolist() == [1] * 6
    assert (s != 0).sum(0).max() == 1


def test_rows_includes_tokens_and_pairs_uniformly():
    """Over 2,000 seeds a token is in with probability K/N, a pair with K(K−1)/(N(N−1)); largest of 45 z below 4.5."""
    tokens, rows, draws = 9, 4, 2_000
    inside = torch.zeros(draws, tokens, dtype=torch.float64)
    for seed in range(draws):
        inside[seed, sample(torch.tensor(seed), tokens, rows)] = 1
    counts = inside.T @ inside
    one, two = rows / tokens, rows * (rows - 1) / (tokens * (tokens - 1))
    expected = torch.full((tokens, tokens), two, dtype=torch.float64).fill_diagonal_(one)
    assert ((counts - draws * expected) / (draws * expected * (1 - expected)).sqrt()).abs().max() < 4.5
