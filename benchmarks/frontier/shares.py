"""What making and using sketches and codes costs: the share of every operator of a converted model's training step."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.block_cases import inputs, llama, roberta
from benchmarks.plots import figure_of
from benchmarks.records import Origin, write_rows
from rmm_linear import convert
from rmm_linear._support.tables import table
from rmm_linear.context.auto_bits import STEPS

FORWARD, BACKWARD, REST = "forward", "backward", "the rest"
_PREFIX, _ROUNDS = "rmm_linear::", 5
# What operators do, in the words of the documentation.
_WORDS = {
    "keep": "sketch and pack inputs of linear layers",
    "unpacked_product": "unpack sketches, dW",
    "stored_product": "dW from sketches",
    "pack_derivative": "pack derivatives",
    "apply_derivative": "apply derivatives",
    "pack_norm": "pack inputs of norms",
    "norm_backward": "norms from packed inputs",
    "pack_attention": "pack query, key and value",
    "attention_backward": "attention from packed inputs, scores again",
    "keep_gated": "pack gated products",
    "apply_gated": "apply gated products",
    "pack_mask": "pack masks of dropout",
    "apply_mask": "apply masks of dropout",
    "dropped_attention": "attention with dropout",
}


@dataclass(frozen=True, kw_only=True)
class Share(Origin):
    """One operator in the steps of one case.

    Attributes:
        case: Title.
        phase: "forward" or "backward"; empty for the rest.
        operator: Name; "the rest" is PyTorch's operators, and this package's Python around its own.
        calls: Per step.
        seconds: Per step, median over steps, the profiler's own time among them.
        share: Of the step.
        seed: Of the weights and the batch.
    """

    case: str
    phase: str
    operator: str
    calls: int
    seconds: float
    share: float
    seed: int = 0


def shares(out: Path, about: dict[str, Any], *, tiny: bool = False) -> Iterator[str]:
    """Profile steps of two converted models.

    Args:
        out: Folder of the csv file and the picture.
        about: Where the rows come from.
        tiny: Whether sizes are small.

    Yields:
        A table per model, and the picture's path.
    """
    size: dict[str, Any] = {"layers": 2, "width": 128, "vocabulary": 1000} if tiny else {"layers": 4}
    batch = (2, 64) if tiny else (8, 128)
    made = {
        f"RoBERTa-base's blocks, {batch[0]} × {batch[1]}": lambda: roberta(0.1, **size),
        f"LLaMA, {batch[0]} × {batch[1]}": lambda: llama(**size),
    }
    rows = list[Share]()
    for title, make in made.items():
        torch.manual_seed(0)
        model = make()
        convert(model)
        found = [dataclasses.replace(row, **about) for row in _profiled(title, model, inputs(model, *batch), tiny)]
        rows += found
        yield share_table(found)
    write_rows(out / "frontier-shares.csv", rows)
    plot_shares(rows).savefig(out / "frontier-shares.png", dpi=150)
    yield str(out / "frontier-shares.png")


def _profiled(title: str, model: nn.Module, batch: dict[str, Any], tiny: bool) -> list[Share]:
    for _ in range(STEPS + 1):
        model(**batch).loss.backward()
    rounds = [_one_step(model, batch) for _ in range(1 if tiny else _ROUNDS)]
    keys = list(dict.fromkeys(key for one in rounds for key in one))
    whole = statistics.median(sum(seconds for seconds, _ in one.values()) for one in rounds)
    found = list[Share]()
    for phase, name in keys:
        seconds = statistics.median(one.get((phase, name), (0.0, 0))[0] for one in rounds)
        calls = max(one.get((phase, name), (0.0, 0))[1] for one in rounds)
        found.append(Share(case=title, phase=phase, operator=name, calls=calls, seconds=seconds, share=seconds / whole))
    return sorted(found, key=lambda row: (row.operator == REST, -row.seconds))


def _one_step(model: nn.Module, batch: dict[str, Any]) -> dict[tuple[str, str], tuple[float, int]]:
    """Seconds and calls of every operator of ours in one step, and the seconds of the rest."""
    model.zero_grad(set_to_none=True)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        with record_function(FORWARD):
            loss = model(**batch).loss
        with record_function(BACKWARD):
            loss.backward()
    events: Any = profiled.events()
    phases = {event.name: event.time_range for event in events if event.name in (FORWARD, BACKWARD)}
    found: dict[tuple[str, str], tuple[float, int]] = {}
    for event in events:
        if not event.name.startswith(_PREFIX) or _is_inside(event):
            continue
        phase = FORWARD if event.time_range.start < phases[FORWARD].end else BACKWARD
        seconds, calls = found.get((phase, event.name.removeprefix(_PREFIX)), (0.0, 0))
        found[phase, event.name.removeprefix(_PREFIX)] = seconds + event.cpu_time_total / 1e6, calls + 1
    whole = (phases[BACKWARD].end - phases[FORWARD].start) / 1e6
    found["", REST] = whole - sum(seconds for seconds, _ in found.values()), 1
    return found


def _is_inside(event: Any) -> bool:
    """Whether an operator of ours runs it."""
    parent = event.cpu_parent
    while parent is not None:
        if parent.name.startswith(_PREFIX):
            return True
        parent = parent.cpu_parent
    return False


def share_table(rows: Sequence[Share]) -> str:
    """Make the table.

    Args:
        rows: Of one case or more.

    Returns:
        A line per operator.
    """
    lines = [
        (row.case, row.phase, _WORDS.get(row.operator, row.operator), str(row.calls), f"{100 * row.share:.1f} %")
        for row in rows
    ]
    return table(("case", "phase", "operator", "calls", "of the step"), lines)


def plot_shares(rows: Sequence[Share]) -> Any:
    """Plot a bar per case.

    Args:
        rows: Of one case or more.

    Returns:
        The figure.
    """
    cases = list(dict.fromkeys(row.case for row in rows))
    figure, (axis,) = figure_of(1, 1, width=9.0, height=1.2 + 0.9 * len(cases))
    names = list(dict.fromkeys(row.operator for row in sorted(rows, key=lambda row: row.operator != REST)))
    for place, case in enumerate(cases):
        left = 0.0
        for name in names:
            share = sum(row.share for row in rows if (row.case, row.operator) == (case, name))
            shade = "0.85" if name == REST else f"C{names.index(name) % 10}"
            label = _WORDS.get(name, name) if place == 0 or name not in _known(rows, cases[:place]) else None
            axis.barh(case, share, left=left, color=shade, edgecolor="white", label=label if share else None)
            left += share
    axis.set(xlabel="share of a training step", xlim=(0, 1))
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    return figure


def _known(rows: Sequence[Share], cases: Sequence[str]) -> set[str]:
    return {row.operator for row in rows if row.case in cases}
