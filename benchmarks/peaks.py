"""Whether the peak of a training step falls as the ledger says: ``python -m benchmarks.blocks peaks``.

Every setting runs in processes of its own: one counts what autograd saves and the peak of live bytes, another one how
far the resident set of the process (RSS) rises in the same step, on Linux. Parameters and gradients exist before, and
the word embeddings are frozen: their dense gradient, 154 MB, would be the peak of a converted model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.block_cases import SETTINGS, inputs, saved, steps
from benchmarks.processes import call
from benchmarks.records import Origin
from rmm_linear import convert
from rmm_linear.context.auto_bits import STEPS
from rmm_linear.memory import peak

_PROCESS = Path("/proc/self")


@dataclass(frozen=True)
class PeakRow(Origin):
    """One model with some operations converted.

    Attributes:
        case: Title of the case.
        operations: What is converted, or "exact".
        dtype: dtype of the model.
        saved: Bytes that autograd saves.
        live: Peak of the bytes of tensors that a step makes.
        rss: What a step adds to the peak resident set of its process; None where there is no /proc.
        live_fall: How far ``live`` lies below the exact model's, by how far ``saved`` does.
        rss_fall: The same of ``rss``.
    """

    case: str
    operations: str
    dtype: str = "float32"
    saved: int = 0
    live: int = 0
    rss: int | None = None
    live_fall: float | None = None
    rss_fall: float | None = None


def measure_peaks(tiny: bool) -> Iterator[PeakRow]:
    """Measure the steps of :func:`benchmarks.block_cases.steps` with each of the settings."""
    for index, (title, _, _) in enumerate(steps(tiny)):
        exact: PeakRow | None = None
        for setting in SETTINGS:
            count, live = call(_live, tiny, index, setting)
            rss = call(_rss, tiny, index, setting) if sys.platform == "linux" else None
            row = PeakRow(title, " ".join(setting) or "exact", "float32", count, live, rss)
            if exact is None:
                exact = row
            else:
                fall = exact.saved - count
                of_rss = None if rss is None or exact.rss is None else (exact.rss - rss) / fall
                row = PeakRow(title, row.operations, "float32", count, live, rss, (exact.live - live) / fall, of_rss)
            yield row


def _live(tiny: bool, index: int, setting: tuple[str, ...]) -> tuple[int, int]:
    """Bytes saved, and the peak of live bytes."""
    model, batch = _ready(tiny, index, setting)
    count = saved(model, batch)
    with peak("cpu") as found:
        model(**batch).loss.backward()
    return count, found.bytes


def _rss(tiny: bool, index: int, setting: tuple[str, ...]) -> int:
    """How far a step raises the peak of the resident set."""
    model, batch = _ready(tiny, index, setting)
    return rss_of(lambda: model(**batch).loss.backward())


def rss_of(step: Callable[[], object]) -> int:
    """Return how far a step raises the peak of the resident set of this process, on Linux.

    Args:
        step: What is run, once.

    Returns:
        Bytes.
    """
    (_PROCESS / "clear_refs").write_text("5")  # the peak starts again from the current size
    before = _status("VmRSS")
    step()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    lines = (_PROCESS / "status").read_text(encoding="utf-8").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def _ready(tiny: bool, index: int, setting: tuple[str, ...]) -> tuple[nn.Module, dict[str, Any]]:
    """A model with gradients in memory, after small steps: buffers are there, and auto has chosen widths."""
    torch.manual_seed(0)
    _, make, shape = steps(tiny)[index]
    model = make()
    if setting:
        convert(model, operations=setting)
    model.get_input_embeddings().requires_grad_(False)  # pyright: ignore[reportCallIssue]
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter).fill_(0.0)
    for _ in range(STEPS + 1):
        model(**inputs(model, 2, 40)).loss.backward()  # more than min_rows
    model.zero_grad(set_to_none=False)
    return model, inputs(model, *shape)
