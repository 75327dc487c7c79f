"""Names without those of wrappers, so that what is saved from a wrapped model fits the model itself."""

from __future__ import annotations

from torch import nn

# Of torch.compile, torch's checkpoint_wrapper and the older FSDP, which may also stand in the middle of a name.
_NAMES = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside of what torch.compile, DataParallel and DistributedDataParallel put around it.

    Args:
        model: A model, wrapped or not.

    Returns:
        The model itself.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> unwrapped(nn.DataParallel(model)) is model
        True
    """
    while True:
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        elif (inner := model._modules.get("_orig_mod")) is not None:
            model = inner
        else:
            return model


def own_name(name: str) -> str:
    """Return the name that a module has where nothing in the model is wrapped.

    Args:
        name: Dotted name in an unwrapped model, parts of which may be wrapped.

    Returns:
        The same without the wrappers' own names.

    Example:
        >>> own_name("encoder.0._orig_mod.dense")
        'encoder.0.dense'
    """
    return ".".join(part for part in name.split(".") if part not in _NAMES)
