"""Replace the forwards of modules inside of another one for a while, for the thread that runs it alone."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import CellType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rmm_linear.layers.converted import ConvertedModule


@contextmanager
def intercepted(module: Any, linears: Sequence[str], called: Callable[..., Any]) -> Iterator[dict[int, Passed]]:
    """Let a function run a module's linear layers: it gets a name, the layer's forward, and its arguments.

    Of a :class:`Passed` that it returns, hooks of the layer get the output, and the module what is passed on. Yields
    what has not been passed on, as where a module calls the forward of a layer without its hooks.
    """
    passed: dict[int, Passed] = {}  # by the output's id, which lives until the hook
    with ExitStack() as stack:
        for name in linears:
            child = module.get_submodule(name)
            forward = functools.partial(called, name, running_forward(child))
            stack.enter_context(replaced(child, functools.partial(_output_for_hooks, forward, passed)))
            stack.callback(child.register_forward_hook(functools.partial(_pass_on, passed)).remove)
        yield passed


class Passed(NamedTuple):
    """The output of a layer as hooks get it, and as the module gets it that called the layer, in a grad mode."""

    output: Tensor
    inner: Tensor
    has_gradients: bool = True


def _output_for_hooks(forward: Callable[..., Any], passed: dict[int, Passed], *args: Any, **kwargs: Any) -> Any:
    found = forward(*args, **kwargs)
    if isinstance(found, Passed):
        passed[id(found.output)] = found
        return found.output
    return found


def _pass_on(passed: dict[int, Passed], module: nn.Module, args: Any, output: Any) -> Any:
    found = passed.pop(id(output), None)
    if found is None:
        return output
    torch.set_grad_enabled(found.has_gradients)
    return found.inner


class _OwnForward:
    """A module's forward that threads replace for themselves: others may run the module meanwhile."""

    def __init__(self, module: nn.Module) -> None:
        self.before, self.own = vars(module).get("forward"), module.forward
        self.by_thread: dict[int, list[Callable[..., Any]]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        replaced = self.by_thread.get(threading.get_ident())
        return (replaced[-1] if replaced else self.own)(*args, **kwargs)


_changing = threading.Lock()


@contextmanager
def _set(known: _OwnForward, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace what a forward runs in this thread."""
    own = known.by_thread.setdefault(threading.get_ident(), [])
    own.append(forward)
    try:
        yield
    finally:
        own.pop()


@contextmanager
def replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    thread = threading.get_ident()
    with _changing:
        known = vars(module).get("forward")
        if not isinstance(known, _OwnForward):
            vars(module)["forward"] = known = _OwnForward(module)
        known.by_thread.setdefault(thread, []).append(forward)
    try:
        yield
    finally:
        with _changing:
            known.by_thread[thread].pop()
            if not known.by_thread[thread]:
                del known.by_thread[thread]
            if not known.by_thread and vars(module).get("forward") is known:
                if known.before is None:
                    del vars(module)["forward"]
                else:
                    vars(module)["forward"] = known.before


def running_forward(module: nn.Module) -> Callable[..., Any]:
    """Return what a call of a module runs in this thread."""
    known = vars(module).get("forward")
    if not isinstance(known, _OwnForward):
        return module.forward
    own = known.by_thread.get(threading.get_ident())
    return own[-1] if own else known.own


@contextmanager
def exact_inside(module: nn.Module, linears: Sequence[str] = ()) -> Iterator[None]:
    """Run converted modules inside of a module exactly, but some layers: they learn nothing, and take no seeds."""
    others = {inner for name in linears for inner in module.get_submodule(name).modules()}
    children = [one for one in module.modules() if isinstance(one, ConvertedModule) and one is not module]
    with ExitStack() as stack:
        for child in children:
            known = vars(child).get("forward")
            known = known.before if isinstance(known, _OwnForward) else known
            cell = _cell(child)
            if child not in others and cell is not None:
                stack.enter_context(_set(cell.cell_contents, original_forward(child)))
            elif child not in others and known is None:  # else another library has replaced it
                stack.enter_context(replaced(child, original_forward(child)))
        yield


def original_forward(module: Any) -> Callable[..., Any]:
    """Return the forward that a module had before it was converted, or has."""
    found = (one for one in type(module).__mro__ if "forward" in vars(one) and not issubclass(one, ConvertedModule))
    return next(found).forward.__get__(module)


def runs_its_class(module: nn.Module) -> bool:
    """Say whether a call of a module runs the forward of its class, in slices of its rows or as a part of a layer."""
    return "forward" not in vars(module) or _is_tiled(module) or _cell(module) is not None


def _is_tiled(module: nn.Module) -> bool:
    return bool(getattr(vars(module).get("forward"), "follows_class", False))


class _ClassForward(_OwnForward):
    """The forward that a module's class has now, where a function around it has kept the one of its former class."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.by_thread = module, {}

    @property
    def own(self) -> Callable[..., Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return functools.partial(type(self.module).forward, self.module)


def follow_class(module: nn.Module) -> None:
    """Let what transformers' tensor parallelism has put around a module's forward run that of its class from now on."""
    cell = _cell(module)
    if cell is not None and not isinstance(cell.cell_contents, _ClassForward):
        cell.cell_contents = _ClassForward(module)


def _cell(module: nn.Module) -> CellType | None:
    """Return what holds the forward of a module's class in the function of transformers' that replaces it."""
    replaced = vars(module).get("forward")
    if not getattr(replaced, "__module__", "").startswith("transformers.distributed."):
        return None
    for cell in getattr(replaced, "__closure__", None) or ():
        held = cell.cell_contents
        is_own = inspect.ismethod(held) and held.__self__ is module and held.__name__ == "forward"
        if is_own or isinstance(held, _ClassForward):
            return cell
    return None


@contextmanager
def without_tiles(model: nn.Module) -> Iterator[None]:
    """Let modules run the forward of their class inside of the block, all rows at once, to be tried and copied."""
    tiled = [(one, vars(one).pop("forward")) for one in model.modules() if _is_tiled(one)]
    try:
        yield
    finally:
        for module, forward in tiled:
            vars(module)["forward"] = forward


HOOKS = "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"


def has_hooks_of_others(module: nn.Module, linears: Sequence[str], kinds: Sequence[str]) -> bool:
    """Say whether linear layers of a module, or those in adapters, have hooks that are not this library's."""
    layers = [module.get_submodule(name) for name in linears]
    layers += [one.base_layer for one in layers if hasattr(one, "base_layer")]
    return any(not _is_own_hook(hook) for one in layers for kind in kinds for hook in vars(one)[kind].values())


def _is_own_hook(hook: Any) -> bool:
    function = hook.func if isinstance(hook, functools.partial) else hook
    return (getattr(function, "__module__", None) or "").startswith("rmm_linear.")
