"""Every kernel against its plain-torch reference with the same seed, in Triton's interpreter or on the device."""

from __future__ import annotations

import math
import sys

import pytest
import torch

from rmm_linear import packing
from rmm_linear.sketches import TokenMask, kept_rows, sketch
from rmm_linear.sketches.dense import block_rows
from rmm_linear.sketches.rows import sample
from rmm_linear.sketches.transforms import next_power_of_two

if sys.platform != "linux":  # where the test extra has Triton, and a failing import of it is a failure
    pytest.skip("Triton has no build for this platform", allow_module_level=True)

from rmm_linear._triton import kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SEED = torch.tensor([-123456789012345678], device=DEVICE)
SHAPES = [(60, 17, 70), (50, 7, 130), (33, 32, 1), (9, 1, 64)]  # N, K, D: nothing is a multiple of a tile
# The interpreter cuts float32 off to bfloat16 instead of rounding it, which doubles the error.
DTYPES = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 5e-3 if DEVICE == "cuda" else 1e-2}
MASKS = {
    "all": None,
    "some": lambda tokens: torch.arange(tokens) % 5 != 1,
    "few": lambda tokens: torch.arange(tokens) % 16 == 3,  # n ≤ K for the larger K
    "none": lambda tokens: torch.zeros(tokens),
}


@pytest.fixture(autouse=True)
def _poisoned_outputs(monkeypatch):
    """Outputs start as NaN and 255, so that an element that no kernel writes is seen."""
    empty = torch.empty

    def poisoned(*size, **options):
        tensor = empty(*size, **options)
        return tensor.fill_(math.nan if tensor.is_floating_point() else 255) if tensor.dtype != torch.int64 else tensor

    monkeypatch.setattr(torch, "empty", poisoned)


def made(tokens, columns, dtype=torch.float32):
    generator = torch.Generator().manual_seed(tokens + columns)
    return torch.randn(tokens, columns, generator=generator).to(dtype).to(DEVICE)


def masked(name, tokens):
    """The mask, and the keywords that the kernels take it by."""
    mask = None if MASKS[name] is None else TokenMask.of(MASKS[name](tokens).to(DEVICE))
    return mask, {} if mask is None else {"order": mask.order, "count": mask.count}


def assert_close(found, expected, dtype=torch.float32):
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    assert not found.isnan().any()
    error = (found.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30)
    assert error <= DTYPES[dtype], error


def dense(x, kind, rows, block, options, **more):
    tokens = x.shape[0]
    size, _, rows_per_block = block_rows(tokens, rows, block)
    if kind == "hadamard":
        more["index"] = sample(SEED, next_power_of_two(tokens), rows)
    return kernels().dense_sketch(x, SEED, kind, size, rows_per_block, **options, **more)


def gathered(tokens, rows, mask):
    """index and scale of the family `rows`, as the kernel takes them."""
    index = sample(SEED, tokens, rows, None if mask is None else mask.count)
    if mask is None:
        return index, torch.full((rows,), math.sqrt(tokens / rows), device=DEVICE)
    count = int(mask.count)
    if count <= rows:
        place = torch.arange(rows, device=DEVICE)
        return mask.order[place], (place < count).float()
    return mask.order[index], torch.full((rows,), math.sqrt(count / rows), device=DEVICE)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    ("shape", "dtype"), [*((shape, torch.float32) for shape in SHAPES), *((SHAPES[0], dtype) for dtype in DTYPES)]
)
def test_countsketch(shape, mask, dtype):
    tokens, rows, columns = shape
    x = made(tokens, columns, dtype)
    ranks, options = masked(mask, tokens)
    found = kernels().sparse_sketch(x, SEED, rows, **options)
    assert_close(found, sketch(x, kind="countsketch", seed=SEED, rows=rows, mask=ranks), dtype)


@pytest.mark.parametrize("mask", MASKS)
def test_countsketch_draws_the_very_same_signs_and_rows(mask):
    """Whole numbers: the sums are exact, so one wrong sign or row in S would show."""
    x = torch.arange(1, 301, device=DEVICE, dtype=torch.float32).view(150, 2)
    ranks, options = masked(mask, 150)
    found = kernels().sparse_sketch(x, SEED, 13, **options)
    assert torch.equal(found, sketch(x, kind="countsketch", seed=SEED, rows=13, mask=ranks))


@pytest.mark.parametrize("mask", ["all", "some", "few"])
@pytest.mark.parametrize("shape", SHAPES[:2])
def test_gathered_rows(shape, mask):
    tokens, rows, columns = shape
    x = made(tokens, columns)
    ranks, _ = masked(mask, tokens)
    index, scale = gathered(tokens, rows, ranks)
    found = kernels().sparse_sketch(x, SEED, rows, index=index, scale=scale)
    assert_close(found, sketch(x, kind="rows", seed=SEED, rows=rows, mask=ranks))


@pytest.mark.parametrize(
    ("mask", "dtype"), [*((mask, torch.float32) for mask in MASKS), *(("some", dtype) for dtype in DTYPES)]
)
@pytest.mark.parametrize(
    ("kind", "block"),
    [("gaussian", None), ("gaussian", 16), ("rademacher", None), ("rademacher", 9), ("hadamard", None)],
)
def test_dense_sketch(kind, block, mask, dtype):
    tokens, rows, columns = 50, 7, 70
    x = made(tokens, columns, dtype)
    ranks, options = masked(mask, tokens)
    expected = sketch(x, kind=kind, seed=SEED, rows=rows, block=block, mask=ranks)
    assert_close(dense(x, kind, rows, block, options), expected, dtype)


@pytest.mark.parametrize(("kind", "rows"), [("gaussian", 37), ("rademacher", 65), ("hadamard", 65)])
def test_dense_sketch_of_more_rows_than_a_tile(kind, rows):
    x = made(130, 5)
    assert_close(dense(x, kind, rows, None, {}), sketch(x, kind=kind, seed=SEED, rows=rows))


@pytest.mark.parametrize("bits", packing.WIDTHS)
@pytest.mark.parametrize(
    ("columns", "dtype"), [*((columns, torch.float32) for columns in (64, 130, 5, 191)), *((70, d) for d in DTYPES)]
)
def test_pack_and_unpack(bits, columns, dtype):
    z = made(37, columns, dtype)
    codes, ranges = kernels().pack(z, bits, SEED)
    expected_codes, expected_ranges = packing.pack(z, bits, SEED)
    assert torch.equal(ranges, expected_ranges)
    # The turn is a product whose last bit may differ: an element on the edge of a step can fall to either side.
    assert (codes != expected_codes).float().mean() < 0.002
    restored = kernels().unpack(expected_codes, expected_ranges, bits, columns, dtype)
    assert_close(
        restored, packing.unpack(expected_codes, expected_ranges, SEED, bits, columns, dtype, turned=True), dtype
    )


@pytest.mark.parametrize("bits", packing.WIDTHS)
@pytest.mark.parametrize("kind", ["countsketch", "rademacher", "hadamard"])
@pytest.mark.parametrize("mask", ["all", "some"])
def test_packed_as_it_is_made(kind, bits, mask):
    """The epilogue packs what packing the finished sketch would."""
    tokens, rows, columns = 60, 11, 130
    x = made(tokens, columns)
    _, options = masked(mask, tokens)
    if kind == "countsketch":
        z = kernels().sparse_sketch(x, SEED, rows, **options)
        codes, ranges = kernels().sparse_sketch(x, SEED, rows, bits=bits, **options)
    else:
        z = dense(x, kind, rows, None, options)
        codes, ranges = dense(x, kind, rows, None, options, bits=bits)
    expected_codes, expected_ranges = kernels().pack(z, bits, SEED)
    torch.testing.assert_close(ranges, expected_ranges, rtol=2**-7, atol=0)
    assert (codes != expected_codes).float().mean() < 0.002


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [64, 130, 5])
def test_turn_back(columns, dtype):
    x = made(37, columns, dtype)
    assert_close(kernels().turn_back(x, SEED), packing.turn_back(x, SEED), dtype)


@pytest.mark.parametrize("count", [None, 0, 3, 1100, 1500])
def test_random_keys_are_those_of_the_library(count):
    """The sample is all that follows from the keys, so it must be the same to the last row."""
    counted = None if count is None else torch.tensor([count], device=DEVICE)
    keys = kernels().random_keys(SEED, 1500, counted)
    found = torch.topk(keys, 40, largest=False, sorted=False).indices.sort().values
    assert torch.equal(found, sample(SEED, 1500, 40, counted))
    assert (keys >= 0).all()


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # NumPy's, in the interpreter
def test_nan_stays_in_its_group():
    z = made(5, 130)
    z[3, 70] = math.nan
    codes, ranges = kernels().pack(z, 4, SEED)
    restored = kernels().unpack(codes, ranges, 4, 130, z.dtype)
    assert restored[3, 64:128].isnan().all()
    restored[3, 64:128] = 0
    assert not restored.isnan().any()
    constant, _ = kernels().pack(torch.zeros(3, 70, device=DEVICE), 2, SEED)
    assert not constant.any()


@pytest.mark.parametrize("kind", ["countsketch", "rademacher"])
def test_masked_rows_are_never_read(kind):
    x = made(60, 20)
    _, options = masked("some", 60)
    poisoned = torch.where(MASKS["some"](60).to(DEVICE).unsqueeze(1), x, math.nan)

    def run(matrix):
        if kind == "countsketch":
            return kernels().sparse_sketch(matrix, SEED, 7, **options)
        return dense(matrix, kind, 7, None, options)

    assert torch.equal(run(poisoned), run(x))


@pytest.mark.parametrize("view", [lambda m: m[:, 3:43], lambda m: m[::2, :40], lambda m: m[:40].T])
def test_any_strides(view):
    x = view(made(80, 80))
    assert not x.is_contiguous()
    expected = sketch(x, kind="countsketch", seed=SEED, rows=9)
    assert_close(kernels().sparse_sketch(x, SEED, 9), expected)
    assert_close(dense(x, "rademacher", 9, 16, {}), sketch(x, kind="rademacher", seed=SEED, rows=9, block=16))
    assert_close(kernels().row_norms(x), x.norm(dim=1))
    assert torch.equal(kernels().pack(x, 4, SEED)[1], packing.pack(x, 4, SEED)[1])
    assert_close(kernels().turn_back(x, SEED), packing.turn_back(x, SEED))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (17, 300), (40, 256)])
def test_row_norms(shape, dtype):
    x = made(*shape, dtype)
    assert_close(kernels().row_norms(x), x.float().norm(dim=1))


def test_nothing_is_a_result_too():
    assert kernels().sparse_sketch(torch.ones(5, 0, device=DEVICE), SEED, 2).shape == (2, 0)
    assert kernels().row_norms(torch.ones(0, 4, device=DEVICE)).shape == (0,)
    assert kernels().turn_back(torch.ones(0, 4, device=DEVICE), SEED).shape == (0, 4)
    assert kernels().random_keys(SEED, 0).shape == (0,)
    assert [t.shape for t in kernels().pack(torch.ones(0, 70, device=DEVICE), 4, SEED)] == [(0, 35), (0, 2, 2)]


def test_rows_kept_by_the_dense_kernel_are_those_of_the_library():
    for tokens, rows, block in ((50, 7, 16), (50, 7, None), (64, 20, 9)):
        size, blocks, rows_per_block = block_rows(tokens, rows, block)
        z = kernels().dense_sketch(made(tokens, 3), SEED, "rademacher", size, rows_per_block)
        assert z.shape[0] == blocks * rows_per_block == kept_rows(tokens, rows, block)
