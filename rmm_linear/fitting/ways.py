"""Find ways to train a model in less memory, each tried on a copy without weights: its peak, its time, what to type.

Times are estimates, relative to the step as it is: floating-point operations of all operators, and the bytes that they
read and write in units of them. Nothing is run, as there may be no memory to run it in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from textwrap import shorten
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from rmm_linear._support.progress import stage
from rmm_linear.context.checkpointing import is_checkpointed
from rmm_linear.conversion.convert import convert
from rmm_linear.conversion.exact import converted_modules, revert
from rmm_linear.fitting.fit import fit
from rmm_linear.fitting.options import ALLOW
from rmm_linear.fitting.remedies import remedies
from rmm_linear.fitting.static_memory import StaticMemory
from rmm_linear.fitting.step_memory import StepMemory
from rmm_linear.planning.blocks.plan import CONVERT, KEEP, OFFLOAD, BlockPlan, label_of
from rmm_linear.planning.blocks.plan_blocks import plan_blocks
from rmm_linear.planning.budget import LEAST, BudgetError
from rmm_linear.planning.step.flash import as_on_gpu
from rmm_linear.planning.step.resize import resized, sequences_of
from rmm_linear.planning.step.twin import without_weights
from rmm_linear.planning.step.watch import watch

# Operations in the time of a byte: of an accelerator with 5e14 per second and 3e12 bytes per second, and of a CPU. The
# second number is of operators that encode and decode, so that two blocks of LLaMA-1B with 16,384 tokens take 1.20 as
# measured on an H200 (checkpointing: 1.27 here, 1.29 measured).
_PER_BYTE, _PER_BYTE_OF_CPU = (150.0, 600.0), (10.0, 10.0)
_GAIN = 0.98  # of the peak: less is won by no way
_LONGEST = 300  # letters of an error
_SPLITS = (2, 4, 8, 16, 32, 64)

_LOGITS = 'rmm_linear.convert(model, operations=("logits",))'
_PACKED = ', checkpointed="packed"'
_ENABLE = ("activation_checkpointing_enable", "gradient_checkpointing_enable")  # of transformers, the newer name first
_BLOCKS = 'rmm_linear.planning.plan_blocks(model, batch, "least").apply()'
_OTHER = "trains in another way"
OF_PARTS = "batch norms take the statistics of each part, so gradients are others"
_SDPA = 'model.set_attn_implementation("sdpa")'


@dataclass(frozen=True)
class Way:
    """A way to train in less memory.

    Attributes:
        name: In a few words.
        code: What to type, in Python, with the names ``model``, ``batch`` and ``optimizer``; ``loss_of`` is your loss
            of an output.
        peak: Bytes of the training process with it, simulated.
        time: Of a step, relative to the step as it is: an estimate.
        noise: Variance that it adds to the gradient, relative to the minibatch's: 0 where gradients are exact, None
            where they are random, or others, and it is not known.
        fits: Whether the peak is within the memory; None where that is not known.
        note: What else it changes, or what it consists of.
    """

    name: str
    code: str
    peak: int
    time: float = 1.0
    noise: float | None = 0.0
    fits: bool | None = None
    note: str = ""


@dataclass
class WaySearch:
    """What ways are tried on."""

    twin: nn.Module  # the model without weights, as it is: converted, planned or not
    batch: Any  # the batch, on the CPU or the meta device
    static: StaticMemory  # what is there in addition to a step
    memory: int | None  # the budget in bytes; None where there is none
    optimizer: Any  # as for fit
    is_on_cpu: bool  # whether the model trains on a CPU

    def __post_init__(self) -> None:
        self.notes: list[str] = []
        self.is_changed = bool(converted_modules(self.twin)) or isinstance(vars(self.twin).get("rmm_plan"), BlockPlan)
        self.is_checkpointed = is_checkpointed(self.twin)
        self.now, self.work = self.step(self.twin, self.batch)

    def step(self, model: nn.Module, batch: Any, *, accumulate: bool = False) -> tuple[StepMemory, float]:
        """Simulate a step; return its memory and its work."""
        held = (lambda parameter: 0) if accumulate else None
        per_byte = _PER_BYTE_OF_CPU if self.is_on_cpu else _PER_BYTE
        with self.as_trained():
            passes, live = watch(model, batch, held=held, per_byte=per_byte)
        return StepMemory(self.static, passes, accumulate), live.work

    def as_trained(self) -> AbstractContextManager[Any]:
        """Count as on a GPU, unless the model trains on a CPU."""
        return nullcontext() if self.is_on_cpu else as_on_gpu()

    def found(self) -> list[Way]:
        """Try all ways; those that win something, the cheapest that fits first."""
        ways = [way for way in self._all() if way is not None and way.peak < _GAIN * self.now.peak]

        def order(way: Way) -> tuple[float, ...]:
            cost = way.note == _OTHER, way.time, way.noise is None, way.peak
            return (0, *cost) if way.fits or self.memory is None else (1, way.peak)

        return sorted(ways, key=order)

    def _all(self) -> Iterator[Way | None]:
        if self.now.is_optimizer:
            yield from self._of_optimizer()
        if not self.is_changed:
            if getattr(getattr(self.twin, "config", None), "_attn_implementation", "") == "eager":
                yield self._tried("fused attention", _SDPA, lambda model: model.set_attn_implementation("sdpa"))
            yield self._tried("loss in chunks", _LOGITS, _in_chunks, note="exact up to the order of summation")
            if not self.is_checkpointed:
                yield from self._checkpoints()
            settings = {"checkpointed": "packed"} if self.is_checkpointed else {}
            code = f"rmm_linear.convert(model{_PACKED if settings else ''})"
            yield self._tried("compressed activations", code, partial(convert, **settings), noise=None)
        yield from self._smaller()
        yield self._fitted()
        if not self.now.is_optimizer:
            yield from self._of_optimizer()

    def _tried(
        self, name: str, code: str, change: Callable[[Any], object], *, noise: float | None = 0.0, note: str = ""
    ) -> Way | None:
        """Try a change on a copy; None where it cannot be made, or the step with it cannot be simulated."""
        stage(f"trying: {name}")
        model = without_weights(self.twin)
        try:
            change(model)
            after, work = self.step(model, self.batch)
        except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
            if not isinstance(error, ValueError):
                self._left_out(name, error)
            return None
        return self._way(name, code, after, work, noise=noise, note=note)

    def _left_out(self, name: str, error: Exception) -> None:
        kind = "" if isinstance(error, BudgetError) else f"{type(error).__name__}: "
        self.notes.append(f"{name} is left out. {kind}{shorten(str(error), _LONGEST)}")

    def _way(
        self, name: str, code: str, after: StepMemory, work: float, *, noise: float | None = 0.0, note: str = ""
    ) -> Way:
        fits = None if self.memory is None else after.peak <= self.memory
        return Way(name, code, after.peak, work / self.work if self.work else 1.0, noise, fits, note)

    def _checkpoints(self) -> Iterator[Way | None]:
        method = next((one for one in _ENABLE if hasattr(self.twin, one)), None)
        if method is None:
            yield self._tried(
                "checkpointing", _BLOCKS, lambda model: plan_blocks(model, self.batch, LEAST).apply(), note="exact"
            )
            return

        def enable(model: Any) -> None:
            if hasattr(model, "config"):
                model.config.use_cache = False  # as the model does itself, and says so
            getattr(model, method)({"use_reentrant": False})

        def both(model: Any) -> None:
            _in_chunks(model)
            enable(model)

        code = f'model.{method}({{"use_reentrant": False}})'
        yield self._tried("checkpointing", code, enable)
        yield self._tried("checkpointing, loss in chunks", f"{_LOGITS}\n{code}", both)

    def _smaller(self) -> Iterator[Way | None]:
        """Divide the batch until it fits, or once; gradients are added up, and there from the second part on."""
        norms = [module for module in self.twin.modules() if isinstance(module, _BatchNorm)]
        takes_all = any(norm.training or not self.twin.training for norm in norms)
        try:
            count = sequences_of(self.batch)
        except ValueError:
            return
        for parts in (parts for parts in _SPLITS if count % parts == 0):
            stage(f"trying: {parts} parts of the batch")
            try:
                after, work = self.step(self.twin, resized(self.batch, count // parts), accumulate=True)
            except (ValueError, TypeError, RuntimeError):
                return
            if self.memory is None or after.peak <= self.memory or count % (2 * parts) or parts == _SPLITS[-1]:
                note = OF_PARTS if takes_all else "exact where the loss is a mean over sequences"
                note += "; in a Trainer: per_device_train_batch_size="
                note += f"{count // parts}, gradient_accumulation_steps={parts}"
                code = _accumulating(self.batch, parts, count)
                noise = None if takes_all else 0.0
                yield self._way(f"{parts} parts of the batch", code, after, parts * work, noise=noise, note=note)
                return

    def _fitted(self) -> Way | None:
        stage("trying: fit")
        model: Any = without_weights(self.twin)
        allow = [word for word in ALLOW if word != OFFLOAD or not self.is_on_cpu]  # a CPU's model has nowhere to go
        memory, before = LEAST if self.memory is None else self.memory, list[str]()
        if self.is_changed:
            revert(model)
            before.append("rmm_linear.revert(model)")
        if hasattr(model, "can_generate") and model.can_generate() and getattr(model.config, "use_cache", False):
            model.config.use_cache = False  # or blocks cannot be recomputed
            before.append("model.config.use_cache = False")
        try:
            with self.as_trained():
                report = fit(model, self.batch, memory, optimizer=self.optimizer, allow=allow, progress=False)
        except (ValueError, TypeError, RuntimeError) as error:
            self._left_out("rmm_linear.fit", error)
            return None
        after, work = self.step(model, self.batch)
        counts = Counter(label_of(block.option) for block in report.plan.blocks if block.choice != KEEP)
        given = f'"{LEAST}"' if self.memory is None else str(self.memory)
        counted = "" if self.optimizer is None else ", optimizer=optimizer"
        code = "\n".join([*before, f"rmm_linear.fit(model, batch, memory={given}{counted})"])
        noise = None if any(CONVERT in block.words for block in report.plan.blocks) else 0.0
        note = ", ".join(f"{count} × {label}" for label, count in counts.items())
        return self._way("one plan", code, after, work, noise=noise, note=note)

    def _of_optimizer(self) -> Iterator[Way]:
        trained = [parameter for parameter in self.twin.parameters() if parameter.requires_grad]
        for one in remedies(self.now, self.optimizer, trained):
            yield self._way(one.title, one.code, one.after, self.work, note="" if one.is_fused else _OTHER)


def _in_chunks(model: Any) -> None:
    convert(model, operations=("logits",))


def _accumulating(batch: Any, parts: int, count: int) -> str:
    """Return a loop over parts of a batch, or words where not all of it can be divided."""
    entries = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else [batch]
    if not all(isinstance(one, Tensor) and one.dim() and len(one) == count for one in entries):
        return f"# load batches of {count // parts} sequences, and call optimizer.step() after every {parts}"
    if isinstance(batch, Mapping):
        each, called = f"zip(*(one.chunk({parts}) for one in batch.values()))", "model(**dict(zip(batch, part))).loss"
    elif isinstance(batch, Tensor):
        each, called = f"batch.chunk({parts})", "loss_of(model(part))"
    else:
        each, called = f"zip(*(one.chunk({parts}) for one in batch))", "loss_of(model(*part))"
    return f"for part in {each}:\n    ({called} / {parts}).backward()"
