"""Rows of results as tables: of a run for the terminal, and of the committed results for the pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import growth, host, linear, models, operators
from benchmarks.records import RATIO, Noise, Row, Sampled, Surveyed, read_rows
from rmm_linear._support.tables import table
from rmm_linear.sketches import SAMPLERS

_SHORT = {"float32": "fp32", "bfloat16": "bf16"}
_FLOOR = 0.01
_TITLES = {
    "paper": "the published dense Gaussian",
    "none": '"none": nothing else',
    "oracle": "the true ‖y‖",
}


def measured(rows: Sequence[Row]) -> str:
    """Return a table of all that a run found, one line per row: times by the reference's and by checkpointing's."""
    ratios = ("of reference", "of checkpoint", "of a copy's speed")
    header = ("case", "dtype", "ratio", "provider", "median, ms", "quartiles", "GB/s", *ratios, "kept", "peak")
    recomputed = {_key(row): row.median for row in rows if row.provider.startswith(models.CHECKPOINT)}  # the last: all
    lines = []
    for row in rows:
        base = recomputed.get(_key(row))
        shares = (row.relative, row.median / base if row.median and base else None, row.copy_share)
        times = ("", "")
        if row.median is not None and row.lower is not None and row.upper is not None:
            times = (f"{row.median * 1e3:.4g}", f"{row.lower * 1e3:.3g}-{row.upper * 1e3:.3g}")
        of_others = ("" if share is None else f"{share:.3f}" for share in shares)
        memory = ("" if count is None else f"{count:,}" for count in (row.kept_bytes, row.peak_bytes))
        what = (row.case, row.dtype, f"{row.ratio:g}", row.provider)
        lines.append((*what, *times, _speed(row), *of_others, *memory, row.status))
    return table((*header, "status"), lines)


def _key(row: Row) -> tuple[str, str, str]:
    return row.suite, row.case, row.dtype


def performance(results: Path) -> str:
    """Return the tables of all suites and devices that have results in a folder, each below where it comes from."""
    parts = []
    for device in ("cpu", "cuda"):
        for suite, make in _MAKERS.items():
            path = results / f"{suite}-{device}.csv"
            rows = [row for row in read_rows(path, Row) if row.ratio == RATIO] if path.is_file() else []
            if rows:
                parts += [_source(rows[0]), make(rows)]
    return "\n\n".join(parts) or "Nothing is measured yet: run `python -m benchmarks run`."


def sampling(results: Path) -> str:
    """Return the table of the norm estimators' noise: settings down, tasks across."""
    path = results / "sampling.csv"
    rows = read_rows(path, Sampled) if path.is_file() else []
    if not rows:
        return "Nothing is measured yet: run `python -m benchmarks.sampling`."
    tasks = dict.fromkeys(row.task for row in rows)
    cells = {(row.kind, row.norm_estimator, row.task): f"{row.noise:.2f}" for row in rows}
    header = ("rows sampled by ‖x‖ and", *(f"{task}: {kind}" for task in tasks for kind in SAMPLERS))
    lines = []
    for name in dict.fromkeys(row.norm_estimator for row in rows if row.norm_estimator):
        title = _TITLES.get(name, f'"{name}"')
        lines.append((title, *(cells[kind, name, task] for task in tasks for kind in SAMPLERS)))
    for kind in ("rows", "countsketch"):
        lines.append((f"for comparison, `{kind}`", *(cells[kind, "", task] for task in tasks for _ in SAMPLERS)))
    return f"{_of(rows[0])}:\n\n{table(header, lines)}"


def survey(results: Path) -> str:
    """Return the table of the sketches' noise at equal memory, and what seeds have: settings down, tasks across."""
    path = results / "noise.csv"
    rows = read_rows(path, Surveyed) if path.is_file() else []
    if not rows:
        return "Nothing is measured yet: run `python -m benchmarks.noise`."
    cells = {(row.setting, row.task, row.memory): digits(row.noise) for row in rows}
    columns = dict.fromkeys((row.task, row.memory) for row in rows)
    padding = {row.task: f"{100 * row.padding:.0f} % on {row.task}" for row in rows}
    header = ("kept of the bytes", *(f"{task}: {100 * memory:g} %" for task, memory in columns))
    settings = dict.fromkeys(row.setting for row in rows)
    lines = [(name, *(cells[name, task, memory] for task, memory in columns)) for name in settings]
    factors = [max(row.most / row.noise, row.noise / row.least) for row in rows if row.least > _FLOOR]
    return (
        f"{_of(rows[0])}; of the tokens, padding is {', '.join(padding.values())}. Where the noise is above {_FLOOR}, "
        f"every seed is within a factor of {max(factors, default=1.0):.1f}:\n\n{table(header, lines)}"
    )


def _of(row: Noise) -> str:
    seeds = "one seed" if row.seeds == 1 else f"mean of {row.seeds} seeds"
    return f"{row.layers} layers, {seeds}, commit `{_short(row.commit)}`"


def digits(noise: float) -> str:
    """Write a ratio of variances.

    Args:
        noise: The ratio.

    Returns:
        Two significant digits or so.
    """
    return f"{noise:.{1 if noise >= 10 else 2 if noise >= 0.095 else 3}f}"


def _source(row: Row) -> str:
    what = {
        "linear": "Forward and backward pass of a layer (N x I -> O) by nn.Linear's time, and bytes kept by its bytes, "
        "a tenth kept",
        "model": "Training step by the exact model's time (8 x 128 is 8 sequences of 128 tokens), and what the whole "
        "model keeps for the backward pass, sketched layers a tenth of their inputs",
        "kernels": "Bytes that must be moved per second, by those of a copy of the same matrix, a tenth kept",
        "blocks": "Forward and backward pass of blocks by the exact ones' time, and what they keep for the backward "
        "pass, sketched layers a tenth of their inputs",
        "operators": "Forward and backward pass by that of PyTorch's own operation; of what makes and reads a "
        "stand-in, bytes per second by those of a copy, too",
        "growth": "Time of a layer's forward and backward pass per token, by that per token of "
        f"{growth.BASE:,} tokens; a tenth kept",
        "host": "Forward and backward pass by the modules: time of one module's call inside of a model whose "
        "arithmetic takes next to none",
    }[row.suite]
    threads = f", {row.threads} thread{'s' * (row.threads != 1)}" if row.device == "cpu" else ""
    triton = f", Triton {row.triton}" if row.device == "cuda" else ""
    return (
        f"{what}; {row.machine}{threads}, PyTorch {row.torch}{triton}, commit `{_short(row.commit)}`, "
        f"{row.date[:10]}, by\n`python -m benchmarks run --device {row.device} --suite {row.suite}`:"
    )


def _short(commit: str) -> str:
    known, dirty, _ = commit.partition("-dirty")
    return known[:12] + dirty


def _pivot(rows: Sequence[Row], cell: Callable[[Row], str]) -> str:
    """Providers down, cases across."""
    cells = {(row.provider, _case(row)): "failed" if row.median is None else cell(row) for row in rows}
    cases = dict.fromkeys(_case(row) for row in rows)
    providers = dict.fromkeys(row.provider for row in rows)
    lines = [(_TITLES.get(name, name), *(cells.get((name, case), "") for case in cases)) for name in providers]
    return table(("", *cases), lines)


def _case(row: Row) -> str:
    return f"{row.case}, {_SHORT.get(row.dtype, row.dtype)}"


def _layers(rows: Sequence[Row]) -> str:
    bases = {_case(row): row.kept_bytes for row in rows if row.provider == linear.REFERENCE}

    def cell(row: Row) -> str:
        if row.provider == linear.REFERENCE:
            return f"{(row.median or 0) * 1e3:.3g} ms"
        return "" if row.relative is None else f"{row.relative:.2f}{_share(row.kept_bytes, bases[_case(row)])}"

    return _pivot(rows, cell)


def _steps(rows: Sequence[Row]) -> str:
    header, lines = ("", "step", "of exact", "kept", "peak"), []
    bases = {_case(row): row.kept_bytes for row in rows if row.provider == models.REFERENCE}
    for row in rows:
        title = f"{_case(row)}: {row.provider}{', all linear layers' if row.provider == models.SKETCHED else ''}"
        values = ("failed", "", "", "")
        if row.median is not None and row.relative is not None:
            kept = _mib(row.kept_bytes) + _share(row.kept_bytes, bases[_case(row)])
            values = (f"{row.median:.3g} s", f"{row.relative:.2f}", kept, _mib(row.peak_bytes))
        lines.append((title, *values))
    if rows[0].device == "cpu":  # where a peak leaves out what lives inside of an operator
        header, lines = header[:-1], [line[:-1] for line in lines]
    return table(header, lines)


def _kernels(rows: Sequence[Row]) -> str:
    return _pivot(rows, lambda row: f"{_speed(row)} GB/s" if row.provider == "copy" else f"{row.copy_share or 0:.0%}")


def tokens_of(row: Row) -> int:
    """Return N of a case "N x I -> O"."""
    return int(row.case.split(" x ")[0])


def per_token(rows: Sequence[Row]) -> dict[tuple[str, int], float]:
    """Return the time per token by that of the base case, by provider and tokens."""
    times = {(row.provider, tokens_of(row)): row.median / tokens_of(row) for row in rows if row.median is not None}
    bases = {name: time for (name, tokens), time in times.items() if tokens == growth.BASE}
    return {(name, tokens): time / bases[name] for (name, tokens), time in times.items() if name in bases}


def _growth(rows: Sequence[Row]) -> str:
    found, providers = per_token(rows), list(dict.fromkeys(row.provider for row in rows))
    lines = []
    for tokens in dict.fromkeys(map(tokens_of, rows)):
        shares = (found.get((name, tokens)) for name in providers)
        lines.append((f"{tokens:,}", *("failed" if share is None else f"{share:.2f}" for share in shares)))
    return table(("tokens", *providers), lines)


def per_layer(row: Row) -> float:
    """Return the median time of one layer in microseconds, of a case "n layers of ..."."""
    return (row.median or 0.0) / int(row.case.split()[0]) * 1e6


def _host(rows: Sequence[Row]) -> str:
    header = ("", "one module, µs", "relative to exact", "over exact, µs")
    lines = []
    for row in rows:
        (base,) = [per_layer(one) for one in rows if (one.case, one.provider) == (row.case, host.REFERENCE)]
        values = ("failed", "", "")
        if row.median is not None:
            over = "" if row.provider == host.REFERENCE else f"{per_layer(row) - base:.1f}"
            values = (f"{per_layer(row):.1f}", f"{row.relative or 0:.2f}", over)
        lines.append((f"{_case(row)}: {row.provider}", *values))
    return table(header, lines)


def _operators(rows: Sequence[Row]) -> str:
    def cell(row: Row) -> str:
        if row.provider in (operators.REFERENCE, operators.COPY):
            return f"{(row.median or 0) * 1e3:.3g} ms"
        speed = "" if row.copy_share is None else f" ({row.copy_share:.0%})"
        return f"{row.relative or 0:.2f}{speed}"

    return _pivot(rows, cell)


_MAKERS = {
    "linear": _layers,
    "model": _steps,
    "blocks": _steps,
    "operators": _operators,
    "kernels": _kernels,
    "growth": _growth,
    "host": _host,
}


def _speed(row: Row) -> str:
    return f"{row.moved_bytes / row.median / 1e9:.3g}" if row.moved_bytes and row.median else ""


def _mib(count: int | None) -> str:
    return "" if count is None else f"{count / 2**20:,.1f} MiB"


def _share(count: int | None, base: int | None) -> str:
    return f" ({count / base:.0%})" if count and base else ""
