"""The attention masks of compiled forward passes.

A token mask is a pair of tensors, whether or not anything is padded. ``torch.compile(model)`` runs the hooks of the
model itself outside of the compiled forward pass and those of its submodules inside; both use :class:`TracedMasks`. A
block that is compiled by itself has no mask, and padding stays in its sketch. Norm estimators neither predict nor learn
in compiled code.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from rmm_linear.context.call_inputs import mask_argument
from rmm_linear.norm_estimators.samples import SAMPLE_INDEX
from rmm_linear.sketches import TokenMask


@dataclass
class TracedMasks:
    """The attention masks that hold in the modules of a compiled forward pass; empty before and after it.

    Attributes:
        masks: Pairs of a mask, or None for no mask, and the module whose call set it; the innermost last. Modules that
            leave the mask unchanged have no entry: a checkpoint inside of a graph may change nothing outside of itself.
    """

    masks: list[tuple[Tensor | None, nn.Module]] = field(default_factory=list)

    def enter(self, module: nn.Module, names: tuple[str, ...], args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Begin the call of a module.

        Args:
            module: The module.
            names: Parameters of its forward.
            args: Its positional arguments.
            kwargs: Its keyword arguments.

        Returns:
            The keyword arguments for its forward.
        """
        self.exit(module)  # if an earlier call has failed
        argument, has_parameter = mask_argument(names, args, kwargs)
        outer = self.masks[-1][0] if self.masks else None
        if isinstance(argument, Tensor) and argument.dim() == 2 and argument is not outer:
            self.masks.append((argument, module))
        elif has_parameter and argument is None and outer is not None:
            self.masks.append((None, module))
        if SAMPLE_INDEX in names or SAMPLE_INDEX not in kwargs:
            return kwargs
        return {name: value for name, value in kwargs.items() if name != SAMPLE_INDEX}

    def exit(self, module: nn.Module) -> None:
        """End the call of a module.

        Args:
            module: The module.
        """
        if self.masks and self.masks[-1][1] is module:
            self.masks.pop()

    def token_mask(self, tokens: int) -> TokenMask | None:
        """Return the mask for a layer whose input has ``tokens`` rows.

        Args:
            tokens: N.

        Returns:
            The mask, even if nothing is padded; None if there is none, or it has another size.
        """
        mask = self.masks[-1][0] if self.masks else None
        return None if mask is None or mask.numel() != tokens else TokenMask.of(mask.detach().reshape(-1))
