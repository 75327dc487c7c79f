"""RMMLinear: nn.Linear that saves a sketch of its input for the backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rmm_linear.config import RMMConfig
from rmm_linear.layers.base import SketchedLayer


class RMMLinear(SketchedLayer, nn.Linear):
    """A drop-in for ``nn.Linear`` that saves K sketched rows of its input for the backward pass instead of N.

    Exact: the output and the gradients with respect to input and bias. Random and unbiased: the gradient with respect
    to the weight. In eval mode nothing is saved, so a gradient with respect to the weight needs train mode. The
    state_dict is that of ``nn.Linear``.

    Args:
        in_features: I.
        out_features: O.
        bias: Whether the layer adds a bias.
        device: Device of the parameters.
        dtype: dtype of the parameters.
        config: How the input is saved; None is ``RMMConfig()``.

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
        """Make a layer with new parameters."""
        super().__init__(in_features, out_features, bias, device, dtype)
        self._set_up(config)

    @classmethod
    def from_linear(cls, linear: nn.Linear, config: RMMConfig | None = None) -> RMMLinear:
        """Make a sketched layer that shares the parameters, hooks and mode of an existing one.

        Args:
            linear: An exact ``nn.Linear``; it stays usable, and both train the same Parameter objects.
            config: How the input is saved; None is ``RMMConfig()``.

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
        own = {name: value for name, value in _shared_state(self).items() if not name.startswith("rmm_")}
        linear.__dict__.update(own)
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
