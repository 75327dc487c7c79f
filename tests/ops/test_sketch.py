"""Sketches, packed and multiplied in parts; operations; float16; which rows are kept; seeds in captured graphs."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from cases import needs_triton
from helpers import assert_packed_alike, product_error
from operator_helpers import BLOCKS, SEED, SKETCH, how, made, ranks
from statistical import assert_unbiased
from torch.utils.flop_counter import FlopCounterMode

from rmm_linear import RMMConfig, RMMLinear, packing, sketched_linear
from rmm_linear.backends.select import backend_of
from rmm_linear.ops import plain
from rmm_linear.ops import sketches as table
from rmm_linear.ops.native import sketches as native
from rmm_linear.ops.save import save_input, save_traced, weight_gradient_traced
from rmm_linear.ops.sketches import weight_gradient
from rmm_linear.sketches import SAMPLERS, kept_rows
from rmm_linear.spec import SaveSpec


@pytest.mark.parametrize("bits", packing.CODES)
@pytest.mark.parametrize("implementation", [plain, native])
def test_the_product_in_parts_is_the_product(implementation, bits, monkeypatch):
    y, spec = made(300, 9), SaveSpec("countsketch", 300, bits=bits)
    codes, scales = packing.encode(made(300, 130), bits, SEED)
    z = packing.decode(codes, scales, SEED, bits, 130, y.dtype)
    whole = y.T @ z
    near = {"rtol": 0, "atol": 4 * product_error(y.T, z)}  # the groups are unrotated after the product, as a sum too
    product = implementation.unpacked_product(y, codes, scales, SEED, spec, 130, None)
    torch.testing.assert_close(product, whole, **near)
    monkeypatch.setattr(plain, "_CHUNK", 130 * 37)
    assert [part.stop for part in plain.product_parts(300, 130, 9, y.dtype)] == [*range(37, 300, 37), 300]
    product = implementation.unpacked_product(y, codes, scales, SEED, spec, 130, None)
    torch.testing.assert_close(product, whole, **near)


@pytest.mark.parametrize("mask", ["all", "some", "few"])
@pytest.mark.parametrize(("kind", "block"), BLOCKS)
def test_a_sketch_packed_in_parts_is_the_packed_sketch(kind, block, mask, monkeypatch):
    x, spec = made(), SaveSpec(kind, 13, block, 4)
    z = table.SKETCH(x, kind=kind, seed=SEED, rows=13, block=block, mask=ranks(mask))
    expected = table.PACK(z, 4, SEED)
    row_parts = packing.row_parts

    def short(rows, columns, device, chunk=0):
        return row_parts(rows, columns, device, 70 * 4)

    monkeypatch.setattr(packing, "row_parts", short)
    monkeypatch.setattr(sys.modules["rmm_linear.packing.pack"], "row_parts", short)
    found = table.PACKED_SKETCH(x, SEED, spec, ranks(mask))
    assert_packed_alike(found, expected, 4)
    if backend_of("cpu", x.dtype) == "native":  # in C every row is made by itself
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(
    ("kind", "block", "flops"),
    [
        ("countsketch", None, 40 * 70),
        ("rows", None, 8 * 70),
        ("gaussian", None, 2 * 40 * 70 * 8),
        ("rademacher", 10, 2 * 40 * 70 * 2),
        ("hadamard", None, round(40 * 70 * math.log2(40))),
        ("hadamard", 10, round(40 * 70 * math.log2(10))),
    ],
)
def test_operations_are_counted(kind, block, flops):
    with FlopCounterMode(display=False) as counter:
        SKETCH(made(), SEED, kind, 8, block)
    assert counter.get_total_flops() == flops
    with FlopCounterMode(display=False) as counter:
        save_input(made(), SaveSpec(kind, 8, block), None, 77)
        save_input(made(), SaveSpec(kind, 8, block, bits=4), None, 77)
    assert counter.get_total_flops() == 2 * flops + 2 * 64 * 8 * 70


def test_a_layers_operations_are_those_of_its_three_products_and_its_sketches():
    x, weight = made(400, 70).requires_grad_(), torch.randn(9, 70, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        sketched_linear(x, weight, config=RMMConfig(ratio=0.1, min_rows=1), seed=1).sum().backward()
    outer, dw, sketches = 2 * (2 * 400 * 70 * 9), 2 * 40 * 70 * 9, 400 * 70 + 400 * 9
    assert counter.get_total_flops() == outer + dw + sketches
    with FlopCounterMode(display=False) as counter:
        sketched_linear(x, weight, config=RMMConfig(ratio=0.1, bits=4, min_rows=1), seed=1).sum().backward()
    rounding = 2 * 64 * 40 * 70 + 2 * 40 * 70 + 2 * 64 * 9 * 70
    assert counter.get_total_flops() == outer + dw + sketches + rounding


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("kind", ["countsketch", "hadamard", "wta"])
def test_operations_of_compiled_code_are_those_of_eager_code(kind, bits):
    x, y, spec = made(), made(40, 9), SaveSpec(kind, 8, bits=bits, uniform_mix=0.1 if kind == "wta" else 0.0)

    def compiled():
        weight_gradient_traced(y, save_traced(x, spec, None), spec, 70, None)

    counts = []
    for run in (compiled, lambda: weight_gradient(y, save_input(x, spec, None, 77), spec, 70, None)):
        with FlopCounterMode(display=False) as counter:
            run()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


@pytest.mark.diagonal
@pytest.mark.parametrize(
    ("backend", "mask"), [("torch", "all"), ("torch", "some"), pytest.param("triton", "some", marks=needs_triton)]
)
@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize(("kind", "block"), [*BLOCKS, *((kind, None) for kind in SAMPLERS)])
def test_float16_has_room_for_the_sums_of_what_it_holds(kind, block, bits, mask, backend, monkeypatch):
    """A channel that is large in all tokens: sums of them pass 65,504 where the tokens and dW do not.

    dW is that of float32 but for the rounding of X, Y, Z, SᵀY and dW, and where codes fall to the other side of a step.
    """
    monkeypatch.setenv("RMM_BACKEND", backend)
    config = RMMConfig(kind=kind, ratio=0.1, bits=bits, block=block, min_rows=1)
    token_mask = None if mask == "all" else torch.arange(200) % 5 != 1
    x, y = made(200, 70), made(200, 6) * 1e-3
    x[:, 3] = 20_000
    y = y if token_mask is None else y * token_mask.unsqueeze(1)
    gradients = {}
    for dtype in (torch.float32, torch.float16):
        weight = made(6, 70).to(dtype).requires_grad_()
        # From the same values in both.
        sketched_linear(x.half().to(dtype), weight, config=config, seed=5, token_mask=token_mask).backward(
            y.half().to(dtype)
        )
        gradients[dtype] = weight.grad.double()
    assert gradients[torch.float16].isfinite().all()
    # Packed, the others of its group are rounded by the large one's steps, and a step weighs much in a short group.
    for part in (slice(3, 4), slice(64, 70)) if bits is None else (slice(3, 4),):
        error = (gradients[torch.float16] - gradients[torch.float32])[:, part].norm()
        assert error <= (5e-3 if bits is None else 2e-2) * gradients[torch.float32][:, part].norm()


@needs_triton
@pytest.mark.parametrize("mask", ["all", "some", "few"])
@pytest.mark.parametrize("rows", [39, 40, 60])
@pytest.mark.parametrize(("kind", "block"), [("countsketch", None), ("rows", None), ("rademacher", 9)])
def test_kernels_keep_the_same_rows(kind, block, rows, mask, monkeypatch):
    """Near K = N, where blocks round K up."""
    x, arguments = made(), how(kind, rows, block, mask=mask)
    expected = SKETCH(x, SEED, *arguments)
    monkeypatch.setenv("RMM_BACKEND", "triton")
    found = SKETCH(x, SEED, *arguments)
    assert found.shape == (kept_rows(40, rows, block), 70)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    codes, scales = table.PACKED_SKETCH(x, SEED, SaveSpec(kind, rows, block, 8), ranks(mask))
    torch.testing.assert_close(packing.unpack(codes, scales, SEED, 8, 70, x.dtype), expected, rtol=0, atol=0.2)


def test_seeds_are_drawn_on_the_device_while_a_graph_is_captured(monkeypatch):
    """A number would be the same in every replay; the device's generator moves on."""
    x, spec = made(), SaveSpec("countsketch", 7)
    assert [int(save_input(x, spec, None, 5)[-1]) for _ in range(2)] == [5, 5]
    monkeypatch.setattr("rmm_linear.sketches.seeds.is_capturing", lambda device: True)
    seeds = {int(save_input(x, spec, None, 5)[-1]) for _ in range(3)}
    assert len(seeds) == 3


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [None, 4])
def test_every_replay_of_a_captured_graph_draws_a_fresh_sketch(bits):
    """The capture itself fails where anything is read from the device."""
    layer = RMMLinear(64, 32, bias=False, config=RMMConfig(ratio=0.25, min_rows=8, bits=bits), device="cuda")
    x, y = torch.randn(256, 64, device="cuda"), torch.randn(256, 32, device="cuda")
    layer.weight.grad = torch.zeros_like(layer.weight)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # kernels are compiled before the capture
        for _ in range(3):
            layer(x).backward(y)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer.weight.grad.zero_()
        layer(x).backward(y)

    def gradient(_):
        graph.replay()
        return layer.weight.grad

    values = assert_unbiased(gradient, y.T @ x, draws=200, widest=0.1)
    assert len(set(values.tolist())) > 190
