"""What the layers of a converted model share during one forward pass."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from rmm_linear.seeds import draw_seed, mix, peek_seed


class ForwardScope:
    """The seeds of one converted model: one per step, from which every layer's follows.

    The step's seed is *read* from the global generator's state when the first layer asks, and the generator moves on only
    when the model's forward pass is over. So nothing random inside the forward pass (dropout) sees a difference between
    the converted and the original model, with or without gradients, and a recomputation in the backward pass (activation
    checkpointing) finds the generator as it was. Layers that run while no forward pass is open, as in that
    recomputation, take further seeds from the last step's.
    """

    def __init__(self) -> None:
        """Make a scope that no model uses yet."""
        self._handles: list[RemovableHandle] = []
        self._depth = 0
        self._count = 0
        self._step_seed: int | None = None

    def attach(self, model: nn.Module) -> None:
        """Open the scope around every forward pass of ``model``.

        Args:
            model: The model whose layers share this scope.
        """
        self._handles += [
            model.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True),
            model.register_forward_hook(self._exit, always_call=True),
        ]

    def detach(self) -> None:
        """Remove the scope from its model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def layer_seed(self, index: int) -> int:
        """Return a fresh seed for one call of one layer.

        Args:
            index: Number of the layer in the model.

        Returns:
            A seed no other call of this step has.
        """
        if self._step_seed is None:
            if self._depth == 0:  # a part of the model is called by itself, and no step was ever open
                return draw_seed()
            self._step_seed = peek_seed()
        self._count += 1
        return mix(self._step_seed, index, self._count)

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._depth == 0:
            self._step_seed, self._count = None, 0
        self._depth += 1

    def _exit(self, module: nn.Module, args: Any, output: Any) -> None:
        self._depth = max(self._depth - 1, 0)
        if self._depth == 0 and self._step_seed is not None:
            draw_seed()
