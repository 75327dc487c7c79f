"""Which blocks of a model activation checkpointing recomputes, as far as the model says so itself.

``torch.utils.checkpoint`` in a loop of one's own is seen in the first training step, see ``layers/converted.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from rmm_linear.conversion.exact import exact_but
from rmm_linear.memory.inputs import saved_tensors

_FLAGS = ("gradient_checkpointing", "activation_checkpointing")  # of transformers, by version
_LAYER, _WRAPPER = "GradientCheckpointingLayer", "CheckpointWrapper"


def checkpointed_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Find the blocks that are recomputed: by transformers' flags, or by torch's checkpoint_wrapper.

    Args:
        model: The model.

    Returns:
        Name to block.
    """
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if _is_a(module, _WRAPPER) or (_is_a(module, _LAYER) and _is_on(module)):
            found[name] = module
        elif _is_on(module) and not any(_is_a(child, _LAYER) for child in module.modules()):
            lists = {key: child for key, child in module.named_children() if isinstance(child, nn.ModuleList)}
            blocks = ((f"{key}.{place}", block) for key, child in lists.items() for place, block in enumerate(child))
            found |= {f"{name}.{key}".lstrip("."): block for key, block in blocks}
    return found


def inside(blocks: dict[str, nn.Module], names: Iterable[str]) -> tuple[str, ...]:
    """Return the names that belong to blocks.

    Args:
        blocks: Name to block.
        names: Names of modules.

    Returns:
        Those of blocks and of modules inside of them.
    """
    prefixes = tuple(f"{name}." for name in blocks)
    return tuple(name for name in names if f"{name}.".startswith(prefixes)) if prefixes else ()


@dataclass(frozen=True)
class BlockMemory:
    """Bytes of a block that is being recomputed.

    Attributes:
        name: The block.
        before: Bytes that it saves meanwhile now.
        after: The same after the conversion.
    """

    name: str
    before: int
    after: int


def block_memory(model: nn.Module, batch: Any) -> BlockMemory | None:
    """Measure what the first recomputed block of a converted model saves while it is recomputed.

    Args:
        model: A converted model; set it aside, see :mod:`rmm_linear.conversion.exact`.
        batch: A training batch, as for :func:`rmm_linear.memory.inputs.saved_tensors`.

    Returns:
        The bytes; None if the batch reaches no block.
    """
    blocks = checkpointed_blocks(model)
    calls: list[tuple[str, nn.Module, Any, Any]] = []

    def note(name: str) -> Callable[..., None]:
        return lambda module, args, kwargs: calls.append((name, module, args, kwargs)) if not calls else None

    handles = [block.register_forward_pre_hook(note(name), with_kwargs=True) for name, block in blocks.items()]
    try:
        saved_tensors(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    if not calls:
        return None
    name, block, args, kwargs = calls[0]
    call = _Call(block, args, kwargs)
    with without_checkpointing(model):
        with exact_but(model):
            before = saved_tensors(call, ())[0].total
        return BlockMemory(name, before, saved_tensors(call, ())[0].total)


class _Call(nn.Module):
    """A call of a module, with the arguments that it was given."""

    def __init__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        super().__init__()
        self.module, self.args, self.kwargs = module, args, kwargs

    def forward(self) -> Any:
        return self.module(*self.args, **self.kwargs)


@contextmanager
def without_checkpointing(model: nn.Module) -> Iterator[None]:
    """Run the blocks of :func:`checkpointed_blocks` without recomputing them, inside of the block.

    Args:
        model: The model.

    Yields:
        Nothing.
    """
    flags = [(module, flag) for module in model.modules() for flag in _FLAGS if getattr(module, flag, False) is True]
    wrappers: list[Any] = [module for module in model.modules() if _is_a(module, _WRAPPER)]
    functions = [module.checkpoint_fn for module in wrappers]
    try:
        for module, flag in flags:
            setattr(module, flag, False)
        for module in wrappers:
            module.checkpoint_fn = lambda function, *args, **kwargs: function(*args, **kwargs)
        yield
    finally:
        for module, flag in flags:
            setattr(module, flag, True)
        for module, function in zip(wrappers, functions, strict=True):
            module.checkpoint_fn = function


def _is_on(module: nn.Module) -> bool:
    return any(getattr(module, flag, False) is True for flag in _FLAGS)


def _is_a(module: nn.Module, name: str) -> bool:
    return any(kind.__name__ == name for kind in type(module).__mro__)
