"""What lowers a peak in the optimizer's step, where nothing is saved for the backward pass any more."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from rmm_linear._support.sizes import show_bytes
from rmm_linear.fitting.step_memory import StepMemory
from rmm_linear.memory.peak import GRADIENTS

# bitsandbytes' AdamW8bit: two states in 8 bits, with a float32 scale for each 256 of them; small parameters in float32.
_BLOCK, _SMALL = 256, 4096


@dataclass(frozen=True)
class Remedy:
    """A change of what is trained, or of the optimizer, and memory with it."""

    title: str  # what to change, in a word or two
    words: str  # the same as users type it, and the peak with it
    after: StepMemory  # memory with it
    code: str  # what to type, in Python
    name: str = ""  # the optimizer's class in torch.optim, if that stays
    flag: str = ""  # in TrainingArguments, for optim; empty where there is none

    @property
    def is_fused(self) -> bool:
        """Whether the optimizer stays, and computes in another way."""
        return bool(self.name)


def class_of(optimizer: Any) -> Any:
    """Return the class of an optimizer, or the function that makes one; None if there is none."""
    while isinstance(optimizer, partial):
        optimizer = optimizer.func
    return optimizer if optimizer is None or isinstance(optimizer, type | FunctionType) else type(optimizer)


def remedies(step: StepMemory, optimizer: Any, trained: Iterable[Tensor]) -> list[Remedy]:
    """List what lowers the peak of a step; a fused optimizer comes first, which changes nothing else."""
    kind, static = class_of(optimizer), step.static
    name, found = getattr(kind, "__name__", ""), list[Remedy]()
    is_adam = name in ("Adam", "AdamW")
    if (
        static.optimizer_transient
        and kind is getattr(torch.optim, name, None)
        and "fused" in signature(kind).parameters
    ):
        fused = replace(step, static=replace(static, optimizer_transient=0))
        flag = "adamw_torch_fused" if name == "AdamW" else ""
        words = f"{name}(fused=True), which makes no temporary results: {show_bytes(fused.peak)}"
        code = f"optimizer = torch.optim.{name}(model.parameters(), fused=True)"
        found.append(Remedy(f"{name}(fused=True)", words, fused, code, name, flag))
    if is_adam:
        state = sum(_in_8_bits(one.numel()) for one in trained)
        small = replace(step, static=replace(static, optimizer=state, optimizer_transient=0))
        words = (
            f"bitsandbytes.optim.{name}8bit, whose state is in 8 bits: {show_bytes(small.peak)}, or Paged{name}8bit, "
            "which moves it to the host where memory is short"
        )
        code = f"optimizer = bitsandbytes.optim.{name}8bit(model.parameters())"
        found.append(Remedy(f"{name}8bit", words, small, code, flag="adamw_bnb_8bit" if name == "AdamW" else ""))
    if static.gradients < static.parameters / 2:  # adapters, or a few layers
        return [one for one in found if one.after.peak < step.peak]
    frozen = replace(static, optimizer=0, optimizer_transient=0, gradients=0)
    words = (
        f"adapters (LoRA), which leave weights of {show_bytes(static.parameters)} and hardly any gradients and state"
    )
    others = [one for one in step.passes.alive if one.kind != GRADIENTS]
    passes = replace(step.passes, bytes=step.activations, alive=others)
    code = 'model = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear"))'
    found.append(Remedy("adapters (LoRA)", words, replace(step, static=frozen, passes=passes), code))
    return [one for one in found if one.after.peak < step.peak]


def _in_8_bits(count: int) -> int:
    return 2 * count + 8 * -(-count // _BLOCK) if count >= _SMALL else 8 * count
