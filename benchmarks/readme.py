"""README's performance tables, generated from the csv files: ``python -m benchmarks table``, or ``--check``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.linear import REFERENCE
from benchmarks.records import RESULTS, ROOT, Row, read_rows

README = ROOT / "README.md"
BEGIN = "<!-- python -m benchmarks table: begin -->"
END = "<!-- python -m benchmarks table: end -->"
RATIO = 0.1
_SHORT = {"float32": "fp32", "bfloat16": "bf16"}


def tables(results: Path = RESULTS) -> str:
    """Return the tables of all devices that have results.

    Args:
        results: Folder of the csv files.

    Returns:
        Markdown.
    """
    parts = []
    for device in ("cpu", "cuda"):
        for suite, make in (("linear", _layers), ("model", _steps), ("kernels", _kernels)):
            path = results / f"{suite}-{device}.csv"
            rows = [row for row in read_rows(path) if row.ratio == RATIO] if path.is_file() else []
            if rows:
                parts += [_source(rows[0], device, suite), make(rows)]
    return "\n\n".join(parts) or "Nothing is measured yet: run `python -m benchmarks run`."


def inserted(text: str, content: str, begin: str = BEGIN, end: str = END) -> str:
    """Put content between the markers of a text.

    Args:
        text: The README.
        content: What goes between the markers.
        begin: The line before.
        end: The line after.

    Returns:
        The new text.

    Raises:
        ValueError: If the markers are not there once each, in order.
    """
    before, opened, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not opened or not closed or begin in rest or end in after:
        raise ValueError(f"README must have the lines {begin} and {end} once each, in this order. Put them back.")
    return f"{before}{begin}\n\n{content}\n\n{end}{after}"


def update(*, check: bool, readme: Path = README, results: Path = RESULTS) -> bool:
    """Write the tables into the README.

    Args:
        check: Only say whether they are there already.
        readme: The README.
        results: Folder of the csv files.

    Returns:
        Whether the README has the tables of the results.
    """
    text = readme.read_text(encoding="utf-8")
    wanted = inserted(text, tables(results))
    if not check:
        readme.write_text(wanted, encoding="utf-8")
        return True
    return text == wanted


def _source(row: Row, device: str, suite: str) -> str:
    what = {
        "linear": "Forward and backward pass of a layer (N x I -> O) by nn.Linear's time, and bytes kept by its bytes",
        "model": "Training step by the exact model's time (8 x 128 is 8 sequences of 128 tokens), and memory",
        "kernels": "Bytes that must be moved per second, by those of a copy of the same matrix",
    }[suite]
    threads = f", {row.threads} threads" if row.device == "cpu" else ""
    triton = f", Triton {row.triton}" if device == "cuda" else ""
    run = f"`python -m benchmarks run --device {device} --suite {suite}`"
    return (
        f"{what}, a tenth kept; {row.machine}{threads}, PyTorch {row.torch}{triton}, "
        f"commit `{row.commit}`, {row.date[:10]}, by\n{run}:"
    )


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _pivot(rows: Sequence[Row], cell: dict[tuple[str, str], str]) -> str:
    """Providers down, cases across."""
    cases = list(dict.fromkeys(_column(row) for row in rows))
    providers = list(dict.fromkeys(row.provider for row in rows))
    body = [[_title(provider), *(cell.get((provider, case), "") for case in cases)] for provider in providers]
    return _markdown(["", *cases], body)


def _column(row: Row) -> str:
    return f"{row.case}, {_SHORT.get(row.dtype, row.dtype)}"


def _title(provider: str) -> str:
    return {"paper": "the published dense Gaussian"}.get(provider, provider)


def _failed(row: Row) -> str:
    return "failed" if row.status != "ok" else ""


def _layers(rows: Sequence[Row]) -> str:
    cell = {}
    for row in rows:
        text = _failed(row)
        if row.relative is not None and row.median is not None:
            reference = row.provider == REFERENCE
            text = f"{row.median * 1e3:.3g} ms" if reference else f"{row.relative:.2f}"
            base = next(r.kept_bytes for r in rows if _column(r) == _column(row) and r.provider == REFERENCE)
            if base and row.kept_bytes and not reference:
                text += f" ({row.kept_bytes / base:.0%})"
        cell[row.provider, _column(row)] = text
    return _pivot(rows, cell)


def _steps(rows: Sequence[Row]) -> str:
    header, body = ["", "step", "of exact", "kept", "peak"], []
    for row in rows:
        values = [_failed(row), "", "", ""]
        if row.relative is not None and row.median is not None:
            values = [f"{row.median:.3g} s", f"{row.relative:.2f}", *map(_mib, (row.kept_bytes, row.peak_bytes))]
        body.append([f"{row.case}, {_SHORT.get(row.dtype, row.dtype)}: {_title(row.provider)}", *values])
    if rows[0].device == "cpu":  # where a peak leaves out what lives inside of an operator
        header, body = header[:-1], [line[:-1] for line in body]
    return _markdown(header, body)


def _kernels(rows: Sequence[Row]) -> str:
    cell = {}
    for row in rows:
        text = _failed(row)
        if row.copy_share is not None and row.median and row.moved_bytes:
            speed = f"{row.moved_bytes / row.median / 1e9:.3g} GB/s"
            text = speed if row.provider == "copy" else f"{row.copy_share:.0%}"
        cell[row.provider, _column(row)] = text
    return _pivot(rows, cell)


def _mib(count: int | None) -> str:
    return "" if count is None else f"{count / 2**20:,.1f} MiB"
