"""Everything that a CUDA machine must show, in one call of a few minutes.

Needs torch, Triton, for models transformers and for adapters PEFT, from the root of a checkout that is not installed.
Every section runs in processes of its own, because an illegal access or a hang on a device ends all that shares the
process: it then costs one section, whose rows so far are kept. Sections get their share of the time that is left, those
first that say most.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import rmm_kernels_parity
import torch
from rmm_kernels_checks import poisoned_outputs

from benchmarks.gpu.largest import Largest, has_failed, run_largest
from benchmarks.gpu.steps import Step, run_steps
from benchmarks.library import write_text
from benchmarks.processes import ProcessError, call, first_line, last_line
from benchmarks.records import RATIO, Parity, Row, add_choices, add_output, origin, read_rows, show, write_rows
from benchmarks.suites import SUITES
from benchmarks.suites.runner import has_memory, run_suite

logger = logging.getLogger("benchmarks")
_WORKERS = 12  # compiling kernels takes the time of the comparisons
_SHARE = 12  # comparisons that one process makes


def run_parity(path: Path, device: str, *, tiny: bool, timeout: float, commit: str) -> list[Parity]:
    end = time.monotonic() + timeout
    titles = list(rmm_kernels_parity.comparisons())[:: 16 if tiny else 1]
    parts = [titles[start : start + _SHARE] for start in range(0, len(titles), _SHARE)]
    parts += [] if tiny else [[title] for title in rmm_kernels_parity.real_sizes()]

    def part(chosen: list[str]) -> list[Parity]:
        try:
            return call(compare, device, chosen, timeout=max(1.0, end - time.monotonic()))
        except ProcessError as error:
            logger.error("parity: %s", error)
            return [Parity(title, status=last_line(error)) for title in chosen]

    with ThreadPoolExecutor(_WORKERS if device == "cuda" else 2) as pool:
        rows = [row for found in pool.map(part, parts) for row in found]
    about = origin(device, commit)
    write_rows(path, [dataclasses.replace(row, **about) for row in rows])
    return rows


def compare(device: str, titles: Sequence[str]) -> list[Parity]:
    known = rmm_kernels_parity.comparisons() | rmm_kernels_parity.real_sizes()
    rows = []
    for title in titles:
        try:
            with poisoned_outputs():
                checks = known[title](device)
            rows += [Parity(title, c.what, c.error, c.limit, "ok" if c.ok else "failed") for c in checks]
        except Exception as error:
            rows.append(Parity(title, status=first_line(error)))
    return rows


SECONDS = 500.0  # and what the last processes need to end: under nine minutes
SHARES = {"parity": 3, "steps": 4, "blocks": 5, "operators": 3, "kernels": 2, "linear": 4, "host": 1, "largest": 6}
_MAIN = "16384 x 4096"  # the size that a GPU is judged by


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="cpu: Triton's interpreter")
    add_choices(parser, "--sections", SHARES)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time for all of it")
    add_output(parser, out=None)


def run(arguments: argparse.Namespace) -> int:
    out, device, tiny, commit = arguments.out, arguments.device, arguments.tiny, arguments.commit
    out.mkdir(parents=True, exist_ok=True)
    if device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")  # for the sections' processes
    end = time.monotonic() + arguments.seconds
    failures: list[str] = []
    waiting = {name: share for name, share in SHARES.items() if name in arguments.sections}
    for name in tuple(waiting):
        left = max(1.0, end - time.monotonic())
        timeout = left * waiting[name] / sum(waiting.values())
        del waiting[name]
        begin = time.monotonic()
        path = out / f"{name}-{device}.csv"
        path.unlink(missing_ok=True)
        try:
            if name == "parity":
                rows = run_parity(path, device, tiny=tiny, timeout=timeout, commit=commit)
                text = "parity: {0.comparison}, {0.what}: {0.status}, error {0.error:.3g}, limit {0.limit:.3g}"
                failures += [text.format(row) for row in rows if row.status != "ok"]
            elif name == "steps":
                steps = run_steps(path, device, tiny=tiny, timeout=timeout, commit=commit)
                failures += [f"steps: {r.case}, {r.method}: {r.status}" for r in steps if r.status != "ok"]
            elif name == "largest":
                found = run_largest(path, device, tiny=tiny, timeout=timeout, commit=commit)
                failures += [f"largest: {r.case}, {r.provider}: {r.status}" for r in found if has_failed(r)]
            else:
                failures += call(suite_section, name, path, device, tiny, commit, timeout=timeout)
        except Exception as error:
            print(f"{name}: {error}", file=sys.stderr, flush=True)
            failures.append(f"{name}: {last_line(error)}")
        print(f"{name}: {time.monotonic() - begin:.0f} s", flush=True)
    write_text(out / f"failures-{device}.txt", "".join(f"{failure}\n" for failure in failures))
    print(_summary(out, device, failures))
    return 1 if failures else 0


def suite_section(name: str, path: Path, device: str, tiny: bool, commit: str) -> list[str]:
    cases = [dataclasses.replace(case, backend="triton") for case in SUITES[name].cases(device, tiny=tiny)]
    cases = [case for case in cases if case.ratio == RATIO or _MAIN in case.name]  # `run` measures the others too
    cases.sort(key=lambda case: _MAIN not in case.name)
    rows: list[Row] = []
    # Of memory, each measurement takes a process its seconds: that of blocks and the main layer alone.
    for found in run_suite(
        path,
        cases,
        commit=commit,
        memory=lambda case: has_memory(case) and (case.suite != "linear" or case.tiny or _MAIN in case.name),
    ):
        rows += found
    return [f"{r.case}, {r.provider}, {r.dtype}, {r.ratio}: {r.status}" for r in rows if r.status != "ok"]


def _summary(out: Path, device: str, failures: Sequence[str]) -> str:
    parity, rows, batches, steps = [], [], [], []
    for name in SHARES:
        path = out / f"{name}-{device}.csv"
        if path.is_file() and name == "parity":
            parity = [row.status for row in read_rows(path, Parity)]
        elif path.is_file() and name == "steps":
            steps = read_rows(path, Step)
        elif path.is_file() and name == "largest":
            batches = read_rows(path, Largest)
        elif path.is_file():
            rows += read_rows(path, Row)
    lines = [f"parity: {parity.count('ok')} of {len(parity)} within their limits"] if parity else []
    shown = [r for r in rows if r.ratio == RATIO and (r.suite != "kernels" or device == "cpu" or _MAIN in r.case)]
    lines += [show(steps)] if steps else []
    lines += [show([row for row in shown if row.median is not None])] if shown else []
    lines += [show(batches)] if batches else []
    last = next(iter([*steps, *rows, *batches]), None)
    lines += [
        f"{last.machine}, torch {last.torch}, triton {last.triton}, commit {last.commit}" if last else torch.__version__
    ]
    return "\n".join(lines + ([f"FAILED {failure}" for failure in failures] or ["nothing failed"]))
