"""The operations with the Triton kernels: one function for each, with the arguments of the plain one.

Kinds without a kernel (dct, dft) run in plain PyTorch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rmm_linear import packing, sketches
from rmm_linear._support.layouts import is_channels_last
from rmm_linear.backends.triton import KINDS, kernels
from rmm_linear.ops import plain
from rmm_linear.ops.plain import fp16_scale
from rmm_linear.ops.repeat import Repeated
from rmm_linear.packing import pooling
from rmm_linear.packing.channel_norms import packed_shape
from rmm_linear.packing.gated import Packed
from rmm_linear.packing.norms import NormCopy, NormGradients
from rmm_linear.packing.pointwise import Pointwise
from rmm_linear.packing.pooling import Window
from rmm_linear.sketches import SAMPLERS, RowSample, TokenMask
from rmm_linear.sketches.blocks import block_rows
from rmm_linear.sketches.seeds import Fresh, place_of, written
from rmm_linear.sketches.transforms import next_power_of_two
from rmm_linear.spec import SaveSpec

# Bytes of shared memory that a program of normal codes takes on Ampere; cards before it have 64 KiB, and need more.
_ROTATED = 75_776
Seed = Tensor | Fresh  # in its place, or to be written there; every function that takes the latter sees to it


def sketch(
    matrix: Tensor,
    *,
    kind: str,
    seed: Seed,
    rows: int,
    block: int | None = None,
    mask: TokenMask | None = None,
    p: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    if kind not in KINDS or sketches.kept_rows(matrix.shape[0], rows, block) >= matrix.shape[0]:
        return plain.sketch(matrix, kind=kind, seed=written(seed), rows=rows, block=block, mask=mask, p=p, dtype=dtype)
    return _sketch(matrix, seed, SaveSpec(kind, rows, block), mask, dtype=dtype)


def packed_sketch(matrix: Tensor, seed: Seed, spec: SaveSpec, mask: TokenMask | None) -> tuple[Tensor, Tensor]:
    """Return pack(SᵀM) as :func:`rmm_linear.ops.plain.packed_sketch` does, by a kernel that stores codes only."""
    if spec.kind not in KINDS:
        return plain.packed_sketch(matrix, written(seed), spec, mask)
    bits = packing.check_code(spec.bits)
    if spec.kept_rows(matrix.shape[0]) >= matrix.shape[0]:
        return encode(matrix if mask is None else mask.compact(matrix), bits, seed)
    if not packing.is_normal(bits):
        return _sketch(matrix, seed, spec, mask, bits=int(bits))
    wide = torch.float32 if matrix.dtype == torch.float16 else None  # whose sums may exceed it
    return encode(_sketch(matrix, seed, spec, mask, dtype=wide), bits, place_of(seed))


def _sketch(matrix: Tensor, seed: Seed, spec: SaveSpec, mask: TokenMask | None, **stored: Any) -> Any:
    """SᵀM with K < N: shape (K, D), of the dtype ``dtype``, or with ``bits`` its codes and scales."""
    tokens, rows = matrix.shape[0], spec.rows
    order, count = (None, None) if mask is None else (mask.order, mask.count)
    if spec.kind == "countsketch":
        return kernels().sparse_sketch(matrix, seed, rows, order=order, count=count, **stored)
    if spec.kind == "rows":
        index, scale = _uniform_rows(seed, tokens, rows, mask)
        return kernels().sparse_sketch(matrix, place_of(seed), rows, index=index, scale=scale, **stored)
    size, _, rows_per_block = block_rows(tokens, rows, spec.block)
    index = None
    if spec.kind == "hadamard":
        index, seed = _sample(seed, next_power_of_two(size), rows_per_block, None), place_of(seed)
    return kernels().dense_sketch(
        matrix, seed, spec.kind, size, rows_per_block, index=index, order=order, count=count, **stored
    )


def _sample(seed: Seed, population: int, size: int, count: Tensor | None) -> Tensor:
    keys = kernels().random_keys(seed, population, count)
    return torch.topk(keys, size, largest=False, sorted=False).indices.sort().values


def _uniform_rows(seed: Seed, tokens: int, rows: int, mask: TokenMask | None) -> tuple[Tensor, Tensor]:
    """Return the rows of M and their scales; where all n valid rows fit into K, these rows, and others with scale 0."""
    if mask is None:
        index = _sample(seed, tokens, rows, None)
        return index, index.new_full((rows,), (tokens / rows) ** 0.5, dtype=torch.float32)
    sampled = _sample(seed, tokens, rows, mask.count)
    place = torch.arange(rows, device=sampled.device)
    fits = mask.count <= rows
    index = mask.order[torch.where(fits, place, sampled)]
    return index, torch.where(fits, (place < mask.count).float(), (mask.count.float() / rows).sqrt())


def unpacked_product(
    y: Tensor, codes: Tensor, scales: Tensor, seed: Tensor, spec: SaveSpec, columns: int, mask: TokenMask | None
) -> Tensor:
    """Return (SᵀY)ᵀ unpack(Z) as :func:`rmm_linear.ops.plain.unpacked_product` does."""
    scale, dtype = fp16_scale(y.dtype, y.shape[0], len(codes)), y.dtype
    wide = None if scale == 1 else torch.float32
    if mask is not None or len(codes) < y.shape[0]:
        y = sketch(y, kind=spec.kind, seed=seed, rows=spec.rows, block=spec.block, mask=mask, dtype=wide)
        y = y if scale == 1 else y.mul_(scale).to(dtype)
    z = _DECODED(codes, scales, seed, packing.check_code(spec.bits), columns, wide or dtype)
    return torch.mm(y.t(), z if scale == 1 else z.mul_(1 / scale).to(dtype))


def pack(matrix: Tensor, bits: int, seed: Seed, *, out: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """Pack as :func:`rmm_linear.packing.pack` does, into ``out`` where it is given."""
    return kernels().pack(matrix, packing.check_bits(bits), seed, out)


def pack_tokens(
    matrix: Tensor,
    bits: int,
    seed: Seed,
    index: Tensor | None,
    mean: Tensor | None,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Pack the rows of :func:`rmm_linear.packing.attention.tokens_of`."""
    return kernels().pack(matrix, packing.check_bits(bits), seed, out, index=_listed(index), mean=mean)


def unpack(
    codes: Tensor,
    scales: Tensor,
    seed: Tensor,
    bits: int,
    columns: int,
    dtype: torch.dtype,
    *,
    rotated: bool = False,
) -> Tensor:
    if rotated:
        return packing.unpack(codes, scales, seed, bits, columns, dtype, rotated=True)
    return kernels().unpack(codes, scales, seed, bits, columns, dtype)


def pack_channels(
    x: Tensor,
    bits: int,
    seed: Seed,
    eps: float,
    groups: int,
    mean: Tensor | None = None,
    rstd: Tensor | None = None,
    *,
    out: NormCopy | None = None,
) -> NormCopy:
    how = x.contiguous(), packing.check_bits(bits), seed, eps, groups, packed_shape(x.shape), mean, rstd, out
    return NormCopy(*kernels().pack_channels(*how))


def channel_gradients(
    y: Tensor, saved: NormCopy, bits: int, seed: Tensor, gamma: Tensor | None, groups: int, **options: Any
) -> NormGradients:
    """Compute what :func:`rmm_linear.packing.channel_norms.channel_gradients` does."""
    how = y.contiguous(), *saved, bits, seed, gamma, groups, packed_shape(y.shape)
    return NormGradients(*kernels().channel_gradients(*how, **options))


def max_pool(x: Tensor, window: Window, ceil_mode: bool) -> tuple[Tensor, Tensor]:
    """Return what :func:`rmm_linear.packing.pooling.max_pool` does."""
    if len(window.size) > 2:
        return pooling.max_pool(x, window, ceil_mode)
    is_last, outputs, plane = is_channels_last(x), window.outputs(ceil_mode), window.plane
    x = x if is_last else x.contiguous()
    x = x if plane is window else x.unsqueeze(-2)
    out, stored = kernels().max_pool(x, (1, *outputs)[-2:], plane[1:], window.bits, is_last)
    return out if plane is window else out.squeeze(-2), stored


def max_pool_backward(y: Tensor, stored: Tensor, window: Window, ceil_mode: bool, is_last: bool) -> Tensor:
    """Return what :func:`rmm_linear.packing.pooling.max_pool_backward` does."""
    if len(window.size) > 2:
        return pooling.max_pool_backward(y, stored, window, ceil_mode, is_last)
    plane = window.plane
    y = y.contiguous(memory_format=torch.channels_last if is_last else torch.contiguous_format)
    y = y if plane is window else y.unsqueeze(-2)
    found = kernels().max_pool_backward(y, stored, plane.size, plane[1:], is_last)
    return found if plane is window else found.squeeze(-2)


def encode(matrix: Tensor, bits: float, seed: Seed) -> tuple[Tensor, Tensor]:
    if not packing.is_normal(bits):
        return pack(matrix, int(bits), seed)
    if not _holds_rotations(matrix.device):
        return packing.encode(matrix, bits, written(seed))
    return kernels().encode_normal(matrix, bits, seed)


def decode(
    codes: Tensor, scales: Tensor, seed: Tensor, bits: float, columns: int, dtype: torch.dtype, *, rotated: bool = False
) -> Tensor:
    if rotated:
        return packing.decode(codes, scales, seed, bits, columns, dtype, rotated=True)
    if packing.is_normal(bits) and not _holds_rotations(codes.device, is_decoding=True):
        return packing.decode(codes, scales, seed, bits, columns, dtype)
    run = kernels().decode_normal if packing.is_normal(bits) else kernels().unpack
    return run(codes, scales, seed, bits, columns, dtype)


@functools.lru_cache(maxsize=64)
def _holds_rotations(device: torch.device, *, is_decoding: bool = False) -> bool:
    """Say whether a device's kernels of normal codes hold a tile beside their rotations."""
    if torch.version.hip is not None:
        return is_decoding
    if device.type != "cuda":
        return True
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", _ROTATED) >= _ROTATED


_DECODED = Repeated(decode)


def directed(
    x: Tensor, bits: float, seed: Seed, basis: Tensor, index: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return plain.directed_by(x, bits, seed, basis, index, _CODER)


def directed_product(
    y: Tensor, saved: Sequence[Tensor], bits: float, columns: int, index: Tensor | None = None
) -> Tensor:
    """Return what :func:`rmm_linear.ops.plain.directed_product` does."""
    return plain.directed_product_by(y, saved, bits, columns, index, _CODER)


def _encode_parts(part: Callable[[int, int], Tensor], shape: Any, bits: float, seed: Seed) -> tuple[Tensor, Tensor]:
    return encode(part(0, shape[0]), bits, seed)


def _decode_parts(codes: Tensor, scales: Tensor, *how: Any) -> Callable[[int, int], Tensor]:
    values = decode(codes, scales, *how)
    return lambda begin, end: values[begin:end]


def _as_it_is(matrix: Tensor, *_: Any) -> Tensor:
    """Return a matrix: the kernels undo rotations as they decode."""
    return matrix


_CODER = plain.Coder(_encode_parts, encode, _decode_parts, decode, _as_it_is, _as_it_is)


def sample_rows(x: Tensor, seed: Seed, spec: SaveSpec, expected: Tensor | None, mask: TokenMask | None) -> RowSample:
    """Sample rows as :func:`rmm_linear.ops.plain.sample_rows` does."""
    norms, keys = kernels().row_norms(x), kernels().random_keys(seed, spec.rows)
    p = sketches.probabilities(norms, spec.uniform_mix, expected, mask)
    return sketches.sample_rows(p, keys, SAMPLERS[spec.kind], mask)


def gather_rows(matrix: Tensor, sample: RowSample) -> Tensor:
    """Gather rows as :func:`rmm_linear.sketches.gather` does."""
    return kernels().sparse_sketch(matrix, None, len(sample.index), index=sample.index, scale=sample.scale)


def packed_rows(matrix: Tensor, seed: Tensor, sample: RowSample, bits: float) -> tuple[Tensor, Tensor]:
    """Pack sampled rows as :func:`rmm_linear.ops.plain.packed_rows` does."""
    if packing.is_normal(bits):
        return encode(gather_rows(matrix, sample), bits, seed)
    index, scale = sample
    return kernels().sparse_sketch(
        matrix, seed, len(index), index=index, scale=scale, bits=packing.check_bits(int(bits))
    )


def pack_mask(mask: Tensor, index: Tensor | None = None) -> Tensor:
    """Return what :func:`rmm_linear.packing.masks.pack_mask` does."""
    return kernels().pack_mask(mask, _listed(index))


def apply_mask(y: Tensor, bits: Tensor, scale: float, index: Tensor | None = None) -> Tensor:
    """Return what :func:`rmm_linear.packing.masks.apply_mask` does."""
    return kernels().apply_mask(y, bits, scale, _listed(index))


def dropout(x: Tensor, seed: Tensor, p: float) -> Tensor:
    """Return what :func:`rmm_linear.packing.masks.dropout` does."""
    return kernels().dropout(x, seed, p)


def pack_derivative(
    x: Tensor, codes: Tensor, function: Pointwise, bits: int, seed: Tensor | None, index: Tensor | None
) -> None:
    """Write the codes of :func:`rmm_linear.packing.derivatives.pack_derivative`."""
    kernels().pack_derivative(x, codes, *_described(function, bits), bits, seed, _listed(index))


def apply_derivative(
    y: Tensor, codes: Tensor, function: Pointwise, bits: int, seed: Tensor | None, index: Tensor | None
) -> Tensor:
    """Return dX̂ as :func:`rmm_linear.packing.derivatives.apply_derivative` does."""
    return kernels().apply_derivative(y, codes, *_described(function, bits), bits, seed, _listed(index))


def activate(
    x: Tensor, codes: Tensor, function: Pointwise, bits: int, seed: Tensor | None, index: Tensor | None
) -> Tensor:
    """Return g(x), and write the codes of :func:`pack_derivative`."""
    return kernels().activate_and_pack(x, codes, *_described(function, bits), bits, seed, _listed(index))


def _described(function: Pointwise, bits: int) -> tuple[str, tuple[float, ...], tuple[float, float]]:
    return function.name, function.parameters, (function.range[0], function.step(bits))


def square(
    x: Tensor, bits: int, seed: Seed, index: Tensor | None, *, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ReLU²(x), and ReLU(x) as :func:`pack` returns it."""
    return kernels().square_and_pack(x, bits, seed, _listed(index), out)


def pack_gated(
    a: Tensor,
    b: Tensor,
    seeds: Seed,
    activation: str,
    bits: int,
    wanted: tuple[bool, bool],
    index: Tensor | None,
    *,
    out: list[Packed | None] | None = None,
) -> list[Packed | None]:
    made = kernels().pack_gated(a, b, seeds, activation, bits, wanted, _listed(index), out)
    return [None if one is None else Packed(*one) for one in made]


def apply_gated(
    y: Tensor, seeds: Tensor, packed: list[Packed | None], bits: int, index: Tensor | None
) -> list[Tensor | None]:
    """Return what :func:`rmm_linear.packing.gated.apply_gated` does."""
    return kernels().apply_gated(y, seeds, packed, bits, _listed(index))


def gate(
    a: Tensor,
    b: Tensor,
    seeds: Seed,
    activation: str,
    bits: int,
    wanted: tuple[bool, bool],
    index: Tensor | None,
    *,
    out: list[Packed | None] | None = None,
) -> tuple[Tensor, list[Packed | None]]:
    """Return act(a) · b, and what :func:`pack_gated` returns."""
    return kernels().gate_and_pack(a, b, seeds, activation, bits, wanted, _listed(index), out)


def pack_norm(
    x: Tensor,
    bits: int,
    seed: Seed,
    eps: float,
    centered: bool = True,
    index: Tensor | None = None,
    *,
    out: NormCopy | None = None,
) -> NormCopy:
    return NormCopy(*kernels().pack_norm(x, packing.check_bits(bits), seed, eps, centered, _listed(index), out))


def norm_gradients(
    y: Tensor,
    saved: NormCopy,
    bits: int,
    seed: Tensor,
    gamma: Tensor | None = None,
    *,
    index: Tensor | None = None,
    **options: Any,
) -> NormGradients:
    """Compute what :func:`rmm_linear.packing.norms.norm_gradients` does."""
    return NormGradients(*kernels().norm_gradients(y, *saved, bits, seed, gamma, index=_listed(index), **options))


def normalize(
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    dtypes: tuple[torch.dtype, torch.dtype],
    bits: int,
    seed: Seed,
    eps: float,
    centered: bool = True,
    index: Tensor | None = None,
    *,
    out: NormCopy | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the output of a norm, and what :func:`pack_norm` returns."""
    return kernels().normalize_and_pack(x, gamma, beta, dtypes, bits, seed, eps, centered, _listed(index), out)


def _listed(index: Tensor | None) -> Tensor | None:
    """Return an index whose elements lie side by side, as the kernels read it."""
    return None if index is None else index.contiguous()
