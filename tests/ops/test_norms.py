"""The operators of norms: what compilers take them for, their bytes and FLOPs, and the same result on every backend."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from rmm_linear.ops.norms import norm_backward, norm_bytes, pack_norm

WIDTH = 96


@pytest.mark.parametrize("index", [None, torch.tensor([0, 2, 5])])
@pytest.mark.parametrize(("dims", "dtype"), [(1, torch.float32), (2, torch.bfloat16)])
def test_the_operators_are_what_compilers_take_them_for(index, dims, dtype):
    x = torch.randn(2, 3, 8, 12) if dims == 2 else torch.randn(6, WIDTH)
    x = x.to(dtype)
    torch.library.opcheck(pack_norm.definition, (x, index, 5, 2, 1e-5, True, dims))
    stored = pack_norm(x, index, 5, 2, 1e-5, True, dims)
    gamma = torch.ones(WIDTH)
    for sums in (True, False):
        torch.library.opcheck(
            norm_backward.definition, (x.view(6, WIDTH), stored, gamma, index, 2, True, torch.float32, sums)
        )


@pytest.mark.parametrize("index", [None, torch.tensor([0, 2, 5])])
@pytest.mark.parametrize(("bits", "centered"), [(2, True), (8, False)])
def test_every_backend_computes_the_same(bits, centered, index, monkeypatch):
    """A code on the edge of a step can fall to either side, which moves one element by a step."""
    x, y, gamma = torch.randn(6, WIDTH), torch.randn(6, WIDTH), torch.rand(WIDTH)
    found = {}
    for backend in ("torch", "auto", "triton"):
        monkeypatch.setenv("RMM_BACKEND", backend)
        stored = pack_norm(x, index, 5, bits, 1e-5, centered)
        assert stored.shape == (norm_bytes(6 if index is None else 3, WIDTH, bits),)
        found[backend] = norm_backward(y, stored, gamma, index, bits, centered, torch.float32, True)
    for backend in ("auto", "triton"):
        for one, other in zip(found[backend], found["torch"], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_a_seed_that_is_not_given_is_drawn_from_the_global_generator():
    x = torch.randn(6, WIDTH)
    torch.manual_seed(1)
    first, second = (pack_norm(x, None, None, 2, 1e-5, True) for _ in range(2))
    torch.manual_seed(1)
    assert torch.equal(first, pack_norm(x, None, None, 2, 1e-5, True))
    assert not torch.equal(first, second)


def test_floating_point_operations_are_counted():
    x = torch.randn(6, WIDTH)
    with FlopCounterMode(display=False) as counter:
        stored = pack_norm(x, None, 5, 2, 1e-5, True)
        norm_backward(x, stored, None, None, 2, True, torch.float32, True)
    rotations = 2 * 2 * 64 * x.numel()
    assert rotations < counter.get_total_flops() < 1.3 * rotations
