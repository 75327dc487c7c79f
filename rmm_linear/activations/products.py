"""The product of two tensors, perhaps added to a third one, that saves its factors in few bits.

    out = a · b        da = y · b^        db = a^ · y

Each gradient is linear in the code of the other factor: it is unbiased, and exact where that factor is saved as it is,
as a weight is. Of two activations both are coded, with errors that are independent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rmm_linear._support.autocast import autocast_off, cast
from rmm_linear._support.layouts import MemoryLayout, as_shape
from rmm_linear.activations.pointwise import SEQUENCES, square_of_sums
from rmm_linear.layers.function import SavingCall, SavingFunction, as_no_view, square_of
from rmm_linear.ops.convolutions import decode_matrix, encode_matrix, scales_in
from rmm_linear.packing import WIDTHS, rounding_variance, sum_dtype, weighted_variance


class Product(NamedTuple):
    """A product of two tensors, perhaps added to a third one."""

    run: Callable[..., Tensor]  # computes it as PyTorch does
    is_matrix: bool
    scales: tuple[float, float] = (1, 1)  # of the product, and of what is added to it
    indices: tuple[str, str, str] | None = None  # of both factors and the product, where it is a sum over some of them

    def gradients(self, y: Tensor, a: Tensor | None, b: Tensor | None, shapes: Sequence[torch.Size]) -> list[Any]:
        """Return the gradients of both factors, None for those whose other factor is None."""
        y = y if self.scales[0] == 1 else y * self.scales[0]
        if self.indices is not None:
            one, other, made = self.indices
            of_a = None if b is None else torch.einsum(f"{made},{other}->{one}", y, b)
            found = of_a, None if a is None else torch.einsum(f"{made},{one}->{other}", y, a)
        elif not self.is_matrix:
            found = (None if one is None else y * one for one in (b, a))
        elif len(shapes[1]) == 2:  # of all rows at once
            y = y.reshape(-1, shapes[1][1])
            of_a = None if b is None else (y @ b.mT).view(shapes[0])
            found = of_a, None if a is None else a.reshape(-1, shapes[1][0]).mT @ y
        else:
            found = None if b is None else y @ b.mT, None if a is None else a.mT @ y
        return [None if one is None else one.sum_to_size(shape) for one, shape in zip(found, shapes, strict=True)]


class ProductFunction(SavingFunction):
    """A product with codes of its factors: PyTorch's own backward pass on what is decoded."""

    @staticmethod
    def forward(
        ctx: Any,
        a: Tensor,
        b: Tensor,
        added: Tensor | None,
        codes_a: Tensor | None,
        codes_b: Tensor | None,
        how: tuple[tuple[MemoryLayout, float, float] | None, ...],
        product: Product,
        dtype: torch.dtype | None,
        call: SavingCall,
    ) -> Tensor:
        """Compute the product exactly; ``how``: layout and bits of both codes, and what was subtracted."""
        ctx.product, ctx.call, ctx.how = product, call, how
        factors = [cast(one, dtype) for one in (a, b)]
        ctx.like = [(one.shape, one.dtype, made.dtype) for one, made in zip((a, b), factors, strict=True)]
        ctx.added = None if added is None else (added.shape, added.dtype)
        with autocast_off(a.device.type):
            more = () if added is None else (cast(added, dtype),)
            output = product.run(*more, *factors)
        needs_a, needs_b = ctx.needs_input_grad[:2]
        ctx.save_for_backward(
            a if needs_b and codes_a is None else None, b if needs_a and codes_b is None else None, codes_a, codes_b
        )
        # Of einsum, a matrix may be a view too.
        is_matrix = output.dim() == 2 and product.indices is not None
        return as_shape(output, output.shape) if is_matrix else as_no_view(output)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (y,), (*exact, codes_a, codes_b) = grad_outputs, ctx.saved_tensors
        SavingFunction.received(ctx, y[:0].reshape(0, 1), "a packed product")
        factors: list[Tensor | None] = []
        with autocast_off(y.device.type):
            for one, codes, how, (_, _, dtype) in zip(exact, (codes_a, codes_b), ctx.how, ctx.like, strict=True):
                if codes is not None:
                    layout, bits, mean = how
                    one = layout.tensor(decode_matrix(codes, layout.rows, layout.columns, bits, dtype))
                    one = one.add_(mean) if mean else one
                factors.append(None if one is None else cast(one, dtype) if ctx.product.is_matrix else one)
            found = ctx.product.gradients(y, *factors, [one[0] for one in ctx.like])
        made = [None if one is None else one.to(dtype) for one, (_, dtype, _) in zip(found, ctx.like, strict=True)]
        of_added = None
        if ctx.needs_input_grad[2]:
            shape, dtype = ctx.added
            of_added = (y * ctx.product.scales[1]).sum_to_size(shape).to(dtype)
        if ctx.call.noise is not None:
            _tell_noise(ctx, y, (codes_a, codes_b), made)
        needed = [one if needs else None for one, needs in zip(made, ctx.needs_input_grad[:2], strict=True)]
        return *needed, of_added, *(None,) * 6


def _tell_noise(ctx: Any, y: Tensor, codes: Sequence[Tensor | None], made: Sequence[Tensor | None]) -> None:
    """Tell the noise of codes whose rows a gradient adds up."""
    for place, (stored, how) in enumerate(zip(codes, ctx.how, strict=True)):
        gradient = made[1 - place]
        if stored is None or gradient is None or how[1] not in WIDTHS or how[2]:  # normal codes have other scales
            continue
        layout, bits, _ = how
        shape, scales = ctx.like[place][0], scales_in(stored, layout.rows, layout.columns, bits)
        if ctx.product.is_matrix:
            are_tokens = layout.columns == shape[-1] and layout.order == tuple(range(len(shape)))
            if place or ctx.product.indices is not None or shape[:-1] != y.shape[:-1] or not are_tokens:
                continue
            norms = torch.linalg.vector_norm(y, dim=-1, dtype=sum_dtype(y.dtype)).reshape(-1).double().square()
            variance = rounding_variance(scales, layout.columns) @ norms * ctx.product.scales[0] ** 2
        elif shape == y.shape:
            variance = weighted_variance(scales, layout.matrix(y))
        else:
            continue
        is_summed = ctx.product.is_matrix or gradient.shape != y.shape
        channel = 1 if gradient.dim() > SEQUENCES else None
        square = square_of(gradient) if is_summed else square_of_sums(gradient, channel)
        ctx.call.noise(variance, square, bits, place)


def encoded(x: Tensor, layout: MemoryLayout, bits: float, dtype: torch.dtype | None, seed: int | None) -> Tensor:
    with torch.no_grad(), autocast_off(x.device.type):
        return encode_matrix(layout.matrix(cast(x.detach(), dtype)), bits, seed)


class IndexAddFunction(SavingFunction):
    """Rows added to others, that saves where; PyTorch saves what is added too, for its shape."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, dim: int, index: Tensor, source: Tensor, inplace: bool, call: SavingCall
    ) -> Tensor:
        ctx.call, ctx.dim, ctx.dtypes = call, dim, (input.dtype, source.dtype)
        if ctx.needs_input_grad[3]:
            ctx.save_for_backward(index)
        if not inplace:
            return input.index_add(dim, index, source)
        ctx.mark_dirty(input)
        return input.index_add_(dim, index, source)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (y,) = grad_outputs
        SavingFunction.received(ctx, y[:0].reshape(0, 1), "index_add")
        of_input = y.to(ctx.dtypes[0]) if ctx.needs_input_grad[0] else None
        of_source = None
        if ctx.needs_input_grad[3]:
            of_source = y.index_select(ctx.dim, *ctx.saved_tensors).to(ctx.dtypes[1])
        return of_input, None, None, of_source, None, None
