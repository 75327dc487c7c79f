"""countsketch: one row for every token, no collision in a segment, independent signs and shifts."""

import pytest
import torch
from helpers import sketch_matrix
from statistical import Z, z_scores

from rmm_linear.sketches.countsketch import destinations, signs_and_shifts


@pytest.mark.parametrize(("tokens", "rows"), [(20, 5), (23, 5), (7, 6), (9, 1)])
def test_gives_every_token_one_row_and_no_segment_a_collision(tokens, rows):
    s = sketch_matrix("countsketch", tokens, rows, 3)
    assert set(s.abs().unique().tolist()) <= {0.0, 1.0}
    assert torch.equal((s != 0).sum(0), torch.ones(tokens, dtype=torch.int64))
    for segment in s.split(rows, dim=1):
        assert (segment != 0).sum(1).max() == 1


@pytest.mark.parametrize(("tokens", "rows"), [(20, 5), (23, 5), (7, 6), (9, 1)])
def test_destinations_are_those_of_the_sketch(tokens, rows):
    """The gather form, which devices use, and the segment form, which the CPU uses, are one map."""
    s = sketch_matrix("countsketch", tokens, rows, 3)
    signs, shifts = signs_and_shifts(torch.tensor(3), tokens, rows)
    assert torch.equal(s.abs().argmax(0), destinations(shifts, tokens, rows))
    assert torch.equal(s.sum(0), signs.double())


def test_shifts_are_uniform_and_independent():
    """χ² of 7 rows over 7,000 shifts, and of the 49 pairs of the first two shifts over 1,000 seeds; p = 1e-5 bounds.

    The first segment stays where it is and has no shift.
    """
    counts = torch.bincount(signs_and_shifts(torch.tensor(5), 49_007, 7)[1][1:], minlength=7).double()
    assert ((counts - 1_000) ** 2 / 1_000).sum() < 33.1  # 6 degrees of freedom
    pairs = [signs_and_shifts(torch.tensor(seed), 21, 7)[1][1:] for seed in range(1_000)]
    cells = torch.bincount(torch.stack([7 * a + b for a, b in pairs]), minlength=49).double()
    assert ((cells - 1_000 / 49) ** 2 / (1_000 / 49)).sum() < 98.0  # 48 degrees of freedom


def test_signs_and_shifts_are_independent():
    """The sign of token 4 must not tell its row: z of the mean of sign · (row − mean row) over 1,000 seeds."""
    values = []
    for seed in range(1_000):
        column = sketch_matrix("countsketch", 8, 4, seed)[:, 4]
        values.append(float(column.sum()) * (int(column.abs().argmax()) - 1.5))
    assert abs(z_scores(torch.tensor(values))) < Z
