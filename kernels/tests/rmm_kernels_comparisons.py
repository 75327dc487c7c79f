"""Every kernel against its plain PyTorch reference with the same seed, one function per property.

Each returns checks: an error and the limit that it must not pass. What S decides is compared bit for bit, sums up to
rounding.
"""

from __future__ import annotations

import math
import os
from unittest import mock

import torch
from rmm_kernels_checks import MASKS, SEED, VIEWS, Check, Inputs, close, relative_error, same
from torch import Tensor

from rmm_linear import RMMConfig, packing, sketched_linear
from rmm_linear.backends.triton import kernels
from rmm_linear.ops import sketches as table
from rmm_linear.sketches import sketch
from rmm_linear.sketches.rows import sample
from rmm_linear.spec import SaveSpec

_SCALES = 0.01  # the rotation's last bit can move a group to the next scale


def next_to(what: str, found: Tensor, expected: Tensor) -> Check:
    """Compare the bytes of scales, of which the next one may be found."""
    return Check(what, float((found.int() - expected.int()).abs().max()), 1.0)


def countsketch(device: str, shape: tuple[int, int, int], mask: str, dtype: torch.dtype) -> list[Check]:
    """Compare CountSketch on normal numbers."""
    make, (tokens, rows, columns) = Inputs(device), shape
    x, (ranks, options) = make.matrix(tokens, columns, dtype), make.mask(mask, tokens)
    found = kernels().sparse_sketch(x, make.seed, rows, **options)
    return [close("SᵀX", found, sketch(x, kind="countsketch", seed=make.seed, rows=rows, mask=ranks), dtype)]


def whole_numbers(device: str, mask: str) -> list[Check]:
    """Compare CountSketch where sums are exact, so one wrong sign or row in S would show."""
    make = Inputs(device)
    x = torch.arange(1, 301, device=device, dtype=torch.float32).view(150, 2)
    ranks, options = make.mask(mask, 150)
    found = kernels().sparse_sketch(x, make.seed, 13, **options)
    return [same("SᵀX", found, sketch(x, kind="countsketch", seed=make.seed, rows=13, mask=ranks))]


def gathered(device: str, shape: tuple[int, int, int], mask: str) -> list[Check]:
    """Compare rows gathered by index and scale with the family ``rows``."""
    make, (tokens, rows, columns) = Inputs(device), shape
    x, (ranks, _) = make.matrix(tokens, columns), make.mask(mask, tokens)
    count = tokens if ranks is None else int(ranks.count)
    index = sample(make.seed, tokens, rows, None if ranks is None else ranks.count)
    scale = torch.full((rows,), math.sqrt(count / rows), device=device)
    if ranks is not None:
        index = ranks.order[index]
        if count <= rows:
            place = torch.arange(rows, device=device)
            index, scale = ranks.order[place], (place < count).float()
    found = kernels().sparse_sketch(x, make.seed, rows, index=index, scale=scale)
    return [close("SᵀX", found, sketch(x, kind="rows", seed=make.seed, rows=rows, mask=ranks))]


def short_group(device: str, bits: int) -> list[Check]:
    """Compare a last group of few columns, which is not rotated, so that its scale is that of its largest element."""
    make = Inputs(device)
    z = make.matrix(150, 69)
    codes, scales = kernels().pack(z, bits, make.seed)
    expected_codes, expected_scales = packing.pack(z, bits, make.seed)
    tail = 8 * bits
    return [
        same("scales", scales[:, 1], expected_scales[:, 1]),
        same("codes", codes[:, tail:], expected_codes[:, tail:], limit=0.002),
    ]


def scaled_rows(device: str, bits: int) -> list[Check]:
    """Compare rows gathered more than once and with scales of their own, as sampling with replacement makes them."""
    make = Inputs(device)
    x = make.matrix(50, 130)
    index = torch.tensor([3, 3, 0, 49, 17, 3, 8] * 5, device=device)
    scale = make.matrix(len(index), 1).view(-1)
    expected = x[index] * scale.unsqueeze(1)
    codes, scales = kernels().sparse_sketch(x, make.seed, len(index), index=index, scale=scale, bits=bits)
    expected_codes, expected_scales = kernels().pack(expected, bits, make.seed)
    return [
        close("SᵀX", kernels().sparse_sketch(x, make.seed, len(index), index=index, scale=scale), expected),
        same("codes", codes, expected_codes, limit=0.002),
        same("scales", scales, expected_scales, limit=_SCALES),
    ]


def sampled(device: str, kind: str, mask: str, bits: int | None, dtype: torch.dtype = torch.float32) -> list[Check]:
    """Compare rows sampled by their weight, and what is stored of them."""
    make = Inputs(device)
    x = make.matrix(60, 130, dtype) * make.matrix(60, 1, dtype).exp()
    ranks, expected = make.mask(mask, 60)[0], make.matrix(60, 1).view(-1).abs()
    spec, found = SaveSpec(kind, 11, uniform_mix=0.1), []
    for backend in ("triton", "torch"):
        with mock.patch.dict(os.environ, {"RMM_BACKEND": backend}):
            index, scale = sample = table.SAMPLE_ROWS(x, make.seed, spec, expected, ranks)
            stored = (table.GATHER_ROWS(x, sample),)
            if bits is not None:
                stored = table.PACKED_ROWS(x, make.seed, sample, bits)
        found.append((index, scale, *stored))
    (index, scale, *stored), (expected_index, expected_scale, *expected_stored) = found
    checks = [same("rows", index, expected_index), close("scales", scale, expected_scale)]
    if bits is None:
        return [*checks, close("SᵀX", stored[0], expected_stored[0], dtype)]
    # A row's factor whose last bit differs can move a group to the next scale, and an element on the edge of a step.
    codes = same("codes", stored[0], expected_stored[0], limit=0.02)
    return [*checks, codes, next_to("scales", stored[1], expected_stored[1])]


def dense_sketch(
    device: str,
    kind: str,
    block: int | None,
    mask: str,
    dtype: torch.dtype = torch.float32,
    shape: tuple[int, int, int] = (50, 7, 70),
) -> list[Check]:
    """Compare a dense sketch."""
    make, (tokens, rows, columns) = Inputs(device), shape
    x, (ranks, options) = make.matrix(tokens, columns, dtype), make.mask(mask, tokens)
    expected = sketch(x, kind=kind, seed=make.seed, rows=rows, block=block, mask=ranks)
    return [close("SᵀX", make.dense(x, kind, rows, block, options), expected, dtype)]


def pack_and_unpack(
    device: str, bits: int, columns: int, dtype: torch.dtype = torch.float32, rows: int = 37
) -> list[Check]:
    """Compare packed storage, and what it is unpacked to."""
    make = Inputs(device)
    z = make.matrix(rows, columns, dtype)
    codes, scales = kernels().pack(z, bits, make.seed)
    expected_codes, expected_scales = packing.pack(z, bits, make.seed)
    restored = kernels().unpack(expected_codes, expected_scales, make.seed, bits, columns, dtype)
    expected = packing.unpack(expected_codes, expected_scales, make.seed, bits, columns, dtype)
    return [
        same("scales", scales, expected_scales, limit=_SCALES),
        # The rotation is a product whose last bit may differ: an element on the edge of a step can fall to either side.
        same("codes", codes, expected_codes, limit=0.002),
        close("unpacked", restored, expected, dtype),
    ]


def encode_and_decode(device: str, bits: float, columns: int, dtype: torch.dtype, rows: int = 37) -> list[Check]:
    """Compare normal codes, and what they are decoded to; a row of zeros, and one that is not finite."""
    make = Inputs(device)
    z = make.matrix(rows, columns, dtype)
    z[3], z[5, columns // 2] = 0, math.nan
    found, expected = kernels().encode_normal(z, bits, make.seed), packing.encode(z, bits, make.seed)
    finite = torch.arange(rows, device=device) != 5
    restored = kernels().decode_normal(*expected, make.seed, bits, columns, dtype)
    wanted = packing.decode(*expected, make.seed, bits, columns, dtype)
    return [
        same("scales", found[1], expected[1], limit=_SCALES),
        same("codes", found[0][finite], expected[0][finite], limit=0.002),
        close("decoded", restored[finite], wanted[finite], dtype),
        same("not finite", restored[5].isfinite(), wanted[5].isfinite()),
    ]


def packed_as_made(device: str, kind: str, bits: int, mask: str, block: int | None = None) -> list[Check]:
    """Compare the packing epilogue of a sketch with packing the finished one."""
    make, rows = Inputs(device), 11
    x, (_, options) = make.matrix(60, 130), make.mask(mask, 60)
    if kind == "countsketch":
        z = kernels().sparse_sketch(x, make.seed, rows, **options)
        codes, scales = kernels().sparse_sketch(x, make.seed, rows, bits=bits, **options)
    else:
        z = make.dense(x, kind, rows, block, options)
        codes, scales = make.dense(x, kind, rows, block, options, bits=bits)
    expected_codes, expected_scales = kernels().pack(z, bits, make.seed)
    return [next_to("scales", scales, expected_scales), same("codes", codes, expected_codes, limit=0.002)]


def masked_rows_unread(device: str, kind: str) -> list[Check]:
    """Compare a sketch with one whose masked rows are NaN."""
    make = Inputs(device)
    x, (ranks, options) = make.matrix(60, 20), make.mask("some", 60)
    assert ranks is not None  # "some" makes one
    poisoned = x.clone()
    poisoned[ranks.order[int(ranks.count) :]] = math.nan

    def run(matrix: Tensor) -> Tensor:
        if kind == "countsketch":
            return kernels().sparse_sketch(matrix, make.seed, 7, **options)
        return make.dense(matrix, kind, 7, None, options)

    return [same("SᵀX", run(poisoned), run(x))]


def strides(device: str, view: str) -> list[Check]:
    """Compare all kernels on a matrix that is not contiguous."""
    make = Inputs(device)
    x, seed = VIEWS[view](make.matrix(80, 80)), make.seed
    dense = sketch(x, kind="rademacher", seed=seed, rows=9, block=16)
    return [
        close("countsketch", kernels().sparse_sketch(x, seed, 9), sketch(x, kind="countsketch", seed=seed, rows=9)),
        close("rademacher", make.dense(x, "rademacher", 9, 16, {}), dense),
        close("norms", kernels().row_norms(x), x.norm(dim=1)),
        same("scales", kernels().pack(x, 4, seed)[1], packing.pack(x, 4, seed)[1], limit=_SCALES),
    ]


def row_norms(device: str, shape: tuple[int, int], dtype: torch.dtype) -> list[Check]:
    """Compare the norms of rows."""
    x = Inputs(device).matrix(*shape, dtype)
    return [close("norms", kernels().row_norms(x), x.float().norm(dim=1))]


def random_keys(device: str, count: int | None) -> list[Check]:
    """Compare the sample that follows from random keys, to the last row."""
    make = Inputs(device)
    counted = None if count is None else torch.tensor([count], device=device)
    keys = kernels().random_keys(make.seed, 1500, counted)
    found = torch.topk(keys, 40, largest=False, sorted=False).indices.sort().values
    return [same("sample", found, sample(make.seed, 1500, 40, counted)), Check("signs", float((keys < 0).sum()), 0.0)]


def layer(device: str, kind: str, bits: int | None, mask: str) -> list[Check]:
    """Compare the weight gradient of a layer on the kernels with that of the same layer on plain PyTorch."""
    make = Inputs(device)
    config = RMMConfig(kind=kind, ratio=0.2, bits=bits, min_rows=1)
    wanted = MASKS[mask]
    x, y = make.matrix(60, 130), make.matrix(60, 6)
    token_mask = None if wanted is None else wanted(60).to(device)
    if token_mask is not None:
        y = y * token_mask.bool().unsqueeze(1)
    gradients = []
    for backend in ("torch", "triton"):
        with mock.patch.dict(os.environ, {"RMM_BACKEND": backend}):
            weight = make.matrix(6, 130).requires_grad_()
            sketched_linear(x, weight, config=config, seed=SEED, token_mask=token_mask).backward(y)
            gradients.append(weight.grad)
    # Codes on the edge of a step fall to either side.
    error = relative_error(gradients[1], gradients[0])
    return [Check("dW", error, 1e-5 if bits is None else 2e-2)]


def long_offsets(device: str, tokens: int, columns: int, rows: int = 4096) -> list[Check]:
    """Compare the last columns of a matrix whose offsets pass 2³¹, where the device has the memory."""
    make = Inputs(device)
    x = torch.zeros(tokens, columns, dtype=torch.bfloat16, device=device)
    x[:, -64:] = make.matrix(tokens, 64, torch.bfloat16)
    end, seed = x[:, -64:].contiguous(), make.seed
    expected = sketch(end, kind="countsketch", seed=seed, rows=rows)
    found = kernels().sparse_sketch(x, seed, rows)[:, -64:]
    dense = make.dense(x, "rademacher", rows, 128, {})[:, -64:]
    return [
        close("countsketch", found, expected, torch.bfloat16),
        close("rademacher", dense, sketch(end, kind="rademacher", seed=seed, rows=rows, block=128), torch.bfloat16),
        close("norms", kernels().row_norms(x), end.float().norm(dim=1)),
    ]
