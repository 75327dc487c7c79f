"""Observe every block in one forward pass: its saved bytes, its operations, and whether it may be recomputed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from rmm_linear.memory.inputs import call_with
from rmm_linear.memory.peak import has_bytes, storages
from rmm_linear.planning.step.flops import attention_flops, flop_counter
from rmm_linear.planning.step.step import has_loss, prepared


@dataclass
class Observed:
    """A block in a forward pass."""

    storages: list[int] = field(default_factory=list)  # bytes of the storages that it saves first, largest first
    flops: int = 0  # operations of its matrix products, convolutions and attention
    attention: int = 0  # of these, those of fused attention
    writes_input: bool = False  # whether a tensor that it was given was changed in place, by it or later
    returns: bool = False  # whether it ran again after another block had run


def observe(model: nn.Module, example: Any, blocks: Sequence[str]) -> tuple[dict[str, Observed], bool]:
    """Run a forward pass and note what every block saves and does, in the order in which blocks ran."""
    found: dict[str, Observed] = {}
    running, order, losses = list[str](), list[str](), list[bool]()
    given: list[tuple[str, Tensor, int]] = []
    seen: dict[int, Any] = {}  # storages, which keeps them: a key is of one that is alive
    counter = flop_counter()

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if running and running[-1] and has_bytes(tensor) and storage._cdata not in seen:
            found[running[-1]].storages.append(storage.nbytes())
        seen.setdefault(storage._cdata, storage)
        return tensor.detach()  # as no backward pass frees the graph: an output would hold the node that saves it

    def enter(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not torch.is_grad_enabled() and name in order:
                running.append("")
                return
            running.append(name)
            block = found.setdefault(name, Observed())
            if torch.is_grad_enabled():
                block.returns |= name in order and order[-1] != name
                if name not in order:
                    block.flops = block.attention = 0
                order.append(name)
            block.flops -= counter.get_total_flops()
            block.attention -= attention_flops(counter)
            leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            given.extend((name, leaf, leaf._version) for leaf in leaves)

        return hook

    def leave(*_: Any) -> None:
        if not (name := running.pop()):
            return
        block = found[name]
        block.flops += counter.get_total_flops()
        block.attention += attention_flops(counter)

    def run(model: nn.Module, batch: Any) -> None:
        tensors = (*model.parameters(), *model.buffers())
        seen.update((storage._cdata, storage) for storage in storages(tensors))
        with counter, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = call_with(model, batch)
        for name, tensor, version in given:
            found[name].writes_input |= tensor._version != version
        losses.append(has_loss(output))

    with prepared(model, example, run) as step, _hooked(model, blocks, enter, leave):
        step()
    for block in found.values():
        block.storages.sort(reverse=True)
    return found, all(losses)


@contextmanager
def _hooked(
    model: nn.Module, names: Sequence[str], enter: Callable[[str], Callable[..., None]], leave: Callable[..., None]
) -> Iterator[None]:
    with ExitStack() as stack:
        for name in names:
            module = model.get_submodule(name)
            stack.callback(module.register_forward_pre_hook(enter(name), with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(leave).remove)
        yield
