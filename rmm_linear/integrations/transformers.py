"""Callbacks for transformers' Trainer: log the noise of the sketches, and save their state in checkpoints.

Needs transformers; nothing else in the library imports this module.
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
from rmm_linear.variance import GradientNoise, GradientProbe, ProbeResults, ProbeRow

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

_ROWS, _WHOLE = "rmm_rows", "rmm_whole"
_PREFIX = "rmm/"


class ProbeCallback(TrainerCallback):
    """Probes every n-th optimizer step with a :class:`~rmm_linear.variance.GradientProbe` and collects the rows.

    Steps are the Trainer's: with gradient accumulation, the first forward pass of the step is probed. The rows are also
    stored in ``state.log_history``, which is part of checkpoints, so a resumed run has the earlier rows. The Trainer
    does not call its callbacks when training fails; the probe's hook then stays on the model until the next training.

    Args:
        every: Probe the steps n, 2n, 3n, …
        modules: As for GradientProbe.
        config: As for GradientProbe.
        whole_every: Measure the whole gradient on every n-th probed step; None never does.
        draws: As for GradientProbe.

    Attributes:
        results: The rows of the whole run; ``results.to_csv(path)`` writes them.
    """

    def __init__(
        self,
        *,
        every: int = 50,
        modules: str | Sequence[str] | None = None,
        config: RMMConfig | None = None,
        whole_every: int | None = None,
        draws: int = 2,
    ) -> None:
        """Store the options; the probe is made when training begins."""
        check_integer("every", every)
        check_integer("whole_every", whole_every, optional=True)
        check_integer("draws", draws)
        self.every, self.modules, self.config = every, modules, config
        self.whole_every, self.draws = whole_every, draws
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
        """Attach the probe to the model, and restore the rows of a resumed run."""
        self._detach()
        if model is None:
            return
        self._probe = GradientProbe(model, self.modules, every=None, config=self.config, draws=self.draws).__enter__()
        history: list[dict[str, Any]] = state.log_history
        self._probe.whole = {
            entry["step"]: GradientNoise(**{**entry[_WHOLE], "weights": tuple(entry[_WHOLE]["weights"])})
            for entry in history
            if _WHOLE in entry
        }
        self._probe.rows = [ProbeRow(**row) for entry in history for row in entry.get(_ROWS, [])]
        self.results = self._probe

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Arm the probe if this step is due."""
        step = state.global_step + 1
        if self._probe is not None and step % self.every == 0:
            is_due = self.whole_every is not None and step % (self.every * self.whole_every) == 0
            self._probe.arm(step, whole=is_due)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Store the rows of this step in the Trainer's log history."""
        if rows := self._rows_of(state.global_step):
            found: Any = {_ROWS: [dataclasses.asdict(row) for row in rows], "step": state.global_step}
            if whole := self.results.whole.get(state.global_step):
                found[_WHOLE] = dataclasses.asdict(whole)
            state.log_history.append(found)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Detach the probe from the model."""
        self._detach()

    def _rows_of(self, step: int) -> list[ProbeRow]:
        return self.results.of_step(step)  # by bisection: called after every step

    def _detach(self) -> None:
        if self._probe is not None:
            self._probe.__exit__(None, None, None)
            self._probe = None


class RMMCallback(SketchStateCallback, ProbeCallback):
    """Logs the noise of the sketches through the Trainer, and so to TensorBoard, W&B and its other integrations.

    Every n steps: ``rmm/noise`` and ``rmm/alpha``, the medians over the layers of D²_sketch/D²_SGD and of α, and the
    same for each layer as ``rmm/noise/NAME`` and ``rmm/alpha/NAME``. With ``whole_every``, the noise of the whole
    gradient as ``rmm/noise_whole/OPERATION``, and of each block as ``rmm/noise_whole/OPERATION/BLOCK``; OPERATION is
    "all" or one of them. Also ``rmm/kept_bytes``, the bytes that one forward pass saves for the backward pass, and
    ``rmm/peak_bytes``, the peak of :func:`rmm_linear.memory.peak`. These two are measured on the first forward and
    backward pass of the previous step, so that the probe does not affect them (on the same step with ``every=1``, or if
    a run is resumed right before it). On CUDA this resets the allocator's peak statistics. Elsewhere, where every
    operator must be intercepted, memory is measured once, before the first probed step.

    The state of the sketches is saved and restored as by :class:`SketchStateCallback`.

    The conversion report is printed when training begins. A warning is logged once if the median noise exceeds a limit.
    A callback cannot add to what the Trainer sends to its other callbacks, so this one calls ``trainer.log`` itself.

    Args:
        trainer: The Trainer that the callback is added to.
        report: The result of :func:`rmm_linear.convert`, to be printed; None prints nothing.
        every: Probe the steps n, 2n, 3n, …
        limit: Median of D²_sketch/D²_SGD above which a warning is logged; at 1 the two variances are equal.
        modules: As for GradientProbe.
        config: As for GradientProbe.
        whole_every: Measure the whole gradient on every n-th probed step; None never does.
        draws: As for GradientProbe.

    Raises:
        TypeError: If ``trainer`` is not a Trainer, or an argument has the wrong type.
        ValueError: If ``every``, ``limit``, ``whole_every`` or ``draws`` is not positive.

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
        whole_every: int | None = None,
        draws: int = 2,
    ) -> None:
        """Store the Trainer and the options, and check them."""
        SketchStateCallback.__init__(self)
        ProbeCallback.__init__(self, every=every, modules=modules, config=config, whole_every=whole_every, draws=draws)
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
        """Print the report, attach the probe and restore the state of a resumed run."""
        super().on_train_begin(args, state, control, model=model, **kwargs)
        self._memory, self._measured = {}, False
        steps = {row.step for row in self.results.rows}
        self._warned = any(self.results.medians(step).get("noise", 0.0) > self.limit for step in steps)
        if self.report is not None and state.is_world_process_zero:
            print(self.report)  # printed, not logged, as by the Trainer's own callbacks

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Arm the probe, or measure memory, if this step is due for it."""
        super().on_step_begin(args, state, control, **kwargs)
        step = state.global_step + 1
        is_due = (step + 1) % self.every == 0 or (step % self.every == 0 and not self._measured)
        if self._probe is not None and is_due and (args.device.type == "cuda" or not self._measured):
            self._measured = True
            self._measure_next_pass(self._probe.model, args.device)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Log the medians and the rows of this step, and warn if the noise exceeds the limit."""
        super().on_step_end(args, state, control, **kwargs)
        rows = self._rows_of(state.global_step)
        if not rows:
            return
        medians = self.results.medians(state.global_step)
        logs, self._memory = {**medians, **self._memory}, {}
        for row in rows:
            logs.update({f"noise/{row.module}": row.noise, f"alpha/{row.module}": row.alpha})
        if whole := self.results.whole.get(state.global_step):
            for operation in whole.stand_ins:
                logs[f"noise_whole/{operation}"] = whole.whole(operation)
                by_depth = whole.by_depth(operation).items()
                logs.update({f"noise_whole/{operation}/{block}": ratio for block, ratio in by_depth})
        should_log = control.should_log
        self.trainer.log({_PREFIX + name: value for name, value in logs.items()})
        control.should_log = should_log  # trainer.log clears it, and the Trainer's own log entry would be skipped
        if medians.get("noise", 0.0) > self.limit and not self._warned:
            self._warned = True
            logger.warning(
                "Step %d: the sketches' noise is %.3g times that of the minibatch (median over the layers), more than "
                "the limit of %g. Store more: a larger ratio or memory, or fewer bits at the same memory.",
                state.global_step, medians["noise"], self.limit,
            )  # fmt: skip

    def _measure_next_pass(self, model: torch.nn.Module, device: torch.device) -> None:
        """Wrap the Trainer's next training_step, so that the measurement ends even if the pass raises."""
        trainer, before = self.trainer, vars(self.trainer).get("training_step")
        training_step = trainer.training_step

        def measured(*args: Any, **kwargs: Any) -> Any:
            if before is None:
                del trainer.training_step
            else:
                trainer.training_step = before
            with track_saved(model) as saved, peak(device) as highest:
                result = training_step(*args, **kwargs)
            self._memory = {"kept_bytes": saved.total, "peak_bytes": highest.bytes}
            return result

        trainer.training_step = measured
