"""D²_sketch against simulation: every kind, with padding, blocks, bits, probabilities; published formulas; refusals.

Simulated draws come in groups of 50, whose means tell the standard error: 40 groups in a light check (p = 3e-4 by
chance at z = 4), 2,000 in a heavy one (6e-5). At this small size the rounding term differs by half from seed to seed.
In 4 bits it is below a tenth of the variance, so that the mean of 100 seeds leaves 0.5 % of it and that of 2,000 leaves
0.1 %: a fraction of a standard error. test_simulation.py compares all widths seed by seed.
"""

import math

import pytest
import torch
from cases import KIND_AND_BLOCK, every_sampler
from helpers import heavy_tailed
from statistical import ROWS, TOKENS, Z, assert_variance, counterexample, padded

from rmm_linear.sketches import KINDS, SAMPLERS
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

LENGTHS = pytest.mark.parametrize(
    ("draws", "roundings", "widest"),
    [
        pytest.param(2_000, 100, 0.05, id="light"),
        pytest.param(100_000, 2_000, 0.007, id="heavy", marks=pytest.mark.montecarlo),
    ],
)


@pytest.mark.one_of(3)
@LENGTHS
@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize(("kind", "block"), KIND_AND_BLOCK)
def test_the_variance_with_padding_is_that_of_simulated_sketches(kind, block, bits, draws, roundings, widest):
    x, y, mask = padded()
    shape = {"kind": kind, "rows": ROWS, "bits": bits, "block": block, "mask": mask}
    found, stated = simulate_variance(x, y, draws=draws, **shape), sketch_variance(x, y, draws=roundings, **shape)
    assert_variance(found, stated, widest=widest)


def chances(tokens=TOKENS):
    """Not those of the norms, and of no particular sum."""
    return 1 + 3 * torch.rand(tokens, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


@pytest.mark.parametrize("bits", [None, 4])
@every_sampler
def test_rows_are_drawn_by_the_probabilities_that_are_given(kind, bits):
    """Up to a factor, and whatever they are for padding; by ‖x‖ alone, the variance would be another one."""
    x, y, mask = padded()
    p = torch.where(mask, chances(), math.nan)
    shape = {"kind": kind, "rows": ROWS, "bits": bits, "mask": mask}
    stated = float(sketch_variance(x, y, probabilities=p, draws=100, **shape))
    found = simulate_variance(x, y, probabilities=p, draws=2_000, **shape)
    assert_variance(found, stated, widest=0.05)
    assert abs(found.z_score(sketch_variance(x, y, draws=100, **shape))) > 2 * Z
    assert float(sketch_variance(x, y, probabilities=3 * p, draws=100, **shape)) == pytest.approx(stated, rel=1e-9)


@pytest.mark.parametrize("rows", [2, 3, 6])
@pytest.mark.parametrize("bits", [None, 8])
@every_sampler
def test_tokens_that_are_never_drawn_add_nothing_or_infinity(kind, bits, rows):
    """Three of ten tokens may be drawn: wta keeps them all where it can, and rows that are left over are nothing."""
    x, y = heavy_tailed(10, 3, 2)
    p = torch.zeros(10, dtype=torch.float64).index_put_((torch.tensor([1, 4, 7]),), torch.tensor([2.0, 3, 5]).double())
    shape = {"kind": kind, "rows": rows, "bits": bits, "probabilities": p}
    assert sketch_variance(x, y, **shape) == math.inf
    y *= (p > 0).unsqueeze(1)
    stated, found = sketch_variance(x, y, draws=200, **shape), simulate_variance(x, y, draws=2_000, **shape)
    scale = float((y.square().sum(1) * x.square().sum(1)).sum())
    if kind == "wta" and rows >= 3:
        # t·d/p − g of a token that is certain to be drawn: two numbers that are off by a few eps of d.
        limit = 64 * 2**-53 * scale if bits is None else 1e-3 * float((y.T @ x).square().sum())
        assert float(stated) == pytest.approx(0, abs=limit)
        assert found.variance == pytest.approx(0, abs=limit)
    else:
        assert stated > 0
        assert abs(found.z_score(stated)) < Z


def test_a_wrong_formula_is_outside_the_band():
    """The published formula where it is a fifth too small: the bands can tell."""
    x, y = heavy_tailed(TOKENS, 2, 1)
    found = simulate_variance(x, y, kind="gaussian", rows=ROWS)
    assert found.z_score(paper_sketch_variance(x, y, rows=ROWS)) > 1.5 * Z
    assert abs(found.z_score(sketch_variance(x, y, kind="gaussian", rows=ROWS))) < Z


def test_the_published_theorem_is_violated():
    """Two tokens with the same gradient, or nearly: the minibatch is quiet, the sketch is not, for every K."""
    x, y = counterexample()
    assert sgd_variance(x, y) == 0
    assert paper_sketch_variance(x, y, rows=1) == 2.25
    assert float(paper_bound(x, y)) == 2.5625
    assert float(sketch_variance(x, y, kind="gaussian", rows=1)) == 5 * 1.25 + 4  # P + g, not P − g
    assert float(sketch_variance(x, y, kind="rademacher", rows=1)) == 5 * 1.25 + 4 - 2 * 2
    x, y = counterexample(0.6)  # and with a minibatch noise above zero
    ratio = paper_sketch_variance(x, y, rows=1) / sgd_variance(x, y)  # K/(N−1) is 1
    assert float(ratio) > 10 * float(paper_bound(x, y))


def test_the_published_variance_is_too_small_by_a_factor_of_alpha():
    x, y, _ = padded()
    alpha = float(correlation(x, y))
    exact = float(sketch_variance(x, y, kind="gaussian", rows=ROWS))
    assert float(paper_sketch_variance(x, y, rows=ROWS)) == pytest.approx(exact * (1 - alpha) / (1 + alpha))
    one = heavy_tailed(1, 5, 3)  # one token: P = g
    assert float(correlation(*one)) == pytest.approx(1)
    exact = float(sketch_variance(*(part.repeat(2, 1) for part in one), kind="gaussian", rows=1))
    assert float(paper_sketch_variance(*one, rows=1)) == pytest.approx(0, abs=1e-9 * exact)


@pytest.mark.parametrize("kind", KINDS)
def test_masked_rows_are_left_out_whatever_they_hold(kind):
    x, y, mask = padded()
    other = torch.where(mask.unsqueeze(1), x, 1e3 * x)
    shape = {"kind": kind, "rows": ROWS, "bits": 4, "mask": mask}
    assert torch.equal(sketch_variance(x, y, **shape), sketch_variance(other, y, **shape))
    assert sketch_variance(x, y, kind=kind, rows=ROWS, mask=torch.zeros_like(mask)) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_layers_in_a_batch_are_layers_one_by_one(kind):
    """With probabilities of their own where rows are drawn by some."""
    pairs = [heavy_tailed(24, 5, 3), heavy_tailed(24, 5, 3)]
    pairs[1] = (pairs[1][0].flip(0), pairs[1][1].square())
    x, y = (torch.stack(parts) for parts in zip(*pairs, strict=True))
    shape = {"kind": kind, "rows": 6, "bits": 4, "mask": torch.arange(24) % 3 != 1}
    choice = {"kind": kind, "bits": 8, "target": 2.0, "samples": (6, 4)}
    found = [
        (sketch_variance, shape),
        (sgd_variance, {"samples": (6, 4)}),
        (correlation, {}),
        (paper_sketch_variance, {"rows": 6}),
        (paper_bound, {}),
        (required_ratio, choice),
    ]
    if kind in SAMPLERS:
        p = torch.stack((chances(24), chances(24).square()))
        found += [(sketch_variance, {**shape, "probabilities": p})]
        found += [(required_ratio, {"kind": kind, "bits": None, "target": 10.0, "probabilities": p})]
    for function, options in found:
        own = [{key: value[i] if key == "probabilities" else value for key, value in options.items()} for i in (0, 1)]
        single = [function(*pair, **given) for pair, given in zip(pairs, own, strict=True)]
        together = function(x, y, **options)
        assert torch.equal(together, torch.stack(single))
        assert together[0] != together[1]
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
        ({"rows": 1000}, ValueError, r"rows must be at most the \d+ tokens, as no layer stores more, got 1000"),
        ({"rows": 2.0}, TypeError, "rows must be a positive integer, got 2.0"),
        ({"bits": 5}, ValueError, "bits must be 8, 4, 3, 2, 1.6 or 1, got 5"),
        ({"block": 4}, ValueError, "block is for rademacher, gaussian, hadamard only, got block=4 with kind='rows'"),
        ({"mask": torch.ones(7)}, ValueError, r"mask must have the shape \(8,\) of the rows of x, got \(7,\)"),
        ({"draws": 0}, ValueError, "draws must be at least 1, got 0"),
        ({"probabilities": torch.ones(8)}, ValueError, "probabilities are for wta and norm_rows, got kind='rows'"),
        *(
            ({"kind": "wta", "probabilities": value}, error, message)
            for value, error, message in [
                (torch.ones(7), ValueError, r"probabilities must have .*8.* rows of x, got \(7,\)"),
                (torch.ones(8, 1), ValueError, r"probabilities must have .*8.* rows of x, got \(8, 1\)"),
                (torch.ones(8).long(), TypeError, "probabilities must be floating point, got torch.int64"),
                (torch.arange(8.0) - 1, ValueError, "must be finite, not negative and not all 0"),
                (torch.full((8,), math.nan), ValueError, "must be finite, not negative and not all 0"),
                (torch.zeros(8), ValueError, "must be finite, not negative and not all 0"),
            ]
        ),
    ],
)
@pytest.mark.parametrize("formula", [sketch_variance, simulate_variance])
def test_wrong_arguments_are_refused(formula, change, error, message):
    x, y = heavy_tailed(8, 3, 2)
    with pytest.raises(error, match=message):
        formula(x, y, **{"kind": "rows", "rows": 2, **change})


def test_wrong_shapes_are_refused():
    x, y = heavy_tailed(8, 3, 2)
    with pytest.raises(ValueError, match=r"got \(8, 3\) and \(7, 2\). Flatten batch and sequence"):
        correlation(x, y[:7])
    with pytest.raises(TypeError, match=r"grad_output must be floating point, got torch.int64"):
        sgd_variance(x, y.long())
    with pytest.raises(ValueError, match=r"Layers are simulated one by one, got x of shape \(1, 8, 3\)"):
        simulate_variance(x[None], y[None], kind="rows", rows=2)
