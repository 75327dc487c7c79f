"""Find the region of a module, and check it: see :mod:`rmm_linear.activations.region`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_unflatten

from rmm_linear._support.saved_graph import graph_leaves
from rmm_linear.activations.base import SavingCall
from rmm_linear.activations.region_arguments import (
    Arguments,
    is_cache,
    leaves_of,
    named,
    narrowed,
    positional,
    shapes_of,
)
from rmm_linear.activations.region_run import (
    SOFTMAX,
    Different,
    Filled,
    RegionForm,
    RegionRun,
    alone,
    exact_inside,
    intercepted,
    random_kept,
    random_state,
    reaches,
    replay,
    set_random_state,
)
from rmm_linear.activations.region_slices import DRAWS, WHOLE, Part, SavedBytes, Slices, guesses, sizes
from rmm_linear.context.surroundings import running_again

_CHOICES = {torch.topk, torch.argmax, torch.sort, torch.argsort, torch.multinomial}
_CHOICES |= {getattr(Tensor, one.__name__) for one in _CHOICES}
_SHAPES = {
    "shape", "device", "dtype", "layout", "ndim", "requires_grad", "is_cuda", "is_cpu", "is_meta", "is_nested",
    "is_sparse", "is_leaf", "itemsize", "nbytes", "size", "dim", "numel", "nelement", "stride", "is_floating_point",
    "__len__", "element_size", "is_contiguous", "ndimension", "get_device", "new_empty", "new_zeros", "new_ones",
    "new_full", "new_tensor", "zeros_like", "ones_like", "empty_like", "full_like", "type", "data_ptr",
}  # fmt: skip
_VIEWS = {
    "view", "reshape", "transpose", "permute", "unsqueeze", "squeeze", "flatten", "unflatten", "contiguous", "expand",
    "view_as", "movedim", "detach", "chunk", "split", "unbind", "stack", "cat",
}  # fmt: skip
_WIDTH = 8  # of what is not coded
_LARGEST_ERROR = {torch.float64: 1e-9, torch.float32: 1e-4}  # of a gradient in the check, relative; 1e-2 in half types


@contextmanager
def _buffers_kept(module: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Give a module's buffers the values back that they have now."""
    before = {name: one.detach().clone() for name, one in module.named_buffers()}
    try:
        yield before
    finally:
        for name, one in module.named_buffers():
            if name in before and not torch.equal(one, before[name]):
                with torch.no_grad():
                    one.copy_(before[name])


def _draws(*args: Any, **kwargs: Any) -> bool:
    given = inspect.signature(F.dropout).bind(*args, **kwargs)
    given.apply_defaults()
    return bool(given.arguments["p"] and given.arguments["training"])


class _Softmaxes(TorchFunctionMode):
    """Notes how many linear layers were called before the last softmax, and before the last choice by values."""

    def __init__(self, calls: list[Any]) -> None:
        super().__init__()
        self.calls, self.last, self.choice, self.is_plain, self.is_random = calls, 0, 0, False, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in SOFTMAX or func is F.scaled_dot_product_attention:
            self.last = len(self.calls)
        if func is F.scaled_dot_product_attention:
            mask = args[3] if len(args) > 3 else (kwargs or {}).get("attn_mask")
            self.is_plain = self.is_plain or (mask is not None and mask.requires_grad and mask.is_cpu)
        self.is_random = self.is_random or (func is F.dropout and _draws(*args, **(kwargs or {})))
        if func in _CHOICES:
            self.choice = len(self.calls)
        return func(*args, **(kwargs or {}))


class _Reads(TorchFunctionMode):
    """Notes which of some tensors, or views of them, are read for more than their shape."""

    def __init__(self, tensors: dict[int | str, Tensor]) -> None:
        super().__init__()
        self.keys, self.read = {id(one): {key} for key, one in tensors.items()}, set[int | str]()
        self.held: list[Tensor] = list(tensors.values())  # an id is of one that lives

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        keys = {key for one in tree_leaves((args, kwargs)) for key in self.keys.get(id(one), ())}
        name = getattr(func, "__name__", "")
        name = getattr(func.__self__, "__name__", "") if name == "__get__" else name
        if keys and name in _VIEWS:
            self.held += tree_leaves(found)
            self.keys |= dict.fromkeys(map(id, tree_leaves(found)), keys)
        elif keys and name not in _SHAPES:
            self.read |= keys
        return found


def look(
    module: Any, linears: Sequence[str], original: Callable[..., Any], arguments: Arguments, *, is_checked: bool = True
) -> RegionForm:
    """Find the region of a module, and check that its outputs have the values and the gradients of autograd."""
    device = next(one for one in tree_leaves(arguments) if isinstance(one, Tensor)).device
    # An output that a node of its own saved as it is would be kept for ever.
    identity = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor)
    kept = _buffers_kept(module) if is_checked else nullcontext({})
    with (
        alone,
        identity,
        running_again(),
        random_kept(device),
        exact_inside(module),
        torch.enable_grad(),
        kept as buffers,
    ):
        state = random_state(device)
        try:
            return _look(module, linears, original, arguments, state, buffers if is_checked else None)
        except torch.OutOfMemoryError:
            raise
        except (Exception, Different, Filled) as error:  # of code that is not made to run again
            return RegionForm(reason=f"its code cannot run again ({type(error).__name__}: {str(error)[:200]})")


def _look(
    module: Any,
    linears: Sequence[str],
    original: Callable[..., Any],
    arguments: Arguments,
    state: Tensor,
    buffers: dict[str, Tensor] | None,
) -> RegionForm:
    given, calls = _detached(arguments), list[tuple[str, Tensor, Tensor, int]]()
    before = {id(one) for one in _tensors_of(module, given)}

    def called(name: str, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = run(*args, **kwargs)
        calls.append((name, args[0], output, output._version))
        return output

    with intercepted(module, linears, called), _Softmaxes(calls) as seen:
        output = original(*positional(given), **named(given))
    form, sources = _found(given, calls, seen.last)
    if 0 < seen.choice <= (seen.last or form.calls):
        form.reason = "it chooses by its scores, and decoded ones would choose otherwise"
    elif any(one.requires_grad and id(one) not in before for one in _tensors_of(module, given)):
        form.reason = "it leaves tensors that have a gradient where other code may read them"
    elif buffers is not None and any(not torch.equal(one, buffers[name]) for name, one in module.named_buffers()):
        form.reason = "it changes its buffers"
    if form.reason:
        return form
    form.is_plain = seen.is_plain
    form.writes = any(one._version != version for _, _, one, version in sources)
    outs = [torch.zeros_like(one, requires_grad=True) for _, _, one, _ in sources]
    again = _detached(arguments)
    floats = {key: one for key, one in again.items() if isinstance(one, Tensor) and one.requires_grad}
    shapes = [one.shape for name, _, one, _ in calls if name == form.sink]
    last = 1 - form.sinks if form.sinks > 1 else None  # call of the sink, before which all is read
    saved = SavedBytes([*outs, *_floats(again), *module.parameters()])
    with _Reads(floats) as reads, torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
        shape = replay(module, linears, form, outs, again, None, shapes, last).shape
    form.free = frozenset(floats.keys() - reads.read)
    run = functools.partial(replay, module, linears, form)

    def misfit(part: Part, some: Sequence[Tensor], arguments: Arguments) -> str | None:
        found = run(some, arguments, None, [part.shape(one) for one in shapes], last).shape
        return None if found == part.shape(shape) else "its code has another shape for some of its sequences"

    candidates = _candidates(misfit, outs, again, saved.bytes)
    if buffers is None:
        form.slices = candidates[0] if candidates else None
        if form.slices is not None and seen.is_random:  # of a simulated step, whose random state does not change
            form.slices = replace(form.slices, reason=DRAWS)
        return form
    wanted = [*_floats(given), *(one for one in module.parameters() if one.requires_grad)]
    exact = _floats(output)
    if any(id(one) not in set(map(id, wanted)) for one in graph_leaves(exact)):
        form.reason = "it reads parameters, or tensors that have a gradient, which are neither its own nor arguments"
        return form
    directions = [_directions(one) for one in exact]
    expected = torch.autograd.grad(exact, wanted, directions, allow_unused=True)
    places = [i for i, one in enumerate(leaves_of(output)[0]) if isinstance(one, Tensor) and one.requires_grad]

    def difference(count: int) -> str | None:
        """Say how a region differs from autograd, or why its replay is not divided; None for neither."""
        set_random_state(exact[0].device, state)
        given = _detached(arguments)
        run = RegionRun(
            module, linears, original, form, given, SavingCall(), [0] * form.calls, _WIDTH, is_coded=False, count=count
        )
        made = leaves_of(run.forward())[0]
        made = [made[place] for place in places]
        if not all(one.requires_grad for one in made):
            return "run again, its code gives no gradient where autograd gives one"
        if run.why_whole:
            return run.why_whole
        wanted = [*_floats(given), *(one for one in module.parameters() if one.requires_grad)]
        found = torch.autograd.grad(made, wanted, directions, allow_unused=True)
        return _difference(exact, made, expected, found)

    form.reason = difference(1)
    for candidate in candidates if form.reason is None else []:
        form.slices = candidate
        reason = candidate.reason or _tried(difference, 2)
        if reason is None:
            break
        form.slices = replace(candidate, reason=reason)
    return form


def _tried(run: Callable[..., str | None], *args: Any) -> str | None:
    """Return what a function says of a difference, or that it does not run."""
    try:
        return run(*args)
    except torch.OutOfMemoryError:
        raise
    except (Exception, Different) as error:
        return f"its code does not run for some of its sequences ({type(error).__name__}: {str(error)[:200]})"


def _candidates(
    misfit: Callable[..., str | None], outs: Sequence[Tensor], arguments: Arguments, saved: int
) -> list[Slices]:
    """Return the ways to divide a replay that run for the first slice; none for one sequence."""
    shapes, leaves, found = [one.shape for one in outs], shapes_of(arguments), list[Slices]()
    if sizes(shapes)[0] < 2:
        return []
    reason: str | None = None
    for guess in guesses(saved, shapes, leaves):
        cut = guess.cut(2, shapes, leaves) or WHOLE
        part = cut.parts()[0]
        some = [part.of(one, ratio) for one, ratio in zip(outs, cut.sources, strict=True)]
        with torch.no_grad():
            reason = _tried(misfit, part, some, narrowed(arguments, part, cut))
        found += [replace(guess, reason=reason)]
    return [one for one in found if one.reason is None] or found[:1]


def _floats(tree: Any) -> list[Tensor]:
    return [one for one in leaves_of(tree)[0] if isinstance(one, Tensor) and one.requires_grad]


def _tensors_of(module: nn.Module, arguments: Arguments) -> list[Tensor]:
    """Return the tensors in arguments, in objects among them, and in attributes of modules."""
    leaves = leaves_of(arguments)[0]
    objects = [one for one in leaves if not isinstance(one, Tensor | nn.Module) and not is_cache(one)]
    held = [dict(one) if isinstance(one, Mapping) else getattr(one, "__dict__", None) for one in objects]
    held += [
        {name: one for name, one in vars(inner).items() if name not in ("_parameters", "_buffers", "_modules")}
        for inner in module.modules()
    ]
    return [one for one in [*leaves, *tree_leaves(held)] if isinstance(one, Tensor)]


def _detached(arguments: Arguments) -> Arguments:
    """Return arguments that share memory with given ones; floating tensors need a gradient, and caches are left out."""
    leaves, spec = leaves_of(arguments)
    made = [None if is_cache(one) else one for one in leaves]
    for i, one in enumerate(made):
        if isinstance(one, Tensor):
            made[i] = one.detach().requires_grad_() if one.is_floating_point() else one.detach().clone()
    return tree_unflatten(made, spec)


def _directions(value: Tensor) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(0)
    numbers = torch.randn(value.shape, generator=generator, dtype=torch.float32, device="cpu")
    return numbers.to(value.device, value.dtype)


_Call = tuple[str, Tensor, Tensor, int]  # of a linear layer: its name, input, output, and the version of that


def _found(arguments: Arguments, calls: Sequence[_Call], last: int) -> tuple[RegionForm, Sequence[_Call]]:
    """Find sources and sink. last: Calls of linear layers before the last softmax; 0 if none was seen."""
    given = {id(one) for one in leaves_of(arguments)[0]}
    is_argument = [id(x) in given for _, x, _, _ in calls]
    if not last:  # in a kernel that is no function of PyTorch: the last layer is the sink, unless it reads an argument
        last = len(calls) - (0 if is_argument[-1:] == [True] else 1)
    while 0 < last < len(calls) and is_argument[last]:
        last += 1  # values, made behind the scores
    if last < 1:
        return RegionForm(reason="no linear layer was called before its softmax"), []
    sink = calls[last][0] if last < len(calls) else None
    sinks = [name for name, *_ in calls].count(sink or "")
    sources = [call for call in calls[:last] if call[0] != sink]
    is_later = len(sources) < last  # a softmax lies behind the sink, as of a second stream
    made = [output for _, _, output, _ in calls]
    reads = any(reaches(x, made) for _, x, _, _ in sources)
    if is_later and (reads or not sources):
        return RegionForm(reason=f"its {sink} is called before its softmax and behind it"), []
    derives = is_later or not (reads or all(is_argument[:last]))
    return RegionForm(len(sources), sink, sinks, reads, derives), sources


def _difference(
    exact: Sequence[Tensor], made: Sequence[Tensor], expected: Sequence[Tensor | None], got: Sequence[Tensor | None]
) -> str | None:
    """Say how a region differs from autograd; None if it does not."""
    limit = _LARGEST_ERROR.get(exact[0].dtype, 1e-2)
    for one, other in zip(exact, made, strict=True):
        if not _is_near(one.detach(), other.detach(), limit):
            return "run again, its code has another output"
        if not torch.equal(one.detach(), other.detach()):
            return "without gradients, its code has an output with other last bits"
    # What is 0 but for rounding, as the gradient of a key's bias, has an error relative to the others.
    least = 0.01 * max((float(one.double().norm()) for one in expected if one is not None), default=0.0)
    for one, other in zip(expected, got, strict=True):
        only = other if one is None else one
        if (one is None) != (other is None) and only is not None and float(only.double().norm()) > limit * least:
            return "run again, its code gives no gradient where autograd gives one"
        if one is not None and other is not None and not _is_near(one, other, limit, least):
            return "run again, its code has another gradient"
    return None


def _is_near(one: Tensor, other: Tensor, limit: float, least: float = 0.0) -> bool:
    one, other = one.double(), other.double()
    return float((one - other).norm()) <= limit * max(float(one.norm()), least)
