"""Packed dropout where it has no rows of columns, drops nothing or everything, or works in place on a view."""

import functools

import pytest
import torch
from cases import checkpoints, needs_triton
from compile_helpers import Graphs
from module_cases import converted_model
from torch import nn
from torch.utils.checkpoint import checkpoint

from rmm_linear import convert
from rmm_linear.activations.dropout import is_dropout
from rmm_linear.packing import masks


def packed(p=0.3, inplace=False):
    module = converted_model("dropout in place" if inplace else "dropout").module
    module.p = p
    return module


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("shape", [(), (5,), (0, 7), (7, 0), (4, 3, 13)])
def test_any_shape_and_probability(shape, inplace):
    x, y = torch.randn(shape), torch.randn(shape)
    for p in (0.0, 0.3, 1.0):
        results = []
        for module in (packed(p, inplace), nn.Dropout(p, inplace)):
            leaf = x.clone().requires_grad_()
            torch.manual_seed(2)
            output = module(leaf * 1)
            results.append((output.detach(), *torch.autograd.grad(output, leaf, y)))
        assert all(map(torch.equal, *results))


def test_a_view_is_overwritten_as_dropout_does():
    results = []
    for module in (packed(inplace=True), nn.Dropout(0.3, True)):
        x = torch.linspace(-1, 1, 48).view(4, 12).requires_grad_()
        torch.manual_seed(2)
        whole = x * 2
        module(whole.view(8, 6))
        results.append((whole.detach(), *torch.autograd.grad(whole.square().sum(), x)))
    assert all(map(torch.equal, *results))


def test_integers_are_refused_as_by_dropout():
    for module in (packed(), nn.Dropout(0.3)):
        with pytest.raises(RuntimeError, match="can't be cast"):
            module(torch.arange(3))


def test_dropout_itself_is_found_and_nothing_else():
    class Other(nn.Dropout):
        pass

    assert is_dropout(nn.Dropout())
    assert not any(map(is_dropout, (Other(), nn.Dropout1d(), nn.AlphaDropout(), nn.Identity(), packed())))


# Without a mask, where a kernel makes the output


@pytest.fixture
def kernels_run(monkeypatch):
    monkeypatch.setenv("RMM_BACKEND", "triton")


def seeded(p=0.3):
    module = converted_model("dropout", fused=True).module
    module.p = p
    return module


def saved(run):
    found = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (found.append(t), t)[1], lambda t: t):
        output = run()
    return output, found


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_seed_alone_is_saved_and_the_gradient_has_the_mask_of_the_output(dtype, kernels_run):
    """Also of rows that lie apart, and of a gradient in another order."""
    x = torch.ones(7, 40, 33, dtype=dtype)[:, ::2].requires_grad_()
    module = seeded()
    output, tensors = saved(lambda: module(x))
    assert [(one.dtype, one.nbytes) for one in tensors] == [(torch.int64, 8)]
    factor = torch.tensor(1 / 0.7, dtype=torch.float32).to(dtype)
    assert ((output == 0) | ((output - factor).abs() <= torch.finfo(dtype).eps)).all()
    y = torch.ones(33, 7, 20, dtype=dtype).movedim(0, -1)
    (gradient,) = torch.autograd.grad(output, x, y, retain_graph=True)
    assert torch.equal(gradient, output)
    (again,) = torch.autograd.grad(output.sum(), x)
    assert torch.equal(again, output)


@needs_triton
def test_numbers_repeat_with_the_generator_and_not_otherwise(kernels_run):
    module, x, found = seeded(), torch.ones(64, 64), []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        found.append([module(x) for _ in range(2)])
    assert all(map(torch.equal, found[0], found[2]))
    different = [*found[0], *found[1]]
    assert len({one.numpy().tobytes() for one in different}) == 4
    torch.manual_seed(1)
    with torch.no_grad():  # as in the first pass of a checkpoint
        assert torch.equal(module(x), found[0][0])
    assert torch.equal(module.eval()(x), x)


@needs_triton
@pytest.mark.parametrize("p", [0.0, 1.0])
def test_nothing_and_everything_are_dropped_exactly(p, kernels_run):
    module, x = seeded(p), torch.randn(5, 6, requires_grad=True)
    output, tensors = saved(lambda: module(x))
    assert torch.equal(output, x * (1 - p))
    assert torch.equal(*torch.autograd.grad(output.sum(), x), torch.full_like(x, 1 - p))
    assert all(one.dtype != torch.uint8 for one in tensors)


@needs_triton
def test_in_place_and_in_float64_it_is_that_of_pytorch(kernels_run):
    for module, dtype in (
        (converted_model("dropout in place", fused=True).module, torch.float32),
        (seeded(), torch.double),
    ):
        x = torch.randn(9, 13, dtype=dtype).requires_grad_()
        module.p = 0.3
        found = []
        for one in (module, nn.Dropout(0.3, inplace=module.inplace)):
            torch.manual_seed(5)
            found.append(one(x * 1))
        assert torch.equal(*found)


@needs_triton
@pytest.mark.parametrize("checkpointed", ["exact", "packed"])
@checkpoints
def test_checkpoints_repeat_it_in_any_order(checkpointed, reentrant, kernels_run):
    """One module in two blocks: the recomputation begins with the last one."""
    model = nn.ModuleDict({"drop": nn.Dropout(0.3)})
    model.forward = lambda x: functools.reduce(
        lambda x, _: checkpoint(lambda x: model.drop(x).sin() * 2, x, use_reentrant=reentrant), range(2), x
    )
    convert(model, fused=True, checkpointed=checkpointed, operations="dropout")
    x = torch.randn(8, 50, requires_grad=True)
    torch.manual_seed(3)
    output = model(x)
    output.sum().backward()
    torch.manual_seed(3)
    plain = functools.reduce(lambda x, _: model.drop(x).sin() * 2, range(2), x)
    assert torch.equal(output, plain)
    (expected,) = torch.autograd.grad(plain.sum(), x)
    torch.testing.assert_close(x.grad, expected)


@needs_triton
def test_compiled_code_is_one_graph_and_draws_a_new_seed_in_every_call(kernels_run):
    module, graphs = seeded(), Graphs()
    compiled, x, outputs = graphs.compile(module), torch.ones(16, 32, requires_grad=True), []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        output = compiled(x)
        (gradient,) = torch.autograd.grad(output.sum(), x)
        assert torch.equal(gradient, output)
        outputs.append(output.detach())
    assert torch.equal(outputs[0], outputs[2])
    assert not torch.equal(outputs[0], outputs[1])
    assert graphs.counts == [{"rmm_linear.dropout.default": 1}] * 2  # forward and backward


@needs_triton
def test_a_compiled_checkpoint_draws_its_seed_again(kernels_run):
    """The partitioner repeats the generator's state for the recomputation, so the gradient is that of the output."""
    module, graphs = seeded(), Graphs()

    def run(x):
        for _ in range(2):
            x = checkpoint(lambda x: module(x.sin()) * x, x, use_reentrant=False)
        return x

    x, change, results = torch.randn(8, 50, dtype=torch.float32), torch.randn(8, 50), []
    compiled = graphs.compile(run)
    for step in (1e-2, -1e-2, 0):
        torch.manual_seed(3)
        leaf = (x + step * change).requires_grad_()
        output = compiled(leaf)
        results.append((output.double().sum().item(), *torch.autograd.grad(output.sum(), leaf)))
    slope = (results[0][0] - results[1][0]) / 2e-2
    assert abs(slope - (results[2][1] * change).sum().item()) < 1e-2 * abs(slope)
    assert graphs.counts == [{"rmm_linear.dropout.default": 2}, {"rmm_linear.dropout.default": 4}]


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_kept_share_and_the_independence_of_calls_and_neighbours(p):
    """Of a million elements each: z-tests of the shares that are kept, and kept twice."""
    size, x = 2**20, torch.ones(1024, 1024)
    one, other = (masks.dropout(x, torch.tensor([seed]), p).flatten() > 0 for seed in (11, 12))
    both = [one & other, one[1:] & one[:-1], one[1024:] & one[:-1024], one[4096:] & one[:-4096]]
    for kept, q in [(one, 1 - p), (other, 1 - p), *((each, (1 - p) ** 2) for each in both)]:
        z = (kept.double().mean() - q) / (q * (1 - q) / size) ** 0.5
        assert abs(z) < 4
    scaled = masks.dropout(x, torch.tensor([13]), p)
    z = (scaled.double().mean() - 1) / (p / (1 - p) / size) ** 0.5
    assert abs(z) < 4
