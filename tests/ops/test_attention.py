"""The operators of packed attention: bytes, operations, and the statistics of their gradients."""

import math

import pytest
import torch
from attention_helpers import exact_rows, formula_gradients, packed_kept, relative, spec_of, tensors
from statistical import Z, assert_unbiased
from torch.utils.flop_counter import FlopCounterMode

from rmm_linear.ops import attention as operators
from rmm_linear.ops.attention import (
    attention_backward,
    attention_parts,
    fused_gradients,
    pack_attention,
)
from rmm_linear.ops.sketches import UNPACK
from rmm_linear.packing import packed_bytes
from rmm_linear.packing.attention import attention_rows
from rmm_linear.packing.attention_gradients import Bias, attention_gradients
from rmm_linear.packing.stored import views

INDEX = torch.tensor([0, 1, 2, 5, 9, 10, 11, 12, 13, 14])  # of two sequences of 9 tokens
HIDING = (torch.zeros(18).index_fill_(0, INDEX, 1) > 0).view(2, 1, 1, 9).expand(2, 1, 9, 9)


def backward(y, stored, spec, mask=None, kept=None, index=None, kv_index=None, bits=(4, 4, 4)):
    return attention_backward(y, stored, mask, kept, index, kv_index, spec, bits)[:3]


def made(dtype=torch.float32, heads=4, kv_heads=2, tokens=9, width=16):
    return tensors(2, heads, kv_heads, tokens, tokens, width, width, dtype)


@pytest.mark.parametrize("bits", [(4, 4, 4), (8, 8, 4)])
@pytest.mark.parametrize("index", [None, INDEX], ids=["all", "some"])
def test_bytes_are_those_of_three_packed_matrices_and_their_seeds(index, bits):
    q, k, v, _ = made()
    stored = pack_attention(q, k, v, index, index, 7, *bits)
    rows = 18 if index is None else len(index)
    each = [packed_bytes(rows, columns, one) for columns, one in zip((64, 32, 32), bits, strict=True)]
    assert 0 <= len(stored) - (24 + sum(each)) < 7 * 16  # every part begins at a multiple of 16
    parts = attention_parts(rows, rows, (64, 32, 32), bits)
    assert sum(math.prod(shape) * dtype.itemsize for shape, dtype in parts) == 24 + sum(each)


def test_errors_of_queries_keys_and_values_are_independent():
    """One seed for all would give three equal tensors equal codes: their errors would be the same numbers."""
    x = torch.randn(1, 2, 40, 64)
    x = x - x.mean(2, keepdim=True)
    parts = attention_parts(40, 40, (128, 128, 128), (4, 4, 4))
    seeds, *packed = views(pack_attention(x, x, x, None, None, 3, 4, 4, 4), parts)
    assert len(set(seeds.tolist())) == 3
    wanted = attention_rows(x, x, x)
    errors = torch.stack(
        [
            (UNPACK(*packed[2 * i : 2 * i + 2], seeds[i : i + 1], 4, 128, torch.float32) - wanted[i]).flatten()
            for i in range(3)
        ]
    )
    found = torch.corrcoef(errors)[tuple(torch.triu_indices(3, 3, 1))]
    assert found.abs().max() < Z / math.sqrt(errors.shape[1])


def test_floating_point_operations():
    q, k, v, y = made()
    with FlopCounterMode(display=False) as counter:
        stored = pack_attention(q, k, v, None, None, 5, 4, 4, 4)
    turned = 2 * 64 * (q.numel() + k.numel() + v.numel())
    assert counter.get_total_flops() == turned
    with FlopCounterMode(display=False) as counter:
        backward(y, stored, spec_of(q, k))
    assert counter.get_total_flops() == 5 * (2 * 2 * 4 * 9 * 9 * 16) + 2 * 64 * 3 * q.numel()


@pytest.mark.parametrize("bits", [8, 4])
def test_gradients_of_packed_tensors_are_near_the_exact_ones(bits):
    """The range of 64 normal numbers is about 5 deviations: steps of 1/51 of a deviation with 8 bits, 1/3 with 4.

    The error of an element is step / √12: 1/177 and 1/10.4 of its size. A gradient has this relative error for each of
    the up to five tensors that it is a product of, squared and added: 5 / 177² and 5 / 10.4² at most, 1/177² at least.
    """
    q, k, v, y = made(tokens=24)
    found = backward(y, pack_attention(q, k, v, None, None, 5, bits, bits, bits), spec_of(q, k), bits=(bits,) * 3)
    error = relative(found, formula_gradients(q.double(), k.double(), v.double(), y.double(), spec_of(q, k)))
    one = 1 / {8: 177, 4: 10.4}[bits] ** 2
    assert one < error < 5 * one


def test_gradients_have_the_right_scale():
    q, k, v, y = tensors(2, 4, 2, 16, 16, 32, 32, torch.float32)
    spec = spec_of(q, k)
    exact = dict(zip("qkv", formula_gradients(q.double(), k.double(), v.double(), y.double(), spec), strict=True))

    def draw(seed):
        stored = pack_attention(q, k, v, None, None, seed, 8, 8, 8)
        return dict(zip("qkv", backward(y, stored, spec, bits=(8, 8, 8)), strict=True))

    assert_unbiased(draw, exact, draws=50, widest=1e-3)


def test_the_gradient_of_a_bias_is_near_the_exact_one():
    """8 bits: an error of 1/177 of an element's size in each of four factors, squared and added, at most."""
    q, k, v, y = made()
    bias, spec = torch.randn(1, 4, 9, 9), spec_of(q, k)
    stored = pack_attention(q, k, v, None, None, 5, 8, 8, 8)
    found = attention_backward(y, stored, None, None, None, None, spec, (8, 8, 8), bias, True)
    own = Bias(bias, torch.zeros_like(bias))
    wanted = attention_gradients(y, exact_rows(q, k, v), spec, bias=own)
    for one, exact in zip(found, (*wanted, own.gradient), strict=True):
        assert 0 < (one - exact).square().sum() < 4 / 177**2 * exact.square().sum()


def by_autograd(y, query, key, value, bias, spec):
    """In place of the kernels of CUDA: the formula, for heads that are repeated already."""
    found = formula_gradients(query, key, value, y.transpose(1, 2), spec, bias)
    return [gradient.transpose(1, 2) for gradient in found]


@pytest.mark.parametrize("kind", ["plain", "causal", "mask", "padding"])
def test_what_surrounds_the_kernels_of_cuda(kind, monkeypatch):
    """Places of rows, heads that share keys, padding: with the formula in place of the kernels."""
    monkeypatch.setattr(operators, "_kernel_gradients", by_autograd)
    q, k, v, y = made(torch.float64)
    spec = spec_of(q, k, is_causal=kind == "causal")
    mask = torch.rand(2, 1, 9, 9) > 0.3 if kind == "mask" else HIDING if kind == "padding" else None
    index = INDEX if kind == "padding" else None
    rows = attention_rows(q, k, v, index, index)
    found = fused_gradients(y, rows, spec, mask, index, index)
    expected = attention_gradients(y, exact_rows(q, k, v, index, index), spec, mask, None, index, index)
    assert relative(found, expected) < 1e-24


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", ["plain", "causal", "mask", "padding", "dropout"])
def test_the_kernels_of_cuda_have_the_gradients_of_the_blocks(kind, dtype):
    q, k, v, y = (tensor.cuda() for tensor in tensors(2, 4, 2, 96, 96, 64, 64, dtype))
    spec = spec_of(q, k, is_causal=kind == "causal", p=0.3 if kind == "dropout" else 0.0)
    valid = torch.arange(96, device="cuda") < torch.tensor([[96], [50]], device="cuda")
    mask = {
        "mask": torch.rand(2, 1, 96, 96, device="cuda") > 0.3,
        "padding": valid.view(2, 1, 1, 96).expand(2, 1, 96, 96),
    }
    index = valid.flatten().nonzero().squeeze(1) if kind == "padding" else None
    kept = packed_kept(torch.rand(2, 4, 96, 96, device="cuda") > 0.3) if kind == "dropout" else None
    stored = pack_attention(q, k, v, index, index, 5, 8, 8, 8)
    found = backward(y, stored, spec, mask.get(kind), kept, index, index, (8, 8, 8))
    columns, count = (256, 128, 128), 192 if index is None else len(index)
    seeds, *packed = views(stored, attention_parts(count, count, columns, (8, 8, 8)))
    rows = [
        UNPACK(*packed[2 * i : 2 * i + 2], seeds[i : i + 1], 8, columns[i], torch.float64).to(dtype).double()
        for i in range(3)
    ]
    parts = tuple(lambda begin, end, row=row: row[begin:end] for row in rows)
    expected = attention_gradients(y.double(), parts, spec, mask.get(kind), kept, index, index)
    assert relative(found, expected) < (1e-2 if dtype != torch.float32 else 1e-4) ** 2
