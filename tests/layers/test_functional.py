"""sketched_linear: everything but dW is nn.Linear's own, under autocast too; dW is (SᵀY)ᵀ SᵀX of one S."""

import pytest
import torch
from functional_helpers import TOLERANCE, config, dtypes, grad_of, leaves
from helpers import chances, heavy_tailed, sketch_matrix
from statistical import TOKENS, assert_unbiased
from torch.nn import functional as F

from rmm_linear import RMMConfig, sketched_linear
from rmm_linear.sketches import KINDS

SHAPES = [(6,), (40, 6), (5, 8, 6), (2, 5, 4, 6), (1, 6), (0, 6), (3, 0, 6)]


def both(shape, dtype=torch.float32, bias=True, **fields):
    """Output and gradients of sketched_linear and of F.linear, on equal leaves."""
    results = []
    for layer in (lambda *a: sketched_linear(*a, config=config(**fields), seed=4), F.linear):
        x, w, b = leaves(shape, dtype, bias=bias)
        output = layer(x, w, b)
        output.backward(grad_of(output))
        results.append((output.detach(), x.grad, w.grad, None if b is None else b.grad))
    return results


# What is exact


@dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_output_and_gradients_by_input_and_bias_are_exact(shape, dtype):
    (output, dx, dw, db), (o, x, w, b) = both(shape, dtype)
    assert torch.equal(output, o)
    assert (dx.dtype, dx.shape, dw.dtype, dw.shape) == (dtype, x.shape, dtype, w.shape)
    for ours, exact in ((dx, x), (db, b)):
        assert torch.allclose(ours.double(), exact.double(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * 4)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_the_exact_parts(kind):
    (output, dx, _, db), (o, x, _, b) = both((5, 8, 6), kind=kind)
    assert torch.equal(output, o)
    assert torch.allclose(dx, x, rtol=1e-5, atol=1e-6)
    assert torch.allclose(db, b, rtol=1e-5, atol=1e-6)


def test_without_bias():
    (output, dx, _, db), (o, x, _, _) = both((40, 6), bias=False)
    assert torch.equal(output, o)
    assert torch.allclose(dx, x, rtol=1e-5, atol=1e-6)
    assert db is None


@pytest.mark.parametrize("make", [lambda x: x.transpose(0, 1), lambda x: x[:, ::2], lambda x: x[:1].expand(7, 8, 6)])
def test_non_contiguous_input(make):
    results = []
    for layer in (lambda *a: sketched_linear(*a, config=config(), seed=4), F.linear):
        x, w, b = leaves((5, 8, 6))
        output = layer(make(x), w, b)
        output.backward(grad_of(output))
        results.append((output.detach(), x.grad, b.grad))
    for ours, exact in zip(*results, strict=True):
        assert torch.allclose(ours, exact, rtol=1e-5, atol=1e-6)


def test_non_contiguous_and_expanded_output_gradient():
    for reduce in (torch.sum, lambda o: (o.transpose(0, 1) * torch.arange(24.0).view(8, 3).unsqueeze(1)).sum()):
        x, w, b = leaves((5, 8, 6))
        reduce(sketched_linear(x, w, b, config=config(), seed=4)).backward()
        sketched = [x.grad, b.grad]
        x, w, b = leaves((5, 8, 6))
        reduce(F.linear(x, w, b)).backward()
        for ours, exact in zip(sketched, (x.grad, b.grad), strict=True):
            assert torch.allclose(ours, exact, rtol=1e-5, atol=1e-5)


@dtypes
@pytest.mark.parametrize("fields", [{"ratio": 1.0}, {"ratio": 0.01, "min_rows": 40}, {"ratio": 0.01, "min_rows": 64}])
def test_as_many_rows_as_tokens_are_exact(dtype, fields):
    for ours, exact in zip(*both((40, 6), dtype, **fields), strict=True):
        assert torch.equal(ours, exact)


def test_a_wrong_shape_has_torchs_own_error():
    x, w, b = leaves((40, 6))
    with pytest.raises(RuntimeError) as exact:
        F.linear(x[:, :5], w, b)
    with pytest.raises(RuntimeError) as ours:
        sketched_linear(x[:, :5], w, b, config=config())
    assert str(ours.value) == str(exact.value)


# dW


@pytest.mark.parametrize(("kind", "block"), [(kind, None) for kind in KINDS] + [("gaussian", 7)])
def test_weight_gradient_is_the_product_of_two_sketches_by_one_matrix(kind, block):
    x, y = heavy_tailed(24, 5, 4)
    w = torch.zeros(4, 5, dtype=torch.float64, requires_grad=True)
    fields = config(kind=kind, ratio=0.25, block=block)
    sketched_linear(x.view(4, 6, 5), w, config=fields, seed=-9).backward(y.view(4, 6, 4))
    s = sketch_matrix(kind, 24, 6, -9, block, chances(kind, x)).T
    assert torch.allclose(w.grad, (s.T @ y).T @ (s.T @ x), rtol=1e-10)
    assert not torch.allclose(w.grad, y.T @ x)


@pytest.mark.parametrize("kind", KINDS)
def test_fewer_tokens_than_one_over_ratio_still_have_an_unbiased_gradient(kind):
    """round(0.01 · 5) = 0 rows would be a zero gradient, which is more than six errors away."""
    x, y = heavy_tailed(5, 3, 2)

    def gradient(seed):
        w = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
        sketched_linear(x, w, config=config(kind=kind, ratio=0.01), seed=seed).backward(y)
        return w.grad

    assert_unbiased(gradient, y.T @ x, draws=400, widest=0.15)


def test_gradients_accumulate():
    x, w, b = leaves((40, 6))
    parts = []
    for seed in (1, 2):
        sketched_linear(x, w, b, config=config(), seed=seed).sum().backward()
        parts.append(w.grad.clone())
    w.grad = None
    sketched_linear(x, w, b, config=config(), seed=2).sum().backward()
    assert torch.allclose(parts[1] - parts[0], w.grad, atol=1e-5)
    assert not torch.equal(parts[0], w.grad)


def test_seed_none_follows_the_global_generator_and_moves_it():
    def run():
        x, w, b = leaves((40, 6))
        for _ in range(2):
            sketched_linear(x, w, b, config=config()).sum().backward()
        return w.grad, torch.get_rng_state()

    torch.manual_seed(3)
    before, (first, state) = torch.get_rng_state(), run()
    torch.manual_seed(3)
    again, _ = run()
    other, _ = run()
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(before, state)


def test_a_given_seed_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    x, w, b = leaves((40, 6))
    sketched_linear(x, w, b, config=config(), seed=1).sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


def test_seeds_are_drawn_on_the_cpu_whatever_the_default_device():
    """The same seed, and so the same sketch, as without a default device."""
    found = []
    for device in ("cpu", "meta"):
        torch.manual_seed(3)
        x, w, b = leaves((40, 6))
        with torch.device(device):
            output = sketched_linear(x, w, b, config=config())
        output.sum().backward()
        found.append(w.grad)
    assert found[0].all()
    assert torch.equal(*found)


# Masks


@pytest.mark.parametrize(
    "mask", [torch.zeros(40, dtype=torch.bool), torch.ones(40, dtype=torch.int64)], ids=["none", "all"]
)
def test_no_and_all_tokens(mask):
    x, y = heavy_tailed(TOKENS, 70, 3)
    y = y * mask.unsqueeze(1)
    w = torch.zeros(3, 70, dtype=torch.float64, requires_grad=True)
    out = sketched_linear(x, w, config=RMMConfig(ratio=0.5, min_rows=1), seed=1, token_mask=mask)
    out.backward(y)
    if not mask.any():
        assert not w.grad.any()
    else:
        unmasked = torch.zeros_like(w, requires_grad=True)
        sketched_linear(x, unmasked, config=RMMConfig(ratio=0.5, min_rows=1), seed=1).backward(y)
        assert unmasked.grad.all()
        assert torch.allclose(w.grad, unmasked.grad)


def test_a_token_mask_of_another_shape_is_refused():
    x, w = torch.randn(4, 10, 8), torch.randn(3, 8, requires_grad=True)
    with pytest.raises(ValueError, match=r"token_mask must have the shape .* got \(10,\)"):
        sketched_linear(x, w, config=RMMConfig(), token_mask=torch.ones(10, dtype=torch.bool))


# Autocast


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("input_dtype", [torch.float32, torch.bfloat16])
def test_autocast_does_what_it_does_to_nn_linear(dtype, input_dtype):
    results = []
    for layer in (lambda *a: sketched_linear(*a, config=config(ratio=1.0), seed=4), F.linear):
        for fields in ({"ratio": 1.0}, {"ratio": 0.3}):
            x, w, b = leaves((40, 6))
            x = x.detach().to(input_dtype).requires_grad_()
            with torch.autocast("cpu", dtype=dtype):
                output = layer(x, w, b) if layer is F.linear else sketched_linear(x, w, b, config=config(**fields))
            output.backward(grad_of(output))
            results.append((output, x.grad, b.grad, w.grad))
    (o1, x1, b1, w1), (o2, x2, b2, w2), (o, x, b, w), _ = results
    for ours, exact in ((o1, o), (o2, o), (x1, x), (x2, x), (b1, b), (b2, b), (w1, w)):
        assert ours.dtype == exact.dtype
        assert torch.allclose(ours.float(), exact.float(), rtol=1e-2, atol=1e-2)
    assert torch.equal(o2, o)
    assert w2.dtype == torch.float32


def test_autocast_leaves_float64_alone():
    x, w, b = leaves((40, 6), torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, exact = sketched_linear(x, w, b, config=config()), F.linear(x, w, b)
    assert output.dtype == exact.dtype
    assert torch.equal(output, exact)


def test_backward_under_autocast_is_backward_outside():
    grads = []
    for inside in (True, False):
        x, w, b = leaves((40, 6))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = sketched_linear(x, w, b, config=config(), seed=1)
            if inside:
                output.backward(grad_of(output))
        if not inside:
            output.backward(grad_of(output))
        grads.append((x.grad, w.grad, b.grad))
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)


def test_torch_func_gets_the_error_that_says_why():
    x, w, _ = leaves((40, 6))
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.grad(lambda w: sketched_linear(x, w, config=config()).sum())(w)
