"""The operators of gated MLPs: what PyTorch asks of them, and the C library as plain PyTorch."""

import math

import pytest
import torch
from cases import needs_triton
from torch.utils.flop_counter import FlopCounterMode

from rmm_linear.backends import native as library
from rmm_linear.ops import gated as ops
from rmm_linear.packing import gated as plain
from rmm_linear.packing import packed_bytes

KEEP = torch.ops.rmm_linear.keep_gated.default
APPLY = torch.ops.rmm_linear.apply_gated.default
SEEDS = torch.tensor([77, -5])
BOTH = (True, True)
INDICES = [None, torch.tensor([2, 0]), torch.tensor([], dtype=torch.int64)]
every_width = pytest.mark.parametrize("bits", [2, 4, 8])
native = pytest.mark.skipif(not library.is_available(), reason="the C library was not built")


def made(rows, columns, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rows + columns)
    return [(torch.randn(rows, columns, generator=generator) * scale).to(dtype) for scale in (3, 1, 1)]


def assert_packed_alike(found, expected, bits):
    """As for any packed matrix, but the values themselves differ by 2⁻²² or so of 1, and by more of what is near 0."""
    torch.testing.assert_close(found.qparams, expected.qparams, rtol=2**-7, atol=1e-6)
    same = (found.qparams == expected.qparams).all(-1)
    assert (~same).sum() <= max(2, 0.01 * same.numel())
    of_group = same[:, torch.arange(found.codes.shape[1]) // (8 * bits)]  # the bytes of 64 elements
    assert ((found.codes != expected.codes) & of_group).sum() <= max(1, 0.002 * found.codes.numel())


def assert_alike(a, b, y, activation, bits, index=None, wanted=BOTH):
    """Packed the same but for elements on the edge of a step, and applied the same."""
    arguments = a, b, SEEDS, activation, bits, wanted, index
    found, expected = ops.PACK_GATED(*arguments), plain.pack_gated(*arguments)
    for one, other in zip(found, expected, strict=True):
        if other is not None:
            assert_packed_alike(one, other, bits)
    gradients = ops.APPLY_GATED(y, SEEDS, expected, bits, index)
    for one, other in zip(gradients, plain.apply_gated(y, SEEDS, expected, bits, index), strict=True):
        assert (one is None) == (other is None)
        if one is None or other is None:
            continue
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        if not one.numel():
            continue
        # Sums of 64 elements ± z/8 in another order: 2 · 64 · 2⁻²⁴ of their sizes; then the rounding of the dtype.
        size = float(y.abs().max() * 8 * max(1.0, float(other.abs().max())))
        torch.testing.assert_close(one, other, rtol=2 * torch.finfo(y.dtype).eps, atol=128 * 2**-24 * size)


@native
@every_width
@pytest.mark.parametrize("activation", plain.ACTIVATIONS)
@pytest.mark.parametrize("shape", [(70, 320), (37, 130), (4, 5), (2, 1), (0, 70), (3, 0)])
def test_the_c_library_gives_the_same(activation, bits, shape):
    assert_alike(*made(*shape), activation, bits)


@native
@every_width
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("index", INDICES)
def test_the_c_library_takes_every_dtype_and_rows_by_index(index, dtype, bits):
    a, b, y = made(7, 130, dtype)
    for view in (lambda m: m, lambda m: m.T, lambda m: m[:, 2:101], lambda m: m[::2]):
        assert_alike(view(a), view(b), view(y), "silu", bits, index)
    for wanted in ((True, False), (False, True)):
        assert_alike(a, b, y, "gelu", bits, index, wanted)


@native
@pytest.mark.parametrize("activation", plain.ACTIVATIONS)
def test_the_c_library_computes_the_activations_to_float32(activation):
    """Two columns, of which the second has s = act(0) = 0: offset and scale tell the first."""
    x = torch.linspace(-5, 20, 4001)
    a = torch.stack((x, torch.zeros_like(x)), dim=1)
    b = torch.ones_like(a)
    found, expected = (pack(a, b, SEEDS, activation, 8, BOTH, None) for pack in (ops.PACK_GATED, plain.pack_gated))
    for one, other in zip(found, expected, strict=True):
        # Offsets and scales are rounded to bfloat16; an error of 2⁻²² moves one of 4,001 to the next number in 2 %.
        assert (one.qparams != other.qparams).any(-1).float().mean() < 0.05
        torch.testing.assert_close(one.qparams, other.qparams, rtol=2**-7, atol=1e-6)


@native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_threads_share_the_rows(dtype):
    a, b, y = made(3000, 70, dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert_alike(a, b, y, "gelu_tanh", 4)
    finally:
        torch.set_num_threads(before)


@native
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_stays_in_its_group(value):
    a, b, y = made(3, 130)
    b[1, 70] = value
    packed = ops.PACK_GATED(a, b, SEEDS, "silu", 4, BOTH, None)
    first, second = ops.APPLY_GATED(y, SEEDS, packed, 4, None)
    assert first[1, 64:128].isnan().all()
    first[1, 64:128] = 0
    assert first.isfinite().all()
    assert second.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("index", INDICES)
def test_operators_keep_pytorchs_rules(index, dtype):
    a, b, y = made(7, 70, dtype)
    rows = 7 if index is None else len(index)
    for needs in (BOTH, (True, False), (False, True)):
        torch.library.opcheck(KEEP, (a, b, "silu", 4, 77, index, *needs))
        stored = ops.keep_gated(a, b, "silu", 4, 77, index, *needs)
        part = (rows * 35 + 15) // 16 * 16 + (rows * 8 + 15) // 16 * 16
        assert stored.nbytes == 16 + sum(needs) * part < 32 + sum(needs) * (packed_bytes(rows, 70, 4) + 32)
        torch.library.opcheck(APPLY, (y, stored, 4, index, *needs))


@pytest.mark.parametrize("run", [ops.keep_gated, ops.gate_and_pack], ids=["keep_gated", "gate_and_pack"])
@pytest.mark.parametrize("change", [lambda b: b.bfloat16(), lambda b: b[:3], lambda b: b[:, :1]])
def test_factors_of_two_kinds_are_refused(run, change):
    """The C library would read b as a: beyond its end, or as numbers of another dtype."""
    a, b, _ = made(7, 70)
    with pytest.raises(ValueError, match=r"a and b must have one dtype and one shape, got torch.float32 \(7, 70\) and"):
        run(a, change(b), "silu", 4, 77, None, True, True)


def test_a_seed_is_drawn_where_none_is_given():
    a, b, _ = made(7, 70)
    stored = []
    for _ in range(2):
        torch.manual_seed(3)
        stored += [ops.keep_gated(a, b, "silu", 4, None, None, True, True) for _ in range(2)]
    assert torch.equal(stored[0], stored[2])
    assert torch.equal(stored[1], stored[3])
    assert not torch.equal(stored[0][:16], stored[1][:16])
    assert len(set(stored[0][:16].view(torch.int64).tolist())) == 2


@needs_triton
def test_operators_on_the_kernels_keep_pytorchs_rules(monkeypatch):
    monkeypatch.setenv("RMM_BACKEND", "triton")
    a, b, y = made(7, 70)
    torch.library.opcheck(KEEP, (a, b, "silu", 4, 77, None, True, True))
    stored = ops.keep_gated(a, b, "silu", 4, 77, None, True, True)
    torch.library.opcheck(APPLY, (y, stored, 4, None, True, True))


def test_operations_are_counted():
    a, b, y = made(7, 70)
    with FlopCounterMode(display=False) as counted:
        stored = ops.keep_gated(a, b, "silu", 4, 77, None, True, True)
        ops.apply_gated(y, stored, 4, None, True, True)
    assert counted.get_total_flops() == 2 * 4 * 64 * 7 * 70
