"""The kernels of norms, gated products and masks against plain PyTorch with the same seed, a function per property."""

from __future__ import annotations

import torch
from rmm_kernels_checks import SEED, VIEWS, Check, Inputs, close, same

from rmm_linear.backends.triton import kernels
from rmm_linear.packing import gated, masks, norms

EPS = 1e-5
_SCALES = 0.01  # the rotation's last bit can move a group to the next scale


def _index(device: str, mask: str, rows: int) -> torch.Tensor | None:
    return None if mask == "all" else torch.arange(1, rows, 3 if mask == "some" else rows, device=device)


def pack_norm(
    device: str, bits: int, columns: int, centered: bool, mask: str, dtype: torch.dtype = torch.float32, rows: int = 37
) -> list[Check]:
    """Compare the statistics and the packed copy of rows whose means are not 0."""
    make = Inputs(device)
    x, index = 3 * make.matrix(rows, columns, dtype) + 2, _index(device, mask, rows)
    codes, scales, rstd = kernels().pack_norm(x, bits, make.seed, EPS, centered, index)
    expected = norms.pack_norm(x, bits, make.seed, EPS, centered, index)
    return [
        close("rstd", rstd, expected.rstd),
        # Statistics and rotation are sums in another order: an element on the edge of a step can fall to either side.
        same("codes", codes, expected.codes, limit=0.005),
        same("scales", scales, expected.scales, limit=0.02),
    ]


def norm_gradients(
    device: str,
    bits: int,
    columns: int,
    centered: bool,
    mask: str,
    dtype: torch.dtype = torch.float32,
    rows: int = 37,
    is_affine: bool = True,
) -> list[Check]:
    """Compare the gradients from one packed copy, those of γ and β in the dtype of γ."""
    make = Inputs(device)
    x, index = make.matrix(rows + 1, columns)[1:], _index(device, mask, rows)  # not y, whose gradient is 0
    y, gamma = make.matrix(rows, columns, dtype), make.matrix(1, columns, dtype).view(-1) if is_affine else None
    saved = norms.pack_norm(x, bits, make.seed, EPS, centered, index)
    options = {"centered": centered, "index": index, "sums": is_affine, "sum_dtype": dtype}
    found = kernels().norm_gradients(y, *saved, bits, make.seed, gamma, **options)
    expected = norms.norm_gradients(y, saved, bits, make.seed, gamma, **options)
    return [
        close("dX", found[0], expected.x, dtype),
        close("dγ", found[1], expected.weight, dtype),
        close("dβ", found[2], expected.bias, dtype),
    ]


def norm_strides(device: str, bits: int) -> list[Check]:
    """Compare rows that lie apart, gradients in another dtype than y, and columns of a transposed matrix."""
    make = Inputs(device)
    x, y = make.matrix(160, 80)[::2, :70], make.matrix(70, 80).T
    found, expected = (of.pack_norm(x, bits, make.seed, EPS, True, None) for of in (kernels(), norms))
    gradients = kernels().norm_gradients(y, *expected, bits, make.seed, dtype=torch.bfloat16)
    wanted = norms.norm_gradients(y, expected, bits, make.seed, dtype=torch.bfloat16)
    return [
        same("codes", found[0], expected[0], limit=0.005),
        close("dX", gradients[0], wanted.x, torch.bfloat16),
        close("dγ", gradients[1], wanted.weight),
    ]


def gated_products(
    device: str, activation: str, bits: int, shape: tuple[int, int], dtype: torch.dtype, indexed: bool
) -> list[Check]:
    """Compare both packed products, and what they make of a gradient."""
    make, seeds = Inputs(device), torch.tensor([SEED, SEED + 1], device=device)
    whole = make.matrix(shape[0], 2 * shape[1], dtype)
    a, b = whole.chunk(2, dim=1)  # rows further apart than they are long
    index = torch.arange(0, shape[0], 3, device=device).flip(0) if indexed else None
    arguments = a, b, seeds, activation, bits, (True, True), index
    expected, checks = gated.pack_gated(*arguments), []
    for name, one, other in zip("ps", kernels().pack_gated(*arguments), expected, strict=True):
        assert other is not None
        checks += [same(f"scales of {name}", one[1], other.scales, limit=_SCALES)]
        checks += [same(f"codes of {name}", one[0], other.codes, limit=0.002)]
    y = make.matrix(*shape, dtype)
    expected_gradients = gated.apply_gated(y, seeds, expected, bits, index)
    for name, one, other in zip(
        ("da", "db"), kernels().apply_gated(y, seeds, expected, bits, index), expected_gradients, strict=True
    ):
        assert other is not None
        checks.append(close(name, one, other, dtype))
    return checks


def gated_halves(device: str, bits: int) -> list[Check]:
    """Compare one product without the other."""
    make, seeds = Inputs(device), torch.tensor([SEED, SEED + 1], device=device)
    a, b = make.matrix(37, 130), make.matrix(37, 131)[:, :130]
    both = kernels().pack_gated(a, b, seeds, "silu", bits)
    checks = []
    for wanted in ((True, False), (False, True)):
        found = kernels().pack_gated(a, b, seeds, "silu", bits, wanted)
        gradients = kernels().apply_gated(a, seeds, found, bits)
        expected = kernels().apply_gated(a, seeds, both, bits)
        assert [one is not None for one in found] == [one is not None for one in gradients] == list(wanted)
        place = wanted.index(True)
        checks += [same("codes", found[place][0], both[place][0]), same("gradient", gradients[place], expected[place])]
    return checks


def pack_and_apply_mask(device: str, shape: tuple[int, int], dtype: torch.dtype, indexed: bool) -> list[Check]:
    """Compare the bits of a mask, and what it makes of a matrix."""
    make = Inputs(device)
    y = make.matrix(*shape, dtype)
    mask, index = (y > 0.3).to(dtype), torch.arange(0, shape[0], 3, device=device).flip(0) if indexed else None
    bits, expected = kernels().pack_mask(mask, index), masks.pack_mask(mask, index)
    applied, expected_applied = (apply(y, expected, 1.25, index) for apply in (kernels().apply_mask, masks.apply_mask))
    return [
        same("bits", bits, expected),
        same("bits of bool", kernels().pack_mask(mask.bool(), index), expected),
        same("zeros", applied == 0, expected_applied == 0),
        close("applied", applied, expected_applied, dtype),
    ]


def strided_masks(device: str, view: str) -> list[Check]:
    """Compare them on a matrix that is not contiguous."""
    y = VIEWS[view](Inputs(device).matrix(80, 80))
    bits = masks.pack_mask(y > 0)
    return [
        same("bits", kernels().pack_mask(y > 0), bits),
        same("applied", kernels().apply_mask(y, bits, 2.0), masks.apply_mask(y, bits, 2.0)),
    ]


def seeded_dropout(device: str, shape: tuple[int, int], dtype: torch.dtype) -> list[Check]:
    """Compare dropout without a mask: which elements are kept, to the bit, and their scale; at the ends of p too."""
    make, checks = Inputs(device), []
    x = make.matrix(*shape, dtype)
    for p, of in ((0.1, x), (0.5, x), (2**-40, x), (1 - 2**-40, x), (0.3, x.T.contiguous().T)):
        found, expected = kernels().dropout(of, make.seed, p), masks.dropout(x, make.seed, p)
        checks += [same(f"zeros, p = {p}", found == 0, expected == 0), close(f"p = {p}", found, expected, dtype)]
    return checks
