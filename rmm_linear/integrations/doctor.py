"""Say on one page how a model trains: what fills its memory, what converts, what stays, and what to type.

Everything is measured by what explains and simulates elsewhere: here it is put together, the largest gain first.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from rmm_linear._support.progress import reporting, stage
from rmm_linear._support.quiet import quiet
from rmm_linear._support.sizes import show_bytes
from rmm_linear.context.checkpointing import FLAGS, how_to_turn_off, is_checkpointed, uncheckpointed
from rmm_linear.context.first_steps import shown
from rmm_linear.conversion.convert import convert
from rmm_linear.conversion.exact import converted_modules, unconvert
from rmm_linear.conversion.explained import explained
from rmm_linear.conversion.explanation import SHOWN, Explanation
from rmm_linear.conversion.report import ConversionReport
from rmm_linear.fitting.described import described, described_batch, is_packed
from rmm_linear.fitting.remedies import Remedy, remedies
from rmm_linear.fitting.static_memory import StaticMemory, static_memory
from rmm_linear.fitting.step_memory import StepMemory, step_memory
from rmm_linear.integrations.diagnosis import Diagnosis, Finding
from rmm_linear.integrations.trainers import is_trainer, untraced
from rmm_linear.memory.inputs import check_example, restored, rows_in, sequences_in
from rmm_linear.planning.step.step import has_memory
from rmm_linear.variance.whole_model import gradient_noise

CONVERT, PACKED = "convert(model)", 'convert(model, checkpointed="packed")'
_CHEAP = {"cpu": 2e11, "cuda": 5e14}  # operations of the passes that measure the noise, which nobody asked for
_PASSES, _OPERATIONS = 20, 6  # steps; per weight and token
_NEARLY = 0.95  # of a peak: nothing is won
_SDPA, _EAGER = "sdpa", "eager"


def doctor(
    trainer_or_model: Any, batch: Any = None, *, optimizer: Any = None, noise: bool | None = None,
    progress: bool | None = None,
) -> Diagnosis:  # fmt: skip
    """Say on one page how a model trains: what fills its memory, what compression changes, and what to type.

    The peak of a step is simulated by parts, as the model is and converted; what stays uncompressed is found by
    :func:`rmm_linear.memory.explain`. Activation checkpointing, attention, experts, rows, and what is trained are
    looked at. Nothing is trained, and the model and the Trainer stay as they are: weights, modes, random numbers, data,
    metrics. It takes a few simulated steps and forward passes, and one step that is converted.

    Args:
        trainer_or_model: A Trainer of transformers or TRL, of which the model, the optimizer and a batch of the
            training data are taken; or a model that is not converted. On the meta device, peaks alone are known.
        batch: As for :func:`rmm_linear.fit`; of a Trainer, as its data collator returns it.
        optimizer: As for :func:`rmm_linear.fit`; None is the Trainer's, or none.
        noise: Whether the variance ratio of the whole gradient is measured, by some twenty passes. None: where that is
            cheap.
        progress: As for :func:`rmm_linear.fit`.

    Returns:
        The page. Print it.

    Raises:
        TypeError: If the first argument is neither a Trainer nor a model, or a model comes without a batch.
        ValueError: If the model is converted or has a plan.

    Example:
        >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3)))
        >>> found = doctor(model, torch.randn(1000, 64))
        >>> found.options["convert(model)"].peak < 0.7 * found.now.peak
        True
    """
    with reporting("doctor", progress), quiet(), ExitStack() as stack:
        if is_trainer(trainer_or_model):
            stage("taking a batch of the training data")
            given = stack.enter_context(_of_trainer(trainer_or_model, batch, optimizer))
        elif isinstance(trainer_or_model, nn.Module):
            _check_plain(trainer_or_model)
            if batch is None:
                raise TypeError("doctor needs a training batch with a model: doctor(model, batch).")
            given = _Patient(trainer_or_model, batch, optimizer)
        else:
            got = trainer_or_model if isinstance(trainer_or_model, type) else type(trainer_or_model)
            raise TypeError(f"doctor takes a Trainer, or a model and a batch, got {got.__name__}.")
        check_example(given.model, given.example)
        return _Examination(given).page(noise)


@dataclass(frozen=True)
class _Patient:
    """A model with what it trains by."""

    model: nn.Module
    example: Any
    optimizer: Any
    accumulate: bool = False
    is_trainer: bool = False
    is_checkpointed_later: bool = False  # when its Trainer begins


def _check_plain(model: nn.Module) -> None:
    if converted_modules(model) or any("rmm_plan" in vars(module) for module in model.modules()):
        raise ValueError(
            "doctor takes a model as it was made, got one that is converted or has a plan. Call "
            "rmm_linear.revert(model) first, or print what convert and fit returned."
        )


@contextmanager
def _of_trainer(trainer: Any, batch: Any, optimizer: Any) -> Iterator[_Patient]:
    """Take what a Trainer trains by; nothing that it counts, and no random number, differs after the block."""
    from rmm_linear.integrations.fit_training import example_of

    model: nn.Module = trainer.model
    _check_plain(model)
    loaders = list(trainer.accelerator._dataloaders)
    try:
        with restored(model), untraced(trainer):
            if batch is None:
                dataset = trainer.train_dataset
                if dataset is None or iter(dataset) is dataset:
                    raise TypeError(
                        "doctor takes a batch of training data, of which there is none, or which can be read once. "
                        "Give one: doctor(trainer, batch)."
                    )
                batch = next(iter(trainer.get_train_dataloader()))
            if optimizer is None and (optimizer := trainer.optimizer) is None:
                kind, settings = trainer.get_optimizer_cls_and_kwargs(trainer.args, model)
                optimizer = partial(kind, **settings)
            example = example_of(trainer, model, trainer._prepare_inputs(batch))
            later = any(getattr(trainer.args, flag, False) is True for flag in FLAGS) and not is_checkpointed(model)
            yield _Patient(model, example, optimizer, trainer.args.gradient_accumulation_steps > 1, True, later)
    finally:
        trainer.accelerator._dataloaders[:] = loaders


class _Examination:
    """What is measured of a model, step by step."""

    def __init__(self, given: _Patient) -> None:
        """Begin with what needs no step."""
        self.given, self.model, self.example = given, given.model, given.example
        self.static: StaticMemory = static_memory(self.model, given.optimizer)
        self.is_checkpointed = is_checkpointed(self.model)
        self.options: dict[str, StepMemory] = {}
        self.why_not = ""  # nothing can be converted
        self.is_unasked = False  # the variance ratio, which could be measured

    def page(self, noise: bool | None) -> Diagnosis:
        """Measure, and put together what was found."""
        stage("simulating a step")
        now = self._memory()
        with uncheckpointed(self.model):
            stage("converting on trial")
            report, explanation = self._converted(CONVERT)
            ratio = self._noise(noise) if report is not None else None
        if self.is_checkpointed and report is not None:
            stage("converting on trial, under activation checkpointing")
            self._converted(PACKED, checkpointed="packed")
        lowest = min((now, *self.options.values()), key=lambda one: one.step)
        is_bound = self.given.optimizer is not None and self.static.in_optimizer_step >= _NEARLY * now.peak
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        cures = remedies(lowest, self.given.optimizer, trained) if is_bound else []
        findings = [
            *self._conversion(now, explanation),
            *self._checkpointing(),
            *self._attention(explanation),
            *self._staying(report, explanation),
            *self._weights(now, cures),
            *(self._variance(ratio) if report is not None else ()),
        ]
        return Diagnosis(
            type(self.model).__name__,
            described(self.model, is_checkpointed_later=self.given.is_checkpointed_later),
            described_batch(self.example, self.given.optimizer, accumulate=self.given.accumulate),
            now,
            self.options,
            sorted(findings, key=lambda one: -one.gain),
            None if explanation is None else (explanation.before, explanation.after),
            ratio,
            self._code(now, findings, cures, {"quality": "careful"} if ratio is not None and ratio > 1 else {}),
        )

    def _memory(self) -> StepMemory:
        return step_memory(self.model, self.example, self.static, accumulate=self.given.accumulate)

    def _converted(self, name: str, **settings: Any) -> tuple[ConversionReport | None, Explanation | None]:
        """Convert for a while, and measure a step; nothing is explained on the meta device, or out of memory."""
        try:
            report, explanation = convert(self.model, **settings), None
        except ValueError as error:
            self.why_not = str(error)
            return None, None
        try:
            if name == CONVERT and has_memory(self.model):
                explanation = explained(self.model, report, self.example)
            self.options[name] = self._memory()
        except torch.OutOfMemoryError:
            pass
        finally:
            unconvert(self.model)
        return report, explanation

    def _noise(self, asked: bool | None) -> float | None:
        is_batch = isinstance(self.example, Mapping) and sequences_in(dict(self.example)) > 1
        if not is_batch or not has_memory(self.model):
            return None
        device = next((p.device.type for p in self.model.parameters()), "cpu")
        cost = _OPERATIONS * _PASSES * sum(p.numel() for p in self.model.parameters()) * rows_in(self.example)
        if asked is False or (asked is None and cost > _CHEAP.get(device, 0)):
            self.is_unasked = True
            return None
        stage("measuring the variance")
        try:
            return gradient_noise(self.model, self.example, draws=1, by_operation=False).whole()
        except (ValueError, torch.OutOfMemoryError):  # of a model without a loss of its own
            return None

    def _conversion(self, now: StepMemory, explanation: Explanation | None) -> list[Finding]:
        if self.why_not:
            return [Finding("conversion", self.why_not)]
        if CONVERT not in self.options:
            return [Finding("conversion", "a step of the converted model runs out of memory on this device")]
        after = self.options[CONVERT]
        gain = now.peak - after.peak
        instead = ", without activation checkpointing," if self.is_checkpointed else ""
        text = f"{CONVERT}{instead} takes the peak from {show_bytes(now.peak)} to {show_bytes(after.peak)}"
        if gain <= 0 and now.is_optimizer:
            text = (
                f"{CONVERT}{instead} leaves the peak, which is in the optimizer's step; it takes a forward and "
                f"backward pass from {show_bytes(now.step)} to {show_bytes(after.step)}"
            )
        if explanation is not None:
            share = explanation.after / max(explanation.before, 1)
            text += (
                f"; what is saved for the backward pass from {show_bytes(explanation.before)} to "
                f"{show_bytes(explanation.after)} ({share:.0%})"
            )
        if gain <= 0 and not now.is_optimizer:
            text += ". Nothing is won here" + (": see checkpointing" if self.is_checkpointed else "")
        return [Finding("conversion", f"{text}.", max(gain, 0), self._to_type())]

    def _checkpointing(self) -> list[Finding]:
        if self.given.is_checkpointed_later:
            text = (
                "the Trainer's arguments turn it on (gradient_checkpointing=True, TRL's default): the figures are "
                'without it. RMMCallback turns it off in its place; checkpointing="keep" leaves it on.'
            )
            return [Finding("checkpointing", text)]
        if not self.is_checkpointed:
            return []
        how = "gradient_checkpointing=False in its arguments" if self.given.is_trainer else how_to_turn_off(self.model)
        text = (
            "it is on: blocks save their input alone and run twice, a third more time, and convert leaves what is "
            f"recomputed exact. To turn it off: {how}."
        )
        if PACKED in self.options and CONVERT in self.options:
            packed, plain = self.options[PACKED].peak, self.options[CONVERT].peak
            better = "is less" if packed < plain else "is no less"
            text += f' With it, checkpointed="packed" takes {show_bytes(packed)}, which {better} than without.'
        return [Finding("checkpointing", text)]

    def _attention(self, explanation: Explanation | None) -> list[Finding]:
        config = getattr(self.model, "config", None)
        if getattr(config, "_attn_implementation", None) != _EAGER:
            return []
        stays = _bytes_of(explanation, "attention", "attn")
        text = "it is eager, whose scores are saved" + (
            f": {show_bytes(stays)} of them stay after convert" if stays else ""
        )
        if not getattr(self.model, "_supports_sdpa", False):
            return [
                Finding("attention", f"{text}. The model has no sdpa, so convert runs it again in the backward pass.")
            ]
        code = f'{"trainer." if self.given.is_trainer else ""}model.set_attn_implementation("{_SDPA}")'
        with self._by_sdpa(), uncheckpointed(self.model):
            stage("converting on trial, with sdpa")
            before = self.options.get(CONVERT)
            self._converted("sdpa")
            after = self.options.pop("sdpa", None)
        gain = 0 if before is None or after is None else max(before.peak - after.peak, 0)
        text += f". With sdpa, a converted step takes {show_bytes(gain)} less" if gain else ". sdpa saves no scores"
        return [Finding("attention", f"{text}: {code}.", gain, code)]

    @contextmanager
    def _by_sdpa(self) -> Iterator[None]:
        """Choose sdpa, for every part of the model; configurations are after the block what they were."""
        model: Any = self.model
        before = [(vars(config), dict(vars(config))) for config in _configurations(model)]
        try:
            model.set_attn_implementation(_SDPA)
            yield
        finally:
            for now, then in before:
                now.clear()
                now.update(then)

    def _staying(self, report: ConversionReport | None, explanation: Explanation | None) -> list[Finding]:
        """Name experts, linear layers that see few rows, and what else stays."""
        found = list[Finding]()
        if report is not None and (experts := [e for e in report.packed.values() if e.operation == "experts"]):
            found.append(
                Finding("experts", f"{len(experts)} modules of experts save codes of their tokens: converted.")
            )
        if report is not None and (names := [n for n, kind in report.uncompressed.items() if kind == "experts"]):
            found.append(Finding("experts", f"they stay exact: {shown(names)}."))
        if explanation is None:
            return found
        few = {name: one for name, one in explanation.layers.items() if "rows and stays exact" in (one.reason or "")}
        size = sum(one.before for one in few.values())
        if report is not None and size >= SHOWN * explanation.before:
            text = f"{len(few)} linear layers stay exact, {show_bytes(size)}: {next(iter(few.values())).reason}, as "
            text += f"min_rows is {report.config.min_rows}. Larger batches, or a smaller min_rows, help."
            found.append(Finding("rows", text, 0, self._to_type(min_rows=1)))
        for one in explanation.remaining:
            if one.share >= SHOWN and "rows and stays exact" not in one.reason:
                text = f"{one.modules or 'the model itself'}, {show_bytes(one.bytes)} ({one.share:.0%}): {one.reason}."
                found.append(Finding("what stays", text))
        return found

    def _weights(self, now: StepMemory, cures: Sequence[Remedy]) -> list[Finding]:
        static = self.static
        if cures:
            above = f", {show_bytes(now.peak - now.step)} above the forward and backward pass"
            text = (
                f"its step takes {show_bytes(static.in_optimizer_step)} of the peak of {show_bytes(now.peak)}"
                f"{above if now.is_optimizer else ''}. It "
                "takes parameters, gradients, state and temporary results, and nothing that is saved for the backward "
                "pass: there, convert and fit change nothing. What does, with convert(model): "
            )
            text += "; ".join(one.words for one in cures)
            text += ". Or divide all of it: fit(..., shards=rmm_linear.Shards(ranks))."
            best = cures[0]
            return [Finding("optimizer", text, now.peak - best.after.peak, self._by(best))]
        rest = static.parameters + static.optimizer + static.gradients
        if rest < now.peak / 2:
            return []
        text = f"parameters, gradients and the optimizer's state are {rest / now.peak:.0%} of the peak, and stay."
        if all(p.requires_grad for p in self.model.parameters()):
            text += " Adapters (LoRA), an optimizer with less state or a smaller dtype would help."
        elif static.parameters >= now.peak / 2 and not any(map(is_packed, self.model.modules())):
            text += " Frozen weights in 4 bits (QLoRA) take some 0.52 bytes each."
        return [Finding("weights", text)]

    def _variance(self, ratio: float | None) -> list[Finding]:
        if ratio is None and self.is_unasked:
            text = "the variance that compression adds was not measured; that takes some twenty steps on a batch."
            what = "trainer" if self.given.is_trainer else "model, batch"
            return [Finding("noise", text, 0, f"rmm_linear.doctor({what}, noise=True)")]
        if ratio is None:
            text = "the variance that compression adds is not measured: that takes a model that has weights and returns"
            return [Finding("noise", f"{text} its loss, and a batch of two or more sequences, by the names of inputs.")]
        text = f"compression adds {ratio:.2g} times the minibatch's variance to the whole gradient"
        if ratio <= 1:
            return [Finding("noise", f"{text}.")]
        text += ', which costs accuracy: quality="careful" adds half of it, an eighth in linear layers.'
        return [Finding("noise", text, 0, self._to_type(quality="careful"))]

    def _to_type(self, **settings: str | int) -> str:
        """Return the call that converts so: of the model, or of the callback of its Trainer."""
        written = ", ".join(f"{name}={json.dumps(value)}" for name, value in settings.items())
        if not self.given.is_trainer:
            return f"rmm_linear.convert({', '.join(filter(None, ['model', written]))})"
        kind = "RMMConfig.preset" if "quality" in settings else "RMMConfig"
        return f"trainer.add_callback(RMMCallback(convert=rmm_linear.{kind}({written})))"

    def _by(self, cure: Remedy) -> str:
        """Return the line that changes the optimizer, where there is one."""
        if not self.given.is_trainer:
            return cure.code if cure.is_fused else ""
        is_made_later = isinstance(self.given.optimizer, partial)
        return f'trainer.args.optim = "{cure.flag}"' if cure.flag and is_made_later else ""

    def _code(
        self, now: StepMemory, findings: list[Finding], cures: Sequence[Remedy], settings: dict[str, str | int]
    ) -> str:
        """Return the lines that get the lowest peak of what was tried, with settings, and a plan that needs no more."""
        better = [name for name, one in self.options.items() if one.peak < now.peak]
        least = min(better, key=lambda name: self.options[name].peak, default="")
        first = [one.code for one in findings if one.topic in ("attention", "optimizer") and one.code]
        call = self._to_type(**({"checkpointed": "packed"} if least == PACKED else {}), **settings)
        share = self.options[least].peak / now.peak if least else None
        if cures and not least:
            cured = replace(now, static=cures[0].after.static)
            share = cures[0].after.peak / cured.peak
            if not cures[0].is_fused or share > _NEARLY:
                return self._with_adapters(first)
        if self.given.is_trainer:
            lines = ["import rmm_linear", "from rmm_linear.integrations.transformers import RMMCallback", "", *first]
            return "\n".join([*lines, call if share else 'trainer.add_callback(RMMCallback(fit="least"))'])
        lines = ["import rmm_linear", "", *first]
        if self.is_checkpointed and least != PACKED and hasattr(self.model, "gradient_checkpointing_disable"):
            lines.append("model.gradient_checkpointing_disable()")
        if share:
            lines += [f"print({call})", "# or, within a budget:", "rmm_linear.revert(model)"]
        model: Any = self.model
        if hasattr(model, "can_generate") and model.can_generate() and getattr(model.config, "use_cache", False):
            lines.append("model.config.use_cache = False  # or blocks cannot be recomputed")
        budget = min(math.ceil(20 * share + 0.2) / 20, 1.0) if share else '"least"'
        state = self._counted()
        if "torch" in state:
            lines.insert(0, "import torch")
            state = ", optimizer=optimizer" if cures and not least else state
        return "\n".join([*lines, f"print(rmm_linear.fit(model, batch, memory={budget}{state}))"])

    def _counted(self) -> str:
        optimizer = self.given.optimizer
        if isinstance(optimizer, type) and optimizer.__module__.startswith("torch.optim"):
            return f", optimizer=torch.optim.{optimizer.__name__}"
        return "" if optimizer is None else ", optimizer=optimizer"

    def _with_adapters(self, first: list[str]) -> str:
        """Return the lines that train less, where nothing that is saved for the backward pass counts."""
        adapters = 'LoraConfig(target_modules="all-linear")'
        imports = "from peft import LoraConfig, get_peft_model"
        if self.given.is_trainer:
            comment = f"# trainer = SFTTrainer(..., peft_config={adapters})"
            return "\n".join(["import rmm_linear", "", *first, "# or, with less to train:", comment])
        head = [*(["import torch"] if "torch" in self._counted() else []), "import rmm_linear", imports, "", *first]
        lines = [
            f"model = get_peft_model(model, {adapters})",
            f"print(rmm_linear.doctor(model, batch{self._counted()}))",
        ]
        return "\n".join([*head, *(["# or, with less to train:"] if first else []), *lines])


def _configurations(model: nn.Module) -> list[Any]:
    """Return the configurations of transformers that a model and its parts have, each once, with those inside."""
    found = dict[int, Any]()
    left = [getattr(module, "config", None) for module in model.modules()]
    while left:
        config = left.pop()
        if hasattr(config, "_attn_implementation") and id(config) not in found:
            found[id(config)] = config
            left += vars(config).values()
    return list(found.values())


def _bytes_of(explanation: Explanation | None, *words: str) -> int:
    """Return what modules save uncompressed whose names have one of some words."""
    remaining = [] if explanation is None else explanation.remaining
    return sum(one.bytes for one in remaining if any(word in one.modules.lower() for word in words))
