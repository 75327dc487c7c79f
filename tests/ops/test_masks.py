"""The operators of masks: what PyTorch asks of them, and the C library as plain PyTorch."""

import pytest
import torch
from cases import needs_triton
from torch.utils.flop_counter import FlopCounterMode

from rmm_linear.backends import native as library
from rmm_linear.ops.masks import apply_mask, pack_mask
from rmm_linear.ops.native import masks as native
from rmm_linear.packing import masks as plain

PACK = torch.ops.rmm_linear.pack_mask.default
APPLY = torch.ops.rmm_linear.apply_mask.default
SHAPES = [(300, 768), (7, 13), (5, 8), (3, 1), (0, 9), (4, 0), (2000, 70)]
INDICES = [None, torch.tensor([2, 0]), torch.tensor([], dtype=torch.int64)]


def made(shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    return (torch.rand(shape, generator=generator) < 0.6).to(dtype), torch.randn(shape, generator=generator)


@pytest.mark.skipif(not library.is_available(), reason="the C library was not built")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("threads", [1, 3])
def test_the_c_library_gives_the_same(shape, threads):
    mask, y = made(shape)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        bits = native.pack_mask(mask)
        assert torch.equal(bits, plain.pack_mask(mask))
        assert torch.equal(native.apply_mask(y, bits, 1.25), plain.apply_mask(y, bits, 1.25))
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(not library.is_available(), reason="the C library was not built")
@pytest.mark.parametrize("index", INDICES)
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float32, torch.bfloat16, torch.float64])
def test_the_c_library_takes_every_dtype_and_rows_by_index(index, dtype):
    mask, y = made((7, 13), dtype)
    for view in (lambda m: m, lambda m: m.T, lambda m: m[:, 2:11], lambda m: m[::2]):
        bits = native.pack_mask(view(mask), index)
        assert torch.equal(bits, plain.pack_mask(view(mask), index))
        assert torch.equal(native.apply_mask(view(y), bits, 2.0, index), plain.apply_mask(view(y), bits, 2.0, index))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("index", INDICES)
def test_operators_keep_pytorchs_rules(index, dtype):
    mask, y = made((7, 13), dtype)
    for view in (lambda m: m, lambda m: m.T):
        torch.library.opcheck(PACK, (view(mask), index))
        bits = pack_mask(view(mask), index)
        torch.library.opcheck(APPLY, (view(y).to(dtype), bits, 2.0, index))


@needs_triton
@pytest.mark.parametrize("index", INDICES)
def test_operators_on_the_kernels_keep_pytorchs_rules(index, monkeypatch):
    monkeypatch.setenv("RMM_BACKEND", "triton")
    mask, y = made((7, 13))
    torch.library.opcheck(PACK, (mask, index))
    bits = pack_mask(mask, index)
    assert torch.equal(bits, plain.pack_mask(mask, index))
    torch.library.opcheck(APPLY, (y, bits, 2.0, index))
    assert torch.equal(apply_mask(y, bits, 2.0, index), plain.apply_mask(y, bits, 2.0, index))


def test_operations_are_counted():
    mask, y = made((7, 13))
    with FlopCounterMode(display=False) as counted:
        apply_mask(y, pack_mask(mask, None), 2.0, None)
    assert counted.get_total_flops() == 2 * 7 * 13
