"""A norm that saves a packed copy: outputs to the bit, gradients in the right dtypes, bytes, and everything around it."""

import copy
import dataclasses
import functools
import gc
import math
import pickle
import weakref

import pytest
import torch
from compile_helpers import Graphs
from norm_helpers import packed
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from rmm_linear.activations.norm import PackedNorm
from rmm_linear.context.model_context import ModelContext
from rmm_linear.ops.norms import norm_backward, norm_bytes, pack_norm
from rmm_linear.sketches import TokenMask

WIDTH = 96
NORMS = {
    "layer": lambda: nn.LayerNorm(WIDTH),
    "rms": lambda: nn.RMSNorm(WIDTH),
    "no bias": lambda: nn.LayerNorm(WIDTH, bias=False),
    "no affine": lambda: nn.LayerNorm(WIDTH, elementwise_affine=False),
    "two dimensions": lambda: nn.LayerNorm((6, 16)),
}
EVERY = pytest.mark.parametrize("name", NORMS)


class Bits:
    """A configuration of which only the width is read."""

    def __init__(self, bits):
        self.norm_bits, self.mask_padding = bits, True


def fresh(name="layer"):
    module = NORMS[name]()
    for parameter in module.parameters():
        nn.init.normal_(parameter, 1.0, 0.3)
    return module


def batch(name="layer", dtype=torch.float32, length=10):
    generator = torch.Generator().manual_seed(length)
    shape = (3, length, 6, 16) if name == "two dimensions" else (3, length, WIDTH)
    return torch.randn(shape, generator=generator).to(dtype).requires_grad_()


def gradients(module, x, y):
    inputs = [x, *module.parameters()]
    output = module(x)
    return output, torch.autograd.grad(output, inputs, y.to(output.dtype))


def error(found, expected):
    return float((found.double() - expected.double()).norm() / expected.double().norm())


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
    output = module(x.detach())
    assert output.grad_fn is None or "NormFunction" not in type(output.grad_fn).__name__
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


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_in_a_checkpoint_the_gradient_is_one_draw_of_the_same(use_reentrant):
    """Twice the same seed by the generator: the second pass makes a copy of its own, and reads that one."""
    module, x = packed(fresh()), batch()
    module.rmm_config = Bits(8)
    y = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    expected = gradients(fresh_like(module), x, y)[1]
    output = checkpoint(module, x, use_reentrant=use_reentrant)
    output.backward(y)
    for one, other in zip((x.grad, module.weight.grad, module.bias.grad), expected, strict=True):
        assert error(one, other) < 0.03


@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE])
def test_a_selective_checkpoint_may_save_the_copy_or_make_another(policy):
    module, x = packed(fresh()), batch()
    module.rmm_config = Bits(8)
    y = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    expected = gradients(fresh_like(module), x, y)[1]

    def choose(context, operator, *arguments, **named):
        return policy if operator == torch.ops.rmm_linear.pack_norm.default else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, choose)
    checkpoint(lambda x: module(x * 1.0), x, use_reentrant=False, context_fn=contexts).backward(y)
    for one, other in zip((x.grad, module.weight.grad, module.bias.grad), expected, strict=True):
        assert error(one, other) < 0.03


def fresh_like(module):
    exact = nn.LayerNorm(WIDTH)
    exact.load_state_dict(module.state_dict())
    return exact


def test_later_random_numbers_do_not_depend_on_grad_mode():
    module, x = packed(fresh()), batch()
    after = []
    for grad in (True, False):
        torch.manual_seed(3)
        with torch.set_grad_enabled(grad):
            module(x)
        after.append(torch.rand(1))
    assert torch.equal(*after)


@pytest.mark.parametrize("name", ["layer", "rms", "two dimensions"])
def test_one_graph_for_all_lengths_and_a_new_copy_in_every_step(name):
    module = packed(fresh(name))
    graphs = Graphs()
    compiled = graphs.compile(module)
    for length in (4, 6, 8):
        x = batch(name, length=length)
        y = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
        found = []
        for _ in range(2):
            torch.manual_seed(7)
            output, own = gradients(compiled, x, y)
            found.append(own)
        assert torch.equal(output, module(x))
        assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
        assert not torch.equal(gradients(compiled, x, y)[1][0], own[0])
        torch.manual_seed(7)
        assert torch.equal(gradients(module, x, y)[1][0], own[0])
    assert len(graphs.counts) == 4  # forward and backward, of one length and of all others
    torch._dynamo.reset()


@pytest.mark.parametrize("index", [None, torch.tensor([0, 2, 5])])
@pytest.mark.parametrize(("dims", "dtype"), [(1, torch.float32), (2, torch.bfloat16)])
def test_the_operators_are_what_compilers_take_them_for(index, dims, dtype):
    x = torch.randn(2, 3, 8, 12) if dims == 2 else torch.randn(6, WIDTH)
    x = x.to(dtype)
    torch.library.opcheck(pack_norm, (x, index, 5, 2, 1e-5, True, dims))
    stored = pack_norm(x, index, 5, 2, 1e-5, True, dims)
    gamma = torch.ones(WIDTH)
    for sums in (True, False):
        torch.library.opcheck(norm_backward, (x.view(6, WIDTH), stored, gamma, index, 2, True, torch.float32, sums))


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


def test_norms_that_read_the_same_input_share_one_copy():
    """As in parallel attention blocks; another input, or another eps, has a copy of its own."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norms = nn.ModuleList([fresh(), fresh(), nn.LayerNorm(WIDTH, eps=1e-3), fresh()])

        def forward(self, x):
            first, second, third, fourth = self.norms
            return first(x) + second(x) + third(x) + fourth(x * 2)

    block = Block().train()
    context = ModelContext([str(number) for number in range(4)])
    for number, norm in enumerate(block.norms):
        block.norms[number] = packed(norm)
        block.norms[number]._set_up(None, context, number)
    context.attach(block)
    places = []

    def keep(tensor):
        if tensor.dtype == torch.uint8:
            places.append(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        block(batch()).sum().backward()
    assert len(places) == 4
    assert places[0] == places[1]
    assert len(set(places)) == 3
    assert context.sketch_cache.groups == {(0, 1)}


def test_output_may_be_changed_in_place():
    module, x = packed(fresh()), batch()
    output = module(x)
    output += 1.0
    output.sum().backward()
    assert x.grad is not None


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
