"""Pooling from the places of maxima, or from sizes: exact in every window, of few bits, and what stays as it is."""

import copy
import math

import pytest
import torch
from helpers import bytes_kept
from torch import nn
from torch.nn import functional as F

from rmm_linear import RMMConfig, convert
from rmm_linear.activations.pooling import PackedAveragePool, PackedPool
from rmm_linear.packing.pooling import Window, max_pool, max_pool_backward

POOLS = {
    "1d": (nn.MaxPool1d(3), (2, 4, 17)),
    "1d overlapping": (nn.MaxPool1d(5, 2, 2, 2, ceil_mode=True), (2, 4, 33)),
    "1d without a batch": (nn.MaxPool1d(2), (4, 16)),
    "2d": (nn.MaxPool2d(2), (2, 3, 8, 10)),
    "2d overlapping": (nn.MaxPool2d(3, 2, 1), (2, 3, 9, 11)),
    "2d of a column": (nn.MaxPool2d((3, 1), (1, 2), (1, 0)), (2, 3, 9, 1)),
    "2d with all settings": (nn.MaxPool2d((4, 3), [1, 2], (2, 1), (2, 3), ceil_mode=True), (2, 3, 21, 19)),
    "2d without a batch": (nn.MaxPool2d(7, 1, 3), (3, 12, 12)),
    "3d": (nn.MaxPool3d(2), (2, 2, 5, 6, 8)),
    "3d overlapping": (nn.MaxPool3d((3, 2, 3), (2, 1, 2), 1), (2, 2, 7, 6, 8)),
    "average 1d": (nn.AvgPool1d(3, 2, 1), (2, 4, 17)),
    "average 2d": (nn.AvgPool2d((3, 2), 2, 1, True, False, 5), (2, 3, 9, 11)),
    "average 2d without a batch": (nn.AvgPool2d(4), (3, 12, 12)),
    "average 3d": (nn.AvgPool3d(2, 1), (2, 2, 5, 6, 8)),
    "adaptive 1d": (nn.AdaptiveAvgPool1d(5), (2, 4, 17)),
    "adaptive 2d": (nn.AdaptiveAvgPool2d((None, 3)), (2, 3, 9, 11)),
    "adaptive 3d": (nn.AdaptiveAvgPool3d((1, 2, 3)), (2, 2, 5, 6, 8)),
}


def pair(pool):
    exact = nn.Sequential(nn.Identity(), copy.deepcopy(pool)).train()
    model = copy.deepcopy(exact)
    convert(model, RMMConfig(operations=["pooling"]))
    assert isinstance(model[1], (PackedPool, PackedAveragePool))
    return model, exact


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", POOLS)
def test_outputs_and_gradients_are_those_of_pytorch(name, dtype):
    """To the bit, with equal numbers in a window, NaN and infinities; what is saved has the bits that it needs."""
    pool, shape = POOLS[name]
    if isinstance(pool, nn.AvgPool3d) and dtype == torch.bfloat16:
        pytest.skip("PyTorch has none on CPU")
    x = torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    x.view(-1)[::13], x.view(-1)[5::29], x.view(-1)[7::31] = math.nan, math.inf, -math.inf
    x.requires_grad_()
    (model, exact), found = pair(pool), []
    layouts = [torch.contiguous_format, *([torch.channels_last] if len(shape) == 4 else [])]
    for layout in layouts:
        for one in (model, exact):
            output = one(x.contiguous(memory_format=layout))
            y = torch.arange(output.numel(), dtype=dtype).view_as(output)
            found.append((output.detach(), *torch.autograd.grad(output, x, y)))
        for one, other in zip(*found[-2:], strict=True):
            assert one.stride() == other.stride()
            assert torch.equal(one.nan_to_num(99), other.nan_to_num(99))
    if isinstance(model[1], PackedAveragePool):
        assert bytes_kept(model, x) == 0 < bytes_kept(exact, x)
        return
    sizes = [pool.kernel_size] if isinstance(pool.kernel_size, tuple) else [(pool.kernel_size,) * int(name[0])]
    bits = math.ceil(math.log2(math.prod(sizes[0])))
    assert bytes_kept(model, x) == bits * math.ceil(output.numel() / 8)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d], ids=str)
def test_windows_of_minus_infinity_in_three_dimensions(layout):
    """Of channels that are side by side in memory, PyTorch's CPU code has indices outside of such windows."""
    x = torch.full((2, 3, 6, 6, 6), -math.inf).index_fill_(4, torch.tensor([0, 5]), 1.0)
    x, found = x.contiguous(memory_format=layout).requires_grad_(), []
    model, exact = pair(nn.MaxPool3d((1, 2, 2)))
    for one in (model, exact):
        output = one(x)
        y = torch.arange(output.numel(), dtype=output.dtype).view_as(output)
        found.append((output, *torch.autograd.grad(output, x, y)))
    assert all(map(torch.equal, *found))
    assert (bytes_kept(model, x) < bytes_kept(exact, x)) == x.is_contiguous()


@pytest.mark.parametrize("shape", [(1, 3, 8, 8), (2, 1, 8, 8)])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_one_image_or_one_channel_lies_in_memory_as_without_codes(shape, layout):
    model, exact = pair(nn.MaxPool2d(2))
    x = torch.randn(shape).contiguous(memory_format=layout).requires_grad_()
    strides = []
    for one in (model, exact):
        output = one(x)
        (gradient,) = torch.autograd.grad(output.square().sum(), x)
        strides.append((output.stride(), gradient.stride()))
    assert strides[0] == strides[1]


@pytest.mark.parametrize(
    "pool",
    [
        nn.MaxPool2d((2,)),
        nn.MaxPool2d(2, stride=[]),
        nn.MaxPool3d(3, [2], (1,)),
        nn.MaxPool2d((torch.tensor(2).numpy()[()], 2)),
    ],
    ids=str,
)
def test_every_way_to_say_the_size_of_a_window(pool):
    """PyTorch takes a sequence of one number for all dimensions, an empty stride, and NumPy's integers."""
    model, exact = pair(pool)
    x = torch.randn(2, 2, *(8,) * (3 if isinstance(pool, nn.MaxPool3d) else 2), requires_grad=True)
    found = [(one(x), *torch.autograd.grad(one(x).square().sum(), x)) for one in (model, exact)]
    assert all(map(torch.equal, *found))
    assert bytes_kept(model, x) < bytes_kept(exact, x)


@pytest.mark.parametrize("size", [(7,), (5, 9), (3, 4, 5)])
def test_every_place_of_a_window_is_found_again(size):
    window = Window(size, (2, 3, 2)[: len(size)], (1,) * len(size), (1,) * len(size), (2, 1, 2)[: len(size)])
    x = torch.randn(40, *size).requires_grad_()
    output, stored = max_pool(x, window, False)
    assert stored.shape == (window.bits, math.ceil(output.numel() / 8))
    run = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[len(size) - 1]
    (expected,) = torch.autograd.grad(run(x, *window[1:]), x, output.detach())
    assert torch.equal(max_pool_backward(output.detach(), stored, window, False, False), expected)


def test_what_stays_exact():
    """Indices that the caller gets, windows that are wider than the input, or have more than 256 elements."""
    model = nn.Sequential(
        nn.MaxPool2d(2, return_indices=True), nn.AdaptiveMaxPool2d(2), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d((1, 1))
    )
    assert list(convert(model, operations=["pooling"]).packed) == ["2"]
    for pool, shape in ((nn.MaxPool2d((3, 5), 1, (1, 2)), (1, 1, 6, 4)), (nn.MaxPool2d(17), (1, 1, 20, 20))):
        model, exact = pair(pool)
        x = torch.randn(shape, requires_grad=True)
        for one in (model, exact):
            assert bytes_kept(one, x) == bytes_kept(exact, x)
    model, _ = pair(nn.MaxPool2d(2))
    with pytest.raises(RuntimeError, match=r"non-empty 3D or 4D|3D or 4D"):
        model(torch.randn(4, 4, requires_grad=True))
