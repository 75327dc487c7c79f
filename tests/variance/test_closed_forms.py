"""D²_sketch against simulation: every kind, with padding, blocks and bits.

Simulated draws come in groups of 50, whose means tell the standard error: 40 groups in a light check (p = 3e-4 by
chance at z = 4), 2,000 in a heavy one (6e-5). At this small size the rounding term differs by half from seed to seed.
In 4 bits it is below a tenth of the variance, so that the mean of 100 seeds leaves 0.5 % of it and that of 2,000 leaves
0.1 %: a fraction of a standard error. test_simulation.py compares all widths seed by seed.
"""

import math

import pytest
import torch
from helpers import heavy_tailed
from statistical import ROWS, TOKENS, Z, assert_variance, padded

from rmm_linear.sketches import KINDS, has_blocks
from rmm_linear.variance import (
    correlation,
    paper_bound,
    paper_sketch_variance,
    required_ratio,
    sgd_variance,
    simulate_sgd_variance,
    simulate_variance,
    sketch_variance,
)

WIDTHS = [None, 4]


def check_sketch(kind, bits, block, draws, roundings, widest):
    x, y, mask = padded()
    shape = {"kind": kind, "rows": ROWS, "bits": bits, "block": block, "mask": mask}
    found, stated = simulate_variance(x, y, draws=draws, **shape), sketch_variance(x, y, draws=roundings, **shape)
    assert_variance(found, stated, widest=widest)


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_sketch_variance_with_padding_is_that_of_simulated_sketches(kind, bits):
    check_sketch(kind, bits, None, draws=2_000, roundings=100, widest=0.03)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if has_blocks(kind)])
def test_sketch_variance_of_blocks_with_padding(kind):
    check_sketch(kind, None, 9, draws=2_000, roundings=1, widest=0.05)


@pytest.mark.montecarlo
@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_sketch_variance_with_padding_heavy(kind, bits):
    check_sketch(kind, bits, None, draws=100_000, roundings=2_000, widest=0.005)


@pytest.mark.montecarlo
@pytest.mark.parametrize("kind", [kind for kind in KINDS if has_blocks(kind)])
def test_sketch_variance_of_blocks_with_padding_heavy(kind):
    check_sketch(kind, None, 9, draws=100_000, roundings=1, widest=0.007)


def test_a_wrong_formula_is_outside_the_band():
    """The published formula where it is a fifth too small: the bands can tell."""
    x, y = heavy_tailed(TOKENS, 2, 1)
    found = simulate_variance(x, y, kind="gaussian", rows=ROWS)
    assert found.z_score(paper_sketch_variance(x, y, rows=ROWS)) > 1.5 * Z
    assert abs(found.z_score(sketch_variance(x, y, kind="gaussian", rows=ROWS))) < Z


@pytest.mark.parametrize("kind", KINDS)
def test_masked_rows_are_left_out_whatever_they_hold(kind):
    x, y, mask = padded()
    other = torch.where(mask.unsqueeze(1), x, 1e3 * x)
    shape = {"kind": kind, "rows": ROWS, "bits": 4, "mask": mask}
    assert torch.equal(sketch_variance(x, y, **shape), sketch_variance(other, y, **shape))
    assert sketch_variance(x, y, kind=kind, rows=ROWS, mask=torch.zeros_like(mask)) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_layers_in_a_batch_are_layers_one_by_one(kind):
    pairs = [heavy_tailed(24, 5, 3), heavy_tailed(24, 5, 3)]
    pairs[1] = (pairs[1][0].flip(0), pairs[1][1].square())
    x, y = (torch.stack(parts) for parts in zip(*pairs, strict=True))
    mask = torch.arange(24) % 3 != 1
    shape = {"kind": kind, "rows": 6, "bits": 4, "mask": mask}
    choice = {"kind": kind, "bits": 8, "target": 2.0, "samples": (6, 4)}
    for found, single in [
        (sketch_variance(x, y, **shape), lambda a, b: sketch_variance(a, b, **shape)),
        (sgd_variance(x, y, samples=(6, 4)), lambda a, b: sgd_variance(a, b, samples=(6, 4))),
        (correlation(x, y), correlation),
        (paper_sketch_variance(x, y, rows=6), lambda a, b: paper_sketch_variance(a, b, rows=6)),
        (paper_bound(x, y), paper_bound),
        (required_ratio(x, y, **choice), lambda a, b: required_ratio(a, b, **choice)),
    ]:
        assert torch.equal(found, torch.stack([single(*pair) for pair in pairs]))
        assert found[0] != found[1]
    assert sgd_variance(x[:0], y[:0]).shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_of_half_types_are_made_in_float64(dtype):
    """Squares of 3,000 overflow float16, and 4,096 ones stop growing in bfloat16 at 256."""
    x, y = torch.full((4096, 2), 3000.0, dtype=dtype), torch.ones(4096, 1, dtype=dtype)
    a, b = x.double(), y.double()
    assert sketch_variance(x, y, kind="rademacher", rows=64) == sketch_variance(a, b, kind="rademacher", rows=64)
    assert correlation(x, y) == pytest.approx(1.0)
    assert paper_sketch_variance(x, y, rows=64) == pytest.approx(0, abs=1e-6 * float(correlation(x, y)))
    assert sgd_variance(x, y, samples=(4, 1024)) == 0


def test_tensors_of_a_graph_are_taken_as_numbers():
    x, y = (part.requires_grad_() for part in heavy_tailed(8, 3, 2))
    assert not sgd_variance(x, y).requires_grad
    assert not sketch_variance(x, y, kind="dct", rows=2, bits=4).requires_grad
    assert simulate_variance(x, y, kind="dct", rows=2, bits=4, draws=100).variance > 0
    assert simulate_sgd_variance(x, y, draws=100).variance > 0


def test_nan_is_not_hidden():
    x, y = heavy_tailed(8, 3, 2)
    x[3, 1] = math.nan
    for found in (
        sgd_variance(x, y),
        sketch_variance(x, y, kind="rows", rows=2),
        correlation(x, y),
        required_ratio(x, y, kind="rows", bits=None, target=1.0),
    ):
        assert found.isnan()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"kind": "fourier"}, ValueError, "kind must be one of countsketch, .*, got 'fourier'"),
        ({"rows": 0}, ValueError, "rows must be at least 1, got 0"),
        ({"rows": 2.0}, TypeError, "rows must be a positive integer, got 2.0"),
        ({"bits": 3}, ValueError, "bits must be 8, 4 or 2, got 3"),
        ({"block": 4}, ValueError, "block is for rademacher, gaussian, hadamard only, got block=4 with kind='rows'"),
        ({"mask": torch.ones(7)}, ValueError, r"mask must have the shape \(8,\) of the rows of x, got \(7,\)"),
        ({"draws": 0}, ValueError, "draws must be at least 1, got 0"),
    ],
)
def test_wrong_arguments_are_refused(change, error, message):
    x, y = heavy_tailed(8, 3, 2)
    with pytest.raises(error, match=message):
        sketch_variance(x, y, **{"kind": "rows", "rows": 2, **change})


def test_wrong_shapes_are_refused():
    x, y = heavy_tailed(8, 3, 2)
    with pytest.raises(ValueError, match=r"got \(8, 3\) and \(7, 2\). Flatten batch and sequence"):
        correlation(x, y[:7])
    with pytest.raises(TypeError, match=r"grad_output must be floating point, got torch.int64"):
        sgd_variance(x, y.long())
    with pytest.raises(ValueError, match=r"Layers are simulated one by one, got x of shape \(1, 8, 3\)"):
        simulate_variance(x[None], y[None], kind="rows", rows=2)
