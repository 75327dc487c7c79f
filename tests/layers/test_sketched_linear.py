"""sketched_linear as a function: dW is (SᵀY)ᵀ SᵀX of one S; its seeds, masks, and what it refuses."""

import pytest
import torch
from helpers import SEED_BYTES, chances, heavy_tailed, sketch_matrix
from statistical import TOKENS, assert_unbiased
from torch import nn
from torch.nn import functional as F

from rmm_linear import RMMConfig, convert, sketched_linear
from rmm_linear.memory import track_saved
from rmm_linear.packing import encoded_bytes
from rmm_linear.sketches import KINDS


def config(ratio=0.2, kind="countsketch", min_rows=1, **fields):
    return RMMConfig(kind=kind, ratio=ratio, min_rows=min_rows, **fields)


def leaves(shape, dtype=torch.float32, outputs=3, bias=True):
    generator = torch.Generator().manual_seed(0)

    def leaf(*size):
        return torch.randn(*size, generator=generator).to(dtype).requires_grad_()

    return [leaf(*shape), leaf(outputs, shape[-1]), leaf(outputs) if bias else None]


def grad_of(output):
    return torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output.dtype)


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


@pytest.mark.parametrize("kind", ["countsketch", "rows", "gaussian"])
def test_fewer_tokens_than_one_over_ratio_still_have_an_unbiased_gradient(kind):
    """round(0.01 · 5) = 0 rows would be a zero gradient, which is more than six errors away."""
    x, y = heavy_tailed(5, 3, 2)

    def gradient(seed):
        w = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
        sketched_linear(x, w, config=config(kind=kind, ratio=0.01), seed=seed).backward(y)
        return w.grad

    assert_unbiased(gradient, y.T @ x, draws=400, widest=0.15)


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


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 3)

    def forward(self, x, attention_mask):
        return self.layer(x) * attention_mask.unsqueeze(-1)


@pytest.mark.parametrize(("fields", "bits"), [({}, 3), ({"memory": 0.16}, 8), ({"bits": 2}, 2)])
def test_valid_rows_alone_are_saved_as_in_a_converted_layer(fields, bits):
    """Codes and scales are all bytes but the seed, of 24 rows of 40. 0.16 holds 8 bits of these, and 4 of all rows."""
    saved: list[torch.Tensor] = []
    x, mask = torch.randn(4, 10, 64), (torch.arange(10) < 6).expand(4, 10)
    how, model = RMMConfig(min_rows=1, operations="linear", **fields), Masked().train()
    convert(model, how)
    weight = nn.Parameter(torch.randn(3, 64))
    for run in (lambda: sketched_linear(x, weight, config=how, token_mask=mask), lambda: model(x, mask.long())):
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            run()
        sizes = [tensor.nbytes for tensor in saved if tensor.dtype == torch.uint8]
        assert sum(sizes) == encoded_bytes(24, 64, bits) == 24 * {3: 25, 8: 65, 2: 33}[bits]


# Autocast


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


# What is saved


def kept_bytes(*args, **fields):
    with track_saved(torch.nn.Identity()) as kept:
        output = sketched_linear(*args, config=config(**fields), seed=1)
    assert output is not None
    return kept.total


def test_bytes_kept_in_autocast_are_half():
    x, w, b = leaves((40, 6))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert kept_bytes(x.detach(), w, b) == 8 * 6 * 2 + SEED_BYTES


def test_exact_layer_keeps_the_input_once():
    x, w, b = leaves((40, 6))
    assert kept_bytes(x.detach(), w, b, ratio=1.0) == 40 * 6 * 4


# What is refused


def test_second_backward_has_torchs_own_error():
    x, w, b = leaves((40, 6))
    loss = sketched_linear(x, w, b, config=config()).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_weight_changed_in_place_after_the_forward_pass_is_noticed():
    """dX would be wrong without a word."""
    x, w, b = leaves((40, 6))
    loss = sketched_linear(x, w, b, config=config()).sum()
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_wrong_shape_has_torchs_own_error():
    x, w, b = leaves((40, 6))
    with pytest.raises(RuntimeError) as exact:
        F.linear(x[:, :5], w, b)
    with pytest.raises(RuntimeError) as ours:
        sketched_linear(x[:, :5], w, b, config=config())
    assert str(ours.value) == str(exact.value)
