"""Masks of zeros: bits are those of the elements, bytes are the formula's, and nothing is lost."""

import math

import pytest
import torch

from rmm_linear.packing.masks import apply_mask, pack_mask

SHAPES = [(3, 8), (5, 13), (4, 1), (1, 64), (0, 9), (6, 0)]


def dropped(rows, columns, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rows + columns)
    return (torch.rand(rows, columns, generator=generator) < 0.6).to(dtype) * 2


@pytest.mark.parametrize("shape", SHAPES)
def test_bit_j_of_byte_i_is_element_8i_plus_j(shape):
    mask = dropped(*shape)
    bits = pack_mask(mask)
    assert bits.dtype == torch.uint8
    assert bits.shape == (shape[0], math.ceil(shape[1] / 8))
    for row in range(shape[0]):
        number = int.from_bytes(bytes(bits[row].tolist()), "little")
        assert number == sum(1 << column for column in range(shape[1]) if mask[row, column])


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.float64]
)
def test_a_mask_is_what_is_not_zero(dtype):
    mask = dropped(5, 13)
    assert torch.equal(pack_mask(mask.to(dtype)), pack_mask(mask))
    assert pack_mask(torch.tensor([[math.nan, -0.0, 1e-30]])).tolist() == [[5]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_applying_it_multiplies_what_was_kept_and_rows_that_are_left_out_are_zero(dtype):
    mask, y, index = dropped(6, 13, dtype), torch.randn(6, 13).to(dtype), torch.tensor([4, 1])
    assert torch.equal(apply_mask(y, pack_mask(mask), 2.0), y * mask)
    expected = torch.zeros_like(y)
    expected[index] = (y * mask)[index]
    assert torch.equal(apply_mask(y, pack_mask(mask, index), 2.0, index), expected)


def test_what_is_not_finite_arrives_as_through_exact_dropout():
    """Also where an element was dropped: a scaler of the loss must see an overflow."""
    y = torch.tensor([[math.inf, math.nan, 3.0, 3.0]])
    mask = torch.tensor([[0.0, 0.0, 2.0, 0.0]])
    assert torch.equal(apply_mask(y, pack_mask(mask), 2.0).nan_to_num(9.0), (y * mask).nan_to_num(9.0))
