"""Every kernel against its plain-torch reference with the same seed, in Triton's interpreter or on the device."""

import collections
import math
import sys

import pytest
import torch

from rmm_linear.sketches import kept_rows
from rmm_linear.sketches.blocks import block_rows

if sys.platform != "linux":  # where the test extra has Triton, and a failing import of it is a failure
    pytest.skip("Triton has no build for this platform", allow_module_level=True)

import rmm_kernels_comparisons as compare
from rmm_kernels_checks import Inputs, poisoned_outputs
from rmm_kernels_parity import comparisons, real_sizes

from rmm_linear.backends.triton import kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MAKE = Inputs(DEVICE)
SEED = MAKE.seed
COMPARISONS = comparisons()


@pytest.fixture(autouse=True)
def _poisoned_outputs():
    with poisoned_outputs():
        yield


# Of these, each of which takes a second in the interpreter or two, one of twelve; of others, one of two that show a new
# pair of settings.
SLOW = ("gated", "gated_halves", "gated_products", "normalized", "norm_gradients", "channel_norm")


def titles():
    seen = collections.Counter()
    for title in COMPARISONS:
        family = title.split()[0]
        left = seen[family] % (12 if family in SLOW else 2)
        seen[family] += 1
        yield pytest.param(title, marks=pytest.mark.thorough if left else [])


@pytest.mark.pairs
@pytest.mark.parametrize("title", titles())
def test_kernel_equals_its_reference(title):
    found = COMPARISONS[title](DEVICE)
    assert found
    assert [check for check in found if not check.ok] == []


def test_every_kernel_is_compared():
    """With every kind, width, mask and dtype: a comparison that is left out would be missed nowhere else."""
    words = {word for title in COMPARISONS for word in title.split()}
    functions = (
        "countsketch gathered gaussian rademacher hadamard pack_and_unpack encode_and_decode row_norms derivative"
    )
    functions += " random_keys layer scaled_rows sampled packed_as_made masked_rows_unread strides pack_norm"
    functions += " norm_gradients norm_strides pack_and_apply_mask strided_masks gated_products gated_halves activated"
    functions += " normalized normalized_in_one_loop gated seeded_dropout channel_norm max_pool"
    settings = "all some few none 8 4 2 float32 float16 bfloat16 transposed"
    assert words >= {*functions.split(), *settings.split()}


@pytest.mark.parametrize(
    "wrong", [lambda z: z * 1.01, lambda z: z[:-1], lambda z: z.to(torch.float64), lambda z: z * math.nan]
)
def test_a_comparison_sees_a_kernel_that_is_wrong(wrong, monkeypatch):
    sparse = kernels().sparse_sketch
    monkeypatch.setattr(kernels(), "sparse_sketch", lambda *args, **options: wrong(sparse(*args, **options)))
    for comparison in (
        compare.countsketch(DEVICE, (60, 17, 70), "all", torch.float32),
        compare.whole_numbers(DEVICE, "some"),
    ):
        assert not any(check.ok for check in comparison)


@pytest.mark.gpu
@pytest.mark.parametrize("title", real_sizes())
def test_kernel_equals_its_reference_at_real_sizes(title):
    assert [check for check in real_sizes()[title]("cuda") if not check.ok] == []


def test_columns_beyond_the_first_tiles_are_the_same():
    assert [check for check in compare.long_offsets(DEVICE, 300, 66, 40) if not check.ok] == []


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # NumPy's, in the interpreter
def test_nan_stays_in_its_group():
    z = MAKE.matrix(5, 130)
    z[3, 70] = math.nan
    codes, scales = kernels().pack(z, 4, SEED)
    restored = kernels().unpack(codes, scales, SEED, 4, 130, z.dtype)
    assert restored[3, 64:128].isnan().all()
    restored[3, 64:128] = 0
    assert not restored.isnan().any()
    zeros = torch.zeros(3, 70, device=DEVICE)
    codes, scales = kernels().pack(zeros, 2, SEED)
    assert not scales.any()
    assert torch.equal(kernels().unpack(codes, scales, SEED, 2, 70, zeros.dtype), zeros)


def test_nothing_is_a_result_too():
    assert kernels().sparse_sketch(torch.ones(5, 0, device=DEVICE), SEED, 2).shape == (2, 0)
    assert kernels().row_norms(torch.ones(0, 4, device=DEVICE)).shape == (0,)
    assert kernels().random_keys(SEED, 0).shape == (0,)
    assert kernels().pack_mask(torch.ones(0, 9, device=DEVICE)).shape == (0, 2)
    bits = torch.zeros(0, 2, dtype=torch.uint8, device=DEVICE)
    assert not kernels().apply_mask(torch.ones(4, 9, device=DEVICE), bits, 2.0, bits.view(-1).long()).any()
    assert [t.shape for t in kernels().pack(torch.ones(0, 70, device=DEVICE), 4, SEED)] == [(0, 35), (0, 2)]


def test_rows_kept_by_the_dense_kernel_are_those_of_the_library():
    for tokens, rows, block in ((50, 7, 16), (50, 7, None), (64, 20, 9)):
        size, blocks, rows_per_block = block_rows(tokens, rows, block)
        z = kernels().dense_sketch(MAKE.matrix(tokens, 3), SEED, "rademacher", size, rows_per_block)
        assert z.shape[0] == blocks * rows_per_block == kept_rows(tokens, rows, block)
