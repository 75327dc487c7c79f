"""Callbacks for transformers' Trainer: the noise of the sketches, in its logs and checkpoints.

Needs transformers; the library loads this module only when it is asked for.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import torch

from rmm_linear._support.validation import check_integer
from rmm_linear.config import RMMConfig
from rmm_linear.conversion.report import ConversionReport
from rmm_linear.memory import peak, track_saved
from rmm_linear.variance import GradientProbe, ProbeResults, ProbeRow

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as missing:
    raise ImportError(
        "rmm_linear.integrations.transformers needs transformers, which is not installed. "
        "Run pip install 'rmm_linear[glue]'."
    ) from missing

from rmm_linear.integrations.checkpoints import SketchStateCallback

__all__ = ["ProbeCallback", "RMMCallback", "SketchStateCallback"]

logger = logging.getLogger(__name__)

_ROWS = "rmm_rows"
_PREFIX = "rmm/"


class ProbeCallback(TrainerCallback):
    """Looks at one optimizer step in n with a :class:`~rmm_linear.variance.GradientProbe` and remembers what it saw.

    Steps are the Trainer's: with gradient accumulation, the first forward pass of the step is looked at. The rows are
    kept in ``state.log_history`` too, which checkpoints carry, so a resumed run has those from before. The Trainer says
    nothing to its callbacks when training fails; the probe's hook then stays on the model until training begins anew.

    Args:
        every: Look at the steps n, 2n, 3n, …
        modules: As for GradientProbe.
        config: As for GradientProbe.

    Attributes:
        results: The rows of the whole run; ``results.to_csv(path)`` writes them.
    """

    def __init__(
        self, *, every: int = 50, modules: str | Sequence[str] | None = None, config: RMMConfig | None = None
    ) -> None:
        """Remember what to look at."""
        check_integer("every", every)
        self.every, self.modules, self.config = every, modules, config
        self.results = ProbeResults()
        self._probe: GradientProbe | None = None

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: torch.nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Put the probe on the model, and take the rows of a run that is resumed.

        Args:
            args: Unused.
            state: Where training is.
            control: Unused.
            model: The model.
            **kwargs: Unused.
        """
        self._leave()
        if model is None:
            return
        self._probe = GradientProbe(model, self.modules, every=None, config=self.config).__enter__()
        history: list[dict[str, Any]] = state.log_history
        self._probe.rows = [ProbeRow(**row) for entry in history for row in entry.get(_ROWS, [])]
        self.results = self._probe

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Look at this step, if it is one to look at.

        Args:
            args: Unused.
            state: Where training is.
            control: Unused.
            **kwargs: Unused.
        """
        step = state.global_step + 1
        if self._probe is not None and step % self.every == 0:
            self._probe.arm(step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Remember what was seen of this step.

        Args:
            args: Unused.
            state: Where training is.
            control: Unused.
            **kwargs: Unused.
        """
        if rows := self._rows_of(state.global_step):
            found: Any = {_ROWS: [dataclasses.asdict(row) for row in rows], "step": state.global_step}
            state.log_history.append(found)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take the probe off the model.

        Args:
            args: Unused.
            state: Unused.
            control: Unused.
            **kwargs: Unused.
        """
        self._leave()

    def _rows_of(self, step: int) -> list[ProbeRow]:
        return self.results.of_step(step)  # asked after every step

    def _leave(self) -> None:
        if self._probe is not None:
            self._probe.__exit__(None, None, None)
            self._probe = None


class RMMCallback(SketchStateCallback, ProbeCallback):
    """Logs the noise of the sketches through the Trainer, and so to TensorBoard, W&B and whatever else it reports to.

    Every n steps: ``rmm/noise`` and ``rmm/alpha``, the medians over the layers of D²_sketch/D²_SGD and of α, and the
    same for each layer as ``rmm/noise/NAME`` and ``rmm/alpha/NAME``. ``rmm/kept_bytes``, the bytes that one forward
    pass keeps for the backward pass, and ``rmm/peak_bytes``, the peak of :func:`rmm_linear.memory.peak`, are measured
    on the first forward and backward pass of the step before, which the probe does not disturb (with ``every=1``, and
    where a run is resumed one step before, on the same step). On CUDA this sets the allocator's peak statistics back;
    elsewhere, where every operator has to be watched, it is done once, before the first look.

    It saves and restores what the sketches have learned, as :class:`SketchStateCallback` does by itself.

    The conversion report is printed when training begins. A warning is logged once if the median noise passes a limit.
    A callback cannot add to what the Trainer sends to its other callbacks, so this one calls ``trainer.log`` itself.

    Args:
        trainer: The Trainer that it is added to.
        report: The result of :func:`rmm_linear.convert`, to be printed; None prints nothing.
        every: Look at the steps n, 2n, 3n, …
        limit: Median of D²_sketch/D²_SGD above which a warning is logged; at 1 the sketch is as loud as the minibatch.
        modules: As for GradientProbe.
        config: As for GradientProbe.

    Raises:
        TypeError: If ``trainer`` is no Trainer, or an argument has the wrong type.
        ValueError: If ``every`` or ``limit`` is not positive.

    Example:
        ``trainer.add_callback(RMMCallback(trainer, rmm_linear.convert(model), every=50))``
    """

    def __init__(
        self,
        trainer: Any,
        report: ConversionReport | None = None,
        *,
        every: int = 50,
        limit: float = 1.0,
        modules: str | Sequence[str] | None = None,
        config: RMMConfig | None = None,
    ) -> None:
        """Remember the Trainer."""
        SketchStateCallback.__init__(self)
        ProbeCallback.__init__(self, every=every, modules=modules, config=config)
        if not callable(getattr(trainer, "log", None)) or not callable(getattr(trainer, "training_step", None)):
            raise TypeError(
                f"trainer must be a transformers Trainer, got {type(trainer).__name__}. "
                "Make the Trainer first, then trainer.add_callback(RMMCallback(trainer))."
            )
        if isinstance(limit, bool) or not isinstance(limit, int | float):
            raise TypeError(f"limit must be a positive number, got {limit!r}.")
        if not limit > 0:
            raise ValueError(f"limit must be positive, got {limit}. Use float('inf') for no warning.")
        self.trainer, self.report, self.limit = trainer, report, limit
        self._memory: dict[str, float] = {}
        self._measured = self._warned = False

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: torch.nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Print the report, and put the probe on the model.

        Args:
            args: The Trainer's arguments.
            state: Where training is.
            control: Unused.
            model: The model.
            **kwargs: Unused.
        """
        super().on_train_begin(args, state, control, model=model, **kwargs)
        self._memory, self._measured = {}, False
        steps = {row.step for row in self.results.rows}
        self._warned = any(self.results.medians(step).get("noise", 0.0) > self.limit for step in steps)
        if self.report is not None and state.is_world_process_zero:
            print(self.report)  # as the Trainer's own callbacks speak to the user

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Look at this step, or measure its memory, if it is one of those.

        Args:
            args: The Trainer's arguments.
            state: Where training is.
            control: Unused.
            **kwargs: Unused.
        """
        super().on_step_begin(args, state, control, **kwargs)
        step = state.global_step + 1
        is_due = (step + 1) % self.every == 0 or (step % self.every == 0 and not self._measured)
        if self._probe is not None and is_due and (args.device.type == "cuda" or not self._measured):
            self._measured = True
            self._measure_next_pass(self._probe.model, args.device)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Log what was seen of this step.

        Args:
            args: Unused.
            state: Where training is.
            control: The Trainer's flags, left as they are.
            **kwargs: Unused.
        """
        super().on_step_end(args, state, control, **kwargs)
        rows = self._rows_of(state.global_step)
        if not rows:
            return
        medians = self.results.medians(state.global_step)
        logs, self._memory = {**medians, **self._memory}, {}
        for row in rows:
            logs.update({f"noise/{row.module}": row.noise, f"alpha/{row.module}": row.alpha})
        should_log = control.should_log
        self.trainer.log({_PREFIX + name: value for name, value in logs.items()})
        control.should_log = should_log  # logging takes it back, and the Trainer's own entry of this step would be lost
        if medians.get("noise", 0.0) > self.limit and not self._warned:
            self._warned = True
            logger.warning(
                "Step %d: the sketches' noise is %.3g times that of the minibatch (median over the layers), more than "
                "the limit of %g. Keep more: a larger ratio or memory, or fewer bits at the same memory.",
                state.global_step, medians["noise"], self.limit,
            )  # fmt: skip

    def _measure_next_pass(self, model: torch.nn.Module, device: torch.device) -> None:
        """Wrap the Trainer's next training_step: a block around it ends however the pass does."""
        trainer, before = self.trainer, vars(self.trainer).get("training_step")
        training_step = trainer.training_step

        def measured(*args: Any, **kwargs: Any) -> Any:
            if before is None:
                del trainer.training_step
            else:
                trainer.training_step = before
            with track_saved(model) as kept, peak(device) as highest:
                result = training_step(*args, **kwargs)
            self._memory = {"kept_bytes": kept.total, "peak_bytes": highest.bytes}
            return result

        trainer.training_step = measured
