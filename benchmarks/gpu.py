"""``python -m benchmarks gpu``: everything that a CUDA machine must show, in one call of a few minutes.

Needs torch and Triton alone, from the root of a checkout that is not installed. Every section runs in processes of its
own, because an illegal access or a hang on a device ends all that shares the process: it then costs one section, whose
rows so far are kept. Sections get their share of the time that is left.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from benchmarks import parity
from benchmarks.checks import poisoned_outputs
from benchmarks.processes import ProcessError, call
from benchmarks.records import Row, environment, read_rows, write_rows
from benchmarks.runner import run_cases
from benchmarks.suites import SUITES
from rmm_linear._support.files import write_text
from rmm_linear._support.tables import table

SECONDS = 450.0
SHARES = {"parity": 3, "kernels": 2, "linear": 4, "model": 3}
RATIO = 0.1
_MAIN = "16384 x 4096"  # the size that a GPU is judged by
_WORKERS = 12  # compiling kernels takes the time of the comparisons
_SHARE = 12  # comparisons that one process makes, and that are lost with it


def gpu(out: Path, *, device: str = "cuda", tiny: bool = False, seconds: float = SECONDS, commit: str = "") -> int:
    """Run all sections.

    Args:
        out: Folder for the csv files: parity and one per suite.
        device: "cuda"; "cpu" runs the kernels in Triton's interpreter, to try the command.
        tiny: Small sizes.
        seconds: Time for all of it.
        commit: What to write as the commit where there is no git.

    Returns:
        0; 1 if a section failed, or a provider in it.
    """
    out.mkdir(parents=True, exist_ok=True)
    if device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")  # for the sections' processes
    end = time.monotonic() + seconds
    failures: list[str] = []
    waiting = dict(SHARES)
    for name in SHARES:
        left = max(1.0, end - time.monotonic())
        timeout = left * waiting[name] / sum(waiting.values())
        del waiting[name]
        begin = time.monotonic()
        try:
            if name == "parity":
                failures += _parity(out, device, tiny, timeout)
            else:
                failures += call(suite_section, name, out, device, tiny, commit, timeout=timeout)
        except Exception as error:
            print(f"{name}: {error}", file=sys.stderr, flush=True)
            failures.append(f"{name}: {str(error).strip().splitlines()[-1]}")
        print(f"{name}: {time.monotonic() - begin:.0f} s", flush=True)
    write_text(out / f"failures-{device}.txt", "".join(f"{failure}\n" for failure in failures))
    print(_summary(out, device, failures))
    return 1 if failures else 0


def suite_section(name: str, out: Path, device: str, tiny: bool, commit: str) -> list[str]:
    """Run a suite and write its csv after every case; meant for a process of its own.

    Args:
        name: Name of the suite.
        out: Folder of the csv file.
        device: Where.
        tiny: Small sizes.
        commit: What to write as the commit; "" asks git.

    Returns:
        What failed.
    """
    cases = [dataclasses.replace(case, backend="triton") for case in SUITES[name].cases(device, tiny=tiny)]
    cases = [case for case in cases if case.ratio == RATIO or _MAIN in case.name]  # `run` measures the others too
    cases.sort(key=lambda case: _MAIN not in case.name)
    about = environment(device, commit or None)
    path = out / f"{name}-{device}.csv"
    path.unlink(missing_ok=True)
    rows: list[Row] = []
    for found in run_cases(cases, memory=lambda c: c.suite == "model" or (_MAIN in c.name and c.ratio == RATIO)):
        rows += [dataclasses.replace(row, **about) for row in found]  # pyright: ignore[reportArgumentType]
        write_rows(path, rows)
    return [f"{r.case}, {r.provider}, {r.dtype}, {r.ratio}: {r.status}" for r in rows if r.status != "ok"]


def parity_part(device: str, titles: Sequence[str]) -> list[tuple[str, str, float, float, str]]:
    """Make comparisons; meant for a process of its own.

    Args:
        device: Where.
        titles: Titles of the comparisons.

    Returns:
        Rows: comparison, what, error, limit and "ok", "failed" or the error that was raised.
    """
    known = parity.comparisons() | parity.real_sizes()
    rows = []
    for title in titles:
        try:
            with poisoned_outputs():
                checks = known[title](device)
            rows += [(title, c.what, c.error, c.limit, "ok" if c.ok else "failed") for c in checks]
        except Exception as error:
            rows.append((title, "", float("nan"), 0.0, f"{type(error).__name__}: {error}".splitlines()[0]))
    return rows


def _parity(out: Path, device: str, tiny: bool, timeout: float) -> list[str]:
    titles = list(parity.comparisons())[:: 16 if tiny else 1]
    parts = [titles[start : start + _SHARE] for start in range(0, len(titles), _SHARE)]
    parts += [] if tiny else [[title] for title in parity.real_sizes()]

    def part(chosen: list[str]) -> list[tuple[str, str, float, float, str]]:
        try:
            return call(parity_part, device, chosen, timeout=timeout)
        except ProcessError as error:
            print(f"parity: {error}", file=sys.stderr, flush=True)
            reason = str(error).strip().splitlines()[-1]
            return [(title, "", float("nan"), 0.0, reason) for title in chosen]

    with ThreadPoolExecutor(_WORKERS if device == "cuda" else 2) as pool:
        rows = [row for found in pool.map(part, parts) for row in found]
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(("comparison", "what", "error", "limit", "status"))
    writer.writerows(
        (title, what, f"{error:.3g}", f"{limit:.3g}", status) for title, what, error, limit, status in rows
    )
    write_text(out / f"parity-{device}.csv", buffer.getvalue())
    return [f"parity: {r[0]}, {r[1]}: {r[4]}, error {r[2]:.3g}, limit {r[3]:.3g}" for r in rows if r[4] != "ok"]


def _summary(out: Path, device: str, failures: Sequence[str]) -> str:
    """A short table of all sections; those without a csv are among the failures."""
    lines: list[tuple[str, ...]] = []
    makers: dict[str, Callable[[Row], tuple[str, ...]]] = {"kernels": _kernel, "linear": _layer, "model": _step}
    path = out / f"parity-{device}.csv"
    if path.is_file():
        with path.open(encoding="utf-8", newline="") as file:
            status = [row["status"] for row in csv.DictReader(file)]
        lines.append(("parity", f"{status.count('ok')} of {len(status)} within their limits", "", "", ""))
    machine = torch.__version__
    for name, make in makers.items():
        path = out / f"{name}-{device}.csv"
        for row in read_rows(path) if path.is_file() else []:
            machine = f"{row.machine}, torch {row.torch}, triton {row.triton}, commit {row.commit}"
            wanted = row.ratio == RATIO and (name != "kernels" or device == "cpu" or _MAIN in row.case)
            if wanted and row.median is not None:
                lines.append(make(row))
    header = ("case", "provider", "time", "of the reference", "kept / peak")
    shown = [f"FAILED {failure}" for failure in failures] or ["nothing failed"]
    return "\n".join((table(header, lines), machine, *shown))


def _kernel(row: Row) -> tuple[str, ...]:
    speed = (row.moved_bytes or 0) / (row.median or 1) / 1e9
    share = f"{row.copy_share or 0:.0%} of its bytes/s"
    return f"{row.case} {row.dtype}", row.provider, f"{(row.median or 0) * 1e6:.0f} us, {speed:.0f} GB/s", share, ""


def _layer(row: Row) -> tuple[str, ...]:
    return f"{row.case} {row.dtype}", row.provider, f"{(row.median or 0) * 1e3:.3f} ms", _relative(row), _memory(row)


def _step(row: Row) -> tuple[str, ...]:
    return f"{row.case} {row.dtype}", row.provider, f"{(row.median or 0) * 1e3:.1f} ms", _relative(row), _memory(row)


def _relative(row: Row) -> str:
    return "" if row.relative is None else f"{row.relative:.3f}"


def _memory(row: Row) -> str:
    if row.kept_bytes is None or row.peak_bytes is None:
        return ""
    return f"{row.kept_bytes / 2**20:,.1f} / {row.peak_bytes / 2**20:,.1f} MiB"
