"""Run a suite: gate, interleaved times of all providers, memory in processes of their own."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from benchmarks.library import count
from benchmarks.processes import ProcessError, call, first_line
from benchmarks.records import RATIO, Row, add_choices, add_output, origin, show, write_rows
from benchmarks.suites import SUITES, gate, setup
from benchmarks.suites.case import Case, Setup
from benchmarks.timing import interleaved, quartiles, threads
from rmm_linear.memory import peak, track_saved

logger = logging.getLogger("benchmarks")
COPY = "copy"  # the provider whose bytes per second are 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    add_choices(parser, "--suite", SUITES)
    parser.add_argument("--threads", type=count(1), default=torch.get_num_threads(), help="threads of the CPU")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sketches in the timed runs")
    parser.add_argument("--ratios", type=float, nargs="+", help="only cases of these ratios; all by default")
    add_output(parser)


def run(arguments: argparse.Namespace) -> int:
    torch.set_num_threads(arguments.threads)
    failed = False
    chosen = {suite: SUITES[suite].cases(arguments.device, tiny=arguments.tiny) for suite in arguments.suite}
    for suite, cases in chosen.items():
        begin, number, path = time.monotonic(), 0, arguments.out / f"{suite}-{arguments.device}.csv"
        cases = [case for case in cases if not arguments.ratios or case.ratio in arguments.ratios]
        for rows in run_suite(path, cases, commit=arguments.commit, seed=arguments.seed):
            number += len(rows)
            failed = failed or any(row.status != "ok" for row in rows)
            print(show(rows), flush=True)
        print(f"{suite}: {number} rows in {time.monotonic() - begin:.0f} s, {path}", flush=True)
    return 1 if failed else 0


def has_memory(case: Case) -> bool:
    return case.suite == "blocks" or (case.suite == "linear" and case.ratio == RATIO)


def run_suite(
    path: Path, cases: Sequence[Case], *, commit: str, seed: int = 0, memory: Callable[[Case], bool] = has_memory
) -> Iterator[list[Row]]:
    """Measure cases of one suite, and write its file anew after each of them: what is measured outlives a failure."""
    rows: list[Row] = []
    if not cases:
        return
    with threads(getattr(SUITES[cases[0].suite], "THREADS", torch.get_num_threads())):
        about = origin(cases[0].device, commit)
        for found in run_cases(cases, seed=seed, memory=memory):
            rows += [dataclasses.replace(row, **about) for row in found]
            write_rows(path, rows)
            yield found


def run_cases(
    cases: Sequence[Case],
    *,
    seed: int = 0,
    make: Callable[[Case, str], Setup] = setup,
    memory: Callable[[Case], bool] = has_memory,
) -> Iterator[list[Row]]:
    for case in cases:
        ready: dict[str, Setup] = {}
        status: dict[str, str] = {}
        titles = SUITES[case.suite].providers(case)
        torch.manual_seed(seed)
        for title in titles:
            try:
                candidate = make(case, title)
                status[title] = gate.failure(candidate, case.torch_dtype, case.draws)
                if not status[title]:
                    candidate.run()
                    ready[title] = candidate
            except Exception as error:
                logger.exception("%s: %s, %s", case.name, title, case.dtype)
                status[title] = first_line(error)
        torch.manual_seed(seed)
        try:
            times = interleaved({title: ready[title].run for title in ready}, case.device, case.rounds)
        except Exception as error:
            logger.exception("%s: timing, %s", case.name, case.dtype)
            times, status = {}, dict.fromkeys(titles, first_line(error))
        rows = []
        for title in titles:
            row = Row(case.suite, case.name, title, case.dtype, case.ratio, status[title] or "ok", seed=seed)
            if title in times:
                lower, median, upper = quartiles(times[title])
                found = {"lower": lower, "median": median, "upper": upper, "samples": len(times[title])}
                row = dataclasses.replace(row, **found, moved_bytes=ready[title].moved or None)
            rows.append(row)
        del ready  # the memory that other processes need
        rows = list(_with_memory(case, rows)) if memory(case) else rows
        (base,) = [row for row in rows if row.provider == SUITES[case.suite].REFERENCE]
        copy = next((row for row in rows if row.provider == COPY), None)
        yield [_with_ratios(row, base, copy) for row in rows]


def memories_of(case: Case, providers: Sequence[str]) -> dict[str, tuple[int, int] | str]:
    found: dict[str, tuple[int, int] | str] = {}
    for title in providers:
        try:
            found[title] = memory_of(case, title)
        except Exception as error:
            found[title] = first_line(error)
    return found


def memory_of(case: Case, provider: str) -> tuple[int, int]:
    candidate = setup(case, provider)
    if candidate.module is None or candidate.forward is None:
        raise ValueError(f"memory_of measures layers and models, got a case of the suite {case.suite}.")
    candidate.run()
    with track_saved(candidate.module) as ledger:
        alive = candidate.forward()
    kept = ledger.total
    del alive
    with peak(case.device) as measured:
        candidate.run()
    return kept, measured.bytes


def _with_ratios(row: Row, base: Row, copy: Row | None) -> Row:
    """Add the ratio of times to the reference's, but to a copy's; and of bytes per second to those of the copy."""
    if row.median is None:
        return row
    if copy is not None and copy.median and copy.moved_bytes and row.moved_bytes:
        share = (row.moved_bytes / row.median) / (copy.moved_bytes / copy.median)
        row = dataclasses.replace(row, copy_share=share)
    if base.median is None or base == copy:
        return row
    return dataclasses.replace(row, relative=(row.median or 0.0) / base.median)


def _with_memory(case: Case, rows: list[Row]) -> Iterator[Row]:
    titles = [row.provider for row in rows if row.status == "ok"]
    try:
        found = call(memories_of, case, titles)
    except ProcessError as error:
        found = dict.fromkeys(titles, str(error).splitlines()[-1])
    for row in rows:
        memory = found.get(row.provider)
        if isinstance(memory, str):
            logger.error("%s: memory of %s: %s", row.case, row.provider, memory)
            row = dataclasses.replace(row, status=f"memory: {memory}")
        yield dataclasses.replace(row, kept_bytes=memory[0], peak_bytes=memory[1]) if isinstance(memory, tuple) else row
