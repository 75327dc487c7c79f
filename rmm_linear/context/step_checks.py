"""Look at the training steps of a converted model, and say once where they save nothing."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import nn

from rmm_linear.context.autograd_nodes import in_backward
from rmm_linear.context.messages import checkpointed_message, few_rows_message, unsketched_message

logger = logging.getLogger(__name__)

CHECKPOINTED = "checkpointed"


class StepChecks:
    """What the first training steps of a model have shown.

    Attributes:
        said: What was logged already, once for all modules.
    """

    def __init__(self, names: Sequence[str], min_rows: int) -> None:
        """Begin with nothing seen.

        Args:
            names: Names of the converted modules.
            min_rows: The configuration's.
        """
        self.said: set[str | None] = set()
        self._names, self._min_rows = names, min_rows
        self._checkpointed: set[int] = set()
        self._is_done = False
        self._rows: dict[int, int | None] = {}

    def note_checkpointed(self, index: int) -> None:
        """Note that activation checkpointing recomputes a module, which stays exact therefore.

        Args:
            index: Index of the module.
        """
        if CHECKPOINTED in self.said:
            return
        if in_backward():  # of a reentrant checkpoint, whose first pass shows nothing
            self._say(CHECKPOINTED, checkpointed_message([], self._names))
        else:
            self._checkpointed.add(index)

    def note_rows(self, index: int, tokens: int | None) -> None:
        """Note what a trained linear layer has seen.

        Args:
            index: Index of the layer.
            tokens: N if it is too small for a sketch, else None.
        """
        if not self._is_done:
            self._rows[index] = tokens

    def forget(self) -> None:
        """Forget what a pass has shown that was no training step."""
        self._rows.clear()

    def finish(self, model: nn.Module) -> None:
        """Say what a forward pass of training has shown, at its end.

        Args:
            model: The outermost module.
        """
        if self._checkpointed:
            names = [self._names[index] for index in sorted(self._checkpointed)]
            self._say(CHECKPOINTED, checkpointed_message(names, self._names))
            self._checkpointed.clear()
        if self._is_done:
            return
        self._is_done = True
        self._say("unsketched", unsketched_message(model))
        few = {self._names[index]: tokens for index, tokens in self._rows.items() if tokens is not None}
        if few and len(few) == len(self._rows):
            self._say("few rows", few_rows_message(few, self._min_rows))
        self._rows.clear()

    def _say(self, key: str, message: str | None) -> None:
        if message is not None and key not in self.said:
            self.said.add(key)
            logger.warning(message)
