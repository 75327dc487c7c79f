"""The tables of benchmarks.md, of cases with a tenth of the bytes, of noise.md and of estimators.md."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Sequence

from benchmarks.library import QUALITIES, SAMPLERS, table
from benchmarks.noise.blocks import BlockRow, LeftRow
from benchmarks.pages.render import Cell, Table, columns, from_csv, of, pivot
from benchmarks.records import RATIO, PresetRow, Row, Sampled, Surveyed
from benchmarks.suites import blocks, host, linear, operators
from benchmarks.suites.zoo import TEXT, ZooRow

_ESTIMATORS = {"none": '"none": nothing else', "oracle": "the true ‖y‖"}


def digits(noise: float) -> str:
    """Write a ratio of variances with two significant digits or so."""
    return f"{noise:.{1 if noise >= 10 else 2 if noise >= 0.095 else 3}f}"


def _survey(rows: Sequence[Surveyed]) -> str:
    across: Cell = lambda row: f"{row.task}: {100 * row.memory:g} %"  # noqa: E731
    return pivot(rows, of("setting"), across, lambda row: digits(row.noise), "bytes relative to the input")


def _sampling(rows: Sequence[Sampled]) -> str:
    """Lay out norm estimators down, tasks and kinds across; kinds without an estimator below, in both columns."""
    tasks = dict.fromkeys(row.task for row in rows)
    cells = {(row.kind, row.norm_estimator, row.task): f"{row.noise:.2f}" for row in rows}
    names = dict.fromkeys(row.norm_estimator for row in rows if row.norm_estimator)
    lines = [
        (_ESTIMATORS.get(name, f'"{name}"'), *(cells[kind, name, task] for task in tasks for kind in SAMPLERS))
        for name in names
    ]
    for kind in ("rows", "countsketch"):
        lines.append((f"for comparison, `{kind}`", *(cells[kind, "", task] for task in tasks for _ in SAMPLERS)))
    return table(("rows sampled by ‖x‖ and", *(f"{task}: {kind}" for task in tasks for kind in SAMPLERS)), lines)


def _presets(rows: Sequence[PresetRow]) -> str:
    """Lay out tasks and batches down, what is measured across, of all steps one after the other."""
    lines = list[tuple[str, ...]]()
    for key in dict.fromkeys((row.case, row.batch, row.dtype) for row in rows):
        here = [row for row in rows if (row.case, row.batch, row.dtype) == key]

        def cell(quality: str, value: Callable[[PresetRow], float], here: list[PresetRow] = here) -> str:
            return " / ".join(digits(value(row)) for row in here if row.quality == quality)

        case, batch, dtype = key
        steps = ", ".join(dict.fromkeys(f"{row.step:,}" for row in here))
        whole = [cell(quality, lambda row: row.whole) for quality in QUALITIES]
        linear = [cell(quality, lambda row: row.alone) for quality in QUALITIES]
        coordinate = cell("default", lambda row: row.coordinate)
        lines.append((f"{case}, {batch}, {_SHORT.get(dtype, dtype)}", steps, *whole, *linear, coordinate))
    header = ("", "steps", *(f"whole: {quality}" for quality in QUALITIES))
    return table((*header, *(f"linear: {quality}" for quality in QUALITIES), "coordinate: default"), lines)


def _saved_by_preset(rows: Sequence[PresetRow]) -> str:
    """Lay out qualities down; bytes by the exact model's across, of batches of one length at the last step."""
    last = {row.case: max(one.step for one in rows if one.case == row.case) for row in rows}
    some = [row for row in rows if row.batch != "padded" and row.step == last[row.case]]
    title: Cell = lambda row: f"{row.case}, {_SHORT.get(row.dtype, row.dtype)}"  # noqa: E731
    return pivot(some, of("quality"), title, lambda row: f"{row.saved:.3f} ({row.linear_saved:.3f})", "quality")


_SHORT = {"float32": "fp32", "bfloat16": "bf16"}
_TITLES = {"paper": "the published dense Gaussian"}


def _case(row: Row | BlockRow) -> str:
    return f"{row.case}, {_SHORT.get(row.dtype, row.dtype)}"


def _by_case(rows: Sequence[Row], cell: Callable[[Row], str]) -> str:
    """Lay out providers down, cases across."""
    title: Cell = lambda row: _TITLES.get(row.provider) or row.provider  # noqa: E731
    return pivot(rows, title, _case, lambda row: _or_failed(row, cell(row)))


def _or_failed(row: Row, text: str) -> str:
    return "failed" if row.median is None else text


def _milliseconds(row: Row) -> str:
    return f"{(row.median or 0) * 1e3:.3g} ms"


def _share(count: int | None, base: int | None) -> str:
    return f" ({count / base:.0%})" if count and base else ""


def _mib(count: int | None) -> str:
    return "" if count is None else f"{count / 2**20:,.1f} MiB"


def _bases(rows: Sequence[Row], reference: str) -> dict[str, Row]:
    return {_case(row): row for row in rows if row.provider == reference}


def _layers(rows: Sequence[Row]) -> str:
    bases = _bases(rows, linear.REFERENCE)

    def cell(row: Row) -> str:
        if row.provider == linear.REFERENCE:
            return _milliseconds(row)
        return f"{row.relative or 0:.2f}{_share(row.kept_bytes, bases[_case(row)].kept_bytes)}"

    return _by_case(rows, cell)


def _steps(rows: Sequence[Row]) -> str:
    bases = _bases(rows, blocks.REFERENCE)
    spec = {
        "": lambda row: f"{_case(row)}: {row.provider}{', all linear layers' * (row.provider == blocks.LINEARS)}",
        "step time": lambda row: _or_failed(row, f"{row.median or 0:.3g} s"),
        "relative to exact": lambda row: f"{row.relative or 0:.2f}",
        "activation memory": lambda row: _mib(row.kept_bytes) + _share(row.kept_bytes, bases[_case(row)].kept_bytes),
        "peak": lambda row: _mib(row.peak_bytes),
    }
    if rows[0].device == "cpu":  # where a peak leaves out what lives inside of an operator
        del spec["peak"]
    return columns(rows, spec)


def _kernels(rows: Sequence[Row]) -> str:
    def cell(row: Row) -> str:
        if row.provider == "copy":
            return f"{(row.moved_bytes or 0) / (row.median or 1) / 1e9:.3g} GB/s"
        return f"{row.copy_share or 0:.0%}"

    return _by_case(rows, cell)


def _operators(rows: Sequence[Row]) -> str:
    def cell(row: Row) -> str:
        if row.provider in (operators.REFERENCE, operators.COPY):
            return _milliseconds(row)
        return f"{row.relative or 0:.2f}" + ("" if row.copy_share is None else f" ({row.copy_share:.0%})")

    return _by_case(rows, cell)


def _host(rows: Sequence[Row]) -> str:
    bases = _bases(rows, host.REFERENCE)

    def over(row: Row) -> str:
        apart = host.per_layer(row) - host.per_layer(bases[_case(row)])
        return "" if row.provider == host.REFERENCE else f"{apart:.1f}"

    spec = {
        "": lambda row: f"{_case(row)}: {row.provider}",
        "one module, µs": lambda row: _or_failed(row, f"{host.per_layer(row):.1f}"),
        "relative to exact": lambda row: f"{row.relative or 0:.2f}",
        "difference to exact, µs": over,
    }
    return columns(rows, spec)


_MAKERS = {
    "linear": _layers,
    "blocks": _steps,
    "operators": _operators,
    "kernels": _kernels,
    "host": _host,
}


def _blocks_bytes(rows: Sequence[BlockRow]) -> str:
    """Lay out models down, operations across, added one after the other, without those that no model has."""
    cells = {(_case(row), row.operations): row for row in rows}
    models = dict.fromkeys(map(_case, rows))
    exact, *sets, others = dict.fromkeys(row.operations for row in rows)
    before = dict(zip(sets, [exact, *sets], strict=False))
    sets = [one for one in sets if any(cells[m, one].value != cells[m, before[one]].value for m in models)]
    titles = [sets[0], *(f"+ {one.split()[-1]}" for one in sets[1:-1]), f"+ {sets[-1].split()[-1]}: all"]
    lines = [
        (
            model,
            f"{cells[model, exact].value / 2**20:.1f}",
            *(f"{cells[model, one].relative:.3f}" for one in [*sets, others]),
        )
        for model in models
    ]
    return table(("", "exact, MiB", *titles, "all but linear"), lines)


def _blocks_noise(rows: Sequence[BlockRow]) -> str:
    cell: Cell = lambda row: " / ".join(map(digits, (row.value, row.first, row.median)))  # noqa: E731
    return pivot(rows, of("case"), of("operations"), cell)


def _blocks_images(rows: Sequence[BlockRow]) -> str:
    titles = {"convolution": "convolutions", "activation": "activations"}
    titles |= dict.fromkeys(("norm pooling", "linear norm"), "norms; ResNet's pool, ConvNeXt's linears")
    some = [row for row in rows if row.operations != "exact"]
    return pivot(some, of("case"), lambda row: titles.get(row.operations, "all"), of("relative", ".2f"))


def _blocks_left(rows: Sequence[LeftRow]) -> str:
    families: dict[str, list[LeftRow]] = {}
    for row in rows:
        families.setdefault(row.case, []).append(row)
    spec: dict[str, Cell] = {
        "family": lambda found: found[0].case,
        "exact, MiB": lambda found: f"{found[0].exact / 2**20:.1f}",
        "remaining share": lambda found: f"{found[0].share:.3f}",
        "what remains above 2 %": lambda found: "; ".join(
            f"{100 * row.share:.1f} %: {row.reason}" for row in found[1:]
        ),
    }
    return columns(families.values(), spec)


def _zoo(rows: Sequence[ZooRow]) -> str:
    spec = {
        "type": of("model"),
        "task": of("task"),
        "bytes left": lambda row: f"{100 * row.share:.0f} %",
        "noise": lambda row: digits(row.noise),
        "what stays, of the exact bytes": lambda row: ", ".join(re.findall(r"(\d+ % \w+):", row.stays)) or "–",
    }
    return columns(sorted((row for row in rows if row.status == "ok"), key=lambda row: row.share), spec)


def _zoo_counts(rows: Sequence[ZooRow]) -> str:
    kinds = {row.task: "text" if row.task in TEXT else row.task for row in rows}
    counted = [_zoo_count([row for row in rows if kinds[row.task] == kind]) for kind in dict.fromkeys(kinds.values())]
    lines = [(title, *(str(one[title]) for one in counted)) for title in counted[0]]
    return table(("", *dict.fromkeys(kinds.values())), lines)


def _zoo_count(rows: Sequence[ZooRow]) -> dict[str, str | int]:
    found = [row for row in rows if row.status == "ok"]
    shares = sorted(row.share for row in found)
    return {
        "types measured": len(found),
        "bytes left, median": f"{100 * statistics.median(shares):.0f} %",
        "bytes left, nine of ten at most": f"{100 * shares[-(-9 * len(shares) // 10) - 1]:.0f} %",
        "logits equal to the bit, of those that have them": f"{sum(row.logits == 'equal' for row in found)} of "
        f"{sum(row.logits != 'none' for row in found)}",
        "same parameters have a gradient": sum(row.gradients == "same" for row in found),
        "as before after `revert`": sum(row.reverted == "same" for row in found),
        "types that these small sizes do not build, or that took too long": len(rows) - len(found),
    }


TABLES: dict[str, Table] = {
    "blocks-bytes": from_csv("blocks-bytes", BlockRow, _blocks_bytes),
    "blocks-noise": from_csv("blocks-noise", BlockRow, _blocks_noise),
    "blocks-images": from_csv("blocks-images", BlockRow, _blocks_images),
    "blocks-left": from_csv("blocks-left", LeftRow, _blocks_left),
    "zoo": from_csv("zoo", ZooRow, _zoo),
    "zoo-counts": from_csv("zoo", ZooRow, _zoo_counts),
    "noise": from_csv("noise", Surveyed, _survey),
    "sampling": from_csv("sampling", Sampled, _sampling),
    "presets": from_csv("blocks-presets", PresetRow, _presets),
    "presets-saved": from_csv("blocks-presets", PresetRow, _saved_by_preset),
    **{
        f"{suite}-{device}": from_csv(
            f"{suite}-{device}", Row, lambda rows, make=make: make([row for row in rows if row.ratio == RATIO])
        )
        for suite, make in _MAKERS.items()
        for device in ("cpu", "cuda")
    },
}
