"""Find the region of a module, and check it: see :mod:`rmm_linear.activations.region`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_unflatten

from rmm_linear.activations.base import SavingCall
from rmm_linear.activations.region_run import (
    SOFTMAX,
    Arguments,
    RegionForm,
    RegionRun,
    Stop,
    Which,
    intercepted,
    is_cache,
    leaves_of,
    named,
    original_forward,
    own_parameters,
    positional,
    random_kept,
    random_state,
    replay,
    set_random_state,
)
from rmm_linear.layers.converted import ConvertedModule

_CHOICES = {torch.topk, torch.argmax, torch.sort, torch.argsort, torch.multinomial}
_CHOICES |= {getattr(Tensor, one.__name__) for one in _CHOICES}
_WIDTH = 8  # of what is not coded
_LARGEST_ERROR = {torch.float64: 1e-9, torch.float32: 1e-4}  # of a gradient in the check, relative; 1e-2 in half types


@contextmanager
def _exact_inside(module: nn.Module) -> Iterator[None]:
    """Run converted modules inside of a module exactly: they learn nothing, and take no seeds."""
    with ExitStack() as stack:
        for child in module.modules():
            if child is not module and isinstance(child, ConvertedModule):
                vars(child)["forward"] = original_forward(child)
                stack.callback(vars(child).pop, "forward", None)
        yield


class _Softmaxes(TorchFunctionMode):
    """Notes how many linear layers were called before the last softmax, and before the last choice by values."""

    def __init__(self, calls: list[Any]) -> None:
        super().__init__()
        self.calls, self.last, self.choice = calls, 0, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in SOFTMAX or func is F.scaled_dot_product_attention:
            self.last = len(self.calls)
        if func in _CHOICES:
            self.choice = len(self.calls)
        return func(*args, **(kwargs or {}))


def look(module: Any, original: Callable[..., Any], arguments: Arguments, *, is_checked: bool = True) -> RegionForm:
    """Find the region of a module, and check that it has the output and the gradients of autograd.

    It runs the module twice exactly and twice as a region, without a trace in its parameters or the random numbers.
    """
    device = next(one for one in tree_leaves(arguments) if isinstance(one, Tensor)).device
    identity = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    with identity, random_kept(device), _exact_inside(module), torch.enable_grad():
        state = random_state(device)
        try:
            return _look(module, original, arguments, device, state, is_checked)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of code that is not made to run again
            return RegionForm(reason=f"its code cannot run again ({type(error).__name__}: {str(error)[:200]})")


def _look(
    module: Any, original: Callable[..., Any], arguments: Arguments, device: torch.device, state: Tensor, checked: bool
) -> RegionForm:
    given = _detached(arguments)
    calls: list[tuple[str, Tensor, Tensor, int]] = []

    def called(name: str, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = run(*args, **kwargs)
        calls.append((name, args[0], output, output._version))
        return output

    with intercepted(module, called), _Softmaxes(calls) as seen:
        output = original(*positional(given), **named(given))
    form = _found(given, calls, seen.last)
    if 0 < seen.choice <= form.calls:
        form.reason = "it chooses by its scores, and decoded ones would choose otherwise"
    if form.reason:
        return form
    leaves = leaves_of(output)[0]
    value = calls[form.calls][1] if form.sink else next(one for one in leaves if isinstance(one, Tensor))
    form.writes = any(one._version != version for _, _, one, version in calls[: form.calls])
    first = next((i for i, one in enumerate(leaves) if isinstance(one, Tensor)), None)
    form.outputs = tuple(
        i for i, one in enumerate(leaves) if i != first and isinstance(one, Tensor) and one.requires_grad
    )
    inputs = [one for one in tree_leaves(given) if isinstance(one, Tensor) and one.requires_grad]
    wanted = [*inputs, *(one for one in own_parameters(module) if one.requires_grad)]
    y = torch.ones_like(value) if not checked else _directions(value)
    expected = torch.autograd.grad(value, wanted, y, allow_unused=True)
    outs = [one.detach().requires_grad_() for _, _, one, _ in calls[: form.calls]]
    if form.writes:  # they have changed since
        outs = [torch.zeros_like(one, requires_grad=True) for one in outs]
    # The same arguments, as leaves that reach the region past the sources.
    again = _detached(arguments)
    set_random_state(device, state)
    reached = [(key, one) for key, one in again.items() if isinstance(one, Tensor) and one.requires_grad]
    there = torch.autograd.grad(
        replay(module, form, outs, again), [*outs, *(one for _, one in reached)], y, allow_unused=True
    )
    form.free = frozenset(key for (key, _), one in zip(reached, there[len(outs) :], strict=True) if one is None)
    if not checked:
        return form
    set_random_state(device, state)
    last = _detached(arguments)
    run = RegionRun(module, original, form, last, SavingCall(), [0] * form.calls, _WIDTH, is_coded=False)
    inputs = [one for one in tree_leaves(last) if isinstance(one, Tensor) and one.requires_grad]
    wanted = [*inputs, *(one for one in own_parameters(module) if one.requires_grad)]
    found_value = _value_of(run)
    found = torch.autograd.grad(found_value, wanted, y, allow_unused=True)
    form.reason = _difference(value, found_value, expected, found)
    return form


def _value_of(run: RegionRun) -> Tensor:
    """Run a region up to its sink."""
    join = run.joined

    def stop(value: Tensor, which: Which = None) -> Tensor:
        raise Stop(join(value, which))

    run.joined = stop
    try:
        run.forward()
    except Stop as stopped:
        return stopped.value
    raise RuntimeError("its sink was not called")


def _detached(arguments: Arguments) -> Arguments:
    """Return arguments that share memory with given ones; floating tensors need a gradient, and caches are left out."""
    leaves, spec = leaves_of(arguments)
    made = [None if is_cache(one) else one for one in leaves]
    for i, one in enumerate(made):
        if isinstance(one, Tensor):
            made[i] = one.detach().requires_grad_() if one.is_floating_point() else one.detach()
    return tree_unflatten(made, spec)


def _directions(value: Tensor) -> Tensor:
    numbers = torch.randn(value.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    return numbers.to(value.device, value.dtype)


def _found(arguments: Arguments, calls: Sequence[tuple[str, Tensor, Tensor, int]], last: int) -> RegionForm:
    """Find sources and sink. last: Calls of linear layers before the last softmax; 0 if none was seen."""
    storages = {one.untyped_storage()._cdata for one in tree_leaves(arguments) if isinstance(one, Tensor)}
    is_argument = [x.untyped_storage()._cdata in storages for _, x, _, _ in calls]
    if not last:  # in a kernel that is no function of PyTorch: the last layer is the sink, unless it reads an argument
        last = len(calls) - (0 if is_argument[-1:] == [True] else 1)
    if last < 1:
        return RegionForm(reason="no linear layer was called before its softmax")
    sink = calls[last][0] if last < len(calls) else None
    if sink is not None and [name for name, *_ in calls].count(sink) > 1:
        return RegionForm(reason=f"its {sink} is called more than once")
    return RegionForm(last, sink, reads=not all(is_argument[:last]))


def _difference(
    value: Tensor, found: Tensor, expected: Sequence[Tensor | None], got: Sequence[Tensor | None]
) -> str | None:
    """Say how a region differs from autograd; None if it does not."""
    limit = _LARGEST_ERROR.get(value.dtype, 1e-2)
    if not _is_near(value.detach(), found.detach(), limit):
        return "run again, its code has another output"
    for one, other in zip(expected, got, strict=True):
        only = other if one is None else one
        if (one is None) != (other is None) and only is not None and bool(only.any()):
            return "run again, its code gives no gradient where autograd gives one"
        if one is not None and other is not None and not _is_near(one, other, limit):
            return "run again, its code has another gradient"
    return None


def _is_near(one: Tensor, other: Tensor, limit: float) -> bool:
    one, other = one.double(), other.double()
    return bool((one - other).norm() <= limit * one.norm())
