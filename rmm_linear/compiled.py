"""Forward passes in compiled code: fresh seeds, masks and shared sketches without host state that changes.

A compiler runs the Python of a forward pass once and its operators in every step. So a seed is drawn by PyTorch's own
random operator: compilers draw it afresh in every step, reproducibly under ``torch.manual_seed``, and never recompute
it in the backward pass, where another seed would turn the gradient into noise. A token mask is always a pair of
tensors, whether or not anything is padded. Layers that read the same tensor one after the other take the same seed;
their sketches are then the same operators on the same inputs, which compilers merge, so that one Z is kept.

``torch.compile(model)`` runs the hooks of the model itself outside of the compiled forward pass and those of its
submodules inside; both find the state below. A region that is compiled by itself, as one block, finds none: its layers
keep padding in the sketch. Norm estimators neither predict nor learn in compiled code.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rmm_linear.estimators.samples import SAMPLE_INDEX
from rmm_linear.given import given_mask
from rmm_linear.seeds import rank_seed
from rmm_linear.sketches import TokenMask


def fresh_seed(device: torch.device) -> Tensor:
    """Draw a seed in compiled code, another one in every step and on every rank.

    Args:
        device: Where the seed is needed; its global generator is used.

    Returns:
        int64, shape (1,).
    """
    return torch.randint(2**63 - 1, (1,), device=device) ^ rank_seed()


@dataclass
class TracedPass:
    """What the layers of one compiled forward pass share; empty before and after it.

    Attributes:
        masks: The attention mask that holds in every module that runs, the innermost last.
        last: The input of the last layer, and its seed.
    """

    masks: list[Tensor | None] = field(default_factory=list)
    last: tuple[Tensor, Tensor] | None = None

    def enter(self, names: tuple[str, ...], args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Begin a module.

        Args:
            names: Parameters of its forward.
            args: Its positional arguments.
            kwargs: Its keyword arguments.

        Returns:
            The keyword arguments that are for its forward.
        """
        given, is_known = given_mask(names, args, kwargs)
        outer = self.masks[-1] if self.masks else None
        is_mask = isinstance(given, Tensor) and given.dim() == 2
        self.masks.append(given if is_mask else None if is_known and given is None else outer)
        if len(self.masks) > 1 or SAMPLE_INDEX in names:
            return kwargs
        return {name: value for name, value in kwargs.items() if name != SAMPLE_INDEX}

    def exit(self) -> None:
        """End a module."""
        self.last = None
        if self.masks:
            self.masks.pop()

    def token_mask(self, tokens: int) -> TokenMask | None:
        """Return the mask for a layer that sees ``tokens`` rows.

        Args:
            tokens: N.

        Returns:
            The mask, also if nothing is padded; None if there is none, or it has another size.
        """
        mask = self.masks[-1] if self.masks else None
        return None if mask is None or mask.numel() != tokens else TokenMask.of(mask.detach().reshape(-1))

    def seed(self, input: Tensor) -> Tensor:
        """Return a fresh seed, or that of the layer before if it read the same tensor.

        Args:
            input: The layer's input.

        Returns:
            int64, shape (1,), on the device of ``input``.
        """
        if self.last is not None and self.last[0] is input:
            return self.last[1]
        seed = fresh_seed(input.device)
        if self.masks:  # else nobody would clear it
            self.last = input, seed
        return seed
