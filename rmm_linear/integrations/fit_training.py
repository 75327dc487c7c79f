"""A callback for transformers' Trainer that fits the training of its model into a memory budget.

Import ``RMMCallback`` from ``rmm_linear.integrations.transformers``, whose error says what to install if transformers
is missing.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from rmm_linear._support.sizes import show_bytes
from rmm_linear.context.checkpointing import REPLACE, Uncheckpointed, check_checkpointing
from rmm_linear.fitting.fit import fit
from rmm_linear.fitting.ranks import Processes, ranks_of
from rmm_linear.fitting.report import FitReport
from rmm_linear.fitting.resident import resident
from rmm_linear.integrations.fit_settings import as_json, read_fit
from rmm_linear.integrations.saved_plans import plan_of
from rmm_linear.integrations.trainers import (
    arguments_of_step,
    around_next_step,
    calling_trainer,
    loss_call,
    prepared_inputs,
)
from rmm_linear.memory.inputs import restored, rows_in
from rmm_linear.planning.blocks.applied import offloaded
from rmm_linear.planning.blocks.plan import BlockPlan
from rmm_linear.planning.budget import BudgetError
from rmm_linear.planning.step.resize import length_of, lengthened, usable_positions
from rmm_linear.planning.step.sharded import is_sharded, silent
from rmm_linear.planning.step.step import loss_of

logger = logging.getLogger(__name__)

_EPS = torch.finfo(torch.float32).eps
ENTRY = "rmm_fit"  # of the Trainer's log history, and so of checkpoints


class FitCallback(TrainerCallback):
    """Plans the Trainer's model with :func:`rmm_linear.fit` in the first step, on the batch of that step.

    Nothing is drawn from the data or the random numbers of the run: where the exact model fits, the run is bit for bit
    the one without the callback. With a ``length`` among the settings, the first batch is planned for as if its
    sequences were that long, so that batches up to that length are planned for once.

    Before a batch that is larger than all before it, by the elements of the model's main input, a step with the plan is
    simulated. The plan stays if that is within the budget. Otherwise the model is planned again, which is logged; if
    nothing fits then, the plan stays, with a warning. Under ``DistributedDataParallel`` and FSDP2 all processes train
    by the plan of the one whose batch takes the most memory, and each of them checks it on its own.

    Where gradients accumulate over several batches, they count as there from the begin of a step.

    Every plan is noted in ``state.log_history``. In a run that is resumed by :class:`SketchStateCallback`, which
    restores the plan of the checkpoint, it is kept, unless ``fit`` is another one than before.

    Activation checkpointing that the Trainer turns on is off as long as the plan is applied, unless it is to be kept.

    fit: A budget, or a mapping of keyword arguments of :func:`rmm_linear.fit` and "length". around: Makes a context in
    which the model is planned. checkpointing: "replace" or "keep", where ``fit`` does not say; None is "replace".
    """

    def __init__(
        self,
        fit: str | int | float | Mapping[str, Any],
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
        checkpointing: str | None = None,
    ) -> None:
        """Store the settings, and check them."""
        self.settings = read_fit(fit)
        if checkpointing is not None:
            check_checkpointing(checkpointing)
            if (other := self.settings.get("checkpointing", checkpointing)) != checkpointing:
                raise ValueError(
                    f'checkpointing and the key "checkpointing" of fit must agree, got checkpointing={checkpointing!r} '
                    f'and fit={{"checkpointing": {other!r}}}. Give one of them.'
                )
            self.settings |= {} if checkpointing == REPLACE else {"checkpointing": checkpointing}
        self.around = around
        # Of the last plan; None before the first step, and if the plan was restored
        self.fit_report: FitReport | None = None
        self._trainer: Any = None
        self._ranks: Processes | None = None
        self._plan: BlockPlan | None = None
        self._largest: float = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Look for a plan that the model has already."""
        if (model := kwargs.get("model")) is not None:
            self.begin(calling_trainer(self), model)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        around_next_step(self._trainer, [self.run])

    on_substep_end = on_step_begin

    def begin(self, trainer: Any, model: nn.Module) -> None:
        """Find out whether there is a plan already: of an earlier training, of a checkpoint, or of the user."""
        whole_parts = getattr(trainer, "is_fsdp_enabled", False) and not is_sharded(model)
        if whole_parts or getattr(trainer, "is_deepspeed_enabled", False):
            raise ValueError(
                "fit plans models that are whole on every device, or divided by FSDP2, got a Trainer with "
                f"{'the first version of FSDP' if whole_parts else 'DeepSpeed'}. Use "
                'TrainingArguments(fsdp=True, fsdp_config={"fsdp_version": 2}), or call '
                "rmm_linear.fit(model, batch, memory, shards=Shards(...)) before training."
            )
        self._trainer, plan = trainer, plan_of(model)
        self._ranks = ranks_of(self._parallel())
        if plan is not None and plan.checkpointing == REPLACE:  # the Trainer has turned it on again
            off = Uncheckpointed(model)
            off.attach()
            plan.undo_later(off)
        if plan is not None and plan is self._plan:
            return
        self._plan, self._largest, self.fit_report = None, 0, None
        if plan is None:
            return
        noted = next(reversed(self._entries()), None)
        if noted is None:
            logger.warning("The model has a plan already: fit leaves it. Call rmm_linear.revert(model) for a new one.")
            self._largest = math.inf
        elif noted["settings"] != as_json(self.settings):
            logger.warning("The checkpoint was planned with fit=%s, so it is planned again.", noted["settings"])
            plan.revert()
        else:
            self._plan, self._largest = plan, noted["elements"]
            if trainer.is_world_process_zero():
                print(f"{noted['summary']} (of the checkpoint)")

    def run(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Plan if the batch of a step is larger than those before it, then run the step."""
        if self._largest == math.inf:  # nothing is planned, in any process
            return step(*args, **kwargs)
        trainer = self._trainer
        inputs = prepared_inputs(trainer, arguments_of_step(args, kwargs)["inputs"])
        size = self._most(_elements(trainer.model, inputs))
        if size > self._largest:
            before = self._largest
            if not before:
                inputs = self._at_length(inputs)
                size = self._most(_elements(trainer.model, inputs))
            self._largest = size
            with self.around():
                self._replan(inputs, int(before), size)
        return step(*args, **kwargs)

    def _parallel(self) -> nn.Module:
        """Return the model with the wrapper of DDP, if it has one, and without that of a compiler."""
        wrapped = self._trainer.model_wrapped
        wrapped = wrapped._modules.get("_orig_mod") or wrapped
        return wrapped if isinstance(wrapped, nn.parallel.DistributedDataParallel) else self._trainer.model

    def _most(self, size: int) -> int:
        return size if self._ranks is None else self._ranks.largest(size, self._trainer.args.device)

    def _at_length(self, inputs: Any) -> Any:
        """Return the batch that is planned for first: one of the longest sequences that will come."""
        length, positions = self.settings.get("length"), usable_positions(self._trainer.model)
        if length is None:
            return inputs
        if positions is not None and length > positions:
            raise ValueError(f"length must be at most {positions}, the positions of the model, got {length}.")
        if (have := length_of(inputs)) > length:
            self._warn("The first batch has sequences of %d tokens, more than length=%d: they are planned for.",
                       have, length)  # fmt: skip
            return inputs
        return lengthened(inputs, length)

    def _tried(self, example: Any) -> int | None:
        """Return the peak of a step with the plan, simulated; None if it is not known to be within the budget."""
        trainer, last, report = self._trainer, next(reversed(self._entries()), None), self.fit_report
        if last is None or last["budget_bytes"] is None:
            return None
        try:
            process = resident(self._parallel(), trainer.optimizer, accumulate=self._accumulates())
            with silent():  # other processes may have no loss to compute now
                peak = process.peak(process.simulated(example).bytes)
            waits = sum(one.copied for one in offloaded(trainer.model).values())
        except Exception:  # other processes wait for an answer; what is wrong, a new fit will say
            return None
        if report is not None and report.measured_peak is not None:  # workspace of operators too
            peak = max(peak, peak * report.measured_peak // report.simulated_peak)
        within = peak <= last["budget_bytes"] and (last.get("host_bytes") is None or waits <= last["host_bytes"])
        return peak if within else None

    def _accumulates(self) -> bool:
        return self._trainer.args.gradient_accumulation_steps > 1

    def _entries(self) -> list[dict[str, Any]]:
        return [entry[ENTRY] for entry in self._trainer.state.log_history if ENTRY in entry]

    def _note(self, entry: dict[str, Any]) -> None:
        self._trainer.state.log_history.append({ENTRY: entry, "step": self._trainer.state.global_step})

    def _replan(self, inputs: Any, before: int, size: int) -> None:
        trainer, old = self._trainer, self._plan
        model: nn.Module = trainer.model
        example = example_of(trainer, model, inputs)  # on all processes, as losses may communicate
        if old is not None:
            peaks = [self._tried(example)] if self._ranks is None else self._ranks.gathered(self._tried(example))
            known = [peak for peak in peaks if peak is not None]
            if len(known) == len(peaks):
                self._note({**self._entries()[-1], "elements": size, "peak_bytes": max(known)})
                if trainer.is_world_process_zero():
                    logger.info("A batch of %d elements came after a plan for %d: a step takes %s, so the plan stays.",
                                size, before, show_bytes(max(known)))  # fmt: skip
                return
            old.revert()
        settings = {name: value for name, value in self.settings.items() if name != "length"}
        if settings.get("progress") is not False and trainer.is_world_process_zero():  # a log has no lines of progress
            print(f"rmm_linear: planning a fit for {size:,} elements, which takes as long as many steps")
        try:
            options = {"optimizer": trainer.optimizer, "accumulate": self._accumulates(), **settings}
            report = fit(self._parallel(), example, **options)
        except Exception as error:
            is_short = isinstance(error, BudgetError)
            said = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            if old is None:
                raise error if is_short else ValueError(f"The model cannot be planned: {said}") from error
            old.apply()
            self._warn("A batch of %d elements came after a plan for %d, and %s, so the plan stays: %s",
                       size, before, "no plan fits it" if is_short else "planning failed", said)  # fmt: skip
            return
        self._plan, self.fit_report = report.plan, report
        entry = self._entry(report, size)
        self._note(entry)
        if before:
            self._warn("A batch of %d elements came after a plan for %d: planned again. %s",
                       size, before, entry["summary"])  # fmt: skip
        elif trainer.is_world_process_zero():
            # Printed, not logged, as by the Trainer's own callbacks.
            print(report)

    def _warn(self, message: str, *values: object) -> None:
        if self._trainer.is_world_process_zero():
            logger.warning(message, *values)

    def _entry(self, report: FitReport, size: int) -> dict[str, Any]:
        return {
            "summary": report.summary(),
            "elements": size,
            "peak_bytes": report.peak,
            "exact_peak_bytes": report.exact_peak,
            "budget_bytes": report.memory,
            "host_bytes": report.host_memory,
            "settings": as_json(self.settings),
        }


def _elements(model: Any, inputs: Any) -> int:
    """Return the elements of the main input of a batch, or of all its tensors."""
    main = inputs.get(getattr(model, "main_input_name", "input_ids")) if hasattr(inputs, "get") else None
    leaves = [main] if isinstance(main, Tensor) else tree_leaves(dict(inputs))
    return sum(leaf.numel() for leaf in leaves if isinstance(leaf, Tensor)) or 1


def example_of(trainer: Any, model: nn.Module, inputs: Any) -> Any:
    """Return how the Trainer calls the model, if it takes the loss that the model returns, else the Trainer's loss."""
    loss, calls = loss_call(trainer, model, inputs), list[tuple[Any, Any, Any]]()
    handle = model.register_forward_hook(lambda _, *call: calls.append(call), with_kwargs=True)
    try:
        with restored(model), torch.no_grad():
            trained = loss()
    finally:
        handle.remove()
    if len(calls) != 1 or calls[0][0]:
        return loss
    ((_, named, output),) = calls
    try:
        own = loss_of(output)
    except ValueError:  # it returns none
        return loss
    return named if is_same_loss(own, trained, rows_in(named)) else loss


def is_same_loss(own: Tensor, trained: Tensor, terms: int) -> bool:
    """Say whether two values are one mean of so many terms, but for the order in which they are added.

    Each of the additions is off by half an eps of a partial sum at most, which is no larger than the sum of sizes, with
    signs at random: √n · eps for the difference, four of which no order reaches. Values in half types are rounded once
    more at the end. (A loss with other terms, such as smoothed labels, differs by more.)
    """
    coarse = max(torch.finfo(one.dtype).eps for one in (own, trained))
    bound = 4 * max(terms, 1) ** 0.5 * _EPS + (coarse if coarse > _EPS else 0)
    return bool((own.double() - trained.double()).abs() <= bound * own.double().abs())
