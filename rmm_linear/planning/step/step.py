"""Run one training step, on the real tensors or on fake ones, which have shapes but no memory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map_only

from rmm_linear._support.distributed import is_dtensor
from rmm_linear.layers.linear import SketchedLayer
from rmm_linear.memory.inputs import LossOfBatch, call_with, restored
from rmm_linear.memory.quantized import replaced_states
from rmm_linear.planning.step.fakes import Fakes
from rmm_linear.planning.step.sharded import copied_container, is_sharded, put_back, runs_alone, silent, untouched

_PACKED = "find_packed_sequence_indices"
_IGNORES = ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa")
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
Run = Callable[[nn.Module, Any], Any]


def run_step(model: nn.Module, example: Any) -> None:
    """Run a forward and a backward pass; the gradients of the parameters are left in ``.grad``."""
    total = loss_of(call_with(model, example))
    total.backward()


def _named_loss(output: Any) -> Any:
    return output.get("loss") if hasattr(output, "get") else getattr(output, "loss", None)


def has_loss(output: Any) -> bool:
    """Say whether a model returned its loss: by that name, or as the one number of its output."""
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    return isinstance(_named_loss(output), Tensor) or (len(tensors) == 1 and not tensors[0].dim())


def loss_of(output: Any) -> Tensor:
    """Return what a step differentiates: the loss, or the sum of all outputs of a model that returns none."""
    loss = _named_loss(output)
    if isinstance(loss, Tensor):
        return loss if loss.dim() == 0 else loss.sum()
    found = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not found:
        raise ValueError(
            "The model must return a tensor that depends on its trained parameters, got none. Set requires_grad on the "
            "parameters that are trained."
        )
    if len(found) == 1 and found[0].dim() == 0:
        return found[0]
    sums = [leaf.sum() for leaf in found]
    return sums[0] if len(sums) == 1 else sum(sums[1:], sums[0])


@contextmanager
def own_gradients(model: nn.Module) -> Iterator[None]:
    """Set the gradients of a model aside inside the block, so that a step makes its own, and no hook gets them.

    Hooks of parameters may step an optimizer.
    """
    kept = [(parameter, parameter.grad) for parameter in model.parameters()]
    hooks: list[Any] = [getattr(parameter, name) for parameter, _ in kept for name in _HOOKS]
    hooks = [(each, dict(each)) for each in hooks if each]
    try:
        for parameter, _ in kept:
            parameter.grad = None
        for each, _ in hooks:
            each.clear()
        yield
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient
        for each, before in hooks:
            each.update(before)


@contextmanager
def as_in_training(model: nn.Module, *, buffers: bool = True) -> Iterator[None]:
    """Run steps inside the block that leave no trace: gradients, buffers, modes and random numbers are as before."""
    with restored(model, buffers=buffers), own_gradients(model), torch.enable_grad():
        yield


def copied(example: Any) -> Any:
    """Copy a batch, for a model that changes what it is given."""
    if callable(example):
        return example
    return tree_map_only(Tensor, lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad), example)


class _Step(nn.Module):
    """A step as one call, because parameters are replaced for the time of a call, and the backward pass needs them."""

    def __init__(self, model: nn.Module, run: Run) -> None:
        super().__init__()
        self.model, self.run = model, run

    def forward(self, example: Any) -> None:
        self.run(self.model, example)


def needs_values(model: nn.Module) -> bool:
    """Say whether this library's modules are in a model: which rows they save depends on masks and norms."""
    return any(type(module).__module__.startswith("rmm_linear.") for module in model.modules())


def has_memory(model: nn.Module) -> bool:
    """Say whether a model's parameters have values: none of them is on the meta device."""
    return not any(parameter.is_meta for parameter in model.parameters())


def runs_on_fakes(model: nn.Module) -> bool:
    """Say whether a model's step runs on fake tensors: not a converted model with all values here."""
    return not (needs_values(model) and runs_alone(model))


@contextmanager
def prepared(
    model: nn.Module, example: Any, run: Run = run_step, on_gradient: Callable[[Tensor], None] | None = None
) -> Iterator[Callable[[], None]]:
    """Prepare a step that leaves no trace, on fake tensors in the place of parameters, buffers and the batch.

    A converted model runs on the real ones, if they have values. Fake tensors for those on the meta device are on the
    CPU, as what a model saves depends on the device. ``on_gradient`` gets each parameter whose gradient is complete.
    Of a model that ``fully_shard`` has divided, FSDP makes the parameters that run.
    """
    buffers = not runs_on_fakes(model)
    with untouched(model), as_in_training(model, buffers=buffers), ExitStack() as stack:

        def follow(tensors: Iterable[Tensor]) -> None:
            for tensor in tensors if on_gradient is not None else ():
                if tensor.requires_grad:
                    stack.callback(tensor.register_post_accumulate_grad_hook(on_gradient).remove)

        if not runs_on_fakes(model):
            follow(model.parameters())
            batch = copied(example)
            yield lambda: run(model, batch)
            return
        fakes_of = Fakes(example.guesses if isinstance(example, LossOfBatch) else None)

        step, divided = _Step(model, run), is_sharded(model)
        if divided:
            stack.enter_context(silent())
        fakes = {  # once for every module that has it: functional_call loses tensors of modules with two names
            f"{path}.{name}" if path else name: fakes_of(tensor)
            for path, module in step.named_modules()
            for name, tensor in (*module._parameters.items(), *module._buffers.items())
            if tensor is not None and not (divided and is_dtensor(tensor))
        }
        follow({id(fake): fake for fake in fakes.values()}.values())
        follow(p for p in model.parameters() if divided and is_dtensor(p))
        batch = example if callable(example) else tree_map_only(Tensor, fakes_of, example)
        _refuse_estimators(model)

        def simulated() -> None:
            try:
                functional_call(step, fakes, (batch,), tie_weights=False)
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                raise ValueError(
                    f"A simulated step has shapes and no values, and this one reads values of a tensor ({error.func}): "
                    "item(), bool(), int() or a selection by a mask, in its code or in a hook. Compute what it reads "
                    "outside of the step, and give it as a number, or as tensors of that shape."
                ) from error

        with _attributes_kept(model), masks_by_values(example), replaced_states(model, fakes_of), fakes_of.mode:
            yield simulated


@contextmanager
def _attributes_kept(model: nn.Module) -> Iterator[None]:
    """Put attributes back after the block, and what dictionaries and lists among them had: a step may keep fakes."""
    own = [vars(module) for module in model.modules()]
    kept = [(each, {key: (value, copied_container(value)) for key, value in each.items()}) for each in own]
    try:
        yield
    finally:
        for each, before in kept:
            for key in each.keys() - before.keys():
                del each[key]
            each.update({key: put_back(value, copy) for key, (value, copy) in before.items()})


def _refuse_estimators(model: nn.Module) -> None:
    for layer in model.modules():
        if isinstance(layer, SketchedLayer) and layer.rmm_estimator is not None:
            raise ValueError(
                f"A model on the meta device is simulated without norm estimators, got norm_estimator="
                f"{layer.rmm_config.norm_estimator!r}: they learn from values. Convert with norm_estimator=None."
            )


@contextmanager
def masks_by_values(batch: Any) -> Iterator[None]:
    """Let transformers make the masks inside of the block that it makes for a batch whose values it can read.

    Where it cannot, it takes the tokens of a row for several texts, and a mask of ones for one that has zeros: then
    there is a mask for all pairs of tokens. With position ids, rows may be packed; of a batch on the meta device, the
    mask may have zeros.
    """
    masks = sys.modules.get("transformers.masking_utils")
    given = batch if isinstance(batch, Mapping) else {}
    instead: dict[str, Callable[..., Any]] = {}
    if given.get("position_ids") is None and hasattr(masks, _PACKED):
        instead[_PACKED] = lambda position_ids: None
    if _masks_nothing(given):
        instead |= {name: _without_mask(getattr(masks, name)) for name in _IGNORES if hasattr(masks, name)}
    before = {name: getattr(masks, name) for name in instead}
    for name, function in instead.items():
        setattr(masks, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(masks, name, function)


def _masks_nothing(batch: Mapping[str, Any]) -> bool:
    found = [value for key, value in batch.items() if key.endswith("attention_mask") and isinstance(value, Tensor)]
    return bool(found) and all(value.dim() == 2 and not value.is_meta and bool(value.cpu().all()) for value in found)


def _without_mask(ignores: Callable[..., bool]) -> Callable[..., bool]:
    return lambda padding_mask, *args, **kwargs: ignores(None, *args, **kwargs)
