"""Look for a gradient in rows that were not saved: it is missing in what the backward pass returns.

Padding is looked at in every module's first backward pass. Later batches may differ from the first, so in every pass
the module next to the loss looks again, where a gradient comes first, and one other module in turn.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NoReturn

import torch
from torch import Tensor

from rmm_linear.context.call_inputs import HostRead, waits
from rmm_linear.sketches import TokenMask
from rmm_linear.sketches.seeds import is_capturing

PADDING = (
    "Padding must not reach the loss, but masked tokens of {} carry a gradient{}. Leaving them out would bias the "
    "weight gradient. {}"
)
POOLED = (
    " (the model pools over padding, or the labels cover it)",
    "Convert with mask_padding=False, or mask the padding in the loss.",
)
_ON_THE_LEFT = (
    ": sequences are padded on the left, and the last token of padding predicts the first token of the text",
    "Set the label of that first token to -100, pad on the right, or convert with mask_padding=False.",
)
_LATER = (
    " No batch before had such a gradient. Those of this step are incomplete: drop them with zero_grad. (On a GPU this "
    "is said one step later: go back to a checkpoint if the optimizer has used them.)"
)


class LeftOut:
    """What rows that were not saved had of a gradient, until the host has read it."""

    def __init__(self) -> None:
        """Begin with nothing noted."""
        self._noted: list[tuple[Callable[[int], None], Tensor]] = []
        self._reads: list[tuple[list[Callable[[int], None]], HostRead]] = []  # on their way to the host

    def note(self, found: Tensor, refuse: Callable[[int], None]) -> None:
        """Call ``refuse`` with an integer unless it is 0: on the CPU now, elsewhere after the next forward pass.

        Then the device has all of that pass to do, and is not kept waiting.
        """
        self._noted.append((refuse, found))
        if not waits(found.device):
            self.read()
            self.refuse()

    def note_padding(self, y: Tensor, mask: TokenMask, name: str) -> None:
        """Look at the gradient of a module's output, shape (N, O), whose padding had none before."""
        self.note(gradient_in_padding(y, mask), functools.partial(refuse_padding, name, when=_LATER))

    def read(self) -> None:
        """Begin to read what was noted."""
        if not self._noted or is_capturing(self._noted[0][1].device):
            return
        found, self._noted = self._noted, []
        values = torch.stack([one.to(found[0][1].device, torch.int64) for _, one in found])
        self._reads.append(([refuse for refuse, _ in found], HostRead(values)))

    def refuse(self) -> None:
        """Refuse what was read."""
        if not self._reads or is_capturing(self._reads[0][1].device):
            return
        reads, self._reads = self._reads, []
        for refusals, read in reads:
            for refuse, had in zip(refusals, read.values, strict=True):
                if had:
                    refuse(had)


def gradient_in_padding(y: Tensor, mask: TokenMask) -> Tensor:
    """Return 0 if no masked row of an output's gradient has one, else 1; 2 if one is followed by a valid token.

    Rows that are not finite do not count.
    """
    order = mask.order[mask.valid_count :]
    padding = y.index_select(0, order)
    has_gradient = ((padding != 0) & padding.isfinite()).any(1)
    found = has_gradient.any().long()
    if not mask.length:
        return found
    is_inside = (order + 1) % mask.length != 0  # the next row is of the same sequence
    is_before_text = mask.valid[(order + 1) % len(y)] & is_inside
    return found + (has_gradient & is_before_text).any()


def refuse_padding(name: str, had: int, *, when: str = "") -> NoReturn:
    """Say what :func:`gradient_in_padding` has found."""
    cause, remedy = POOLED if had == 1 else _ON_THE_LEFT
    raise RuntimeError(PADDING.format(name, cause, remedy) + when)
