"""Measure a converted model without changing it: run it exactly for a while, and learn nothing from it.

``revert`` would lose what the conversion has learned: widths chosen by ``bits="auto"``, norm estimators, groups of
layers that share a sketch. :func:`exact_but` gives modules their original class and takes it away again; their
attributes stay. :func:`set_aside` lets the passes inside of it leave no trace.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from rmm_linear.context.auto_bits import AutoBits
from rmm_linear.context.model_context import ModelContext
from rmm_linear.context.sketch_cache import SketchCache
from rmm_linear.conversion.revert import original_class
from rmm_linear.layers.base import SketchedLayer
from rmm_linear.layers.converted import ConvertedModule

_BITS = 4  # of a layer that has not chosen yet, as in its first steps


def converted_modules(model: nn.Module) -> list[ConvertedModule]:
    """List the converted modules of a model.

    Args:
        model: Any model.

    Returns:
        The modules, each once.
    """
    return [module for module in model.modules() if isinstance(module, ConvertedModule)]


@contextmanager
def exact_but(model: nn.Module, operations: Collection[str] = ()) -> Iterator[None]:
    """Make the converted modules of all operations but some exact, inside of the block.

    They have their original class there and keep their attributes. The attention function that a conversion registers
    is exact for modules that are not of its class, so the model's configuration stays as it is.

    Args:
        model: A converted model.
        operations: Those that stay converted, of :data:`rmm_linear.config.OPERATIONS`.

    Yields:
        Nothing.
    """
    with exact_where(model, lambda one: one.rmm_operation not in operations):
        yield


@contextmanager
def exact_where(model: nn.Module, is_exact: Callable[[ConvertedModule], bool]) -> Iterator[None]:
    """Make some converted modules exact, inside of the block, as :func:`exact_but` does.

    Args:
        model: A converted model.
        is_exact: Says which.

    Yields:
        Nothing.
    """
    changed = [(one, type(one)) for one in converted_modules(model) if is_exact(one)]
    try:
        for module, kind in changed:
            module.__class__ = original_class(kind)
        yield
    finally:
        for module, kind in changed:
            module.__class__ = kind


@contextmanager
def set_aside(model: nn.Module) -> Iterator[list[ModelContext]]:
    """Let forward and backward passes inside of the block leave no trace in a converted model.

    After it, contexts, the choices of ``bits="auto"``, norm estimators, what modules remember, and buffers (running
    averages) are as before, even in the middle of a forward pass. Inside, nothing is learned: layers take the widths
    that they have chosen, or 4 bits, and estimators predict what they know.

    Args:
        model: A converted model.

    Yields:
        The contexts of its modules.
    """
    modules = converted_modules(model)
    contexts = list({id(one): one for module in modules if (one := module.rmm_context) is not None}.values())
    things: list[Any] = [*modules, *contexts]
    before = [{name: value for name, value in vars(one).items() if _is_kept(one, name)} for one in things]
    buffers = [
        (module._buffers, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    for context in contexts:
        checks = context.checks
        context._reset()
        context.checks = checks.aside()
        context.sketch_cache = SketchCache(set(context.sketch_cache.groups))
        context.auto_bits = {}
    for module in modules:
        if isinstance(module, SketchedLayer):
            module.rmm_auto_bits = AutoBits(module.rmm_auto_bits.bits or _BITS)
            module.rmm_estimator = None  # the context has it too, for predictions
    try:
        yield contexts
    finally:
        for one, kept in zip(things, before, strict=True):
            for name in [name for name in vars(one) if _is_kept(one, name)]:
                del vars(one)[name]
            vars(one).update(kept)
        with torch.no_grad():
            for owner, name, buffer, value in buffers:
                owner[name] = buffer
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


def _is_kept(one: object, name: str) -> bool:
    return isinstance(one, ModelContext) or name.startswith("rmm_")
