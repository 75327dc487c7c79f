"""revert: give the modules of a converted model their original classes back."""

from __future__ import annotations

from typing import Any

from torch import nn

from rmm_linear.layers.converted import ConvertedModule


def revert(model: nn.Module) -> nn.Module:
    """Give every converted module of a model its original class back, in place.

    A model that trains by a plan (:func:`rmm_linear.fit`, ``plan.apply()``) recomputes and offloads nothing any more
    either.

    Args:
        model: A converted model, or part of one; or a model with a plan.

    Returns:
        The same model, exact again.

    Raises:
        ValueError: If the model has no converted module and no plan.
    """
    planned = [module for module in model.modules() if "rmm_applied" in vars(module)]  # a wrapper has the model inside
    for module in planned:
        vars(module)["rmm_applied"].revert()  # which comes back here if the plan has a conversion
    converted = [module for module in model.modules() if isinstance(module, ConvertedModule)]
    if planned and not converted:
        return model
    if not converted:
        raise ValueError(
            "revert takes a converted model, got one without converted modules. Call rmm_linear.convert first."
        )
    for module in converted:
        if module.rmm_context is not None:
            module.rmm_context.release()
        module._tear_down()
        module.__class__ = original_class(type(module))
    return model


def original_class(kind: type[nn.Module]) -> type[Any]:
    """Return the class that a module had before its conversion.

    Args:
        kind: Its class; one that PyTorch derived (fully_shard, parametrize) is derived again.

    Returns:
        The original class.
    """
    if not kind.__module__.startswith("torch."):
        return next(c for c in kind.__mro__ if not issubclass(c, ConvertedModule))
    bases = tuple(original_class(base) if issubclass(base, ConvertedModule) else base for base in kind.__bases__)
    own = {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__")}
    return type(kind.__name__.replace("RMM", "").replace("Packed", ""), bases, own)
