"""The kernels of norms against their plain PyTorch references with the same seed, one function per property."""

from __future__ import annotations

import torch
from rmm_kernels_checks import Check, Inputs, close, same

from rmm_linear.backends.triton import kernels
from rmm_linear.packing import norms

EPS = 1e-5


def _index(device: str, mask: str, rows: int) -> torch.Tensor | None:
    return None if mask == "all" else torch.arange(1, rows, 3 if mask == "some" else rows, device=device)


def pack_norm(
    device: str, bits: int, columns: int, centered: bool, mask: str, dtype: torch.dtype = torch.float32, rows: int = 37
) -> list[Check]:
    """Compare the statistics and the packed copy of rows whose means are not 0."""
    make = Inputs(device)
    x, index = 3 * make.matrix(rows, columns, dtype) + 2, _index(device, mask, rows)
    codes, qparams, rstd = kernels().pack_norm(x, bits, make.seed, EPS, centered, index)
    expected = norms.pack_norm(x, bits, make.seed, EPS, centered, index)
    return [
        close("rstd", rstd, expected.rstd),
        # Statistics and rotation are sums in another order: an element on the edge of a step can fall to either side.
        same("codes", codes, expected.codes, limit=0.005),
        same("qparams", qparams, expected.qparams, limit=0.02),
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
    """Compare the gradients from one packed copy."""
    make = Inputs(device)
    x, index = make.matrix(rows + 1, columns)[1:], _index(device, mask, rows)  # not y, whose gradient is 0
    y, gamma = make.matrix(rows, columns, dtype), make.matrix(1, columns).view(-1) if is_affine else None
    saved = norms.pack_norm(x, bits, make.seed, EPS, centered, index)
    options = {"centered": centered, "index": index, "sums": is_affine}
    found = kernels().norm_gradients(y, *saved, bits, make.seed, gamma, **options)
    expected = norms.norm_gradients(y, saved, bits, make.seed, gamma, **options)
    if not is_affine:
        return [close("dX", found[0], expected.x, dtype), Check("no sums", float(found[1] is not None), 0.0)]
    return [
        close("dX", found[0], expected.x, dtype),
        close("dγ", found[1], expected.weight),
        close("dβ", found[2], expected.bias),
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
