"""D²_SGD against brute force, D²_sketch against simulation, and the published formulas against both.

The band of a variance: simulated draws come in groups of 50, and the mean of the groups' means lies within z = 4 of its
own standard error of the closed form (p = 3e-4 by chance for the 40 groups of a light check, 6e-5 for the 2,000 of a
heavy one). The standard error is asserted too, so that a wrong formula could not hide behind a wide band. At this small
size the rounding term differs by half from seed to seed. In 4 bits it is below a tenth of the variance, so that the
mean of 100 seeds leaves 0.5 % of it and that of 2,000 leaves 0.1 %: a fraction of a standard error.
tests/variance/test_simulation.py compares all widths seed by seed.
"""

import math

import pytest
import torch
from helpers import heavy_tailed
from statistical import ROWS, TOKENS, Z, assert_variance, padded

from rmm_linear.sketches import KINDS, has_blocks, variance
from rmm_linear.variance import (
    correlation,
    effective_batch,
    paper_bound,
    paper_sketch_variance,
    required_ratio,
    sgd_variance,
    simulate_sgd_variance,
    simulate_variance,
    sketch_variance,
)
from rmm_linear.variance.simulation import Simulation

RAGGED = torch.tensor([4] * 3 + [0] * 20 + [9] + [4] * 10 + [-2] * 8)  # 4 sequences; one of them in two places
WIDTHS = [None, 4]


def counterexample(second=0.5):
    return torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0], [second]])


def brute_sgd(x, y, samples):
    gradients = torch.stack([y[samples == s].T @ x[samples == s] for s in samples.unique()])
    return len(gradients) * gradients.var(dim=0, unbiased=True).sum()


@pytest.mark.parametrize("samples", [None, (6, 7), (42, 1), (2, 21), RAGGED], ids=str)
def test_sgd_variance_is_the_sample_variance_of_the_gradients(samples):
    x, y = heavy_tailed(42, 5, 3)
    batch, length = samples if isinstance(samples, tuple) else (42, 1)
    owners = samples if isinstance(samples, torch.Tensor) else torch.arange(batch).repeat_interleave(length)
    torch.testing.assert_close(sgd_variance(x, y, samples=samples), brute_sgd(x, y, owners), rtol=1e-10, atol=0)


def test_sgd_variance_over_sequences_is_that_of_per_example_gradients():
    """The same with the lengths of the sequences told apart: padded rows carry no gradient."""
    torch.manual_seed(0)
    weight = torch.randn(3, 5, dtype=torch.float64)
    x = torch.randn(6, 7, 5, dtype=torch.float64)
    real = torch.arange(7) < torch.tensor([7, 3, 5, 1, 7, 4]).unsqueeze(1)

    def loss(weight, x, real):
        return (torch.tanh(x @ weight.T) * real.unsqueeze(1)).mean(0).square().sum()

    gradients = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(weight, x, real)
    brute = 6 * gradients.var(dim=0).sum()
    output = (x @ weight.T).requires_grad_()
    (torch.tanh(output) * real.unsqueeze(2)).mean(1).square().sum().backward()
    y = output.grad.flatten(0, 1)
    found = sgd_variance(x.flatten(0, 1), y, samples=(6, 7))
    torch.testing.assert_close(found, brute, rtol=1e-10, atol=0)
    keep = real.flatten()
    owners = torch.arange(6).repeat_interleave(7)[keep]
    ragged = sgd_variance(x.flatten(0, 1)[keep], y[keep], samples=owners)
    torch.testing.assert_close(ragged, brute, rtol=1e-10, atol=0)


def test_rows_without_a_gradient_count_as_tokens_and_not_in_sequences():
    x, y = counterexample()
    padded_x, padded_y = torch.cat((x, torch.ones(4, 1))), torch.cat((y, torch.zeros(4, 1)))
    assert sgd_variance(x, y) == 0
    assert float(sgd_variance(padded_x, padded_y)) == pytest.approx(1.6)
    owners = torch.tensor([0, 1, 0, 0, 1, 1])
    assert sgd_variance(padded_x, padded_y, samples=owners) == sgd_variance(x, y, samples=owners[:2]) == 0


@pytest.mark.parametrize("outputs", [1, 3])
def test_a_layer_with_few_outputs_is_summed_without_a_loop_over_its_tokens(outputs):
    x, y = heavy_tailed(2_000, 6, outputs)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        found = sgd_variance(x, y)
    assert sum(event.count for event in profile.key_averages()) < 200
    torch.testing.assert_close(found, brute_sgd(x, y, torch.arange(2_000)), rtol=1e-10, atol=0)


def test_one_gradient_for_all_samples_is_no_noise_at_all():
    x, y = torch.full((3000, 4), 0.1), torch.full((3000, 2), 0.3)
    assert sgd_variance(x, y, samples=(30, 100)) == pytest.approx(0, abs=1e-6)
    assert sgd_variance(x, y, samples=(30, 100)) >= 0


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ((2, 2), r"samples must be \(batch, sequence\) and multiply to the 6 rows of x, got \(2, 2\)"),
        ((6,), r"samples must be \(batch, sequence\) and multiply to the 6 rows of x, got \(6,\)"),
        ((1, 6), "at least two of them, got 1"),
        (torch.zeros(6, dtype=torch.int64), "at least two of them, got 1"),
        (torch.zeros(5, dtype=torch.int64), r"each of the 6 rows of x, got torch.int64 of shape \(5,\)"),
        (torch.zeros(6), r"samples must be int64 .*, got torch.float32"),
    ],
)
def test_wrong_samples_are_refused(samples, message):
    x = torch.randn(6, 2)
    for function in (sgd_variance, simulate_sgd_variance):
        with pytest.raises(ValueError, match=message):
            function(x, x, samples=samples)


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


@pytest.mark.parametrize("samples", [None, (10, 4), RAGGED[:TOKENS]], ids=str)
def test_sgd_variance_is_that_of_drawn_batches(samples):
    x, y, _ = padded()
    found = simulate_sgd_variance(x, y, samples=samples, draws=5_000)
    assert_variance(found, sgd_variance(x, y, samples=samples), widest=0.03)


@pytest.mark.montecarlo
@pytest.mark.parametrize("samples", [None, (10, 4), RAGGED[:TOKENS]], ids=str)
def test_sgd_variance_is_that_of_drawn_batches_heavy(samples):
    x, y, _ = padded()
    found = simulate_sgd_variance(x, y, samples=samples, draws=100_000)
    assert_variance(found, sgd_variance(x, y, samples=samples), widest=0.006)


def test_a_wrong_formula_is_outside_the_band():
    """The published formula where it is a fifth too small: the bands can tell."""
    x, y = heavy_tailed(TOKENS, 2, 1)
    found = simulate_variance(x, y, kind="gaussian", rows=ROWS)
    assert found.z_score(paper_sketch_variance(x, y, rows=ROWS)) > 1.5 * Z
    assert abs(found.z_score(sketch_variance(x, y, kind="gaussian", rows=ROWS))) < Z


def test_an_interval_is_as_wide_as_its_confidence():
    found = Simulation(10.0, 2.0, 100)
    assert found.interval(0.95) == pytest.approx((10 - 1.95996 * 2, 10 + 1.95996 * 2), rel=1e-5)
    assert found.z_score(7.0) == 1.5
    assert Simulation(1.0, 0.0, 100).z_score(1.0) == 0
    assert Simulation(1.0, 0.0, 100).z_score(2.0) == -math.inf


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
        ({"block": 4}, ValueError, "block is for kinds with blocks, got block=4 with kind='rows'"),
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


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_required_ratio_is_quiet_enough_and_one_row_less_is_not(kind, bits, masked):
    x, y, mask = padded()
    given = {"kind": kind, "bits": bits, "mask": mask if masked else None}
    limit = 1.5 * float(sgd_variance(x, y, samples=(10, 4)))
    rows = float(required_ratio(x, y, target=1.5, samples=(10, 4), **given)) * TOKENS
    assert rows == pytest.approx(round(rows))
    assert float(sketch_variance(x, y, rows=round(rows), **given)) <= limit
    assert round(rows) > 1
    assert float(sketch_variance(x, y, rows=round(rows) - 1, **given)) > limit


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"countsketch", "wta"}))
def test_required_ratio_is_the_smallest(kind):
    x, y, _ = padded()
    limit = 2.0 * float(sgd_variance(x, y))
    smallest = next(k for k in range(1, TOKENS + 1) if float(variance(x, y, kind=kind, rows=k)) <= limit)
    assert float(required_ratio(x, y, kind=kind, bits=None, target=2.0)) == smallest / TOKENS


def test_required_ratio_says_when_no_ratio_suffices():
    """Rounding remains when every row is stored; without it, storing every row is exact."""
    x, y, mask = padded()
    assert required_ratio(x, y, kind="rows", bits=2, target=1e-6) == math.inf
    assert required_ratio(x, y, kind="rows", bits=None, target=1e-9) == 1
    masked = required_ratio(x, y, kind="rows", bits=None, target=1e-9, mask=mask)
    assert float(masked) * TOKENS == int(mask.sum())  # as soon as all tokens that count are stored
    x, y = counterexample()
    assert required_ratio(x, y, kind="gaussian", bits=None, target=1.0) == 1  # no minibatch noise to hide behind
    with pytest.raises(ValueError, match="target must be positive, got 0"):
        required_ratio(x, y, kind="rows", bits=None, target=0)


@pytest.mark.parametrize(("kind", "masked"), [("rademacher", True), ("hadamard", False), ("countsketch", False)])
def test_required_ratio_finds_a_quiet_ratio_below_rows_that_are_stored_as_they_are(kind, masked):
    """In 2 bits the noise is not monotone: where tokens are long in X and Y at once, storing all of them is louder."""
    generator = torch.Generator().manual_seed(20)
    length = torch.exp(1.2 * torch.randn(64, 1, generator=generator, dtype=torch.float64))
    x = torch.randn(64, 64, generator=generator, dtype=torch.float64) * length
    y = torch.randn(64, 4, generator=generator, dtype=torch.float64) * length
    mask = torch.arange(64) % 4 > 0 if masked else torch.ones(64, dtype=torch.bool)
    y *= mask.unsqueeze(1)
    given = {"kind": kind, "bits": 2, "mask": mask if masked else None}
    sgd = float(sgd_variance(x, y, samples=(16, 4)))
    noises = [float(sketch_variance(x, y, rows=rows, **given)) / sgd for rows in range(1, 129)]
    for share in (0.3, 0.7, 1.5):
        target = min(noises) + share * (noises[-1] - min(noises))
        quiet = [rows for rows, noise in enumerate(noises, start=1) if noise <= target]
        found = round(64 * float(required_ratio(x, y, target=target, samples=(16, 4), **given)))
        assert found in quiet
        assert found - 1 not in quiet
        assert found <= quiet[0] + 8  # the rounding term of a few seeds wavers from K to K
    if kind != "countsketch":  # most rows of which hold few tokens long before
        assert min(noises) < 0.7 * noises[-1]


def test_effective_batch_has_the_noise_of_both_together():
    x, y, _ = padded()
    sgd, sketch = sgd_variance(x, y, samples=(10, 4)), sketch_variance(x, y, kind="countsketch", rows=ROWS)
    batch = effective_batch(10, sketch / sgd)
    torch.testing.assert_close(sgd * 10 / batch, sgd + sketch)
    assert effective_batch(10, 0.0) == 10
    assert effective_batch(10, math.inf) == 0
    with pytest.raises(ValueError, match="batch must be at least 1 sample, got 0"):
        effective_batch(0, 1.0)
