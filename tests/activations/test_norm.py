"""A norm that saves a packed copy: outputs to the bit, gradients in the right dtypes, bytes, and what is around it."""

import copy
import dataclasses
import gc
import math
import pickle
import weakref

import pytest
import torch
from norm_helpers import NORMS, WIDTH, Bits, batch, error, fresh, gradients, packed
from torch import nn

from rmm_linear import RMMConfig, convert
from rmm_linear.activations.norm import PackedNorm
from rmm_linear.memory import track_saved
from rmm_linear.ops.norms import norm_bytes
from rmm_linear.sketches import TokenMask

EVERY = pytest.mark.parametrize("name", NORMS)


@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_outputs_are_exact_and_gradients_near(name, dtype):
    """At 8 bits the noise of dγ is a step of 6 / 255 by √12, of some 1e-2 of it; that of dX is much smaller."""
    module = fresh(name).to(dtype)
    standin, x = packed(module), batch(name, dtype)
    standin.rmm_config = Bits(8)
    y = torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (output, expected), (own, found) = gradients(module, x, y), gradients(standin, x, y)
    assert torch.equal(output, own)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert error(one, other) < 0.03
    if name == "layer":  # dβ is exact but for one rounding; PyTorch's own, of half types, rounds partial sums
        beta = y.to(dtype).double().flatten(0, -2)
        room = float(torch.finfo(torch.promote_types(dtype, torch.float32)).eps * beta.abs().sum(0).max())
        torch.testing.assert_close(found[-1].double(), beta.sum(0), rtol=torch.finfo(dtype).eps, atol=room)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")
@pytest.mark.parametrize(
    ("weights", "inputs"),
    [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)],
)
@pytest.mark.parametrize("name", ["layer", "rms"])
def test_under_autocast_gradients_have_their_tensors_dtypes(name, weights, inputs):
    module = fresh(name).to(weights)
    standin = packed(module)
    standin.rmm_config = Bits(8)
    x = batch(name, inputs)
    y = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16):
        (output, expected), (own, found) = gradients(module, x, y), gradients(standin, x, y)
    assert torch.equal(output, own)
    assert output.dtype == own.dtype
    assert [one.dtype for one in found] == [one.dtype for one in expected]
    assert all(error(one, other) < 0.03 for one, other in zip(found, expected, strict=True))


@EVERY
def test_eval_no_grad_and_frozen_inputs_save_nothing_of_ours(name):
    module = packed(fresh(name))
    x = batch(name)
    module.eval()
    assert "NormFunction" not in type(module(x).grad_fn).__name__
    module.train()
    with torch.no_grad():
        assert not module(x).requires_grad
    frozen = packed(fresh(name)).requires_grad_(False)
    assert not frozen(x.detach()).requires_grad
    assert "NormFunction" in type(module(x).grad_fn).__name__


def test_a_frozen_weight_has_no_gradient():
    module = packed(fresh())
    module.requires_grad_(False)
    x = batch()
    module(x).sum().backward()
    assert x.grad is not None
    assert module.weight.grad is None
    assert module.bias.grad is None
    module.bias.requires_grad_()
    module(x).sum().backward()
    torch.testing.assert_close(module.bias.grad, torch.full((WIDTH,), 30.0))
    assert module.weight.grad is None


@EVERY
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_the_bytes_are_those_of_the_formula_and_the_input_is_freed(name, bits):
    module, x, sizes = packed(fresh(name)), batch(name), []
    module.rmm_config = Bits(bits)

    def keep(tensor):
        sizes.append(tensor.nbytes)
        return tensor

    hidden = x * 1.0
    reference = weakref.ref(hidden)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = module(hidden)
    weights = [module.weight.nbytes] if module.weight is not None else []
    assert sizes == [*weights, norm_bytes(30, WIDTH, bits)]
    assert norm_bytes(30, WIDTH, bits) == 16 + 128 + 30 * (WIDTH * bits // 8) + 30 * 2 * 4  # seed, rstd, codes, qparams
    del hidden
    gc.collect()
    assert reference() is None
    output.sum().backward()


def test_padding_is_left_out_and_its_rows_get_no_gradient():
    module, x, sizes, calls = packed(fresh()), batch(), [], []
    mask = TokenMask.of(torch.arange(30) % 3 != 0)
    original = module._packed_call

    def masked(*arguments):
        return dataclasses.replace(original(*arguments), mask=mask, on_backward=lambda *seen: calls.append(seen))

    module._packed_call = masked
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.nbytes) or t, lambda t: t):
        output = module(x)
    assert norm_bytes(20, WIDTH, 2) in sizes
    y = torch.randn(30, WIDTH) * mask.valid.unsqueeze(1)
    output.backward(y.view(x.shape))
    assert not x.grad.view(30, WIDTH)[~mask.valid].any()
    assert x.grad.view(30, WIDTH)[mask.valid].all()
    assert len(calls) == 1
    assert calls[0][1] is mask


def test_output_may_be_changed_in_place():
    module, x = packed(fresh()), batch()
    output = module(x)
    output += 1.0
    output.sum().backward()
    assert x.grad is not None


def test_the_input_may_be_given_by_its_name():
    module, x = packed(fresh()), batch()
    assert torch.equal(module(input=x), module(x))
    with pytest.raises(TypeError):
        module(x, x)
    with pytest.raises(RuntimeError, match="normalized_shape"):
        module(x[..., :5])


def test_nothing_is_an_input_too():
    module = packed(fresh())
    x = torch.zeros(0, WIDTH, requires_grad=True)
    module(x).sum().backward()
    assert x.grad.shape == x.shape
    assert not module.weight.grad.any()


def test_copies_and_pickles_are_packed_norms():
    module, x = packed(fresh()), batch()
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert isinstance(other, PackedNorm)
        assert other.rmm_norm == module.rmm_norm
        torch.manual_seed(1)
        expected = gradients(module, x, torch.ones_like(x))[1]
        torch.manual_seed(1)
        found = gradients(other, x, torch.ones_like(x))[1]
        assert all(map(torch.equal, found, expected))


def test_modules_that_were_pickled_before_there_was_fused_train():
    """They have neither the casts nor the field of the configuration."""
    module, x = packed(fresh(), RMMConfig(checkpointed="packed")), batch()
    vars(module).pop("rmm_casts")
    vars(module.rmm_config).pop("fused")
    gradient = gradients(pickle.loads(pickle.dumps(module)), x, torch.ones_like(x))[1]
    assert all(one.any() for one in gradient)


def test_double_backward_is_refused():
    module, x = packed(fresh()), batch()
    with pytest.raises(RuntimeError, match="a packed norm does not support double backward"):
        torch.autograd.grad(module(x).sum(), x, create_graph=True)


def test_a_nan_stays_in_its_row():
    module, x = packed(fresh()), batch()
    with torch.no_grad():
        x[1, 2, 3] = math.nan
    module(x).sum().backward()
    bad = x.grad.isnan()
    assert bad[1, 2].all()
    assert bad.sum() == WIDTH


@pytest.mark.parametrize("shape", [(8,), (5, 20)])
def test_an_input_of_one_row_without_leading_dimensions(shape):
    exact = nn.LayerNorm(shape)
    norm = copy.deepcopy(exact)
    convert(nn.Sequential(norm), norm_bits=8)
    norm.train()
    gradients = []
    for module in (norm, exact):
        x = torch.linspace(-1, 2, math.prod(shape)).view(shape).requires_grad_()
        module(x).square().sum().backward()
        gradients.append((x.grad, module.weight.grad, module.bias.grad))
    for found, expected in zip(*gradients, strict=True):
        # 8 bits: half of a step of 1/255 of the range of ĥ, of at most 4, in every element.
        assert (found - expected).abs().max() <= 4 / 255 * 4 * max(1.0, float(expected.abs().max()))


def test_a_trained_scale_above_an_input_without_gradient_is_packed():
    norm = nn.LayerNorm(64)
    model = nn.Sequential(norm)
    x = torch.randn(100, 64, generator=torch.Generator().manual_seed(0))
    convert(model)
    with track_saved(model) as saved:
        output = model.train()(x)
    assert saved.total < 0.4 * x.nbytes
    output.sum().backward()
    assert norm.weight.grad is not None
    norm.weight.requires_grad_(False)
    with track_saved(model) as saved:
        output = model(x)
    del output
    assert saved.total <= x.nbytes + 2 * 4 * len(x)  # with mean and rstd


class Float32RMSNorm(nn.Module):
    """Its output is float32, whatever its input is."""

    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(64)), 1e-6

    def forward(self, x):
        h = x.float()
        return self.weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps))


def test_an_output_of_another_dtype_than_the_input():
    model = nn.Sequential(Float32RMSNorm())
    convert(model, RMMConfig(operations=["norm"], min_rows=1))
    x = torch.randn(20, 64, dtype=torch.float64, requires_grad=True)
    for _ in range(2):
        model.train()(x).sum().backward()
    assert x.grad.dtype == torch.float64
    assert model[0].weight.grad.isfinite().all()
