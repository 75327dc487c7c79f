"""The operators: what PyTorch asks of them, which code runs them, and a layer on the kernels as on plain PyTorch."""

from __future__ import annotations

import math
import statistics
import sys
import types

import pytest
import torch
from helpers import assert_packed_alike, product_error
from torch.utils.flop_counter import FlopCounterMode

from rmm_linear import RMMConfig, RMMLinear, _triton, native, ops, packing, sketched_linear
from rmm_linear.kept import Recipe, keep
from rmm_linear.sketches import FAMILIES, SAMPLERS, TokenMask, kept_rows, sketch

SEED = torch.tensor([77])
KEEP = torch.ops.rmm_linear.keep.default
DENSE_BLOCKS = [("gaussian", 9), ("rademacher", 9), ("hadamard", 9)]
BLOCKS = [(kind, None) for kind in FAMILIES] + DENSE_BLOCKS
needs_triton = pytest.mark.skipif(sys.platform != "linux", reason="Triton has no build for this platform")


def made(tokens=40, columns=70, dtype=torch.float32):
    return torch.randn(tokens, columns, generator=torch.Generator().manual_seed(tokens)).to(dtype)


def ranks(name, tokens=40):
    if name == "all":
        return ()
    mask = TokenMask.of(torch.arange(tokens) % (3 if name == "some" else 16) == 1)
    return mask.order, mask.count


@pytest.mark.parametrize("mask", ["all", "some", "few"])
@pytest.mark.parametrize(("kind", "block"), BLOCKS)
def test_operators_keep_pytorchs_rules(kind, block, mask):
    torch.library.opcheck(ops.sketch, (made(), SEED, kind, 7, block, *ranks(mask)))
    for bits in (None, 4):
        torch.library.opcheck(KEEP, (made(), 77, kind, 7, block, bits, 0.0, None, *ranks(mask)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rows", [40, 60])
def test_operators_that_keep_every_row_return_tensors_of_their_own(rows, dtype):
    x = made(dtype=dtype)
    torch.library.opcheck(ops.sketch, (x, SEED, "countsketch", rows))
    torch.library.opcheck(ops.sketch, (x, SEED, "rademacher", 39, 9, *ranks("some")))
    for bits in (None, 8):
        torch.library.opcheck(KEEP, (x, 77, "countsketch", rows, None, bits))


@pytest.mark.parametrize("view", [lambda m: m.T, lambda m: m[:, 3:33], lambda m: m[::2]])
@pytest.mark.parametrize("rows", [7, 60])
def test_operators_take_any_strides(rows, view):
    x = view(made(70, 70))
    for kind in ("countsketch", "rows", "hadamard"):
        torch.library.opcheck(ops.sketch, (x, SEED, kind, rows))
    torch.library.opcheck(KEEP, (x, 77, "countsketch", rows, None, 4))


@needs_triton
@pytest.mark.parametrize("mask", ["all", "some"])
@pytest.mark.parametrize(("kind", "block"), [("countsketch", None), ("rows", None), ("rademacher", 9)])
def test_operators_on_the_kernels_keep_pytorchs_rules(kind, block, mask, monkeypatch):
    monkeypatch.setenv("RMM_BACKEND", "triton")
    torch.library.opcheck(ops.sketch, (made().T.contiguous().T, SEED, kind, 7, block, *ranks(mask)))
    for bits in (None, 4):
        torch.library.opcheck(KEEP, (made(), 77, kind, 7, block, bits, 0.0, None, *ranks(mask)))


def test_a_block_is_refused_where_there_are_none():
    with pytest.raises(ValueError, match="block is for kinds with blocks, got block=9 with kind='countsketch'"):
        ops.sketch(made(), SEED, "countsketch", 7, 9)
    with pytest.raises(ValueError, match="block is for kinds with blocks, got block=9 with kind='rows'"):
        ops.packed_sketch(made(), SEED, "rows", 7, 4, 9)


@pytest.mark.parametrize("bits", packing.WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [130, 5, 64])
def test_the_product_keeps_pytorchs_rules(bits, dtype, columns):
    codes, ranges = packing.pack(made(20, columns), bits, SEED)
    shape = (SEED, "countsketch", 20, bits, columns)
    torch.library.opcheck(ops.unpacked_product, (made(20, 9, dtype), codes, ranges, *shape))
    torch.library.opcheck(ops.unpacked_product, (made(40, 9, dtype), codes, ranges, *shape))
    torch.library.opcheck(ops.unpacked_product, (made(40, 9, dtype), codes, ranges, *shape, None, *ranks("few")))


@pytest.mark.parametrize("bits", packing.WIDTHS)
def test_the_product_in_parts_is_the_product(bits, monkeypatch):
    y = made(300, 9)
    codes, ranges = packing.pack(made(300, 130), bits, SEED)
    z = packing.unpack(codes, ranges, SEED, bits, 130, y.dtype)
    whole, more = y.T @ z, (y, codes, ranges, SEED, "countsketch", 300, bits, 130)
    near = {"rtol": 0, "atol": 2 * product_error(y.T, z)}  # the groups are turned back after the product, as a sum too
    torch.testing.assert_close(ops.unpacked_product(*more), whole, **near)
    monkeypatch.setattr(ops, "_CHUNK", 130 * 37)
    calls = []
    unpack = packing.unpack
    monkeypatch.setattr(packing, "unpack", lambda *args, **options: calls.append(1) or unpack(*args, **options))
    torch.testing.assert_close(ops.unpacked_product(*more), whole, **near)
    assert len(calls) == 9


@pytest.mark.parametrize("mask", ["all", "some", "few"])
@pytest.mark.parametrize(("kind", "block"), BLOCKS)
def test_a_sketch_packed_in_parts_is_the_packed_sketch(kind, block, mask, monkeypatch):
    x, more = made(), ranks(mask)
    z = sketch(x, kind=kind, seed=SEED, rows=13, block=block, mask=TokenMask(*more) if more else None)
    expected = packing.pack(z, 4, SEED)
    for name in ("_CHUNK", "_COMPILED_CHUNK"):
        monkeypatch.setattr(packing, name, 70 * 4)
    found = ops.packed_sketch(x, SEED, kind, 13, 4, block, *more)
    assert_packed_alike(found, expected, 4)
    if native.applies_to(x):  # in compiled form every row is made by itself
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
        ops.sketch(made(), SEED, kind, 8, block)
    assert counter.get_total_flops() == flops
    with FlopCounterMode(display=False) as counter:
        keep(made(), Recipe(kind, 8, block), 77)
        keep(made(), Recipe(kind, 8, block, bits=4), 77)
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


@pytest.mark.parametrize("value", ["cuda", "", "Triton"])
def test_another_backend_is_refused(value, monkeypatch):
    monkeypatch.setenv("RMM_BACKEND", value)
    with pytest.raises(ValueError, match=f"RMM_BACKEND must be auto, torch or triton, got '{value}'"):
        ops.sketch(made(), SEED, "countsketch", 7)


@pytest.fixture
def calls(monkeypatch):
    """Names of the kernels that run, in order."""
    from rmm_linear import _triton

    names = []

    class Recorded:
        def __getattr__(self, name):
            def run(*args, **options):
                names.append(name)
                return getattr(kernels, name)(*args, **options)

            return run

    kernels = _triton.kernels()
    monkeypatch.setattr(_triton, "kernels", Recorded)
    return names


@needs_triton
def test_the_processor_runs_pytorch_unless_asked(calls, monkeypatch):
    for value in (None, "auto", "torch"):
        if value is not None:
            monkeypatch.setenv("RMM_BACKEND", value)
        ops.packed_sketch(made(), SEED, "countsketch", 7, 4)
    assert calls == []


@needs_triton
@pytest.mark.parametrize(
    ("kind", "dtype", "expected"),
    [
        ("countsketch", torch.float32, ["sparse_sketch"]),
        ("rows", torch.float16, ["random_keys", "sparse_sketch"]),
        ("gaussian", torch.float32, ["dense_sketch"]),
        ("rademacher", torch.bfloat16, ["dense_sketch"]),
        ("hadamard", torch.float32, ["random_keys", "dense_sketch"]),
        ("dct", torch.float32, []),
        ("countsketch", torch.float64, []),
    ],
)
def test_kernels_run_when_asked_where_there_is_one(kind, dtype, expected, calls, monkeypatch):
    monkeypatch.setenv("RMM_BACKEND", "triton")
    ops.sketch(made(dtype=dtype), SEED, kind, 7)
    assert calls == expected


@needs_triton
@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("mask", ["all", "some", "few"])
@pytest.mark.parametrize(("kind", "block"), BLOCKS)
def test_a_layer_on_the_kernels_is_the_layer(kind, block, mask, bits, monkeypatch):
    """Same seed, same S: the gradients differ by rounding, and where codes fall to the other side of a step."""
    config = RMMConfig(kind=kind, ratio=0.2, bits=bits, block=block, min_rows=1)
    token_mask = None if mask == "all" else torch.arange(40) % (3 if mask == "some" else 16) == 1
    y = made(40, 6) if token_mask is None else made(40, 6) * token_mask.unsqueeze(1)
    gradients = {}
    for backend in ("torch", "triton"):
        monkeypatch.setenv("RMM_BACKEND", backend)
        weight = made(6, 70).requires_grad_()
        sketched_linear(made(), weight, config=config, seed=5, token_mask=token_mask).backward(y)
        gradients[backend] = weight.grad
    error = (gradients["torch"] - gradients["triton"]).norm() / gradients["torch"].norm()
    assert error <= (1e-5 if bits is None else 2e-2), error


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
    x, more = made(), ranks(mask)
    expected = ops.sketch(x, SEED, kind, rows, block, *more)
    monkeypatch.setenv("RMM_BACKEND", "triton")
    found = ops.sketch(x, SEED, kind, rows, block, *more)
    assert found.shape == (kept_rows(40, rows, block), 70)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    codes, ranges = ops.packed_sketch(x, SEED, kind, rows, 8, block, *more)
    torch.testing.assert_close(packing.unpack(codes, ranges, SEED, 8, 70, x.dtype), expected, rtol=0, atol=0.2)


def test_seeds_are_drawn_on_the_device_while_a_graph_is_captured(monkeypatch):
    """A number would be the same in every replay; the device's generator moves on."""
    x, recipe = made(), Recipe("countsketch", 7)
    assert [int(keep(x, recipe, 5)[-1]) for _ in range(2)] == [5, 5]
    monkeypatch.setattr("rmm_linear.kept.is_capturing", lambda device: True)
    seeds = {int(keep(x, recipe, 5)[-1]) for _ in range(3)}
    assert len(seeds) == 3


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [None, 4])
def test_every_replay_of_a_captured_graph_draws_a_fresh_sketch(bits):
    """z = 4; the capture itself fails where anything is read from the device."""
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
    exact, values = y.T @ x, []
    for _ in range(200):
        graph.replay()
        values.append(((layer.weight.grad * exact).sum() / exact.square().sum()).item())
    assert len(set(values)) > 190
    assert abs(statistics.mean(values) - 1) < 4 * statistics.stdev(values) / len(values) ** 0.5


@pytest.mark.parametrize(
    ("version", "is_enough"), [("3.3.1", False), ("3.4.0", True), ("3.10.0+git1", True), ("4.0", True)]
)
def test_kernels_are_left_to_a_triton_that_compiles_them(version, is_enough, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", types.SimpleNamespace(__version__=version, __spec__=True))
    assert _triton._is_installed.__wrapped__() == is_enough
