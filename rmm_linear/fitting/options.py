"""The options of every block of a model for a fit, with their bytes, seconds and noise."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from rmm_linear.fitting.noise import Noise, measure_noise
from rmm_linear.fitting.settings import NARROW, PACK, SETTINGS, SKETCH, Conversions, Setting, converting
from rmm_linear.fitting.times import Times, time_options
from rmm_linear.planning.blocks.measure import Costs
from rmm_linear.planning.blocks.plan import (
    CONVERT,
    KEEP,
    NESTED,
    OFFLOAD,
    RECOMPUTE,
    SELECTIVE,
    BlockPlan,
    PlannedBlock,
    label_of,
)
from rmm_linear.planning.blocks.plan_blocks import Recomputations
from rmm_linear.planning.blocks.proposals import Proposals
from rmm_linear.planning.step.step import has_memory

_NOMINAL = 1e-3  # of the noise of settings, by their order, where it is not known
ALLOW = (KEEP, SKETCH, PACK, RECOMPUTE, OFFLOAD)


class Candidates:
    """Adds the allowed options to the given ones.

    Attributes:
        notes: What was left out, and why.
        seconds: Of an exact step, as far as blocks make it; 0 until options are added.
        is_noise_unknown: Whether the variance ratio could not be measured.
        is_too_noisy: Whether an option was left out for its variance ratio.
        needs_folder: Whether a folder for files would allow to offload.
    """

    def __init__(self, proposals: Proposals, conversions: Conversions, allow: Collection[str]) -> None:
        """Begin with exact blocks."""
        self.proposals, self.conversions, self.allow = proposals, conversions, allow
        self.model: nn.Module = proposals.model
        self.example: Any = proposals.example
        self.costs: Costs = proposals.costs
        self.notes: list[str] = []
        self.seconds = 0.0
        self.is_noise_unknown = self.is_too_noisy = self.needs_folder = False
        self.is_meta = not has_memory(self.model)

    def add(self, max_noise: float, sampled: Any = None) -> Proposals:
        """Measure every allowed option; a layer's variance ratio, on ``sampled``, may be ``max_noise`` at most."""
        if RECOMPUTE in self.allow:
            self._add_recomputation()
        if SKETCH in self.allow and not self.is_meta:
            self.conversions.look_at(self.example)
        settings = self._settings()
        for setting in settings:
            self._try(f"{CONVERT} {setting.name}", self._converting(setting))
        if OFFLOAD in self.allow:
            self._add_offloading()
        self._add_times()
        if settings:
            self._add_noise(settings, max_noise, self.example if sampled is None else sampled)
        if KEEP not in self.allow:
            self._set([rows[1:] or rows for rows in self.proposals.rows])
        return self.proposals

    def _set(self, rows: Iterable[Sequence[PlannedBlock]]) -> None:
        self.proposals = replace(self.proposals, rows=[*rows])

    def _add_recomputation(self) -> None:
        choices = [RECOMPUTE] if self.is_meta else [RECOMPUTE, SELECTIVE, NESTED]
        if self.is_meta:
            self.notes.append(f"{SELECTIVE} and {NESTED} are left out: their time is not known on the meta device.")
        try:
            ways = Recomputations(self.model, self.example, self.costs, choices)
            for choice in choices:
                self.proposals = ways.add_to(self.proposals, choice)
        except ValueError as error:
            self.notes.append(f"{RECOMPUTE} is left out. {error}")

    def _add_offloading(self) -> None:
        on_cpu = all(parameter.device.type == "cpu" for parameter in self.model.parameters())
        if self.is_meta or (on_cpu and self.proposals.folder is None):
            self.needs_folder = not self.is_meta
            where = "the model is on the CPU, whose memory it would use; give folder=... to write files instead"
            self.notes.append(
                f"{OFFLOAD} is left out: {'a model on the meta device has no copies' if self.is_meta else where}."
            )
            return
        self._try(OFFLOAD, [PlannedBlock(block.name, OFFLOAD) for block in self.costs.blocks])

    def _settings(self) -> list[Setting]:
        there = {
            setting.name for name in self.proposals.names for setting in self.conversions.settings(name, self.allow)
        }
        wanted = {SKETCH, PACK} & {*self.allow}
        if wanted and not there:
            self.notes.append(f"{' and '.join(sorted(wanted))}: no module of the model can be converted.")
        return [setting for setting in SETTINGS if setting.name in there]

    def _converting(self, setting: Setting) -> list[PlannedBlock | None]:
        return converting(
            self.proposals.names, setting, lambda name: setting in self.conversions.settings(name, self.allow)
        )

    def _try(self, option: str, rows: Sequence[PlannedBlock | None]) -> None:
        try:
            self.proposals = self.proposals.adding(rows)
        except torch.OutOfMemoryError:
            self.notes.append(f"{label_of(option)} is left out: a step with it in all blocks ran out of memory.")

    def _add_times(self) -> None:
        times = self._times()
        self.seconds = sum(times.plain.values())
        self._set(
            [replace(row, seconds=times.extra.get((row.name, row.option), row.seconds)) for row in rows]
            for rows in self.proposals.rows
        )

    def _times(self) -> Times:
        rows = {found[0].name: found[1:] for found in self.proposals.rows}
        if self.is_meta:  # operations stand for seconds
            operations = {block.name: float(block.flops) for block in self.costs.blocks}
            extra = {
                (name, one.option): operations[name] if one.choice == RECOMPUTE else 0.0
                for name, found in rows.items()
                for one in found
            }
            self.notes.append("A model on the meta device has no times: numbers of operations replace them.")
            return Times({name: 3 * count for name, count in operations.items()}, extra)

        def make(row: PlannedBlock) -> BlockPlan:
            return self.proposals.plan_of([row if name == row.name else PlannedBlock(name, KEEP) for name in rows])

        return time_options(self.model, self.example, rows, make)

    def _add_noise(self, settings: Sequence[Setting], max_noise: float, batch: Any) -> None:
        noise = self._noise([one for one in settings if not self._adds_none(one)], batch)
        self.is_noise_unknown = bool(noise.unknown)
        if noise.unknown:
            self.notes.append(
                f"The variance ratio is not measured, so max_noise={max_noise:g} is not checked, and "
                f'"{label_of(f"{CONVERT} {NARROW}")}" is left out: {noise.unknown}.'
            )
            self._add_nominal_noise()
        dropped: dict[str, list[str]] = {}
        left: list[list[PlannedBlock]] = []
        for rows in self.proposals.rows:
            kept: list[PlannedBlock] = []
            for row in rows:
                found = noise.found.get(row.setting, {}).get(row.name)
                if found is None:
                    kept.append(row)
                elif found.worst <= max_noise:
                    kept.append(replace(row, noise=found.total))
                else:
                    dropped.setdefault(row.setting, []).append(f"{row.name} ({found.worst:.3g})")
            left.append(kept)
        self._set(left)
        self.is_too_noisy = bool(dropped)
        for setting, names in dropped.items():
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            self.notes.append(
                f'"{label_of(f"{CONVERT} {setting}")}" is left out where the variance ratio of one layer exceeds '
                f"max_noise={max_noise:g}: {names[0]}{more}."
            )

    def _add_nominal_noise(self) -> None:
        """Prefer wide settings among those that cost the same."""
        order = {setting.name: place for place, setting in enumerate(SETTINGS)}
        self._set(
            [replace(row, noise=_NOMINAL * order.get(row.setting, 0)) for row in rows if row.setting != NARROW]
            for rows in self.proposals.rows
        )

    def _noise(self, settings: Sequence[Setting], batch: Any) -> Noise:
        if self.is_meta:
            return Noise(unknown="a model on the meta device has no gradient")
        plans = {one.name: self.proposals.plan_of(_filled(self._converting(one), self.proposals)) for one in settings}
        return measure_noise(self.model, batch, self.costs.blocks, plans) if plans else Noise()

    def _adds_none(self, setting: Setting) -> bool:
        names = [row.name for row in self._converting(setting) if row is not None]
        return all(self.conversions.is_exact(name, setting) for name in names)


def _filled(rows: Sequence[PlannedBlock | None], proposals: Proposals) -> list[PlannedBlock]:
    return [row or PlannedBlock(name, KEEP) for row, name in zip(rows, proposals.names, strict=True)]
