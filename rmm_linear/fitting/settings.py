"""The conversions that a block may have, at a few widths, and the configuration that gives every block its own."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rmm_linear._support.patterns import expressions_for
from rmm_linear.config import OPERATIONS, RMMConfig
from rmm_linear.conversion.convert import convert
from rmm_linear.planning.blocks.find import owner_of
from rmm_linear.planning.blocks.plan import CONVERT, TILE, PlannedBlock
from rmm_linear.planning.step.ring import current_ring
from rmm_linear.planning.step.step import copied

SKETCH, PACK = "sketch", "pack"
LINEAR, LOGITS = "linear", "logits"
NARROW = "narrow"


@dataclass(frozen=True)
class Setting:
    """How the modules of a block are converted: operation to the fields of RMMConfig that differ."""

    name: str
    fields: Mapping[str, Mapping[str, Any]]

    @property
    def parts(self) -> set[str]:
        """Of "sketch" and "pack": whether linear layers are sketched, and other operations packed."""
        return {SKETCH if operation == LINEAR else PACK for operation in self.fields}


def _others(activation: int, norm: int, attention: int, bits: float | None = None) -> dict[str, dict[str, Any]]:
    return {
        "activation": {"activation_bits": activation},
        "norm": {"norm_bits": norm},
        "attention": {"attention_bits": attention},
        "dropout": {},
        "logits": {},
        "experts": {"activation_bits": activation},
        "convolution": {} if bits is None else {"bits": bits},
        "pooling": {},
    }


_DEFAULT: dict[str, dict[str, Any]] = {LINEAR: {}}
# From the least noise to the least memory. "tenth" is convert's default.
SETTINGS = (
    Setting("linears", _DEFAULT),
    Setting("others", _others(4, 3, 4)),
    Setting("wide", {LINEAR: {"bits": 8}, **_others(8, 4, 8, 8)}),
    Setting("tenth", {**_DEFAULT, **_others(4, 3, 4)}),
    Setting(NARROW, {LINEAR: {"bits": 1.6}, **_others(4, 3, 4, 1.6)}),
)


class Conversions:
    """The modules that may be converted in every block of a model."""

    def __init__(self, model: nn.Module, blocks: Sequence[str]) -> None:
        """Look at a model; it stays as it is."""
        self._model = model
        self.operations: dict[str, dict[str, str]] = {name: {} for name in blocks}
        self._names, self._vain = list[str](), set[str]()
        # What is in eval mode while the rest trains stays so, and is exact: a converted layer would save nothing.
        self._in_eval = {name for name, one in model.named_modules() if model.training and not one.training}
        try:
            report = convert(model, RMMConfig(), dry_run=True)
        except ValueError:  # nothing that saves anything
            return
        found = dict.fromkeys((name for name, layer in report.converted.items() if not layer.frozen), LINEAR)
        # In a ring, attention runs in rounds that PyTorch makes.
        found |= {
            name: entry.operation
            for name, entry in report.packed.items()
            if entry.operation != "attention" or current_ring() is None
        }
        for name, operation in found.items():
            if name not in self._in_eval and (block := owner_of(name, blocks)) is not None:
                self.operations[block][name] = operation
        self._names = [name for name, _ in model.named_modules()]

    def look_at(self, example: Any) -> None:
        """Find the linear layers whose input other operations save anyway, in a forward pass."""
        if any(LINEAR in found.values() for found in self.operations.values()):
            self._vain = _saved_anyway(self._model, example)

    def settings(self, block: str, allowed: Iterable[str]) -> list[Setting]:
        found = dict[str, Setting]()
        for setting in SETTINGS:
            does = {name: setting.fields[operation] for name, operation in self.chosen(block, setting).items()}
            parts = {_part(operation, allowed) for operation in self.chosen(block, setting).values()}
            if does and parts <= {*allowed}:
                found.setdefault(repr(sorted(does.items())), setting)
        return list(found.values())

    def chosen(self, block: str, setting: Setting) -> dict[str, str]:
        vain = self._vain if setting.parts == {SKETCH} else set[str]()
        there = self.operations[block].items()
        return {name: operation for name, operation in there if operation in setting.fields and name not in vain}

    def is_exact(self, block: str, setting: Setting) -> bool:
        """Say whether a setting adds no noise to a block: its logits are computed in chunks, its dropout in bits."""
        return {*self.chosen(block, setting).values()} <= {"dropout", "logits", "pooling"}

    def configure(self, rows: Sequence[PlannedBlock]) -> RMMConfig | None:
        """Make the configuration that converts a plan's chosen blocks and nothing else; None without such blocks."""
        known = {setting.name: setting for setting in SETTINGS}
        chosen = {row.name: known[row.setting] for row in rows if CONVERT in row.words}
        again = {row.name for row in rows if CONVERT in row.words and row.recomputation}
        if not any(self.chosen(block, setting) for block, setting in chosen.items()):
            return None
        used = {operation for block, setting in chosen.items() for operation in self._done(block, setting)}
        overrides: dict[str, dict[str, Any]] = {}
        groups: dict[tuple[str, tuple[str, ...], bool], list[str]] = {}
        for block, setting in chosen.items():
            groups.setdefault((setting.name, self._done(block, setting), block in again), []).append(block)
        for (name, operations, is_again), blocks in groups.items():
            fields = {key: value for one in operations for key, value in known[name].fields[one].items()}
            fields |= {"checkpointed": "packed"} if is_again else {}
            if fields:
                overrides[_inside(blocks)] = fields
        left = [block for block in self.operations if block not in chosen]
        outside = [name for name in self._names if name and owner_of(name, self.operations) is None]
        excluded = [f"^{_inside(left)}"] if left else []
        excluded += expressions_for((*outside, *sorted(self._in_eval), *self._left_inside(chosen)))
        return RMMConfig(
            operations=[one for one in OPERATIONS if one in used],
            overrides=overrides,
            exclude_modules=excluded or None,
        )

    def _done(self, block: str, setting: Setting) -> tuple[str, ...]:
        there = {*self.chosen(block, setting).values()}
        return tuple(one for one in OPERATIONS if one in there)

    def _left_inside(self, chosen: Mapping[str, Setting]) -> list[str]:
        """Return the modules of converted blocks that stay exact."""
        left: list[str] = []
        for block, setting in chosen.items():
            linears = [name for name, operation in self.operations[block].items() if operation == LINEAR]
            converted = self.chosen(block, setting)
            if LINEAR not in setting.fields:
                left += linears
            if PACK not in setting.parts:
                left += [name for name in self._names if owner_of(name, [block]) and name not in converted]
        return left


def _part(operation: str, allowed: Iterable[str]) -> str:
    """Return what allows to convert an operation; a loss in chunks is exact, and runs in slices as tiles do."""
    if operation == LOGITS:
        return TILE if TILE in allowed else PACK
    return SKETCH if operation == LINEAR else PACK


def _saved_anyway(model: nn.Module, example: Any) -> set[str]:
    """Return the linear layers that a sketch of their input does not help, as long as other operations are exact."""
    try:
        report = convert(model, RMMConfig(operations=(LINEAR,)), example=copied(example), dry_run=True)
    except (ValueError, torch.OutOfMemoryError):
        return set()
    return set(report.skipped)


def converting(blocks: Sequence[str], setting: Setting, has: Callable[[str], bool]) -> list[PlannedBlock | None]:
    """Return the option of a setting for every block, None where the block does not have it."""
    return [PlannedBlock(name, CONVERT, setting=setting.name) if has(name) else None for name in blocks]


def _inside(blocks: Sequence[str]) -> str:
    """Return a regular expression for blocks and what is in them."""
    return f"(?:{'|'.join(map(re.escape, blocks))})(?:\\..*)?"
