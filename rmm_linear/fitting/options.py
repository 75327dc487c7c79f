"""The options of every block of a model for a fit, with their bytes, seconds and noise."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from rmm_linear._support.progress import counting, stage
from rmm_linear.fitting.link import SPEED, Link
from rmm_linear.fitting.noise import Noise, measure_noise
from rmm_linear.fitting.settings import NARROW, PACK, SETTINGS, SKETCH, Conversions, Setting, converting
from rmm_linear.fitting.times import Times, time_options
from rmm_linear.memory.inputs import rows_in
from rmm_linear.planning.blocks.measure import Costs
from rmm_linear.planning.blocks.plan import (
    ATTENTION,
    CONVERT,
    KEEP,
    NESTED,
    OFFLOAD,
    RECOMPUTE,
    SELECTIVE,
    TILE,
    BlockPlan,
    PlannedBlock,
    joined,
    label_of,
)
from rmm_linear.planning.blocks.plan_blocks import Recomputations
from rmm_linear.planning.blocks.proposals import Proposals
from rmm_linear.planning.step.sharded import is_sharded, runs_alone
from rmm_linear.planning.step.step import has_memory
from rmm_linear.planning.tiles.find import find_tiles
from rmm_linear.planning.tiles.slices import GRANULE
from rmm_linear.planning.tiles.tile import ROWS, ROWS_OF_ACCELERATORS

_NOMINAL = 1e-6  # of the noise of settings, by their order, where it is not known: it decides between equals
ALLOW = (KEEP, SKETCH, PACK, RECOMPUTE, OFFLOAD, TILE)
_FEW_ROUNDS = (1, 0)  # of compositions, which are many, and wanted where no option of one word fits
_LONG = 0.2  # of a block's operations: attention of long sequences
# Slices of a tiled block: 16, so that what one of them takes is little beside its input and output, of rows that keep a
# device busy.
_SLICES, _SEVERAL = 16, 4
_LEAST, _FEW = {"cpu": 64}, 1024
_COMPOSED = "tenth"  # the setting that is composed with other words


class Candidates:
    """Adds the allowed options to the given ones."""

    def __init__(
        self, proposals: Proposals, conversions: Conversions, allow: Collection[str], bandwidth: float | None = None
    ) -> None:
        """Begin with exact blocks. ``bandwidth`` is that of the link in bytes per second."""
        self.proposals, self.conversions, self.allow = proposals, conversions, allow
        self.bandwidth = bandwidth
        self.model: nn.Module = proposals.model
        self.example: Any = proposals.example
        self.costs: Costs = proposals.costs
        self.notes: list[str] = []  # what was left out, and why
        self.seconds = 0.0  # of an exact step, as far as blocks make it
        self.what = "a sharded model" if is_sharded(self.model) else "a model on the meta device"
        self.is_noise_unknown = self.is_too_noisy = self.needs_folder = False
        self.is_meta, self.is_counted = not has_memory(self.model), not runs_alone(self.model)
        self.is_composed = False
        self._waits: dict[tuple[str, str], float] = {}
        self._begins: Callable[[str], None] = lambda option: None  # says which option is measured
        self.slice = 0  # rows
        self.tiles: dict[str, float] = {}  # by block, the operations of the forward pass of what runs in slices

    def add(self, max_noise: float, sampled: Any = None) -> Proposals:
        """Measure every allowed option; a layer's variance ratio, on ``sampled``, may be ``max_noise`` at most."""
        with counting("measuring options", len(self.singles())) as self._begins:
            if RECOMPUTE in self.allow:
                self._add_recomputation()
            if SKETCH in self.allow and not self.is_counted:
                self.conversions.look_at(self.example)
            settings = self._settings()
            for setting in settings:
                self._try(f"{CONVERT} {setting.name}", self._converting(setting))
            if OFFLOAD in self.allow:
                self._add_offloading()
        if self.is_meta:
            self._add_compositions()
        self._add_times()
        if settings:
            self._add_noise(settings, max_noise, self.example if sampled is None else sampled)
        if KEEP not in self.allow:
            self._set([rows[1:] or rows for rows in self.proposals.rows])
        return self.proposals

    def compose(self, fits: Callable[[Proposals], bool]) -> Proposals:
        """Add what takes less memory, and more time, than single words: recomputed blocks whose input waits, slices."""
        if not self.is_composed:
            known = [len(rows) for rows in self.proposals.rows]
            self._add_compositions()
            if fits(self.proposals):
                self._add_times(known)
        return self.proposals

    def singles(self) -> list[str]:
        """Name the options of one word that :meth:`add` tries; settings that do the same are found later."""
        found = self._recomputations() if RECOMPUTE in self.allow else []
        found += [f"{CONVERT} {setting.name}" for setting in self._there()]
        return found + ([OFFLOAD] if OFFLOAD in self.allow and not self._lacks_folder() else [])

    def _add_compositions(self) -> None:
        self.is_composed, self._begins = True, lambda option: stage(f"measuring {option}")
        there = {word for rows in self.proposals.rows for row in rows for word in row.words}
        if {CONVERT, RECOMPUTE} <= there:
            self._compose(RECOMPUTE, lambda row: row.setting == _COMPOSED)
        if OFFLOAD in there:
            self._compose(OFFLOAD, _is_composed)
        if TILE in self.allow:
            self._find_tiles()
        if self.tiles:
            self._compose(TILE, lambda row: _is_composed(row) and not {CONVERT, RECOMPUTE} <= {*row.words})

    def _compose(self, word: str, where: Callable[[PlannedBlock], bool]) -> None:
        """Add a word to all options where that makes sense, one step for each of them."""
        options = dict.fromkeys(row.option for rows in self.proposals.rows for row in rows)
        for option in options:
            rows = [self._composed(rows, option, word, where) for rows in self.proposals.rows]
            new = next((row.option for row in rows if row is not None), None)
            if new is not None and new not in options:
                self._try(new, rows)

    def _find_tiles(self) -> None:
        """Find the blocks of which something can run in slices, if there are several of them."""
        rows = rows_in(self.example)
        device = next((p.device.type for p in self.model.parameters()), "cpu")
        self.slice = min(ROWS.get(device, ROWS_OF_ACCELERATORS), max(_LEAST.get(device, _FEW), rows // _SLICES))
        self.slice -= self.slice % GRANULE
        if rows < _SEVERAL * self.slice:
            why = f"{rows:,} rows are too few for slices of {self.slice:,}" if rows else "a function hides its rows"
            self.notes.append(f"{TILE} is left out: {why}.")
            return
        for block in self.costs.blocks:
            module = self.model.get_submodule(block.name)
            found = [module.get_submodule(one.name) for one in find_tiles(module).tiles]
            weights = sum(p.numel() for one in found for p in one.parameters() if p.dim() == 2)
            self.tiles |= {block.name: 2.0 * rows * weights} if found else {}
        if not self.tiles:
            self.notes.append(f"{TILE} is left out: nothing was found that treats every position by itself.")

    def _composed(
        self, rows: Sequence[PlannedBlock], option: str, word: str, where: Callable[[PlannedBlock], bool]
    ) -> PlannedBlock | None:
        row = next((one for one in rows if one.option == option), None)
        if row is None or word in row.words or not where(row):
            return None
        if word == RECOMPUTE and all(one.recomputation != RECOMPUTE for one in rows):
            return None  # the block cannot be recomputed
        if word == TILE and row.name not in self.tiles:
            return None
        return row.adding(word, rows=self.slice if word == TILE else row.rows)

    def _set(self, rows: Iterable[Sequence[PlannedBlock]]) -> None:
        self.proposals = replace(self.proposals, rows=[*rows])

    def _recomputations(self) -> list[str]:
        is_long = any(block.attention > _LONG * block.flops for block in self.costs.blocks)
        return [RECOMPUTE, *([ATTENTION] if is_long else []), *([] if self.is_counted else [SELECTIVE, NESTED])]

    def _add_recomputation(self) -> None:
        choices = self._recomputations()
        if self.is_counted:
            self.notes.append(f"{SELECTIVE} and {NESTED} are left out: their time is not known for {self.what}.")
        try:
            ways = Recomputations(self.model, self.example, self.costs, choices)
            for choice in choices:
                self._begins(choice)
                self.proposals = ways.add_to(self.proposals, choice)
        except ValueError as error:
            self.notes.append(f"{RECOMPUTE} is left out. {error}")

    def _add_offloading(self) -> None:
        self.needs_folder = self._lacks_folder()
        if self.needs_folder:
            self.notes.append(
                f"{OFFLOAD} is left out: the model is on the CPU, whose memory it would use; give folder=... to write "
                "files instead."
            )
            return
        self._try(OFFLOAD, [PlannedBlock(block.name, OFFLOAD) for block in self.costs.blocks])

    def _lacks_folder(self) -> bool:
        on_cpu = all(parameter.device.type == "cpu" for parameter in self.model.parameters())
        return on_cpu and self.proposals.folder is None

    def _there(self) -> list[Setting]:
        there = {
            setting.name for name in self.proposals.names for setting in self.conversions.settings(name, self.allow)
        }
        return [setting for setting in SETTINGS if setting.name in there]

    def _settings(self) -> list[Setting]:
        wanted, found = {SKETCH, PACK} & {*self.allow}, self._there()
        if wanted and not found:
            self.notes.append(f"{' and '.join(sorted(wanted))}: no module of the model can be converted.")
        return found

    def _converting(self, setting: Setting) -> list[PlannedBlock | None]:
        return converting(
            self.proposals.names, setting, lambda name: setting in self.conversions.settings(name, self.allow)
        )

    def _try(self, option: str, rows: Sequence[PlannedBlock | None]) -> None:
        self._begins(label_of(option))
        try:
            self.proposals = self.proposals.adding(rows)
        except torch.OutOfMemoryError:
            self.notes.append(f"{label_of(option)} is left out: a step with it in all blocks ran out of memory.")

    def _add_times(self, known: Sequence[int] | None = None) -> None:
        """Add the times of options, but for the first ones of each block; copies are timed, or come from a link."""
        begins = known or [1] * len(self.proposals.rows)
        untimed = OFFLOAD if self.bandwidth is not None else ""
        asked = {
            rows[0].name: [row for row in rows[begin:] if untimed not in row.words]
            for rows, begin in zip(self.proposals.rows, begins, strict=True)
        }
        times = self._counted(asked) if self.is_counted else self._timed(asked, None if known is None else _FEW_ROUNDS)
        self.seconds = sum(times.plain.values())
        self._set(
            [replace(row, seconds=times.extra.get((row.name, row.option), row.seconds)) for row in rows]
            for rows in self.proposals.rows
        )
        if self.bandwidth is not None:
            self._waits = {}
            self._set([self._copied(row, rows, times.plain[row.name]) for row in rows] for rows in self.proposals.rows)

    def waits(self, row: PlannedBlock) -> float:
        """Return the time for which a block waits for copies."""
        return self._waits.get((row.name, row.option), 0.0)

    def _copied(self, row: PlannedBlock, rows: Sequence[PlannedBlock], plain: float) -> PlannedBlock:
        """Return an offloaded row with its time: that of the same row where it stays, and what copies add."""
        if OFFLOAD not in row.words or self.bandwidth is None:
            return row
        stays = joined(word for word in row.words if word != OFFLOAD) or KEEP
        base = next((one.seconds for one in rows if one.choice == stays and one.setting == row.setting), 0.0)
        link = Link(self.bandwidth, SPEED if self.is_counted else 1.0)
        added = self._waits[row.name, row.option] = link.added(row.host, plain / 3, plain * 2 / 3 + base)
        return replace(row, seconds=base + added)

    def _counted(self, asked: Mapping[str, Sequence[PlannedBlock]]) -> Times:
        """Let operations stand for seconds; a tiled block computes its tiles once more, unless it is recomputed."""
        note = (
            f"{self.what.capitalize()} has no times: numbers of operations replace them, "
            f"{SPEED / 1e12:.0f}e12 per second where copies are compared with them."
        )
        self.notes += [] if note in self.notes else [note]
        extra = dict[tuple[str, str], float]()
        for block in self.costs.blocks:
            again = {RECOMPUTE: block.flops, ATTENTION: block.flops - block.attention}
            for row in asked[block.name]:
                tiled = self.tiles[block.name] if TILE in row.words and not row.recomputation else 0
                extra[block.name, row.option] = float(again.get(row.recomputation, tiled))
        return Times({block.name: 3.0 * block.flops for block in self.costs.blocks}, extra)

    def _timed(self, asked: Mapping[str, Sequence[PlannedBlock]], rounds: tuple[int, int] | None) -> Times:
        def make(row: PlannedBlock) -> BlockPlan:
            return self.proposals.plan_of([row if name == row.name else PlannedBlock(name, KEEP) for name in asked])

        return time_options(self.model, self.example, asked, make, rounds=rounds)

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
                f'"{label_of(f"{CONVERT} {setting}")}" is left out where the ratio of one layer, not of the whole '
                f"gradient, exceeds max_noise={max_noise:g}: {names[0]}{more}."
            )

    def _add_nominal_noise(self) -> None:
        """Prefer wide settings among those that cost the same."""
        order = {setting.name: place for place, setting in enumerate(SETTINGS)}
        self._set(
            [replace(row, noise=_NOMINAL * order.get(row.setting, 0)) for row in rows if row.setting != NARROW]
            for rows in self.proposals.rows
        )

    def _noise(self, settings: Sequence[Setting], batch: Any) -> Noise:
        if self.is_counted and settings:
            return Noise(unknown=f"{self.what} has no gradient in one process")
        plans = {one.name: self.proposals.plan_of(_filled(self._converting(one), self.proposals)) for one in settings}
        return measure_noise(self.model, batch, self.costs.blocks, plans) if plans else Noise()

    def _adds_none(self, setting: Setting) -> bool:
        names = [row.name for row in self._converting(setting) if row is not None]
        return all(self.conversions.is_exact(name, setting) for name in names)


def _is_composed(row: PlannedBlock) -> bool:
    """Say whether a row is composed with other words."""
    return not {SELECTIVE, NESTED} & {*row.words} and row.setting in ("", _COMPOSED)


def _filled(rows: Sequence[PlannedBlock | None], proposals: Proposals) -> list[PlannedBlock]:
    return [row or PlannedBlock(name, KEEP) for row, name in zip(rows, proposals.names, strict=True)]
