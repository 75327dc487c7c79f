"""Copy a model without its weights, so that changes can be tried on the copy where there is no memory for steps."""

from __future__ import annotations

import copy
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from rmm_linear.memory.quantized import is_of, replaced

_COPIES = (Tensor.__deepcopy__, Tensor.clone)


def without_weights(model: nn.Module) -> nn.Module:
    """Return a deep copy of a model whose tensors are on the meta device; nothing is allocated on another one.

    Ties, views, modes, hooks and what is frozen, quantized, converted or planned stay. Functions of others that are
    hooks are the same ones, not copies.
    """
    inside, on_meta = {id(module) for module in model.modules()}, _OnMeta()
    memo: dict[int, Any] = {}
    for module in model.modules():
        for name, hooks in vars(module).items():
            for hook in hooks.values() if name.endswith("_hooks") and isinstance(hooks, dict) else ():
                if not _belongs(hook, inside):
                    memo[id(hook)] = hook
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and id(tensor) not in memo:
                memo[id(tensor)] = on_meta(tensor)
    try:
        with _Copies(on_meta):
            return copy.deepcopy(model, memo)
    except Exception as error:  # of what others have put into the model
        raise ValueError(
            f"Changes are tried on a copy of the model without weights, and {type(model).__name__} cannot be copied: "
            f"{type(error).__name__}: {error}. Remove what copy.deepcopy(model) fails on, or plan with a model that is "
            'made under torch.device("meta").'
        ) from error


def _belongs(hook: Any, modules: set[int]) -> bool:
    """Say whether a hook is the library's, or a method of one of the modules."""
    owner = hook.__self__ if isinstance(hook, MethodType) else hook
    kind = getattr(owner, "__module__", None) or type(owner).__module__
    return id(owner) in modules or f"{kind}.".startswith("rmm_linear.")


class _OnMeta:
    """Makes tensors on the meta device like others; those that share memory share it there."""

    def __init__(self) -> None:
        self._stores: dict[int, torch.UntypedStorage] = {}

    def __call__(self, tensor: Tensor) -> Tensor:
        if is_traceable_wrapper_subclass(tensor):
            names, context = tensor.__tensor_flatten__()
            inner = {name: self(getattr(tensor, name)) for name in names}
            made: Any = type(tensor).__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())
        else:
            made = self._plain(tensor.detach())
        if is_of(tensor):
            made = Tensor._make_subclass(type(tensor), made, tensor.requires_grad)
        elif isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, tensor.requires_grad)
        vars(made).update({name: replaced(value, self) for name, value in vars(tensor).items()})
        return made.requires_grad_(tensor.requires_grad) if tensor.is_leaf else made

    def _plain(self, tensor: Tensor) -> Tensor:
        if tensor.layout != torch.strided:
            return torch.empty_like(tensor, device="meta")
        there = tensor.untyped_storage()
        store = self._stores.setdefault(there._cdata, torch.UntypedStorage(there.nbytes(), device="meta"))
        empty = torch.empty(0, dtype=tensor.dtype, device="meta")
        return empty.set_(store, tensor.storage_offset(), tensor.shape, tensor.stride())  # pyright: ignore[reportArgumentType]


class _Copies(TorchFunctionMode):
    """Lets tensors that are copied be on the meta device."""

    def __init__(self, on_meta: _OnMeta) -> None:
        super().__init__()
        self.on_meta = on_meta

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _COPIES:
            return func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction():
            made = self.on_meta(args[0])
        if func is Tensor.__deepcopy__:
            args[1][id(args[0])] = made
        return made
