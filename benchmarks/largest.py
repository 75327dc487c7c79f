"""Section ``largest`` of ``python -m benchmarks gpu``: the largest batch that a device holds, found by trying.

Whole models train in bfloat16 with AdamW: RoBERTa-base under autocast, and a LLaMA of a billion parameters that is
bfloat16 itself. Attention has no dropout, as in current models: it is where the fast kernels of PyTorch and ours are.
Every method runs in a process of its own. The bytes of two small batches say where the largest should lie; it is tried,
and what is around it. Each is also measured with the batch that is exact training's largest.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.largest_search import NO_TIME, first_line, largest
from benchmarks.largest_trial import CASES, EXACT, Trial
from benchmarks.processes import ProcessError, call
from benchmarks.records import Origin, origin, write_rows
from rmm_linear._support.tables import table


@dataclass(frozen=True, kw_only=True)
class Largest(Origin):
    """One method that trains one model.

    Attributes:
        case: Title of the model.
        provider: The method.
        what: "largest", or "exact's largest": the batch that is measured.
        batch: Sequences; 0 if not one fits.
        length: Tokens of each.
        memory: Bytes of the device.
        peak: Bytes at the peak of a step, parameters and optimizer among them, by
            ``torch.cuda.max_memory_allocated``; on a CPU those of live tensors.
        seconds: Median of up to three steps.
        tokens_per_second: With this batch.
        status: "ok", or what ended the search.
        seed: Of the weights and the tokens.
    """

    case: str
    provider: str
    what: str = "largest"
    batch: int = 0
    length: int = 0
    memory: int = 0
    peak: int | None = None
    seconds: float | None = None
    tokens_per_second: float | None = None
    status: str = "ok"
    seed: int = 0


def run_largest(path: Path, device: str, *, tiny: bool, timeout: float, commit: str) -> list[Largest]:
    """Find the largest batches.

    Args:
        path: The csv file; it is written after every method.
        device: "cuda"; "cpu" counts live tensors against a few megabytes, to try the command.
        tiny: Toy models.
        timeout: Seconds for all of it; searches end early rather than not at all.
        commit: What to write as the commit; "" asks git.

    Returns:
        The rows.
    """
    about: dict[str, Any] = origin(device, commit)
    rows, end = list[Largest](), time.monotonic() + timeout
    waiting = [(case, provider) for case, model in CASES.items() for provider in model.providers]
    exact: dict[str, int] = {}
    while waiting:
        case, provider = waiting[0]
        left = max(1.0, (end - time.monotonic()) / len(waiting))
        del waiting[0]
        row = Largest(case=case, provider=provider, **about)
        try:
            # What a process reports must be there before it is ended.
            found = call(
                search_in, case, provider, device, tiny, time.time() + 0.9 * left, exact.get(case), timeout=left
            )
            rows += [dataclasses.replace(row, **one) for one in found]
        except ProcessError as error:
            rows.append(dataclasses.replace(row, status=str(error).strip().splitlines()[-1]))
        if provider == EXACT:
            exact[case] = rows[-1].batch
        write_rows(path, rows)
        print(f"{case}, {provider}: {rows[-1].batch}, {rows[-1].status}", file=sys.stderr, flush=True)
    return rows


def search_in(case: str, provider: str, device: str, tiny: bool, end: float, exact: int | None) -> list[dict[str, Any]]:
    """Search for the largest batch of one method; meant for a process of its own.

    Args:
        case: Of :data:`CASES`.
        provider: The method.
        device: "cpu" or "cuda".
        tiny: Toy models.
        end: By ``time.time``, when all must be done; the last sixth is for the steps that are measured.
        exact: The batch that is measured besides; None or 0 measures none.

    Returns:
        Fields of a :class:`Largest` for each batch that was measured, the largest last.
    """
    begin = time.time()
    trial = Trial(CASES[case], provider, device, tiny)
    batch, status = largest(trial.peak, trial.memory, trial.first, end - (end - begin) / 6)
    chosen = {"exact's largest": exact} if exact and exact < batch else {}
    rows = list[dict[str, Any]]()
    for what, size in {**chosen, "largest": batch}.items():
        row = {"what": what, "batch": size, "length": trial.length, "memory": trial.memory}
        try:
            row |= trial.measured(size, end)
            state = "ok"
        except RuntimeError as error:
            state = f"when it was measured: {first_line(error)}"
        rows.append(row | {"status": status if what == "largest" and status != "ok" else state})
    return rows


def has_failed(row: Largest) -> bool:
    """Say whether a row is a failure: a search that only ran out of time has found something.

    Args:
        row: Of a method.

    Returns:
        Whether something went wrong.
    """
    return row.status != "ok" and not (row.status.startswith(NO_TIME) and row.batch)


def largest_table(rows: Sequence[Largest]) -> str:
    """Make the table.

    Args:
        rows: Of all models.

    Returns:
        A line per batch that was measured.
    """
    lines = [
        (
            row.case,
            row.provider,
            f"{row.batch} × {row.length}" + (" (exact's)" if row.what != "largest" else ""),
            "" if row.peak is None else f"{row.peak / 1e9:.3g} of {row.memory / 1e9:.3g} GB",
            "" if row.seconds is None else f"{row.seconds:.3g} s",
            "" if row.tokens_per_second is None else f"{row.tokens_per_second:.3g}",
            row.status,
        )
        for row in rows
    ]
    return table(("model", "method", "batch", "peak", "a step", "tokens per second", "status"), lines)
