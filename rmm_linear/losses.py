"""Compute the cross entropy of a vocabulary, a few rows of logits at a time.

The logits of N tokens, hidden · weightᵀ with V columns, are the largest tensor of many language models, and their
gradient is as large again. Here they exist for one chunk of rows at a time: its logits are made, turned into the loss
and into the gradient softmax − one-hot in place, multiplied by the weight and by the hidden states, and dropped. Both
products are made in the forward pass: the loss is a number, so its backward pass only scales them. To compute the
logits again in the backward pass instead would save the weight's gradient for a moment, and cost a fourth product of
N · H · V in addition to the three that are needed anyway.

Every chunk reads the weight twice, and reads and writes its gradient in float32. On a GPU a chunk has so many rows that
its products take about as long as that; a CPU, whose products take far longer, gains nothing by more than its caches
and pages hold.

Loss and gradients are those of ``F.cross_entropy(hidden @ weight.T, labels)`` up to the order of summation. The
logits are rounded to the dtype of the hidden states, as a linear layer does it; all else is computed in float32, or
in float64 for float64.

Source: chunks of the sequence for the head and its loss: Luo et al. 2024 (Mini-Sequence), arXiv 2407.15892.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from rmm_linear._support.autocast import autocast_dtype, autocast_off, cast
from rmm_linear._support.validation import check_integer
from rmm_linear.layers.function import refuse_double_backward
from rmm_linear.ops.dispatch import Call, Case, call, operator

_PART = 1 << 20  # elements of a product that are made and added at a time on CPU, where dtypes differ
CHUNK = 256  # rows of logits at a time on CPU, and the least elsewhere
_BYTES = 1 << 29  # of logits in float32 that an accelerator makes at a time
_REDUCTIONS = ("mean", "sum")


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    chunk: int | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    num_items_in_batch: Tensor | float | None = None,
    shift: bool = False,
    softcap: float | None = None,
    scale: float = 1.0,
) -> Tensor:
    """Compute the cross entropy of softmax(hidden · weightᵀ + bias), with ``chunk`` rows of logits at a time.

    Exact up to the order of summation. Memory: chunk · V numbers in float32, as many again with ``softcap`` and half
    as many bytes in half types; until the backward pass the gradients with respect to ``hidden``, ``weight`` (in
    float32) and ``bias``. Time: the three products that a linear layer needs. Ignored rows cost nothing on CPU.

    Args:
        hidden: Last hidden states, floating point, shape (*, H).
        weight: Of the output layer, shape (V, H). Where it needs no gradient, none is computed.
        labels: Class of every row, int64, shape (*).
        bias: Of the output layer, shape (V,), or None.
        chunk: Rows of logits at a time. None: 256 on CPU; elsewhere as many as 512 MiB of logits in float32 have, a
            multiple of 128 and 256 at least.
        ignore_index: Label of rows that have no part in the loss.
        reduction: "mean" over the rows that are not ignored, or "sum".
        num_items_in_batch: If given, the sum is divided by it instead, as transformers does where a batch is split.
        shift: Whether the row of token t predicts the label of token t + 1 along the last dimension of ``labels``, as
            in causal language models.
        softcap: Logits z are replaced by softcap · tanh(z / softcap).
        scale: Logits are multiplied by it, before ``softcap``.

    Returns:
        The loss, shape (), float32, or float64 for float64. NaN for a mean over no row, with gradients of zero.

    Raises:
        ValueError: If shapes do not fit, or an argument is none of those above.

    Example:
        >>> hidden, weight = torch.randn(5, 8), torch.randn(100, 8)
        >>> labels = torch.tensor([3, 99, -100, 0, 7])
        >>> exact = F.cross_entropy(hidden @ weight.T, labels)
        >>> torch.allclose(chunked_cross_entropy(hidden, weight, labels, chunk=2), exact)
        True
    """
    _check(hidden, weight, labels, bias, reduction, softcap)
    if chunk is not None:
        check_integer("chunk", chunk)
    if shift:
        labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    rows, classes = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1).to(hidden.device)
    wide = torch.promote_types(hidden.dtype, torch.float32)
    if num_items_in_batch is not None:
        count = torch.as_tensor(num_items_in_batch, dtype=wide, device=hidden.device)
    elif reduction == "mean":
        count = (classes != ignore_index).sum().to(wide)
    else:
        count = torch.ones((), dtype=wide, device=hidden.device)
    dtype = autocast_dtype(hidden.device.type, hidden.dtype)
    # Without gradients, a function's needs_input_grad says no more than what its inputs require.
    needs = [torch.is_grad_enabled() and one is not None and one.requires_grad for one in (hidden, weight, bias)]
    chunk = chunk or chunk_rows(weight.shape[0], hidden.device.type, wide.itemsize)
    options = (chunk, ignore_index, scale, softcap, *needs)
    return _ChunkedCrossEntropy.apply(rows, weight, bias, classes, count, dtype, options)


def chunk_rows(classes: int, device: str, itemsize: int) -> int:
    """Return how many rows of logits are made at a time, whose elements take ``itemsize`` bytes each."""
    if device in ("cpu", "meta"):  # the latter stands for the former
        return CHUNK
    return max(CHUNK, _BYTES // (itemsize * classes) // 128 * 128)


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        count: Tensor,
        dtype: torch.dtype | None,
        options: tuple[int, int, float, float | None, bool, bool, bool],
    ) -> Tensor:
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        tensors = cast(hidden, dtype), cast(weight, dtype), None if bias is None else cast(bias, dtype)
        with autocast_off(hidden.device.type):
            total, *gradients = _loss_and_gradients(*tensors, labels, *options)
            ctx.save_for_backward(count, *gradients)
            return total / count

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward("chunked_cross_entropy")
        (grad_output,) = grad_outputs
        count, *gradients = ctx.saved_tensors
        factor = (grad_output / count).where(count != 0, 0)  # no row, no gradient
        found = [
            (gradient * factor).to(dtype) if needed else None
            for gradient, dtype, needed in zip(gradients, ctx.dtypes, ctx.needs_input_grad[:3], strict=True)
        ]
        return *found, None, None, None, None


def _samples(case: Case) -> Iterator[Call]:
    labels = torch.arange(case.rows) % 9
    if case.index is not None:
        labels = labels.new_full(labels.shape, -100).index_copy_(0, case.index, labels[case.index])
    for place, softcap in enumerate((None, 5.0)):
        weight, bias = (
            Case(9, case.columns, case.dtype).matrix(1),
            None if place else Case(1, 9, case.dtype).matrix()[0],
        )
        yield call(case.matrix(), weight, bias, labels, 4, -100, 0.5, softcap, True, not place, bias is not None)


def _flops(hidden: Sequence[int], weight: Sequence[int], *arguments: Any) -> int:
    needs_hidden, needs_weight = arguments[-3:-1]
    return 2 * math.prod(hidden) * weight[0] * (1 + needs_hidden + needs_weight)


def _workspace(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, chunk: int, *arguments: Any) -> int:
    """Bytes of a chunk: of its logits in both dtypes and of their slope, or of their gradient and a product with it."""
    softcap, needs_hidden, needs_weight, _ = arguments[2:]
    wide, size, rows = torch.promote_types(hidden.dtype, torch.float32), hidden.itemsize, min(chunk, len(hidden))
    logits = rows * len(weight) * (size * (size < wide.itemsize) + wide.itemsize * (1 if softcap is None else 2))
    is_added = size == wide.itemsize or _adds_in_float32(hidden.device.type)
    products = rows * needs_hidden, len(weight) * (needs_weight and not is_added)
    return max(logits, size * (rows * len(weight) + max(products) * weight.shape[1]))


@operator("chunked_cross_entropy", samples=_samples, flops=_flops, workspace=_workspace)
def _loss_and_gradients(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    chunk: int,
    ignore_index: int,
    scale: float,
    softcap: float | None,
    needs_hidden: bool,
    needs_weight: bool,
    needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sum of the losses, and its gradients: of hidden in its dtype, of weight and bias in float32 or wider."""
    total, *gradients = _empty_results(hidden, weight, needs_hidden, needs_weight, needs_bias)
    grad_hidden, grad_weight, grad_bias = (gradient.zero_() for gradient in gradients)
    total.zero_()
    index = None
    if hidden.device.type == "cpu" and bool((labels == ignore_index).any()):
        index = (labels != ignore_index).nonzero().squeeze(1)
    count = len(labels) if index is None else len(index)
    for begin in range(0, count, chunk):
        place = slice(begin, min(begin + chunk, count)) if index is None else index[begin : begin + chunk]
        h, classes = hidden[place], labels[place]
        logits = h @ weight.T if bias is None else torch.addmm(bias, h, weight.T)
        logits, slope = _transform(logits.to(total.dtype), scale, softcap)
        total += _to_gradient(logits, classes, ignore_index)
        if not (needs_hidden or needs_weight or needs_bias):
            continue
        y = logits if slope is None else logits.mul_(slope)
        del logits, slope
        if needs_bias:
            grad_bias += y.sum(0)
        y = y.to(h.dtype)
        if needs_hidden:
            grad_hidden[place] = y @ weight
        if needs_weight:
            _add_product(grad_weight, y.T, h)
        del y  # before the next chunk is made
    return total, grad_hidden, grad_weight, grad_bias


@_loss_and_gradients.register_fake
def _(hidden, weight, bias, labels, chunk, ignore_index, scale, softcap, needs_hidden, needs_weight, needs_bias):
    return _empty_results(hidden, weight, needs_hidden, needs_weight, needs_bias)


def _empty_results(
    hidden: Tensor, weight: Tensor, needs_hidden: bool, needs_weight: bool, needs_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wide = torch.promote_types(hidden.dtype, torch.float32)
    return (
        hidden.new_empty((), dtype=wide),
        hidden.new_empty(hidden.shape if needs_hidden else (0,)),
        hidden.new_empty(weight.shape if needs_weight else (0,), dtype=wide),
        hidden.new_empty(weight.shape[:1] if needs_bias else (0,), dtype=wide),
    )


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a · b to ``total``, in its dtype, which may be wider than theirs."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif _adds_in_float32(a.device.type):
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)  # pyright: ignore[reportCallIssue]
    elif a.device.type == "cpu":  # some rows at a time, whose products, in both dtypes, stay in the cache
        rows = max(1, _PART // max(1, b.shape[1]))
        for some, theirs in zip(total.split(rows), a.split(rows), strict=True):
            some += theirs @ b
    else:
        total += a @ b


@functools.cache
def _adds_in_float32(device: str) -> bool:
    """Say whether a product of half types can be added to a sum in float32 without a copy of its own."""
    # PyTorch 2.8 has it for CUDA alone; on ROCm, PyTorch's own tests leave it out.
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    is_known = "dtype_out" in torch.ops.aten.addmm.overloads()
    return device == "cuda" and torch.version.hip is None and is_known and has_kernel("aten::addmm.dtype_out", "CUDA")


def _transform(logits: Tensor, scale: float, softcap: float | None) -> tuple[Tensor, Tensor | None]:
    """Return scaled and capped logits, in place, and their derivative by what they were; None where it is 1."""
    if scale != 1:
        logits.mul_(scale)
    if softcap is None:
        return logits, None if scale == 1 else logits.new_full((), scale)
    slope = logits.div_(softcap).tanh_().square()
    return logits.mul_(softcap), slope.neg_().add_(1).mul_(scale)


def _to_gradient(logits: Tensor, classes: Tensor, ignore_index: int) -> Tensor:
    """Return the sum of the rows' losses; the logits become its gradient, softmax − one-hot, 0 in ignored rows."""
    valid = (classes != ignore_index).unsqueeze(1)
    classes = classes.unsqueeze(1).where(valid, 0)
    logits.sub_(logits.amax(1, keepdim=True))
    of_class = logits.gather(1, classes)
    sums = logits.exp_().sum(1, keepdim=True)
    logits.mul_(sums.reciprocal().where(valid, 0)).scatter_add_(1, classes, -valid.to(logits.dtype))
    return (sums.log() - of_class).where(valid, 0).sum()


def _check(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, reduction: str, softcap: float | None
) -> None:
    if hidden.shape[:-1] != labels.shape or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (hidden, weight, labels))
        raise ValueError(f"hidden, weight and labels must have the shapes (*, H), (V, H) and (*), got {shapes}.")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must have the shape ({weight.shape[0]},), got {tuple(bias.shape)}.")
    if reduction not in _REDUCTIONS:
        raise ValueError(f"reduction must be {' or '.join(map(repr, _REDUCTIONS))}, got {reduction!r}.")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap must be above 0, got {softcap}. Use None for logits without a cap.")
