"""Callbacks for transformers' Trainer: log the variance of the sketches, and save their state in checkpoints.

Needs transformers; nothing else in the library imports this module.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

import rmm_linear
from rmm_linear._support.installing import not_usable
from rmm_linear._support.tables import wrapped
from rmm_linear.config import OPERATIONS, RMMConfig, suggested
from rmm_linear.context.checkpointing import KEEP, REPLACE, Uncheckpointed, check_checkpointing
from rmm_linear.context.first_steps import shown
from rmm_linear.conversion.report import ConversionReport
from rmm_linear.fitting.report import FitReport
from rmm_linear.memory import peak, track_saved

try:
    from transformers import TrainerControl, TrainerState, TrainingArguments
except ImportError as missing:
    raise not_usable(__name__, "transformers", missing) from missing

from rmm_linear.integrations.checkpoints import SketchStateCallback
from rmm_linear.integrations.explaining import is_converted, late_linears, saved_by_model
from rmm_linear.integrations.fit_training import FitCallback
from rmm_linear.integrations.probing import ProbeCallback
from rmm_linear.integrations.trainers import (
    arguments_of_step,
    around_next_step,
    calling_trainer,
    is_trainer,
    loss_call,
    prepared_inputs,
    turn_off_checkpointing,
    untraced,
)

__all__ = ["ProbeCallback", "RMMCallback", "SketchStateCallback"]

logger = logging.getLogger(__name__)

_PREFIX = "rmm/"
# The step whose noise is measured in any case, after adapters that begin with zeros have gradients, and of how many
# layers, as on most GPUs that takes as long as some steps.
_FIRST, _LAYERS = 3, 16
_ADVICE = (
    'Store more, as RMMConfig.preset("careful") does (an eighth of the default\'s), or leave linear layers exact: '
    f"RMMConfig(operations={[one for one in OPERATIONS if one != 'linear']})."
)
_EXACT = (
    "rmm_linear: no linear layer of this model is compressed, so their variance ratio says nothing. "
    "RMMCallback(..., whole_every=1) measures that of the whole gradient, all operations together, which takes a pass "
    "over every example of a batch."
)


class RMMCallback(SketchStateCallback, ProbeCallback):
    """Logs the variance ratio of the sketches through the Trainer, and so to TensorBoard, W&B and others.

    Every n steps: ``rmm/noise`` and ``rmm/alpha``, the medians over the layers of D²_sketch/D²_SGD and of α; no noise
    where all of them save their rows as they are, as the head of a convolutional network. With
    ``whole_every``, the variance ratio of the whole gradient as ``rmm/noise_whole/OPERATION``; OPERATION is "all" or
    one of them. With ``per_layer``, ratio and α of each layer as ``rmm/noise/NAME`` and ``rmm/alpha/NAME``, and the
    ratio of each block as ``rmm/noise_whole/OPERATION/BLOCK``. Also ``rmm/kept_bytes``, the bytes that one forward pass
    saves for the backward pass, and ``rmm/peak_bytes``, the peak of :func:`rmm_linear.memory.peak`. These two are
    measured on the first forward and backward pass of the previous step, so that the probe does not affect them (on the
    same step with ``every=1``, or if a run is resumed right before it). On CUDA this resets the allocator's peak
    statistics. Elsewhere, where every operator must be intercepted, memory is measured once, before the first probed
    step.

    The state of the sketches is saved and restored as by :class:`SketchStateCallback`.

    The conversion report is printed when training begins, and in the first step what the whole model saves for the
    backward pass, exactly and converted, which ``report.memory`` has from then on; that calls ``compute_loss`` three
    times more, and leaves no trace in what the Trainer counts. With ``convert``, the ratio of some layers is measured
    in the third step too, and its median printed. A warning is logged once if the median ratio exceeds a limit. A
    callback cannot add to what the Trainer sends to its other callbacks, so this one calls ``trainer.log`` itself.

    With ``fit``, :func:`rmm_linear.fit` chooses for every block what it saves, so that training fits a budget. It
    plans in the first step, with its batch and the Trainer's optimizer, prints its report, and plans again before a
    step with a larger batch that the plan does not fit, see
    :class:`~rmm_linear.integrations.fit_training.FitCallback`. With ``fit={"memory": "80GB", "length": 8192}`` it plans
    for sequences of that length at once. Ratios are then logged of what it converted, if anything.

    Args:
        trainer: The Trainer that the callback is added to; None finds it when training begins.
        report: The result of :func:`rmm_linear.convert`, to be printed; None prints nothing.
        convert: Converts the model so when training begins, after all that wraps it, such as the adapters of
            ``SFTTrainer(peft_config=...)``. A model that is converted already stays as it is, unless it
            trains linear layers that came later: then it is reverted and converted again. Either is logged.
        fit: A budget as for :func:`rmm_linear.fit`, such as "8GB", or a dictionary of its keyword arguments, such as
            ``{"memory": "8GB", "max_noise": 0.5}``.
        per_layer: Whether the ratio and α of every layer are logged too.
        every: Probe the steps n, 2n, 3n, …
        limit: Median of D²_sketch/D²_SGD above which a warning is logged; at 1 the two variances are equal.
        modules: As for GradientProbe.
        config: As for GradientProbe.
        whole_every: Measure the whole gradient on every n-th probed step; None never does.
        draws: As for GradientProbe.
        checkpointing: "replace" turns activation checkpointing, which TRL's trainers turn on by default, off: with
            ``convert`` until the training ends, or the next one begins if it raises, and with ``fit`` as long as the
            plan is applied; with ``RMMConfig(checkpointed="packed")`` it stays. "keep" leaves it on: what it recomputes
            stays exact, and is not the plan's to choose. ``fit`` may have it as a key instead. None is "replace".

    Raises:
        TypeError: If ``trainer`` is not a Trainer, or an argument has the wrong type.
        ValueError: If ``every``, ``limit``, ``whole_every`` or ``draws`` is not positive, or more than one of
            ``report``, ``convert`` and ``fit`` is given, ``fit`` has no budget, or it has another "checkpointing".

    Example:
        ``SFTTrainer(model, callbacks=[RMMCallback(convert=RMMConfig())])`` converts, reports and logs;
        ``trainer.add_callback(RMMCallback(trainer, rmm_linear.convert(model), every=50))`` does so for a model that was
        converted before. ``Trainer(model, args, train_dataset=rows, callbacks=[RMMCallback(fit="8GB")])`` trains within
        8 GB.
    """

    def __init__(
        self,
        trainer: Any = None,
        report: ConversionReport | None = None,
        *,
        convert: RMMConfig | None = None,
        fit: str | int | float | Mapping[str, Any] | None = None,
        per_layer: bool = False,
        every: int = 50,
        limit: float = 1.0,
        modules: str | Sequence[str] | None = None,
        config: RMMConfig | None = None,
        whole_every: int | None = None,
        draws: int = 2,
        checkpointing: str | None = None,
    ) -> None:
        """Store the Trainer and the options, and check them."""
        SketchStateCallback.__init__(self)
        ProbeCallback.__init__(self, every=every, modules=modules, config=config, whole_every=whole_every, draws=draws)
        if trainer is not None and not is_trainer(trainer):
            raise TypeError(
                f"trainer must be a transformers Trainer or None, got {type(trainer).__name__}. "
                "Leave it out: the callback finds its Trainer when training begins. A budget is given as fit=, a "
                "configuration as convert=."
            )
        if convert is not None and not isinstance(convert, RMMConfig):
            raise TypeError(
                f"convert must be an RMMConfig or None, got {convert!r}. Use RMMCallback(convert={suggested(convert)})."
            )
        if convert is not None and report is not None:
            raise ValueError(
                "report is of a model that is converted, convert is for one that is not, got both. Give one of them."
            )
        if fit is not None and (convert is not None or report is not None):
            raise ValueError(
                "fit chooses the conversion of a model that is not converted, got "
                f"{'convert' if report is None else 'report'} too. Give one of them."
            )
        if isinstance(limit, bool) or not isinstance(limit, int | float):
            raise TypeError(f"limit must be a positive number, got {limit!r}.")
        if not limit > 0:
            raise ValueError(f"limit must be positive, got {limit}. Use float('inf') for no warning.")
        self._given: Any = trainer
        self.trainer: Any = trainer
        self.report, self.limit = report, limit
        self.convert, self.per_layer = convert, per_layer
        if checkpointing is not None:
            check_checkpointing(checkpointing)
        is_kept = convert is not None and convert.checkpointed == "packed"
        self.checkpointing = KEEP if is_kept else checkpointing or REPLACE
        self._off: Uncheckpointed | None = None
        self._fitting = None if fit is None else FitCallback(fit, self._unprobed, checkpointing)
        self.offload_folder = None if self._fitting is None else self._fitting.settings.get("folder")
        self._memory: dict[str, float] = {}
        self._measured = self._warned = self._explains = self._prints = False
        self._asked = 0

    @property
    def fit_report(self) -> FitReport | None:
        """The report of :func:`rmm_linear.fit`; None before the first step, or without ``fit``."""
        return None if self._fitting is None else self._fitting.fit_report

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Convert if asked, print the report, attach the probe and restore the state of a resumed run."""
        model, self.trainer = kwargs.get("model"), calling_trainer(self) if self._given is None else self._given
        self._turn_on()  # as an earlier training may have raised
        if model is not None and self.convert is not None and self.checkpointing == REPLACE:
            self._off = turn_off_checkpointing(model, args)
        if self.convert is not None and model is not None:
            self._convert(model)
        elif model is not None and self._fitting is None and self.config is None and not is_converted(model):
            logger.warning(
                "RMMCallback logs the variance that compression adds, and the model is not converted: it logs what the "
                "default would add. Pass convert=RMMConfig() to convert it, or config=... to choose what is measured."
            )
        if self._fitting is None:
            super().on_train_begin(args, state, control, **kwargs)
        elif model is not None:
            self._restore(args, state, model)
            with self._unprobed():
                self._fitting.begin(self.trainer, model)
        self._memory, self._measured = {}, False
        steps = {row.step for row in self.results.rows}
        self._warned = any(self.results.medians(step).get("noise", 0.0) > self.limit for step in steps)
        self._prints = state.is_world_process_zero
        self._asked = min(_FIRST, state.max_steps) if self.convert is not None else 0
        self._explains = self.report is not None and self.report.memory is None and not state.global_step
        if self.report is not None and self._prints:
            # Printed, not logged, as by the Trainer's own callbacks.
            print(self.report.modules() if self.report.memory is None else self.report)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Arm the probe, or measure memory, if this step is due for it; explain the first one."""
        step = state.global_step + 1

        def arm() -> None:
            if self._probe is not None and step == self._asked:
                self._probe.arm(step, whole=False, at_most=_LAYERS)
            super(RMMCallback, self).on_step_begin(args, state, control, **kwargs)

        around: list[Callable[..., Any]] = [] if self._fitting is None else [self._fitting.run]
        if self._probe is not None and self._explains:
            self._explains = False
            around.append(self._explaining(self._probe.model, arm))
        else:
            arm()
        is_due = (step + 1) % self.every == 0 or (step % self.every == 0 and not self._measured)
        if self._probe is not None and is_due and (args.device.type == "cuda" or not self._measured):
            self._measured = True
            around.append(self._measuring(self._probe.model, args.device))
        if around:
            around_next_step(self.trainer, around)

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Look at the next batch that is accumulated too, if its size matters."""
        if self._fitting is not None:
            around_next_step(self.trainer, [self._fitting.run])

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Log the medians and the rows of this step, and warn if the noise exceeds the limit."""
        super().on_step_end(args, state, control, **kwargs)
        rows, whole = self._rows_of(state.global_step), self.results.whole.get(state.global_step)
        has_linears = self._probe is None or self._probe.has_layers
        if not rows and whole is None and (has_linears or state.global_step != self._asked):
            return
        medians = self.results.medians(state.global_step)
        is_exact = all(row.rows >= row.tokens and row.sketch_variance == 0 for row in rows)
        if is_exact:  # as in a ResNet, whose convolutions have all of the noise: 0 is no measure of the model
            medians.pop("noise", None)
        logs, self._memory = {**medians, **self._memory}, {}
        for row in rows if self.per_layer else ():
            logs.update({f"noise/{row.module}": row.noise, f"alpha/{row.module}": row.alpha})
        if whole is not None:
            for operation in whole.stand_ins:
                logs[f"noise_whole/{operation}"] = whole.whole(operation)
                by_depth = whole.by_depth(operation).items() if self.per_layer else ()
                logs.update({f"noise_whole/{operation}/{block}": ratio for block, ratio in by_depth})
        should_log = control.should_log
        with untraced(self.trainer):  # TRL's log hands on its metrics, and begins new ones
            self.trainer.log({_PREFIX + name: value for name, value in logs.items()})
        control.should_log = should_log  # trainer.log clears it, and the Trainer's own log entry would be skipped
        if state.global_step == self._asked and self._prints and is_exact and self.whole_every is None:
            print(wrapped(_EXACT, 2))
        if state.global_step == self._asked and self._prints and "noise" in medians:
            text = (
                f"rmm_linear: variance ratio of linear layers, compression to minibatch: {medians['noise']:.2g} "
                f"(median of {len(rows)} layers in step {state.global_step}; above 1 it costs accuracy)"
            )
            print(wrapped(f"{text}. {_ADVICE}" if medians["noise"] > self.limit else text, 2))
        if medians.get("noise", 0.0) > self.limit and not self._warned:
            self._warned = True
            logger.warning(
                "Step %d: the variance ratio, sketch to minibatch, is %.3g (median over the layers), more than the "
                "limit of %g. %s", state.global_step, medians["noise"], self.limit, _ADVICE,
            )  # fmt: skip

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Detach the probe, and turn checkpointing on again, if it was."""
        super().on_train_end(args, state, control, **kwargs)
        self._turn_on()

    def _turn_on(self) -> None:
        if self._off is not None:
            self._off.detach()

    @contextmanager
    def _unprobed(self) -> Iterator[None]:
        """Take the probe off while the plan changes; then put it on, for this step if it is due, if there is noise."""
        self._detach()
        yield
        trainer = self.trainer
        if self.config is not None or is_converted(trainer.model):
            ProbeCallback.on_train_begin(self, trainer.args, trainer.state, trainer.control, model=trainer.model)
            ProbeCallback.on_step_begin(self, trainer.args, trainer.state, trainer.control)

    def _convert(self, model: torch.nn.Module) -> None:
        if late := late_linears(model):
            logger.warning(
                "The model trains %d linear layers that came after its conversion, as adapters do (%s): "
                "RMMCallback(convert=...) reverts the model and converts it again.",
                len(late), shown(late),
            )  # fmt: skip
            rmm_linear.revert(model)
        elif is_converted(model):
            if self.report is None:
                logger.warning(
                    "RMMCallback(convert=...) converts models that are not converted, and this one is: it stays as it "
                    "is, with the configuration that it has. Call rmm_linear.revert(model) for another one, or leave "
                    "out convert."
                )
            return
        self.report = dataclasses.replace(rmm_linear.convert(model, self.convert), is_eval=False)

    def _explaining(self, model: torch.nn.Module, then: Callable[[], None]) -> Callable[..., Any]:
        """Print what the whole model saves on the batch of a step, and call a function after that."""
        trainer = self.trainer
        assert self.report is not None  # noqa: S101
        report = self.report.in_training(model)

        def explaining(step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            given = arguments_of_step(args, kwargs)
            inputs = prepared_inputs(trainer, given["inputs"])
            loss = loss_call(trainer, model, inputs, given.get("num_items_in_batch"))
            found = saved_by_model(model, report, loss)  # all processes run the model alike
            if not isinstance(found, str):
                self.report = dataclasses.replace(report, memory=found)
            if self._prints:
                line, note = (found, "") if isinstance(found, str) else (found.line(), found.note())
                print(f"{wrapped(f'rmm_linear: {line}', 2)}{note}")
            then()
            return step(*args, **kwargs)

        return explaining

    def _measuring(self, model: torch.nn.Module, device: torch.device) -> Callable[..., Any]:
        def measured(step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with track_saved(model) as saved, peak(device) as highest:
                result = step(*args, **kwargs)
            self._memory = {"kept_bytes": saved.total, "peak_bytes": highest.bytes}
            return result

        return measured
