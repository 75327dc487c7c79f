"""Random gradients against exact ones, and simulated variances against closed forms."""

import torch
from helpers import heavy_tailed

Z = 4.0
TOKENS, ROWS = 40, 8


def padded():
    """Heavy-tailed, correlated X and Y in two groups of columns, of which 40 % of the rows are padding."""
    x, y = heavy_tailed(TOKENS, 70, 3)
    mask = torch.rand(TOKENS, generator=torch.Generator().manual_seed(2)) < 0.6
    return x, y * mask.unsqueeze(1), mask
