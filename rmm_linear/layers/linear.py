"""RMMLinear: nn.Linear that keeps a sketch of its input for the backward pass."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

from rmm_linear.config import RMMConfig
from rmm_linear.context.auto_bits import BitsChoice
from rmm_linear.context.autograd_nodes import in_backward
from rmm_linear.context.model_context import ForwardScope
from rmm_linear.layers.functional import Plan, autocast_dtype, planned_linear, recipe_for
from rmm_linear.norm_estimators import LayerCall, NormEstimator, make_norm_estimator
from rmm_linear.ops.save import is_capturing
from rmm_linear.sketches import TokenMask
from rmm_linear.sketches.sampling import row_norms
from rmm_linear.sketches.seeds import draw_seed

_PADDING = (
    "Padding must not reach the loss, but masked tokens of {} carry a gradient (the model pools over padding, or the "
    "labels cover it). Leaving them out would bias the weight gradient. Convert with mask_padding=False, or mask the "
    "padding in the loss."
)


class SketchedLayer(nn.Module):
    """What every sketched layer has beside its parameters: a configuration, and its place in a converted model.

    Attributes:
        rmm_config: How the input is kept.
        rmm_scope: What the layers of a converted model share, or None for a layer by itself.
        rmm_index: Number of the layer in the converted model.
        rmm_choice: The width chosen by a layer by itself with ``bits="auto"``.
        rmm_estimator: What is expected of the tokens' gradients; None without a ``norm_estimator``.
        rmm_mask_checked: Whether a backward pass has shown that masked tokens carry no gradient.
    """

    rmm_config: RMMConfig
    rmm_scope: ForwardScope | None
    rmm_index: int
    rmm_choice: BitsChoice
    rmm_estimator: NormEstimator | None
    rmm_mask_checked: bool

    def _set_up(self, config: RMMConfig | None, scope: ForwardScope | None = None, index: int = 0) -> None:
        self.rmm_config = config or RMMConfig()
        self.rmm_scope = scope
        self.rmm_index = index
        self.rmm_choice = BitsChoice() if scope is None else scope.choice(index)
        self.rmm_mask_checked = False
        self._set_estimator(make_norm_estimator(self.rmm_config.norm_estimator))

    def _set_estimator(self, estimator: NormEstimator | None) -> None:
        self.rmm_estimator = estimator
        if self.rmm_scope is not None and estimator is not None:
            self.rmm_scope.estimators[self.rmm_index] = estimator  # its siblings ask it too

    def _tear_down(self) -> None:
        for name in SketchedLayer.__annotations__:
            self.__dict__.pop(name, None)

    def _linear(
        self, input: Tensor, weight: Tensor, bias: Tensor | None, shape: tuple[int, ...] | None = None
    ) -> Tensor:
        """Apply the layer; ``shape`` has the leading dimensions of an input that was flattened before."""
        if type(weight).__name__ == "DTensor":
            raise RuntimeError(
                "A sketched layer needs its whole weight in its forward pass, got a DTensor: tensor parallel layers "
                "cannot be sketched. Name them in exclude_modules. (FSDP's fully_shard works; its layers run inside "
                "of the modules it was called on.)"
            )
        plan = self._plan(input, weight, tuple(input.shape[:-1]) if shape is None else shape) if self.training else None
        if plan is None and (self.training or torch.compiler.is_compiling()):
            return F.linear(input, weight, bias)  # compilers ask for the gradient by the weight beforehand
        return planned_linear(input, weight, bias, plan)

    def _plan(self, input: Tensor, weight: Tensor, shape: tuple[int, ...]) -> Plan | None:
        """Say what this call keeps; seeds are asked for in any grad mode, as both passes of a checkpoint must."""
        if torch.compiler.is_compiling():
            return self._traced_plan(input, weight)
        config, scope, index = self.rmm_config, self.rmm_scope, self.rmm_index
        if scope is None and self.rmm_choice.backward_seen and not in_backward():
            self.rmm_choice.backward_seen = False
            self.rmm_choice.settle()  # between steps: a checkpoint may hold several calls
        recipe = recipe_for(input, weight, config, self.rmm_choice.width())
        if recipe is None:
            return None
        if scope is None:
            call = LayerCall(shape, input.device)
        else:
            call = scope.call_of(index, shape, input.device, config.mask_padding)
        is_choosing = config.bits == "auto" and config.memory is not None and self.rmm_choice.bits is None
        if is_choosing and not in_backward() and not is_capturing(input.device):
            dtype = autocast_dtype(input) or input.dtype
            with _disable_current_modes():  # a selective checkpoint counts the operators that it will run again
                x = input.detach().reshape(call.tokens, -1)
                self.rmm_choice.observe(x, config, dtype.itemsize, call.mask)
        # Asked without an estimator too: siblings may have one.
        expected = functools.partial(self._expected, call) if recipe.draws(call.tokens) else None
        on_backward = functools.partial(self._on_backward, call)
        if scope is None:
            return Plan(recipe, draw_seed(), call.mask, expected=expected, on_backward=on_backward)
        shared = scope.shared if scope.is_open() else None  # nobody would clear it
        return Plan(recipe, scope.layer_seed(index), call.mask, shared, index, expected, on_backward)

    def _traced_plan(self, input: Tensor, weight: Tensor) -> Plan | None:
        config, scope = self.rmm_config, self.rmm_scope
        recipe = recipe_for(input, weight, config, self.rmm_choice.bits)
        if recipe is None:
            return None
        mask = None
        if scope is not None and config.mask_padding:
            mask = scope.traced.token_mask(input.shape[:-1].numel())
        return Plan(recipe, None, mask, on_backward=None if mask is None else self._traced_check)

    def _traced_check(self, y: Tensor, mask: TokenMask | None) -> None:
        if mask is not None and not self.rmm_mask_checked:
            padding = y[mask.order]
            is_padding = torch.arange(len(y), device=y.device).unsqueeze(1) >= mask.count
            torch._assert_async(~((padding != 0) & padding.isfinite() & is_padding).any(), _PADDING.format("a layer"))  # pyright: ignore

    def _expected(self, call: LayerCall) -> Tensor | None:
        if self.rmm_scope is not None:
            return self.rmm_scope.expected(self.rmm_index, call)
        return None if self.rmm_estimator is None else self.rmm_estimator.predict(call)

    def _on_backward(self, call: LayerCall, y: Tensor, mask: TokenMask | None) -> None:
        if self.rmm_scope is None:
            self.rmm_choice.backward_seen = True
        else:
            self.rmm_scope.note_backward()
        self._check_padding(y, mask)
        if self.rmm_estimator is not None:
            norms = row_norms(y.detach()).float()
            # An overflowing step shows nothing; waiting for the device to tell would cost more than a sum of zeros.
            self.rmm_estimator.observe(call, torch.where(norms.isfinite().all(), norms, 0))

    def _check_padding(self, y: Tensor, mask: TokenMask | None) -> None:
        if mask is None or self.rmm_mask_checked or is_capturing(y.device):
            return
        padding = y[mask.order[int(mask.count) :]]
        finite = padding.isfinite()
        if bool((finite & (padding != 0)).any()):
            name = self.rmm_scope.names[self.rmm_index] if self.rmm_scope is not None else "the layer"
            raise RuntimeError(_PADDING.format(name))
        # An overflowing step shows nothing, nor does one without any gradient, as above LoRA's fresh B.
        self.rmm_mask_checked = bool(finite.all() & (y != 0).any())

    def _describe(self) -> str:
        config = self.rmm_config
        amount = (
            f"ratio={config.ratio:g}" if config.ratio is not None else f"memory={config.memory:g}, bits={config.bits}"
        )
        block = "" if config.block is None else f", block={config.block}"
        expected = f", norm_estimator={config.norm_estimator}" if self.rmm_estimator is not None else ""
        return f"kind={config.kind}, {amount}{block}{expected}, min_rows={config.min_rows}"


class RMMLinear(SketchedLayer, nn.Linear):
    """A drop-in for ``nn.Linear`` that keeps K sketched rows of its input instead of N.

    Exact: output, gradient by the input, gradient by the bias. Random and unbiased: the gradient by the weight. In eval
    mode nothing is kept, so gradients by the weight need train mode. The state_dict is that of ``nn.Linear``.

    Args:
        in_features: I.
        out_features: O.
        bias: Whether the layer adds a bias.
        device: Device of the parameters.
        dtype: dtype of the parameters.
        config: How the input is kept; None is ``RMMConfig()``.

    Example:
        >>> RMMLinear(16, 4, config=RMMConfig(ratio=0.2))
        RMMLinear(in_features=16, out_features=4, bias=True, kind=countsketch, ratio=0.2, min_rows=64)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        config: RMMConfig | None = None,
    ) -> None:
        """Make a layer with fresh parameters."""
        super().__init__(in_features, out_features, bias, device, dtype)
        self._set_up(config)

    @classmethod
    def from_linear(cls, linear: nn.Linear, config: RMMConfig | None = None) -> RMMLinear:
        """Make a sketched layer that shares the parameters, hooks and mode of an existing one.

        Args:
            linear: An exact ``nn.Linear``; it stays usable, and both train the same Parameter objects.
            config: How the input is kept; None is ``RMMConfig()``.

        Returns:
            The sketched layer.

        Raises:
            TypeError: If ``linear`` is not exactly an ``nn.Linear``.
        """
        if type(linear) is not nn.Linear:
            raise TypeError(f"from_linear takes an nn.Linear and none of its subclasses, got {type(linear).__name__}.")
        layer = cls.__new__(cls)
        layer.__dict__.update(_shared_state(linear))
        layer._set_up(config)
        return layer

    def to_linear(self) -> nn.Linear:
        """Make an ``nn.Linear`` that shares this layer's parameters, hooks and mode.

        Returns:
            The exact layer.
        """
        linear = nn.Linear.__new__(nn.Linear)
        linear.__dict__.update(_shared_state(self))
        SketchedLayer._tear_down(linear)  # pyright: ignore[reportArgumentType]
        return linear

    def forward(self, input: Tensor) -> Tensor:
        """Apply the layer.

        Args:
            input: Activations, shape (*, I).

        Returns:
            Shape (*, O).
        """
        return self._linear(input, self.weight, self.bias)

    def extra_repr(self) -> str:
        """Describe the layer.

        Returns:
            The fields of ``nn.Linear`` and of the sketch.
        """
        return f"{super().extra_repr()}, {self._describe()}"


def _shared_state(module: nn.Module) -> dict[str, Any]:
    """The module's state with the same Parameter and hook objects, in containers of its own."""
    return {name: value.copy() if isinstance(value, dict) else value for name, value in vars(module).items()}
