"""Make a converted model exact again: for good, or for a while to measure it without changing it.

:func:`revert` loses what the conversion has learned: norm estimators, groups of layers that share a sketch.
:func:`exact_but` gives modules their original class and takes it away again; their attributes stay. :func:`set_aside`
lets the passes inside of it leave no trace.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from rmm_linear.context.model_context import ModelContext
from rmm_linear.context.sketch_cache import SketchCache
from rmm_linear.layers.converted import ConvertedModule
from rmm_linear.layers.linear import SketchedLayer


def converted_modules(model: nn.Module) -> list[ConvertedModule]:
    return [module for module in model.modules() if isinstance(module, ConvertedModule)]


@contextmanager
def exact_but(model: nn.Module, operations: Collection[str] = ()) -> Iterator[None]:
    """Make the converted modules of all operations but some exact, inside of the block.

    They have their original class there and keep their attributes. The attention function that a conversion registers
    is exact for modules that are not of its class, so the model's configuration stays as it is.
    """
    with exact_where(model, lambda one: one.rmm_operation not in operations):
        yield


@contextmanager
def exact_where(model: nn.Module, is_exact: Callable[[ConvertedModule], bool]) -> Iterator[None]:
    """Make some converted modules exact, inside of the block, as :func:`exact_but` does."""
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

    After it, contexts, norm estimators, what modules remember, and buffers (running averages) are as before, even in
    the middle of a forward pass. Inside, nothing is learned: estimators predict what they know.
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
        context.learned = {index: one.settled() for index, one in context.learned.items()}
        context.noise = context.noise.settled()
        context.directions = {index: replace(one, is_learning=False) for index, one in context.directions.items()}
    for module in modules:
        if isinstance(module, SketchedLayer):
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


def revert(model: nn.Module) -> nn.Module:
    """Give every converted module of a model its original class back, in place.

    A model that trains by a plan (:func:`rmm_linear.fit`, ``plan.apply()``) recomputes and offloads nothing any more
    either, and one with tiles (:func:`rmm_linear.tile`) runs nothing in slices.

    Args:
        model: A converted model, or part of one; or a model with a plan, or with tiles.

    Returns:
        The same model, exact again.

    Raises:
        TypeError: If ``model`` is not a module.
        ValueError: If the model has no converted module, no plan and no tiles.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}. Pass the model.")
    # A wrapper has the model inside. Tiles come before a plan, and go after it.
    handles = [(module, name) for name in ("rmm_applied", "rmm_tiled") for module in model.modules()]
    planned = [module for module, name in handles if name in vars(module)]
    for module, name in handles:
        if name in vars(module):
            vars(module)[name].revert()  # which comes back here if the plan has a conversion
    converted = converted_modules(model)
    if planned and not converted:
        return model
    if not converted:
        raise ValueError(
            "revert takes a converted model, got one without converted modules. Call rmm_linear.convert first."
        )
    unconvert(model)
    return model


def unconvert(model: nn.Module) -> None:
    """Give converted modules their original class back; a plan and tiles stay."""
    contexts = dict[ModelContext, None]()
    for module in converted_modules(model):
        if module.rmm_context is not None:
            contexts[module.rmm_context] = None
            module.rmm_context.release()
        module._tear_down()
        module.__class__ = original_class(type(module))
    for context in contexts:
        if context.is_attached_inside(model):
            context.detach()  # modules that were replaced since are released by nobody


def original_class(kind: type[nn.Module]) -> type[Any]:
    """Return the class that a module had before its conversion."""
    if not kind.__module__.startswith("torch."):
        return next(c for c in kind.__mro__ if not issubclass(c, ConvertedModule))
    bases = tuple(original_class(base) if issubclass(base, ConvertedModule) else base for base in kind.__bases__)
    own = {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__")}
    return type(kind.__name__.replace("RMM", "").replace("Packed", ""), bases, own)
