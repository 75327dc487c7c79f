"""Look for a gradient in rows that were not saved: it is missing in what the backward pass returns.

Padding is looked at in every module's first backward pass. Later batches may differ from the first, so in every pass
the first module that runs backward looks again, next to the loss, and one other module at random. Once one has found a
gradient, all modules look in every pass.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import NoReturn

import torch
from torch import Tensor

from rmm_linear.context.call_inputs import HostRead, waits
from rmm_linear.context.learned import largest_of_rows
from rmm_linear.sketches import TokenMask
from rmm_linear.sketches.seeds import is_capturing

logger = logging.getLogger(__name__)

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
_NEXT_TO_THE_LOSS = (
    " The gradients of this step are incomplete: drop them with zero_grad. (On a GPU this is said one step later: go "
    "back to a checkpoint if the optimizer has used them.)"
)
_AT_RANDOM = (
    " The gradients of this step are incomplete, and perhaps those of earlier steps with such batches: a layer that is "
    "not next to the loss looks in some of the steps, and from now on in all. Go back to a checkpoint before them."
)


class LeftOut:
    """What rows that were not saved had of a gradient, until the host has read it."""

    def __init__(self) -> None:
        """Begin with nothing noted."""
        self.is_suspected = False  # whether a gradient in padding was found
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

    def note_padding(self, y: Tensor, mask: TokenMask, name: str, *, is_first: bool) -> None:
        """Look at the gradient of a module's output, shape (N, O), whose padding had none before."""
        when = _NEXT_TO_THE_LOSS if is_first else _AT_RANDOM
        self.note(gradient_in_padding(y, mask), functools.partial(self._refuse_padding, name, when))

    def _refuse_padding(self, name: str, when: str, had: int) -> NoReturn:
        self.is_suspected = True
        refuse_padding(name, had, when=when)

    def read(self) -> None:
        """Begin to read what was noted."""
        if not self._noted or is_capturing(self._noted[0][1].device):
            return
        found, self._noted = self._noted, []
        values = torch.stack([one.to(found[0][1].device, torch.int64) for _, one in found])
        self._reads.append(([refuse for refuse, _ in found], HostRead(values)))

    def end(self) -> None:
        """Log what would be refused after a forward pass that does not come."""
        try:
            self.read()
            self.refuse()
        except RuntimeError as error:
            logger.warning("%s", error)

    def refuse(self) -> None:
        """Refuse what was read; the first error is raised, after all have been told."""
        if not self._reads or is_capturing(self._reads[0][1].device):
            return
        reads, self._reads, errors = self._reads, [], list[RuntimeError]()
        for refusals, read in reads:
            for refuse, had in zip(refusals, read.values, strict=True):
                try:
                    if had:
                        refuse(had)
                except RuntimeError as error:
                    errors.append(error)
        if errors:
            raise errors[0]


def gradient_in_padding(y: Tensor, mask: TokenMask) -> Tensor:
    """Return 0 if no masked row of an output's gradient has one, else 1; 2 if a valid token follows all that have one.

    Rows that are not finite do not count.
    """
    if not y.numel():
        return y.new_zeros((), dtype=torch.int64)
    order = mask.order[mask.valid_count :]
    sizes = largest_of_rows(y).index_select(0, order)
    has_gradient = (sizes != 0) & sizes.isfinite()
    found = has_gradient.any().long()
    if not mask.length:
        return found
    is_inside = (order + 1) % mask.length != 0  # the next row is of the same sequence
    is_before_text = mask.valid[(order + 1) % len(y)] & is_inside
    return found + found * (~has_gradient | is_before_text).all()


def refuse_padding(name: str, had: int, *, when: str = "") -> NoReturn:
    """Say what :func:`gradient_in_padding` has found."""
    cause, remedy = POOLED if had == 1 else _ON_THE_LEFT
    raise RuntimeError(PADDING.format(name, cause, remedy) + when)
