"""Comparisons of the kernels of gated MLPs with plain PyTorch."""

from __future__ import annotations

import torch
from rmm_kernels_checks import SEED, Check, Inputs, close, same

from rmm_linear.backends.triton import kernels
from rmm_linear.packing import gated as plain

_QPARAMS = 0.01  # the rotation's last bit can move a range to the next number of bfloat16


def gated_products(
    device: str, activation: str, bits: int, shape: tuple[int, int], dtype: torch.dtype, indexed: bool
) -> list[Check]:
    """Compare both packed products, and what they make of a gradient."""
    make, seeds = Inputs(device), torch.tensor([SEED, SEED + 1], device=device)
    whole = make.matrix(shape[0], 2 * shape[1], dtype)
    a, b = whole.chunk(2, dim=1)  # rows further apart than they are long
    index = torch.arange(0, shape[0], 3, device=device).flip(0) if indexed else None
    arguments = a, b, seeds, activation, bits, (True, True), index
    expected, checks = plain.pack_gated(*arguments), []
    for name, one, other in zip("ps", kernels().pack_gated(*arguments), expected, strict=True):
        assert other is not None
        checks += [same(f"qparams of {name}", one[1], other.qparams, limit=_QPARAMS)]
        checks += [same(f"codes of {name}", one[0], other.codes, limit=0.002)]
    y = make.matrix(*shape, dtype)
    expected_gradients = plain.apply_gated(y, seeds, expected, bits, index)
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
