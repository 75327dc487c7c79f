"""X and Y of a model's linear layers during one training step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from torch import Tensor, nn

from rmm_linear.conversion.convert import convert


@dataclass(frozen=True, eq=False)
class LayerRecord:
    """X and Y of a layer in one training step.

    Attributes:
        name: Of the layer in the model.
        x: Layer input, shape (N, I).
        grad_output: Gradient of the loss by the layer's output, shape (N, O).
        samples: (batch, sequence), for :func:`rmm_linear.variance.sgd_variance`; None where the rows are not known to
            be tokens of sequences, as in a head that sees one row per sequence.
        mask: True for valid tokens, shape (N,); None where nothing is masked, or masked rows have a gradient.
    """

    name: str
    x: Tensor = field(repr=False)
    grad_output: Tensor = field(repr=False)
    samples: tuple[int, int] | None
    mask: Tensor | None = field(repr=False)


def record_layers(
    model: nn.Module, batch: Mapping[str, Any] | Sequence[Any], modules: str | Sequence[str] = "all-linear"
) -> list[LayerRecord]:
    """Run one forward and backward pass and record X and Y of the layers that a conversion would take.

    The gradients of the parameters accumulate as in any backward pass, and the mode stays as it is. Memory: X and Y of
    all these layers at the same time.

    Args:
        model: A model that is not converted, and that returns its loss, or an object with ``loss``.
        batch: A mapping of keyword arguments, or a sequence of arguments. A 2-D ``attention_mask`` says what is
            padding, and what the sequences of a layer are that sees its tokens flattened.
        modules: Which layers, as ``target_modules`` of :class:`rmm_linear.RMMConfig`.

    Returns:
        One record for each layer that ran, of its first call, in the model's order.

    Raises:
        ValueError: If the model returns no loss.

    Example:
        >>> import torch
        >>> class Model(nn.Sequential):
        ...     def forward(self, x):
        ...         return super().forward(x).square().mean()
        >>> (record,) = record_layers(Model(nn.Linear(3, 2)), (torch.ones(4, 5, 3),))
        >>> record.name, record.x.shape, record.grad_output.shape, record.samples
        ('0', torch.Size([20, 3]), torch.Size([20, 2]), (4, 5))
    """
    names = convert(model, dry_run=True, target_modules=modules).converted
    inputs: dict[str, Tensor] = {}
    gradients: dict[str, Tensor] = {}

    def look(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            # Without gradients runs the first pass of a reentrant checkpoint; the recomputation comes again.
            if name not in inputs and output.requires_grad:
                inputs[name] = next(iter((*args, *kwargs.values()))).detach()
                output.register_hook(lambda gradient: gradients.setdefault(name, gradient.detach()))

        return hook

    linears = {name: module for name, module in model.named_modules() if name in names}
    handles = [module.register_forward_hook(look(name), with_kwargs=True) for name, module in linears.items()]
    try:
        output = model(**batch) if isinstance(batch, Mapping) else model(*batch)
        loss = output if isinstance(output, Tensor) else getattr(output, "loss", None)
        if loss is None or loss.numel() != 1:
            raise ValueError(
                f"The model must return its loss, or an object with one, got {type(output).__name__}. "
                "Use a model with its head, and give the batch its labels."
            )
        loss.backward()
    finally:
        for handle in handles:
            handle.remove()
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return [_record(name, inputs[name], gradients[name], mask) for name in linears if name in gradients]


def _record(name: str, x: Tensor, y: Tensor, mask: Tensor | None) -> LayerRecord:
    shape = x.shape[:-1]
    if len(shape) < 2 and mask is not None and mask.dim() == 2 and mask.numel() == shape.numel():
        shape = mask.shape
    samples = (shape[0], prod(shape[1:])) if len(shape) > 1 else None
    if mask is not None:
        mask = mask.reshape(-1).bool() if mask.shape == samples else None
    flat_x, flat_y = x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1])
    if mask is not None and bool((flat_y[~mask] != 0).any()):
        mask = None
    return LayerRecord(name, flat_x, flat_y, samples, mask)
