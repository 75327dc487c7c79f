"""Give a model on the meta device the sizes that one rank of tensor parallelism has.

By the rules of PyTorch's ``parallelize_module``: a layer that is divided "colwise" has its share of the outputs, one
"rowwise" its share of the inputs; its bias stays whole. What lies between the two is as much smaller, attention's heads
for one. Sums over ranks go into new tensors: of the gradient of a colwise layer's input, and of a rowwise layer's
output. All else stays whole on every rank, embeddings and the head too, unless the plan names them: the loss is then
computed from the rank's share of the logits.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rmm_linear.memory.quantized import is_of
from rmm_linear.planning.step.shards import STYLES, Shards, check_shards

_COLWISE, _ROWWISE = STYLES
_HEADS = ("num_attention_heads", "num_key_value_heads")  # in configurations of transformers
_WHOLE = "replicated"  # begins names of its styles that divide nothing
_REMEDY = "Give tensor_plan, names of linear layers to "


@contextmanager
def tensor_parallel_sizes(model: nn.Module, shards: Shards | None) -> Iterator[None]:
    """Give linear layers the sizes that they have on one rank, inside of the block."""
    check_shards(shards)
    if shards is None or shards.tensor == 1:
        yield
        return
    found = _styles(model, shards)
    with ExitStack() as stack:
        for name, style in found.items():
            module = model.get_submodule(name)
            for layer, dim, attribute in _divided(module, style):
                _check(name, getattr(layer, attribute), shards.tensor)
                stack.callback(setattr, layer, attribute, getattr(layer, attribute))
                setattr(layer, attribute, getattr(layer, attribute) // shards.tensor)
                for key, parameter in layer._parameters.items():
                    if parameter is not None and (parameter.dim() > 1 or style == _COLWISE):
                        stack.callback(layer._parameters.__setitem__, key, parameter)
                        layer._parameters[key] = _share(parameter, dim, shards.tensor)
            if style == _COLWISE:
                stack.callback(module.register_forward_pre_hook(_sum_gradient).remove)
            else:
                stack.callback(module.register_forward_hook(_sum_output).remove)
        yield


def _styles(model: nn.Module, shards: Shards) -> dict[str, str]:
    """Return the linear layers that are divided, and how."""
    config = getattr(model, "config", None)
    plan = shards.tensor_plan or getattr(config, "base_model_tp_plan", None)
    if not plan:
        raise ValueError(
            f"tensor={shards.tensor} needs to know which layers are divided, got {type(model).__name__}, which comes "
            f"without a plan. {_REMEDY}{' or '.join(STYLES)}."
        )
    for name in _HEADS:
        if isinstance(heads := getattr(config, name, None), int):
            _check(name, heads, shards.tensor)
    found = dict[str, str]()
    for pattern, style in plan.items():
        if style.startswith(_WHOLE):
            continue
        if style not in STYLES:
            raise ValueError(
                f"Layers are divided {' or '.join(STYLES)}, got {style!r} for {pattern!r} in the model's own plan. "
                f"{_REMEDY}these, without that one."
            )
        expression = re.compile(rf"(.*\.)?{re.escape(pattern).replace(re.escape('*'), '[^.]+')}")
        names = [name for name, _ in model.named_modules() if expression.fullmatch(name)]
        if not names and shards.tensor_plan:
            raise ValueError(f"tensor_plan must name modules of the model, got {pattern!r}, which matches none.")
        for name in names:
            _check_layer(name, model.get_submodule(name))
            found[name] = style
    return found


def _divided(module: nn.Module, style: str) -> Iterator[tuple[nn.Module, int, str]]:
    """Go through a layer and its adapters: what is divided, along which dimension, and the attribute with its size."""
    dim, attribute = (0, "out_features") if style == _COLWISE else (1, "in_features")
    base = getattr(module, "base_layer", None)
    if not isinstance(base, nn.Module):
        yield module, dim, attribute
        return
    yield base, dim, attribute
    for adapter in getattr(module, "lora_B" if style == _COLWISE else "lora_A").values():
        yield adapter, dim, attribute


def _check(name: str, size: int, ranks: int) -> None:
    if size % ranks:
        raise ValueError(f"tensor must divide {name}, which is {size}, got {ranks}. Use a divisor of it.")


def _check_layer(name: str, module: nn.Module) -> None:
    layer = getattr(module, "base_layer", module)
    weight = getattr(layer, "weight", None)
    if not isinstance(layer, nn.Linear) or is_of(weight):
        raise ValueError(
            f"Tensor parallelism is simulated for linear layers that are not quantized, got {type(layer).__name__} for "
            f"{name!r}. {_REMEDY}{' or '.join(STYLES)}, without it."
        )


def _share(parameter: Tensor, dim: int, ranks: int) -> nn.Parameter:
    shape = [size // ranks if place == dim else size for place, size in enumerate(parameter.shape)]
    return nn.Parameter(parameter.new_empty(shape), parameter.requires_grad)


class _SumOfGradients(torch.autograd.Function):
    """Sums the gradients of ranks into a new tensor."""

    @staticmethod
    def forward(ctx: Any, input: Tensor) -> Tensor:
        """Return the input."""
        return input.view_as(input)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Make the sum."""
        return gradient.clone()


class _SumOfOutputs(torch.autograd.Function):
    """Sums the outputs of ranks into a new tensor."""

    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        """Make the sum."""
        return output.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradient, which all ranks have."""
        return gradient


def _sum_gradient(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (_SumOfGradients.apply(args[0]), *args[1:])


def _sum_output(module: nn.Module, args: Any, output: Tensor) -> Any:
    return _SumOfOutputs.apply(output)
