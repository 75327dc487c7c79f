"""Optimal subsets of chains: their peaks, and the predicted peak beside the measured one."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.records import Origin, write_rows
from rmm_linear._support.tables import table
from rmm_linear.memory import peak
from rmm_linear.planning import ChainPlan, chain_sizes, checkpoint_chain, minimum_peak

SEED = 0


@dataclass(frozen=True)
class Subset(Origin):
    """The best subset of one chain.

    Attributes:
        chain: Which chain.
        outputs: Its outputs, n.
        kept: Outputs that are kept.
        peak: Peak that is predicted, in bytes, or in outputs where they are of one size.
        everything: Peak if all outputs are kept, predicted.
        measured: Peak of a run, with the chain's input; None if it was not run.
        measured_everything: The same if all outputs are kept.
        is_equal: Whether the gradients are those of the plain run to the bit.
        seed: Of the sizes and weights.
    """

    chain: str
    outputs: int
    kept: int
    peak: int
    everything: int
    measured: int | None = None
    measured_everything: int | None = None
    is_equal: str = ""
    seed: int = SEED


def run(out: Path, about: dict[str, Any], tiny: bool) -> str:
    """Write chains-subsets.csv and return it as a table.

    Args:
        out: Folder of the csv file.
        about: Where the rows come from.
        tiny: Whether sizes are small.

    Returns:
        The table.
    """
    draw = random.Random(SEED)
    rows = []
    for count in (10**2, 10**3) if tiny else (10**2, 10**3, 10**4, 10**5, 10**6):
        for name, sizes in (("equal", [1] * count), ("uniform", [draw.randint(1, 10**6) for _ in range(count)])):
            plan = minimum_peak(sizes)
            rows.append(Subset(name, count, len(plan.kept), plan.peak, _everything(sizes), **about))
    rows += [_measured(count, about) for count in ((6, 12) if tiny else (50, 200))]
    write_rows(out / "chains-subsets.csv", rows)
    header = ("chain", "outputs", "kept", "peak by keeping all", "√(2n)/n", "measured", "of keeping all", "gradients")
    lines = []
    for row in rows:
        ratio = "" if row.chain != "equal" else f"{math.sqrt(2 / row.outputs):.4f}"
        shares = ("", "")
        if row.measured is not None and row.measured_everything is not None:
            shares = (f"{row.measured:,} (predicted {row.peak:,})", f"{row.measured / row.measured_everything:.4f}")
        cells = (row.chain, f"{row.outputs:,}", f"{row.kept:,}", f"{row.peak / row.everything:.4f}", ratio)
        lines.append((*cells, *shares, row.is_equal))
    return table(header, lines)


def _everything(sizes: list[int]) -> int:
    """Peak with all outputs kept: all of them, and two gradients."""
    total, most = 0, 0
    for size, after in pairwise(sizes):
        total += size
        most = max(most, total + size + after)
    return most


def _measured(count: int, about: dict[str, Any]) -> Subset:
    """A network of several widths, run by its plan and with everything kept; each module saves its input and output."""
    torch.manual_seed(SEED)
    draw = random.Random(SEED)
    widths = [64 * draw.randint(1, 16) for _ in range(count + 1)]
    layers = (nn.Sequential(nn.Linear(i, o), nn.Tanh()) for i, o in pairwise(widths))
    modules = nn.Sequential(*layers)
    modules.requires_grad_(False)  # their gradients are no part of the chain
    x = torch.randn(256, widths[0], requires_grad=True)
    plan = minimum_peak(chain_sizes(modules, x))
    found = []
    for chosen in (plan, ChainPlan(0, tuple(range(len(modules) + 1)))):
        x.grad = None
        with peak("cpu") as measured:
            checkpoint_chain(modules, x, chosen).sum().backward()
        # The input was there before, and is a part of the prediction.
        found.append((measured.bytes + x.nbytes, x.grad))
    (ours, grad), (plain, expected) = found
    is_equal = "equal" if grad is not None and expected is not None and torch.equal(grad, expected) else "differ"
    shape = (len(modules) + 1, len(plan.kept), plan.peak, _everything(chain_sizes(modules, x)))
    return Subset("linear and tanh", *shape, ours, plain, is_equal, **about)
