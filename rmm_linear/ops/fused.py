"""Operators that make the output of an activation or a gated product in the pass that packs its stand-in.

They compute what a module computes, in float32, and store what :mod:`rmm_linear.ops.derivatives` and
:mod:`rmm_linear.ops.gated` store for the same seed. In Triton's kernels an output is then within 16 · 2⁻²⁴ · max(|x|,
|g(x)|) of the function's value, and half a last bit of its dtype, but not PyTorch's own to the bit. So modules call
them where ``RMMConfig.fused`` asks for it, and where the kernels run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from rmm_linear.backends.select import backend_of
from rmm_linear.backends.triton import kernels
from rmm_linear.ops import derivatives, gated
from rmm_linear.ops.operator import operator
from rmm_linear.ops.save import _on_device
from rmm_linear.ops.stored import empty_stored, fill_seeds, stored_bytes, views
from rmm_linear.ops.table import PACK, Operation, _is_plain
from rmm_linear.packing.gated import Packed
from rmm_linear.packing.norms import wide
from rmm_linear.packing.pointwise import Pointwise
from rmm_linear.sketches.seeds import draw_seed


@torch.compiler.assume_constant_result
def _has_kernels(device: str, dtype: torch.dtype) -> bool:
    return backend_of(device, dtype) == "triton"


def runs_fused(x: Tensor, is_composed: bool) -> bool:
    """Say whether an output is to be made in the pass that packs: where Triton's kernels run, and its dtype is known.

    Args:
        x: The input of a module.
        is_composed: Whether the module runs several functions, to which autocast may give different dtypes.

    Returns:
        True or False. Elsewhere one pass in PyTorch would be no faster than two.
    """
    if not _has_kernels(x.device.type, x.dtype) or (is_composed and torch.is_autocast_enabled(x.device.type)):
        return False
    return torch.compiler.is_compiling() or _is_plain(x)


def _activate_plainly(
    x: Tensor, codes: Tensor, function: Pointwise, bits: int, seed: Tensor | None, index: Tensor | None
) -> Tensor:
    derivatives.PACK_DERIVATIVE(x, codes, function, bits, seed, index)
    return function(wide(x)).to(x.dtype)


def _activate_with_triton(
    x: Tensor, codes: Tensor, function: Pointwise, bits: int, seed: Tensor | None, index: Tensor | None
) -> Tensor:
    line = function.range[0], function.step(bits)
    return kernels().activate_and_pack(x, codes, function.name, function.parameters, line, bits, seed, index)


def _square_plainly(x: Tensor, bits: int, seed: Tensor, index: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    kept = torch.relu(x)
    return wide(kept).square().to(x.dtype), *PACK(kept if index is None else kept.index_select(0, index), bits, seed)


def _gate_plainly(
    a: Tensor, b: Tensor, seeds: Tensor, activation: str, bits: int, wanted: tuple[bool, bool], index: Tensor | None
) -> tuple[Tensor, list[Packed | None]]:
    packed = gated.PACK_GATED(a, b, seeds, activation, bits, wanted, index)
    return Pointwise(activation)(wide(a)).to(a.dtype) * b, packed


ACTIVATE = Operation(_activate_plainly, None, _activate_with_triton)
SQUARE = Operation(_square_plainly, None, lambda *arguments: kernels().square_and_pack(*arguments))
GATE = Operation(_gate_plainly, None, lambda *arguments: kernels().gate_and_pack(*arguments))


@operator(
    "activate_and_pack",
    "(Tensor x, Tensor? index, SymInt? seed, str name, float[] parameters, int bits) -> (Tensor, Tensor)",
)
def activate_and_pack(
    x: Tensor, index: Tensor | None, seed: int | None, name: str, parameters: Sequence[float], bits: int
) -> tuple[Tensor, Tensor]:
    """Apply a pointwise function, and make the stand-in of its input.

    Args:
        x: Input of the function, shape (N, C).
        index: As for :func:`rmm_linear.ops.derivatives.pack_derivative`, as the following ones. Its rows are distinct.
        seed: Seed of the rounding; None draws a new one.
        name: :attr:`Pointwise.name`.
        parameters: :attr:`Pointwise.parameters`.
        bits: 8, 4, 2 or 1.

    Returns:
        g(x) of all rows, shape (N, C), dtype of ``x``, contiguous; and the stand-in, the bytes of ``pack_derivative``.
    """
    function = Pointwise(name, tuple(parameters))
    derivatives.check_width(function, bits)
    parts = derivatives.stored_parts(function, bits, len(x) if index is None else len(index), x.shape[1])
    stored = empty_stored(x, parts).zero_()
    if function.is_exact:
        return ACTIVATE(x, views(stored, parts)[0], function, bits, None, index).contiguous(), stored
    seeds, *tensors = views(stored, parts)
    seeds.copy_(_on_device(draw_seed() if seed is None else seed, x.device))
    if function.is_bounded:
        return ACTIVATE(x, tensors[0], function, bits, seeds, index).contiguous(), stored
    output, *packed = SQUARE(x, bits, seeds, index)
    for view, tensor in zip(tensors, packed, strict=True):
        view.copy_(tensor)
    return output.contiguous(), stored


@activate_and_pack.register_fake
def _(x, index, seed, name, parameters, bits):
    rows = x.shape[0] if index is None else index.shape[0]
    parts = derivatives.stored_parts(Pointwise(name), bits, rows, x.shape[1])
    return x.new_empty(x.shape), x.new_empty(stored_bytes(parts), dtype=torch.uint8)


@operator("gate_and_pack")
def gate_and_pack(
    a: Tensor,
    b: Tensor,
    activation: str,
    bits: int,
    seed: int | None,
    index: Tensor | None,
    needs_a: bool,
    needs_b: bool,
) -> tuple[Tensor, Tensor]:
    """Compute act(a) · b, and make what a gated MLP saves.

    Args:
        a: The gate's output, floating point, shape (N, C).
        b: What act(a) is multiplied by, shape and dtype of ``a``.
        activation: As for :func:`rmm_linear.ops.gated.keep_gated`, as the following ones.
        bits: 8, 4 or 2.
        seed: Seed of the rounding; None draws one.
        index: Rows to store, int64, shape (n,), distinct; None for all.
        needs_a: Whether the gradient with respect to ``a`` is needed.
        needs_b: Whether the gradient with respect to ``b`` is needed.

    Returns:
        act(a), rounded to the dtype of ``a``, times b, shape (N, C), contiguous; and the bytes of ``keep_gated``.

    Raises:
        ValueError: If dtypes or shapes of ``a`` and ``b`` differ.
    """
    gated.check_factors(a, b)
    parts = gated.stored_parts(len(a) if index is None else len(index), a.shape[1], bits, needs_a + needs_b)
    stored = empty_stored(a, parts).zero_()
    seeds, *tensors = views(stored, parts)
    fill_seeds(seeds, seed)
    output, packed = GATE(a, b, seeds, activation, bits, (needs_a, needs_b), index)
    for view, tensor in zip(tensors, [tensor for one in packed for tensor in one or ()], strict=True):
        view.copy_(tensor)
    return output.contiguous(), stored


@gate_and_pack.register_fake
def _(a, b, activation, bits, seed, index, needs_a, needs_b):
    rows = a.shape[0] if index is None else index.shape[0]
    parts = gated.stored_parts(rows, a.shape[1], bits, needs_a + needs_b)
    return a.new_empty(a.shape), a.new_empty(stored_bytes(parts), dtype=torch.uint8)


@register_flop_formula(torch.ops.rmm_linear.activate_and_pack)
def _(x: Sequence[int], *arguments, out_shape=None, **named) -> int:
    return 2 * math.prod(x)  # the function and its derivative


@register_flop_formula(torch.ops.rmm_linear.gate_and_pack)
def _(a: Sequence[int], *arguments, out_shape=None, **named) -> int:
    return gated.packing_flops(a) + 2 * math.prod(a)
