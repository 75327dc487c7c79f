"""Logits that are computed when they are read, and not at all by the loss.

A language model computes logits = head(hidden) and gives them, reshaped, to ``F.cross_entropy``; the loss is all that
training needs of them. :class:`~rmm_linear.activations.logits.ChunkedHead` returns :class:`LazyLogits` instead: a
tensor that remembers hidden and what was done to it, as long as this is one of the few steps that models take on the
way to their loss (views, casts to float, multiplication by a number, tanh of a cap). ``F.cross_entropy`` of it is
:func:`rmm_linear.losses.chunked_cross_entropy`. Anything else reads the logits: they are computed then, with the same
operations in the same order as in the original model, with its autocast and with gradients.

A hook that is registered on them waits until they are read, and makes whatever uses them read them, since a loss in
chunks has no gradient of all logits. So FSDP2, which registers hooks on all outputs, does not read them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from rmm_linear._support.autocast import autocast_dtype
from rmm_linear.losses import chunked_cross_entropy

_READ = "The logits are computed when they are read, and the weight of the output layer has changed since the forward "
_READ += "pass, or FSDP has sharded it again. Read them before, or convert without the operation 'logits'."


@dataclass(frozen=True)
class Source:
    """The operands of logits that are not computed yet."""

    hidden: Tensor  # the input of the output layer
    head: Any
    weight: Tensor
    version: int
    rows: Tensor  # hidden after the views that were taken of the logits
    dtype: torch.dtype
    autocast: torch.dtype | None  # the dtype of autocast in the forward pass; None where it was off
    used: list[None]  # has an element once a loss was computed, or the logits
    is_tracked: bool = True  # whether they have a gradient: not after a step without gradients
    steps: tuple[Callable[[Tensor], Tensor], ...] = ()  # the operations since, to be repeated when the logits are read
    scale: float = 1.0  # the factor that they were multiplied by
    before: float = 1.0  # scale before the last step, if that was a division by divisor: tanh may follow
    divisor: float | None = None
    cap: float | None = None  # the divisor before tanh, if there was one
    is_open: bool = False  # whether the multiplication by cap after tanh is still to come

    @contextmanager
    def as_in_forward(self) -> Iterator[None]:
        """Have autocast as it was in the forward pass."""
        self.used.append(None)
        with torch.autocast(self.hidden.device.type, self.autocast, self.autocast is not None):
            yield


class LazyLogits(Tensor):
    """Logits of shape (*, V) that are computed when they are read."""

    _source: Source
    _value: Tensor | None
    _version_read: int  # of the value, when it was computed
    _viewed: LazyLogits | None  # the logits that these are a view of, by _view
    _view: Callable[[Tensor], Tensor]
    _like: Tensor  # without memory, and with the strides that they have
    _hooks: OrderedDict[int, Callable[[Tensor], Tensor | None]]

    @staticmethod
    def __new__(
        cls, source: Source, viewed: LazyLogits | None = None, view: Callable[[Tensor], Tensor] = Tensor.detach
    ) -> LazyLogits:
        """Make logits, which may be a view of others; nothing is computed."""
        shape = (*source.rows.shape[:-1], source.head.weight.shape[0])
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=source.dtype, device=source.rows.device)  # pyright: ignore[reportAttributeAccessIssue]
        made._source, made._value, made._hooks = source, None, OrderedDict()
        made._viewed, made._view, made._version_read = viewed, view, 0
        made._like = torch.empty(shape, device="meta") if viewed is None else view(viewed._like)
        return made

    def __init__(self, *arguments: Any) -> None:
        """Do nothing; see ``__new__``."""

    def read(self) -> Tensor:
        """Compute the logits, once."""
        if self._value is not None:
            return self._value
        value = self._computed() if self._viewed is None else self._view(self._viewed.read())
        if self._hooks:
            value.register_hook(self._run_hooks)
        self._value, self._version_read = value, value._version
        return value

    def _computed(self) -> Tensor:
        source = self._source
        if source.head.weight is not source.weight or source.weight._version != source.version:
            raise RuntimeError(_READ)
        # Whoever reads first, perhaps without gradients, others may need them.
        with torch.inference_mode(False), torch.enable_grad(), source.as_in_forward():
            value = getattr(source.head, "exact_forward", source.head.forward)(source.hidden)  # reverted since: its own
            for step in source.steps:
                value = step(value)
        return value

    def _is_written(self) -> bool:
        """Say whether something was written into these logits, or into those that they are a view of."""
        if self._value is not None and self._value._version != self._version_read:
            return True
        return self._viewed is not None and self._viewed._is_written()

    def _defer(self, hook: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
        handle = RemovableHandle(self._hooks)
        self._hooks[handle.id] = hook
        return handle

    def _run_hooks(self, gradient: Tensor) -> Tensor:
        for hook in tuple(self._hooks.values()):
            found = hook(gradient)
            gradient = gradient if found is None else found
        return gradient

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Take a step that models take on the way to their loss, or read the logits."""
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first = args[0] if args else kwargs.get("input")
        if isinstance(first, LazyLogits) and first._value is None and not first._is_written():
            if func == _REQUIRES_GRAD:
                return first._source.is_tracked
            if func is Tensor.register_hook and first._source.is_tracked:
                return first._defer(*args[1:], **kwargs)
            found = None
            if not first._hooks:
                found = _loss(first, *args[1:], **kwargs) if func is F.cross_entropy else _step(func, *args, **kwargs)
            if found is not None:
                return found
        args, kwargs = tree_map_only(LazyLogits, LazyLogits.read, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute what reaches an operator by another way, such as copies and printing."""
        args, kwargs = tree_map_only(LazyLogits, lambda one: one.read().detach(), (args, kwargs))
        return func(*args, **(kwargs or {}))


_METADATA = {
    # Before they are read, logits have no graph and are no view of another tensor: grad_fn and _base are None.
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_sparse", "grad_fn", "_base")
} | {Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.element_size, Tensor.ndimension}
_METADATA |= {
    Tensor.is_complex,
    Tensor.nelement,
    Tensor.get_device,
    Tensor.__len__,
    torch.is_floating_point,
    torch.numel,
}
_REQUIRES_GRAD = Tensor.requires_grad.__get__  # pyright: ignore[reportAttributeAccessIssue]
_VIEWS = (Tensor.view, Tensor.reshape, Tensor.flatten, torch.reshape, torch.flatten)
_PRODUCTS = (Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.mul)
_QUOTIENTS = (Tensor.div, Tensor.__truediv__, torch.div)


def _step(func: Any, logits: Any, *args: Any, **kwargs: Any) -> LazyLogits | None:
    """Return the logits after a step that the loss can take too; None for any other."""
    source, changed, mode = logits._source, None, torch.is_grad_enabled()
    is_view = func is Tensor.contiguous and not args and not kwargs
    if is_view:
        changed = {}
    elif func in _VIEWS and not kwargs:
        shape = tuple(func(logits._like, *args).shape)
        if shape[-1] == logits.shape[-1]:
            changed, is_view = {"rows": source.rows.reshape(*shape[:-1], source.rows.shape[-1])}, True
    elif func is Tensor.__getitem__ and _keeps_columns(args[0], logits.dim()):
        changed, is_view = {"rows": source.rows[args[0]]}, True
    elif func is Tensor.clone and not args and not kwargs:  # of DDP, of all outputs
        changed = {}
    elif (func is Tensor.float and not args) or (func is Tensor.to and args in ((torch.float32,), (source.dtype,))):
        dtype = torch.float32 if func is Tensor.float else args[0]
        if dtype == source.dtype and not kwargs:
            return logits
        changed = None if kwargs else {"dtype": dtype}
    elif func in (torch.tanh, Tensor.tanh) and source.divisor is not None:
        changed = {"cap": source.divisor, "scale": source.before, "divisor": None, "is_open": True}
    elif func in _PRODUCTS + _QUOTIENTS and len(args) == 1 and type(args[0]) in (int, float) and not kwargs:
        changed = _number(source, func in _QUOTIENTS, float(args[0]))
    if changed is None:
        return None

    def again(value: Tensor) -> Tensor:
        with torch.set_grad_enabled(mode):
            return func(value, *args, **kwargs)

    steps, is_tracked = (*source.steps, again), source.is_tracked and mode
    made = replace(source, **changed, steps=steps, is_tracked=is_tracked)
    like = again(logits._like) if is_view else None
    is_view = like is logits._like or (like is not None and like._base is not None)  # not a copy, as of a cut's rows
    return LazyLogits(made, logits, again) if is_view else LazyLogits(made)


def _number(source: Source, is_quotient: bool, number: float) -> dict[str, Any] | None:
    if source.cap is not None:  # cap · tanh(z / cap), and nothing after it
        return {"is_open": False} if source.is_open and not is_quotient and number == source.cap else None
    if number == 0:
        return None
    scale = source.scale / number if is_quotient else source.scale * number
    return {"scale": scale, "before": source.scale, "divisor": number if is_quotient and number > 0 else None}


def _keeps_columns(index: Any, dimensions: int) -> bool:
    """Say whether an index leaves the last dimension whole, and takes slices of the others."""
    if not isinstance(index, tuple) or index[-1:] != (slice(None),):
        return False
    is_whole = len(index) == dimensions or (len(index) <= dimensions and index.count(Ellipsis) == 1)
    return is_whole and all(part is Ellipsis or isinstance(part, slice) for part in index)


def _loss(
    logits: LazyLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """F.cross_entropy in chunks; None where only the logits will do."""
    source = logits._source
    is_plain = weight is None and size_average is None and reduce is None and not label_smoothing
    if not is_plain or reduction not in ("mean", "sum") or source.is_open or logits.dim() != 2:
        return None
    if target.dim() != 1 or target.dtype != torch.int64:
        return None
    is_wide = autocast_dtype(logits.device.type, logits.dtype) is not None  # autocast computes losses in float32
    with torch.set_grad_enabled(torch.is_grad_enabled() and source.is_tracked), source.as_in_forward():
        loss = chunked_cross_entropy(
            source.rows,
            source.weight,
            target,
            bias=source.head.bias,
            chunk=getattr(source.head, "rmm_chunk", None),
            ignore_index=ignore_index,
            reduction=reduction,
            scale=source.scale,
            softcap=source.cap,
        )
    return loss.to(torch.float32 if is_wide else logits.dtype)
