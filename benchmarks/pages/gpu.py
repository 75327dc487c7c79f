"""The tables of ``docs/gpu.md``, bounds that need no csv file, and of ``docs/compiled.md``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from benchmarks.gpu import roofline
from benchmarks.gpu.compiled import TARGETS, CompiledRow, csv_name
from benchmarks.gpu.roofline import ALL, BLOCKS, EXACT, FUSED, MACHINES, WAYS, Block, Machine, Way, Work
from benchmarks.gpu.steps import Step
from benchmarks.library import table
from benchmarks.pages.render import Table, columns, from_csv
from benchmarks.records import RESULTS, Row, read_rows
from rmm_linear.losses import CHUNK, chunk_rows


def _compiled(rows: Sequence[CompiledRow]) -> str:
    """Lay out variants down, targets across."""
    targets = dict.fromkeys(row.target for row in rows)
    found: dict[tuple[str, str], dict[str, CompiledRow]] = {}
    for row in rows:
        found.setdefault((row.kernel, row.variant), {})[row.target] = row
    lines = []
    for (kernel, variant), here in found.items():
        first = next(iter(here.values()))
        bytes_of = f"{first.moved} = {first.moved_per_element:.3f}"
        lines.append((kernel, variant, bytes_of, *(_registers(here.get(target)) for target in targets)))
    return table(("kernel", "variant", "bytes per element", *targets), lines)


def _default_path(results: Path) -> str:
    """Lay out what the default path's kernels issue on sm_90, beside their limits and what memory allows."""
    rows = [row for row in read_rows(results / csv_name("sm_90"), CompiledRow) if row.default_path]
    spec = {
        "kernel": lambda row: f"{row.kernel} {row.variant}",
        "instructions per element": lambda row: f"{row.instructions_per_element:.1f}",
        "outside of the loop, of a tile": lambda row: f"{row.outside_per_tile:.1f}",
        "limit": lambda row: f"{row.limit:g}",
        "bytes allow": lambda row: f"{row.bytes_allow:.0f}",
        "registers": lambda row: f"{row.registers}",
        "loads": lambda row: row.loads,
        "stores": lambda row: row.stores,
    }
    return columns(rows, spec)


def _of_all_targets(make: Callable[[Sequence[CompiledRow]], str]) -> Table:
    return lambda results: make(
        [row for target in TARGETS for row in read_rows(results / csv_name(target), CompiledRow)]
    )


def _steps(rows: Sequence[Step]) -> str:
    """Lay out methods down, a case after the other, relative to exact where it is one of them."""
    exact = {row.case: row for row in rows if row.method == "exact"}

    def by_exact(name: str, factor: float, spec: str) -> Callable[[Step], str]:
        def cell(row: Step) -> str:
            value, base = getattr(row, name), getattr(exact.get(row.case), name, None)
            return f"{factor * value:{spec}}" + (f" ({value / base:.2f})" if base else "")

        return cell

    spec = {
        "case": lambda row: row.case,
        "method": lambda row: row.method,
        "step, ms": by_exact("step", 1e3, ".1f"),
        "host, ms": lambda row: f"{1e3 * row.host:.1f}",
        "kernels, ms": by_exact("busy", 1e3, ".2f"),
        "launches": lambda row: f"{row.launches}",
        "saved, MiB": by_exact("saved", 2.0**-20, ".0f"),
        "peak, MiB": by_exact("peak", 2.0**-20, ".0f"),
    }
    return columns([row for row in rows if row.status == "ok"], spec)


def _suites(rows: Sequence[Row]) -> str:
    """Lay out providers down: times relative to exact, and peaks where they were measured."""
    spec = {
        "case": lambda row: row.case,
        "provider": lambda row: row.provider,
        "ms": lambda row: f"{1e3 * row.median:.3g}",
        "relative to exact": lambda row: f"{row.relative:.2f}",
        "peak, MiB": lambda row: f"{row.peak_bytes / 2**20:,.0f}" if row.peak_bytes else "",
    }
    return columns(rows, spec)


def _registers(row: CompiledRow | None) -> str:
    """Write registers and shared memory, on AMD with accumulators and scalars; spills where there are any."""
    if row is None:
        return ""
    parts = [f"{row.registers}" if row.scalars is None else f"{row.registers} + {row.accumulators}, {row.scalars} s"]
    parts += [f"{row.shared / 1024:.3g} K"] if row.shared else []
    parts += [f"spills {count}" for count in (row.spilled_bytes, row.spilled_registers) if count]
    return "; ".join(parts)


def _machines() -> str:
    spec = {
        "": lambda one: one.name,
        "memory, TB/s": lambda one: f"{one.bandwidth / 1e12:.2f}",
        "bf16, TFLOP/s": lambda one: f"{one.flops / 1e12:.0f}",
    }
    return columns(MACHINES, spec)


def _ways(block: Block) -> str:
    """Lay out least times of forward and backward pass, in parentheses relative to the exact block."""
    exact = roofline.works(block, EXACT)

    def time_on(machine: Machine, way: Way) -> str:
        times = [sum(map(machine.seconds, which)) for which in (roofline.works(block, way), exact)]
        return f"{times[0] * 1e3:.2f} ms ({times[0] / times[1]:.2f})"

    def total(way: Way, count: str) -> float:
        return sum(getattr(one, count) for one in roofline.works(block, way))

    spec = {
        "least time of a block": lambda way: way.name,
        "GB moved": lambda way: f"{total(way, 'bytes') / 1e9:.2f}",
        "TFLOP": lambda way: f"{total(way, 'flops') / 1e12:.2f}",
        "saved, MiB": lambda way: f"{roofline.saved(block, way) / 2**20:,.0f}",
        **{machine.name: partial(time_on, machine) for machine in MACHINES},
    }
    return columns(WAYS, spec)


def _operators(block: Block) -> str:
    """Lay out what each operation moves, and its share of the block's least time; of the fused only what differs."""
    unfused = {one.operator for one in roofline.works(block, ALL)}
    lines = list[tuple[str, str, list[Work], list[Work]]]()
    for title, way in (("exact", EXACT), ("all operations", ALL), ("fused", FUSED)):
        found = roofline.works(block, way)
        for name, is_forward in dict.fromkeys((one.operator, one.is_forward) for one in found):
            if way is not FUSED or name not in unfused:
                same = [one for one in found if (one.operator, one.is_forward) == (name, is_forward)]
                lines.append((f"{title}: {name}", "forward" if is_forward else "backward", same, found))

    def share_on(machine: Machine, line: tuple[str, str, list[Work], list[Work]]) -> str:
        return f"{sum(map(machine.seconds, line[2])) / sum(map(machine.seconds, line[3])):.1%}"

    spec = {
        "operation": lambda line: line[0],
        "pass": lambda line: line[1],
        "MB moved": lambda line: f"{sum(one.bytes for one in line[2]) / 1e6:,.0f}",
        "GFLOP": lambda line: f"{sum(one.flops for one in line[2]) / 1e9:,.1f}",
        **{f"{machine.name}: share": partial(share_on, machine) for machine in MACHINES},
    }
    return columns(lines, spec)


def _head() -> str:
    """Lay out least times of an output layer with its loss, relative to the exact one."""
    rows, exact = chunk_rows(roofline.HEAD[2], "cuda", 4), roofline.head(*roofline.HEAD, None)
    ways = {
        "exact": exact,
        "chunks of 256 rows, sums in a pass of their own": roofline.head(*roofline.HEAD, CHUNK, adds_wide=False),
        f"chunks of {rows:,} rows, sums in a pass of their own": roofline.head(*roofline.HEAD, rows, adds_wide=False),
        f"chunks of {rows:,} rows": roofline.head(*roofline.HEAD, rows),
    }

    def time_on(machine: Machine, way: tuple[str, list[Work]]) -> str:
        times = [sum(map(machine.seconds, which)) for which in (way[1], exact)]
        return f"{times[0] * 1e3:.1f} ms ({times[0] / times[1]:.2f})"

    spec = {
        "least time of head and loss": lambda way: way[0],
        "GB moved": lambda way: f"{sum(one.bytes for one in way[1]) / 1e9:.0f}",
        **{machine.name: partial(time_on, machine) for machine in MACHINES},
    }
    return columns(list(ways.items()), spec)


TABLES: dict[str, Table] = {
    "kernels-compiled": _of_all_targets(_compiled),
    "kernels-default-path": _default_path,
    "gpu-steps": from_csv("steps-cuda", Step, _steps),
    "gpu-blocks": from_csv("blocks-cuda", Row, _suites),
    "gpu-operators": from_csv("operators-cuda", Row, _suites),
    "roofline-machines": lambda results: _machines(),
    "roofline-head": lambda results: _head(),
    **{
        f"roofline-{block.name.split('-')[0].lower()}{part}": lambda results, make=make, block=block: make(block)
        for block in BLOCKS
        for part, make in (("", _ways), ("-operators", _operators))
    },
}


def add_arguments(parser: argparse.ArgumentParser) -> None: ...


def run(arguments: argparse.Namespace) -> Iterator[str]:
    yield from (f"{make(RESULTS)}\n" for name, make in TABLES.items() if name.startswith("roofline"))
