"""Remember what operators make of fake tensors, which depends on shapes, strides and dtypes alone.

PyTorch remembers it too, for all that a tensor may be: subclasses, sparse or symbolic, constant, complex. To look that
up takes most of the time of a simulated step. Here are plain tensors and numbers, in operators of PyTorch that return
new tensors, their first argument, or a view of it; all else is left to PyTorch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

_aten = torch.ops.aten
_NEW, _WRITTEN, _VIEW = "new", "written", "view"
_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
_OTHERS = {_aten._unsafe_view.default, _aten._resize_output_.default}
_OTHERS |= {_aten.lift.default, _aten.lift_fresh.default, _aten.lift_fresh_copy.default}
_PLAIN = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}


class _UnknownArgumentError(Exception):
    """An argument is neither a plain fake tensor nor a number."""


@functools.cache
def _kind_of(func: Any) -> str:
    """Return what an operator returns; empty where that is not known."""
    schema = getattr(func, "_schema", None)
    if schema is None or func.namespace != "aten" or func in _OTHERS or not _TAGS.isdisjoint(func.tags):
        return ""
    of_arguments = [argument.alias_info for argument in schema.arguments]
    of_results = [result.alias_info for result in schema.returns]
    if not any(of_arguments) and not any(of_results):
        return _NEW
    if len(of_results) != 1 or of_arguments[0] is None or any(of_arguments[1:]) or of_results[0] is None:
        return ""
    if of_results[0].is_write:
        return _WRITTEN
    composed = torch._C._dispatch_has_kernel_for_dispatch_key(
        func.name(), torch._C.DispatchKey.CompositeImplicitAutograd
    )
    return "" if composed else _VIEW


def _described(value: Any) -> Any:
    kind = type(value)
    if kind is FakeTensor:
        if value.constant is not None or value.layout is not torch.strided or value.is_neg() or value.is_complex():
            raise _UnknownArgumentError
        return value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device, value.requires_grad
    if kind in _PLAIN:
        return kind, value
    if kind is list or kind is tuple:
        return kind, *map(_described, value)
    raise _UnknownArgumentError


class Remembered:
    """What operators returned in one mode of fake tensors."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._known: dict[Any, Any] = {}

    def __call__(self, func: Any, args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        """Return what an operator returns, or ``run()``, which has it run by its rule for fake tensors."""
        kind = _kind_of(func)
        if not kind or self._mode.in_kernel_invocation:
            return run()
        try:
            key = (func, torch.get_default_dtype(), *map(_described, args))
            if kwargs:
                key += tuple((name, _described(value)) for name, value in kwargs.items())
        except _UnknownArgumentError:
            return run()
        if key not in self._known:
            output = run()
            self._known[key] = _noted(kind, args, output)
            return output
        known = self._known[key]
        if known is None:
            return run()
        if kind == _WRITTEN:
            return args[0]
        if type(known) is list:
            return tuple(self._made(one) for one in known)
        return self._made(known, args[0] if kind == _VIEW else None)

    def _made(self, known: Any, base: Tensor | None = None) -> FakeTensor | None:
        if known is None:
            return None
        shape, stride, offset, dtype, device, _ = known
        with in_kernel_invocation_manager(self._mode):
            empty = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            if base is not None:
                empty.set_(base.untyped_storage(), offset, shape, stride)
        return FakeTensor(self._mode, empty, device)


def _noted(kind: str, args: Any, output: Any) -> Any:
    """Return what is known of a result; None where another one may not be alike."""
    if kind == _WRITTEN:
        return "" if output is args[0] else None
    results = output if type(output) is tuple else (output,)
    some = [one for one in results if one is not None]
    try:
        found = [None if one is None else _described(one) for one in results]
    except _UnknownArgumentError:
        return None
    if not some or any(type(one) is not FakeTensor or one.requires_grad for one in some):
        return None
    own = {one.untyped_storage()._cdata for one in some}
    if kind == _VIEW:
        is_alike = type(output) is FakeTensor and type(args[0]) is FakeTensor and output.dtype == args[0].dtype
        is_alike = is_alike and own == {args[0].untyped_storage()._cdata}
    else:
        before = {one.untyped_storage()._cdata for one in _tensors(args)}
        is_alike = own.isdisjoint(before) and len(own) == len(some) and all(map(_is_whole, some))
    if not is_alike:
        return None
    return found if type(output) is tuple else found[0]


def _tensors(args: Any) -> list[Tensor]:
    return [
        one for arg in args for one in (arg if isinstance(arg, list | tuple) else (arg,)) if isinstance(one, Tensor)
    ]


def _is_whole(tensor: Tensor) -> bool:
    """Say whether a tensor's storage has just its elements, from the first one on."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    size = (last + 1) * tensor.itemsize if tensor.numel() else 0
    return tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == size
