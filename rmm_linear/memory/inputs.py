"""Run one forward pass and find out which operators save what for the backward pass, each layer's input above all."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from rmm_linear._support.generators import other_generators, set_other_generators
from rmm_linear._support.saved_graph import saved_in_graph
from rmm_linear.memory.ledger import Ledger, StorageKey, storage_key, track_saved


@dataclass(frozen=True)
class LayerInput:
    """The input of one layer in one forward pass."""

    tokens: int
    itemsize: int
    storage: StorageKey | None  # key of its storage in the ledger; None if autograd does not save it
    bytes: int
    others: tuple[str, ...]  # names of other operators that save the same storage, the given layers excluded


@dataclass(frozen=True)
class Saver:
    """An operator that saves a tensor for the backward pass."""

    name: str  # of its node in the autograd graph, such as "MulBackward0"
    is_stand_in: bool  # whether the node is one of this library's

    @property
    def operator(self) -> str:
        """The name without what autograd adds to it, such as "Mul"."""
        if "ScaledDotProduct" in self.name:
            return "scaled_dot_product_attention"
        return self.name.removesuffix("Backward").rstrip("0123456789").removesuffix("Backward")

    @property
    def is_linear(self) -> bool:
        """Whether it is the product of a linear layer."""
        return self.name.startswith(("Addmm", "Mm", "Linear", "MkldnnLinear", "Bmm"))


def unsaved_reason(seen: LayerInput) -> str | None:
    """Say why sketching a layer's input saves nothing, whatever the sketch's size."""
    if seen.storage is None:
        return "autograd does not save its input"
    return f"{' and '.join(seen.others)} saves this tensor anyway" if seen.others else None


def saved_tensors(model: nn.Module, batch: Any) -> tuple[Ledger, dict[StorageKey, list[Saver]]]:
    """Run one forward pass in training mode and record which operators save what for backward."""
    return layer_inputs(model, batch, [])[1:]


def layer_inputs(
    model: nn.Module, batch: Any, names: Sequence[str]
) -> tuple[dict[str, LayerInput], Ledger, dict[StorageKey, list[Saver]]]:
    """Run one forward pass as :func:`saved_tensors` does, and record the inputs of some layers too."""
    modules = {name: module for name, module in model.named_modules() if name in names}
    calls: dict[str, Tensor] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls.setdefault(name, next(iter((*args, *kwargs.values()))).detach())

        return hook

    handles = [module.register_forward_pre_hook(note(name), with_kwargs=True) for name, module in modules.items()]
    try:
        with restored(model), torch.enable_grad(), track_saved(model) as ledger:
            output = call_with(model, batch)
            # Inside the block, while the graph is alive: its nodes know what they saved.
            savers, storages = _savers(output), dict(ledger.storages)
            inputs = {
                name: _layer_input(calls[name], name, storages, savers, names) for name in modules if name in calls
            }
            return inputs, ledger, savers
    finally:
        for handle in handles:
            handle.remove()


def _layer_input(
    x: Tensor,
    name: str,
    storages: Mapping[StorageKey, Any],
    savers: Mapping[StorageKey, Sequence[Saver]],
    names: Sequence[str],
) -> LayerInput:
    tokens = x.shape[:-1].numel()
    key = storage_key(x)
    if key in storages and set(storages[key].modules) & set(names):
        others = [module for module in storages[key].modules if module not in names]
        operators = sorted({one.operator for one in savers.get(key, ()) if not one.is_linear})
        saved_by_others = tuple(operators or others) if others or operators else ()
        return LayerInput(tokens, x.element_size(), key, storages[key].bytes, saved_by_others)
    # Under autocast a copy in another dtype is saved instead of the input.
    copies = [(k, e) for k, e in storages.items() if name in e.modules and e.bytes * 2 in (x.nbytes, 2 * x.nbytes)]
    if copies:
        copy_key, entry = copies[0]
        return LayerInput(tokens, entry.bytes // max(x.numel(), 1), copy_key, entry.bytes, ())
    return LayerInput(tokens, x.element_size(), None, 0, ())


def _savers(output: Any) -> dict[StorageKey, list[Saver]]:
    """Map each storage to the autograd nodes that save it."""
    found: dict[StorageKey, list[Saver]] = {}
    for node, tensor in saved_in_graph(output):
        function = getattr(type(node), "_forward_cls", None)  # of an autograd.Function
        is_ours = getattr(function, "__module__", "").startswith("rmm_linear.")
        found.setdefault(storage_key(tensor), []).append(Saver(node.name(), is_ours))
    return found


@dataclass(frozen=True)
class LossOfBatch:
    """A batch with a function that computes the loss of one like it, to be called as :func:`call_with` does."""

    batch: Mapping[str, Any]
    of: Callable[[Mapping[str, Any]], Any]
    # Operators that read numbers in simulated steps, which have none, so that they were guessed
    guesses: set[str] = field(default_factory=set, compare=False)

    def __call__(self) -> Any:
        """Compute the loss of the batch itself."""
        return self.of(self.batch)


def check_example(model: nn.Module, example: Any) -> None:
    """Raise unless an example is a batch that a model can be called with, as far as its signature and device show."""
    if isinstance(example, str) or not (isinstance(example, Mapping | list | tuple | Tensor) or callable(example)):
        is_loader = hasattr(example, "__iter__") and not isinstance(example, str)
        hint = " Take one of its batches: next(iter(loader))." if is_loader else ""
        raise TypeError(
            "example must be a training batch: a mapping of keyword arguments, a sequence of arguments, or a tensor, "
            f"got {type(example).__name__}.{hint}"
        )
    if callable(example):
        return
    given = dict(example) if isinstance(example, Mapping) else {}
    placed = () if isinstance(example, Mapping) else example if isinstance(example, list | tuple) else (example,)
    signature = inspect.signature(model.forward)
    try:
        signature.bind(*placed, **given)
    except TypeError as error:
        raise TypeError(
            f"example must have the arguments of {type(model).__name__}, and does not: {error}. They are "
            f"{', '.join(signature.parameters)}."
        ) from error
    devices = {p.device.type for p in model.parameters()}
    if len(devices) != 1 or any(map(_may_move_inputs, model.modules())):
        return
    (device,) = devices
    for leaf in tree_leaves((placed, given)):
        if isinstance(leaf, Tensor) and leaf.device.type != device and "meta" not in (device, leaf.device.type):
            raise ValueError(
                f"example must be on the model's device, {device}, got a tensor on {leaf.device}. Move it there."
            )


def _may_move_inputs(module: nn.Module) -> bool:
    """Say whether something may move inputs, or weights, before a module runs, as offloading does."""
    own = vars(module)  # accelerate has put another forward there, and FSDP that flattens weights has no hooks
    return bool(own["_forward_pre_hooks"] or "_hf_hook" in own or "_is_fsdp_managed_module" in own)


def call_with(model: nn.Module, batch: Any) -> Any:
    """Run a model on a batch, as :func:`saved_tensors` takes it."""
    if callable(batch):
        return batch()
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, list | tuple) else model(batch)


def sequences_in(batch: Any) -> int:
    """Return the number of sequences in a batch: the first dimension that most of its tensors have."""
    leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]
    sizes = Counter(len(leaf) for leaf in leaves if len(leaf))
    return sizes.most_common(1)[0][0] if sizes else 0


def rows_in(batch: Any) -> int:
    """Return the rows that the layers of a model get of a batch: its tokens, or the rows of its largest tensor."""
    batch = batch.batch if isinstance(batch, LossOfBatch) else batch
    tensors = [] if callable(batch) else [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    tokens = [leaf.numel() for leaf in tensors if leaf.dim() > 1 and not leaf.is_floating_point()]
    others = [leaf.numel() // leaf.shape[-1] for leaf in tensors if leaf.dim() > 1 and leaf.numel()]
    return max(tokens or others, default=0)


@contextmanager
def restored(model: nn.Module, *, buffers: bool = True) -> Iterator[None]:
    """Set training mode inside the block, unless it is set: then parts in eval mode are meant to be."""
    modes = {module: module.training for module in model.modules()}
    kept = [
        (module, name, buffer, buffer.detach().clone())
        for module in (model.modules() if buffers else ())
        for name, buffer in module.named_buffers(recurse=False)
    ]
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    drawn = other_generators()
    with torch.random.fork_rng(devices=devices):
        if not model.training:
            model.train()
        try:
            yield
        finally:
            set_other_generators(drawn)
            for module, mode in modes.items():
                module.training = mode
            with torch.no_grad():
                for module, name, buffer, value in kept:
                    module._buffers[name] = buffer
                    buffer.copy_(value)
