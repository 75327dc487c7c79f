"""The attention masks of compiled forward passes.

A token mask is a pair of tensors, whether or not anything is padded. ``torch.compile(model)`` runs the hooks of the
model itself outside of the compiled forward pass and those of its submodules inside; both find the masks below. A block
that is compiled by itself finds none, and padding stays in the sketch. Norm estimators neither predict nor learn in
compiled code.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from rmm_linear.context.call_inputs import given_mask
from rmm_linear.norm_estimators.samples import SAMPLE_INDEX
from rmm_linear.sketches import TokenMask


@dataclass
class TracedMasks:
    """The attention masks that hold in the modules of a compiled forward pass; empty before and after it.

    Attributes:
        masks: A mask, None for none, and the module that said so; the innermost last. Checkpoints inside of a graph may
            change nothing outside of themselves, so modules that leave the mask as it is leave no entry.
    """

    masks: list[tuple[Tensor | None, nn.Module]] = field(default_factory=list)

    def enter(self, module: nn.Module, names: tuple[str, ...], args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Begin a module.

        Args:
            module: The module.
            names: Parameters of its forward.
            args: Its positional arguments.
            kwargs: Its keyword arguments.

        Returns:
            The keyword arguments that are for its forward.
        """
        self.exit(module)  # of a call that has failed
        given, is_known = given_mask(names, args, kwargs)
        outer = self.masks[-1][0] if self.masks else None
        if isinstance(given, Tensor) and given.dim() == 2 and given is not outer:
            self.masks.append((given, module))
        elif is_known and given is None and outer is not None:
            self.masks.append((None, module))
        if SAMPLE_INDEX in names or SAMPLE_INDEX not in kwargs:
            return kwargs
        return {name: value for name, value in kwargs.items() if name != SAMPLE_INDEX}

    def exit(self, module: nn.Module) -> None:
        """End a module.

        Args:
            module: The module.
        """
        if self.masks and self.masks[-1][1] is module:
            self.masks.pop()

    def token_mask(self, tokens: int) -> TokenMask | None:
        """Return the mask for a layer that sees ``tokens`` rows.

        Args:
            tokens: N.

        Returns:
            The mask, also if nothing is padded; None if there is none, or it has another size.
        """
        mask = self.masks[-1][0] if self.masks else None
        return None if mask is None or mask.numel() != tokens else TokenMask.of(mask.detach().reshape(-1))
