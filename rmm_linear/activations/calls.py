"""Modules whose own code calls functions of PyTorch, and multiplies: what these save for the backward pass is coded.

Outputs are those of PyTorch's functions, to the bit. Which calls a class has is read from its source, see
:mod:`rmm_linear.activations.own_code`; what each saves is in :mod:`rmm_linear.activations.functional`. Which of them
free bytes shows in the first training step, and the others are exact from then on.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parameter import is_lazy

from rmm_linear._support.distributed import shape_of
from rmm_linear.activations import functional
from rmm_linear.activations.base import PackedModule
from rmm_linear.activations.own_code import Calls, OwnCode, Site, own_code


class PackedCalls(PackedModule):
    """A module that saves what its own code multiplies, and what activations in it need, in few bits.

    Its methods are those of its class with other calls in them, in training; in eval mode they are the class's own.
    All rows are saved, those of padding too, which a loss of routing may count.
    """

    rmm_operation = "linear"  # that of its first call of a selected operation
    rmm_learns_rows = False

    @classmethod
    def fields_of(cls, original: type[nn.Module]) -> dict[str, Any]:
        """Return the methods of the class that is derived from a module's own."""
        changed = code_of(original).methods
        return {name: _in_training(original, name, one) for name, one in changed.items()}

    def _set_up(self, *arguments: Any, operation: str = "linear", **named: Any) -> None:
        super()._set_up(*arguments, **named)
        self.rmm_operation = operation  # pyright: ignore[reportAttributeAccessIssue]


def _in_training(original: type[nn.Module], name: str, changed: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that runs a changed one in training, unless another was put in its place since.

    A function in the class need not take a module.
    """
    own = getattr(original, name)

    @functools.wraps(own)
    def method(self: PackedCalls, *args: Any, **named: Any) -> Any:
        now = getattr(original, name)
        if now is not own or not isinstance(self, PackedCalls) or not self.training:
            return now(self, *args, **named)
        if not torch.compiler.is_compiling() and torch._C._is_tracing():  # pyright: ignore[reportAttributeAccessIssue]
            self._refuse_transforms()  # before sizes become tensors
        return changed(self, *args, **named)

    return method


# What is replaced

_OPERATIONS = {
    **dict.fromkeys(("linear", "@", "matmul", "mm", "bmm", "baddbmm", "einsum"), "linear"), "dropout": "dropout",
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), "convolution"), "layer_norm": "norm", "group_norm": "norm",
    "softmax": "attention", **dict.fromkeys(("max_pool2d", "index_add", "index_add_"), "pooling"),
    **dict.fromkeys(("avg_pool1d", "avg_pool2d", "avg_pool3d"), "pooling"),
}  # fmt: skip
_WEIGHTED = ("linear", "conv1d", "conv2d", "conv3d")  # called with a weight of the module's own
_Attempt = Callable[..., Tensor | None]
_FUNCTIONS: dict[str, tuple[_Attempt, Callable[..., Any]]] = {
    **{name: (getattr(functional, name), getattr(torch, name)) for name in ("matmul", "baddbmm", "einsum", "mul")},
    **{name: (getattr(functional, name), getattr(F, name))
       for name in ("linear", "dropout", "layer_norm", "group_norm", "max_pool2d", "softmax")},
    "index_add": (partial(functional.index_add, False), torch.index_add), "mm": (functional.matmul, torch.mm),
    "bmm": (functional.matmul, torch.bmm),
    **{f"conv{i}d": (partial(functional.convolution, i), getattr(F, f"conv{i}d")) for i in (1, 2, 3)},
    **{f"avg_pool{i}d": (partial(functional.average_pool, run), run)
       for i, run in enumerate((F.avg_pool1d, F.avg_pool2d, F.avg_pool3d), 1)},
    **{name: (partial(functional.activation, kind, getattr(F, name)), getattr(F, name))
       for name, kind in functional.ACTIVATIONS.items()},
    "clamp": (functional.clamp, torch.clamp), "clip": (functional.clamp, torch.clip),
}  # fmt: skip
_OTHERS = ("relu", "sigmoid", "tanh", "layer_norm", "softmax")  # in torch, with other arguments than in functional
_METHODS: dict[str, _Attempt] = {
    **{
        name: _FUNCTIONS[name][0]
        for name in ("matmul", "mm", "bmm", "mul", "sigmoid", "tanh", "relu", "clamp", "clip", "index_add", "softmax")
    },
    "index_add_": partial(functional.index_add, True),
}


def _ours(attempt: _Attempt, exact: Callable[..., Any]) -> Callable[..., Any]:
    def call(module: PackedCalls, site: int, *args: Any, **named: Any) -> Any:
        found = attempt(module, site, *args, **named)
        return exact(*args, **named) if found is None else found

    return call


def _method(name: str, attempt: _Attempt) -> Callable[..., Any]:
    def call(module: PackedCalls, site: int, x: Any, *args: Any, **named: Any) -> Any:
        found = attempt(module, site, x, *args, **named) if isinstance(x, Tensor) else None
        return getattr(x, name)(*args, **named) if found is None else found

    return call


CALLS = Calls(
    functions={
        **{exact: name for name, (_, exact) in _FUNCTIONS.items()},
        **{getattr(torch, name): f"torch.{name}" for name in _OTHERS},
    },
    methods={name: f".{name}" for name in _METHODS},
    ours={
        "*": _ours(functional.mul, operator.mul), "@": _ours(functional.matmul, operator.matmul),
        **{name: _ours(*one) for name, one in _FUNCTIONS.items()},
        **{f"torch.{name}": _ours(_FUNCTIONS[name][0], getattr(torch, name)) for name in _OTHERS},
        **{f".{name}": _method(name, one) for name, one in _METHODS.items()},
    },
)  # fmt: skip


@functools.cache
def code_of(kind: type[nn.Module]) -> OwnCode:
    """Return the code of a class with calls replaced."""
    return own_code(kind, CALLS)


def operation_of(site: Site) -> str:
    return _OPERATIONS.get(site.name.rpartition(".")[2], "activation")


def calls_of(module: nn.Module, operations: Sequence[str]) -> list[Site]:
    """Return the calls in a module's own code, of some operations, that may save what can be coded."""
    return [one for one in code_of(type(module)).sites if operation_of(one) in operations and _may_save(module, one)]


def why_left(module: nn.Module) -> str | None:
    """Say why calls in a module's own code cannot be replaced; None where there are none, or they can."""
    reasons = code_of(type(module)).left.values()
    return f"its own code calls functions of PyTorch, and cannot be changed: {next(iter(reasons))}" if reasons else None


def _may_save(module: nn.Module, site: Site) -> bool:
    """Say whether the attributes that an operator multiplies are tensors of several elements, and a weight is there."""
    if site.name in _WEIGHTED:
        own = (one for one in module._parameters.values() if one is not None and not is_lazy(one))
        return any(len(shape_of(one)) > 1 and 1 not in shape_of(one)[:2] and one.is_floating_point() for one in own)
    for name in site.own:
        value = None if name is None else getattr(module, name, 0.0)
        if isinstance(value, nn.Parameter) and (is_lazy(value) or value.numel() > 1):
            return True
        if not (value is None or isinstance(value, nn.Module)):
            return False
    return True
