"""The operators of packed attention: bytes, operations, and the statistics of their gradients."""

import math

import pytest
import torch
from attention_helpers import packed_kept, relative, spec_of, tensors
from statistical import Z
from torch.utils.flop_counter import FlopCounterMode

from rmm_linear.ops.attention import (
    attention_backward,
    attention_parts,
    pack_attention,
)
from rmm_linear.ops.sketches import UNPACK
from rmm_linear.packing.attention import attention_rows
from rmm_linear.packing.attention_gradients import attention_gradients
from rmm_linear.packing.stored import views


def backward(y, stored, spec, mask=None, kept=None, index=None, kv_index=None, bits=(4, 4, 4)):
    return attention_backward(y, stored, mask, kept, index, kv_index, spec, bits)[:3]


def made(dtype=torch.float32, heads=4, kv_heads=2, tokens=9, width=16):
    return tensors(2, heads, kv_heads, tokens, tokens, width, width, dtype)


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
