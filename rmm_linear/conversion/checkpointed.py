"""Find the blocks that activation checkpointing recomputes, by what the model says or a forward pass shows.

Without an example, ``torch.utils.checkpoint`` in a loop of one's own is seen in the first training step, see
``layers/converted.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from rmm_linear.context.checkpointing import is_on, is_wrapper, uncheckpointed
from rmm_linear.context.surroundings import checkpoint_inputs
from rmm_linear.conversion.exact import exact_but, exact_where
from rmm_linear.memory.inputs import saved_tensors
from rmm_linear.memory.ledger import StorageKey, storage_key

_LAYER = "GradientCheckpointingLayer"


def checkpointed_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Find the blocks that are recomputed: by transformers' flags, or by torch's checkpoint_wrapper."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if is_wrapper(module) or (_is_layer(module) and is_on(module)):
            found[name] = module
        elif is_on(module) and not any(map(_is_layer, module.modules())):
            lists = {key: child for key, child in module.named_children() if isinstance(child, nn.ModuleList)}
            blocks = ((f"{key}.{place}", block) for key, child in lists.items() for place, block in enumerate(child))
            found |= {f"{name}.{key}".lstrip("."): block for key, block in blocks}
    return found


def inside(blocks: Iterable[str], names: Iterable[str]) -> tuple[str, ...]:
    prefixes = tuple(f"{name}." for name in blocks)
    return tuple(name for name in names if f"{name}.".startswith(prefixes)) if prefixes else ()


@dataclass
class NotedModules:
    """The modules that ran inside of ``torch.utils.checkpoint`` in a forward pass, and the tensors that it saves."""

    names: set[str] = field(default_factory=set)
    inputs: set[StorageKey] = field(default_factory=set)


@contextmanager
def noting_recomputed(model: nn.Module) -> Iterator[NotedModules]:
    """Note what runs inside of ``torch.utils.checkpoint`` in the forward passes inside of the block."""
    noted = NotedModules()

    def note(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            if not torch.compiler.is_compiling() and (inputs := checkpoint_inputs()) is not None:
                noted.names.add(name)
                noted.inputs.update(map(storage_key, inputs))

        return hook

    handles = [module.register_forward_pre_hook(note(name)) for name, module in model.named_modules()]
    try:
        yield noted
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class BlockMemory:
    """Bytes of a block that is being recomputed.

    Attributes:
        name: The block.
        before: Bytes that it saves meanwhile now.
        after: The same after the conversion.
        packed: The same if all of its modules were converted with ``checkpointed="packed"``.
    """

    name: str
    before: int
    after: int
    packed: int


def block_memory(model: nn.Module, batch: Any) -> BlockMemory | None:
    """Measure what the first recomputed block that the batch reaches saves while it is recomputed."""
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
    call = _BoundCall(block, args, kwargs)
    with uncheckpointed(model):
        with exact_but(model):
            before = saved_tensors(call, ())[0].total
        with exact_where(model, lambda one: one.rmm_config.checkpointed == "exact"):
            after = saved_tensors(call, ())[0].total
        return BlockMemory(name, before, after, saved_tensors(call, ())[0].total)


class _BoundCall(nn.Module):
    """A call of a module, with the arguments that it was given."""

    def __init__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        super().__init__()
        self.module, self.args, self.kwargs = module, args, kwargs

    def forward(self) -> Any:
        return self.module(*self.args, **self.kwargs)


def _is_layer(module: nn.Module) -> bool:
    return any(kind.__name__ == _LAYER for kind in type(module).__mro__)
