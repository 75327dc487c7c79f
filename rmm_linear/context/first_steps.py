"""Look at the first training step of a converted model, and say once where a conversion saves nothing, and why."""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Mapping, Sequence

from torch import nn
from torch.autograd import Variable

from rmm_linear._support.tables import folded
from rmm_linear.context.checkpointing import how_to_turn_off
from rmm_linear.context.code_noise import MOST_NOISE
from rmm_linear.context.surroundings import in_backward

logger = logging.getLogger(__name__)

CHECKPOINTED = "checkpointed"
_ALONE = "alone"
MOST_WAITS = 64  # forward passes in a row
_PART = 0.1  # of the converted modules, of which more would be a warning
WAITING = (
    f"at the start of each of the last {MOST_WAITS} forward passes, others still had no backward pass, as in pipelines "
    "that never drain: what the first steps have shown (codes with too much noise, rows without gradients) "
    "is not used before all have begun theirs. Drop outputs that get no backward pass, or drain the pipeline once"
)


class StepChecks:
    """The observations of a model's first training steps."""

    def __init__(self, names: Sequence[str], min_rows: int) -> None:
        """Begin with nothing seen."""
        self.said: set[str | None] = set()  # what was logged already, once for all modules
        self._names, self._min_rows = names, min_rows
        self._model: weakref.ref[nn.Module] | None = None
        self._present: weakref.WeakSet[nn.Module] | None = None  # unknown in a copy of a converted model
        self._checkpointed: set[int] = set()
        self.is_done = False  # whether a first training step was looked at
        self._rows: dict[int, int | None] = {}

    def note_model(self, model: nn.Module) -> None:
        self._model, self._present = weakref.ref(model), weakref.WeakSet(model.modules())

    def aside(self) -> StepChecks:
        """Return checks for passes that are no training steps, in which a part of the modules may be exact."""
        silent = StepChecks(self._names, self._min_rows)
        silent.said |= {CHECKPOINTED, _ALONE}
        silent.is_done = True
        return silent

    def note_alone(self, index: int) -> None:
        """Note that a module runs outside of the forward pass of the model that was converted."""
        if _ALONE in self.said:
            return
        self._say(
            _ALONE,
            f"{self._names[index]} is trained outside of a forward pass of the model that was converted. Such a pass "
            "shares codes among layers, and decides in the first steps what needs more bits: neither happens, and "
            "dropout draws other numbers. Convert the module that the training loop calls.",
        )

    def note_checkpointed(self, index: int) -> None:
        """Note that activation checkpointing recomputes a module, which stays exact therefore."""
        if CHECKPOINTED in self.said:
            return
        if not self._checkpointed and in_backward():  # of a reentrant checkpoint, whose first pass shows nothing
            Variable._execution_engine.queue_callback(self._say_checkpointed)
        self._checkpointed.add(index)

    def note_rows(self, index: int, tokens: int | None) -> None:
        """Note what a trained linear layer has seen: N if it is too small for a sketch, else None."""
        if not self.is_done:
            self._rows[index] = tokens

    def forget(self) -> None:
        """Forget what a pass has shown that was no training step."""
        self._rows.clear()

    def finish(self, model: nn.Module) -> None:
        """Say what a forward pass of training has shown, at its end."""
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
            is_part = len(few) < _PART * len(self._names)  # as the head of a convolutional network
            self._say("few rows", few_rows_message(few, self._min_rows), logging.INFO if is_part else logging.WARNING)
        self._rows.clear()

    def say_kept_anyway(self, found: Sequence[int], *, is_chosen: bool) -> None:
        """Say that modules are exact from now on: a warning where a user has named layers to convert."""
        logger.log(
            logging.WARNING if is_chosen else logging.INFO,
            "%d converted modules (%s) free nothing, as other operations or the caller keep the same tensors anyway: "
            "they are exact from now on.",
            len(found),
            shown([self._names[index] for index in found]),
        )

    def say_widened(self, found: Sequence[int]) -> None:
        """Say that modules take more bits from now on."""
        logger.info(
            "In the first steps, the codes of %d converted modules (%s) added noise of more than %g times the gradient "
            "that is made of them: they take more bits from now on.",
            len(found),
            shown([self._names[index] for index in found]),
            MOST_NOISE,
        )

    def say_waiting(self) -> None:
        """Say that what the first steps have shown is not used."""
        self._say("waiting", f"{WAITING[0].upper()}{WAITING[1:]}.")

    def late_linears(self) -> list[str]:
        """Name the plain linear layers that are trained and came into the model after its conversion."""
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

    def _say(self, key: str, message: str, level: int = logging.WARNING) -> None:
        if key not in self.said:
            self.said.add(key)
            logger.log(level, message)


def _is_trained(module: nn.Module) -> bool:
    return module.weight.requires_grad  # pyright: ignore[reportReturnType]


_SHOWN = 3


def checkpointed_message(names: Sequence[str], converted: Sequence[str], model: nn.Module | None) -> str:
    """Say that recomputed modules stay exact, what can still be saved, and how to save more."""
    rest = len(converted) - len(names)
    left = f"in the other {rest} alone" if rest else "nowhere"
    return (
        f"Activation checkpointing recomputes {len(names)} of the {len(converted)} converted modules ({shown(names)}). "
        "It drops what they save for the backward pass, so they stay exact and add no noise, and the conversion saves "
        f"memory {left}. To save memory without recomputing, turn checkpointing off: {how_to_turn_off(model)}. "
        'To lower the peak inside of the block that is being recomputed, convert with checkpointed="packed".'
    )


def late_message(names: Sequence[str]) -> str:
    """Say that linear layers are trained that came after the conversion."""
    return (
        "Sketches replace the input of linear layers that are in a model when it is converted, and this one trains "
        f"{len(names)} that came later, as adapters do ({shown(names)}): they save their whole input. Call "
        "rmm_linear.revert(model), then rmm_linear.convert after get_peft_model; in a Trainer, pass "
        "RMMCallback(convert=RMMConfig()) instead of an earlier convert."
    )


def few_rows_message(rows: Mapping[str, int], min_rows: int) -> str:
    least, most = min(rows.values()), max(rows.values())
    seen = f"{least}" if least == most else f"{least} to {most}"
    return (
        f"Layers that see at most min_rows={min_rows} rows stay exact, and all {len(rows)} trained linear layers that "
        f"ran ({shown(list(rows))}) saw {seen}, so no sketch was made. Give larger batches, or convert with a smaller "
        "min_rows; a head that sees one row per sequence saves little anyway."
    )


def shown(names: Sequence[str]) -> str:
    """Name a few of many modules, those that differ in numbers alone together.

    Example:
        >>> shown(["0", "1.2.bias", "1.3.bias", "head", "last"])
        '0, 1.{2-3}.bias, head, …'
    """
    patterns = [*folded(names)]
    return ", ".join(patterns[:_SHOWN]) + (", …" if len(patterns) > _SHOWN else "")
