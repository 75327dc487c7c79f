"""Look at the training steps of a converted model, and say once where they save nothing."""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Sequence

from torch import nn
from torch.autograd import Variable

from rmm_linear.context.autograd_nodes import in_backward
from rmm_linear.context.messages import checkpointed_message, few_rows_message, late_message

logger = logging.getLogger(__name__)

CHECKPOINTED = "checkpointed"


class StepChecks:
    """What the first training steps of a model have shown.

    Attributes:
        said: What was logged already, once for all modules.
        is_done: Whether a first training step was looked at.
    """

    def __init__(self, names: Sequence[str], min_rows: int) -> None:
        """Begin with nothing seen.

        Args:
            names: Names of the converted modules.
            min_rows: The configuration's.
        """
        self.said: set[str | None] = set()
        self._names, self._min_rows = names, min_rows
        self._model: weakref.ref[nn.Module] | None = None
        self._present: weakref.WeakSet[nn.Module] | None = None  # unknown in a copy of a converted model
        self._checkpointed: set[int] = set()
        self.is_done = False
        self._rows: dict[int, int | None] = {}

    def note_model(self, model: nn.Module) -> None:
        """Note which modules a model has when it is converted.

        Args:
            model: The model.
        """
        self._model, self._present = weakref.ref(model), weakref.WeakSet(model.modules())

    def aside(self) -> StepChecks:
        """Return checks for passes that are no training steps, in which a part of the modules may be exact.

        Returns:
            Checks that say nothing.
        """
        silent = StepChecks(self._names, self._min_rows)
        silent.said.add(CHECKPOINTED)
        silent.is_done = True
        return silent

    def note_checkpointed(self, index: int) -> None:
        """Note that activation checkpointing recomputes a module, which stays exact therefore.

        Args:
            index: Index of the module.
        """
        if CHECKPOINTED in self.said:
            return
        if not self._checkpointed and in_backward():  # of a reentrant checkpoint, whose first pass shows nothing
            Variable._execution_engine.queue_callback(self._say_checkpointed)
        self._checkpointed.add(index)

    def note_rows(self, index: int, tokens: int | None) -> None:
        """Note what a trained linear layer has seen.

        Args:
            index: Index of the layer.
            tokens: N if it is too small for a sketch, else None.
        """
        if not self.is_done:
            self._rows[index] = tokens

    def forget(self) -> None:
        """Forget what a pass has shown that was no training step."""
        self._rows.clear()

    def finish(self, model: nn.Module) -> None:
        """Say what a forward pass of training has shown, at its end.

        Args:
            model: The outermost module.
        """
        if self._model is None:
            self._model = weakref.ref(model)
        self._say_checkpointed()
        if self.is_done:
            return
        self.is_done = True
        if late := self.late_linears():
            self._say("late", late_message(late))
        few = {self._names[index]: tokens for index, tokens in self._rows.items() if tokens is not None}
        if few and len(few) == len(self._rows):
            self._say("few rows", few_rows_message(few, self._min_rows))
        self._rows.clear()

    def late_linears(self) -> list[str]:
        """Find the plain linear layers that are trained and came into the model after its conversion.

        Returns:
            Their names in the converted model; empty for a copy of one, of which it is not known.
        """
        model = None if self._model is None else self._model()
        if model is None or self._present is None:
            return []
        conv1d = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", nn.Linear)
        plain = {name: module for name, module in model.named_modules() if type(module) in (nn.Linear, conv1d)}
        return [name for name, one in plain.items() if one not in self._present and _is_trained(one)]

    def _say_checkpointed(self) -> None:
        if self._checkpointed:
            names = [self._names[index] for index in sorted(self._checkpointed)]
            model = None if self._model is None else self._model()
            self._say(CHECKPOINTED, checkpointed_message(names, self._names, model))
            self._checkpointed.clear()

    def _say(self, key: str, message: str) -> None:
        if key not in self.said:
            self.said.add(key)
            logger.warning(message)


def _is_trained(module: nn.Module) -> bool:
    return module.weight.requires_grad  # pyright: ignore[reportReturnType]
