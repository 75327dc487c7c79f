"""What making and using sketches and codes costs: the share of every operator of a converted model's training step."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.figures import distinct, figure_of
from benchmarks.frontier.runs import Asked
from benchmarks.noise.blocks import inputs, llama, roberta
from benchmarks.records import Origin, show, write_rows
from benchmarks.suites.paper import use_paper
from rmm_linear import RMMConfig, convert

FORWARD, BACKWARD, REST = "forward", "backward", "the rest"
_PREFIXES, _ROUNDS = ("rmm_linear::", "paper::"), 5
_SKETCHING = ("sketch_x", "sketch_y")  # by matrix products that exact training does not have
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::baddbmm", "aten::baddbmm_")
# What operators do, in the words of the documentation.
WORDS = {
    "keep": "sketch and pack inputs of linear layers",
    "unpacked_product": "unpack sketches, dW",
    "stored_product": "sketch Y, dW",
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
    "chunked_cross_entropy": "head and loss in chunks, with their gradients",
    "sketch": "sketch Y",
    "draw_s": "draw S",
    "sketch_x": "SᵀX",
    "sketch_y": "SᵀY",
    "weight_gradient": "dW",
}


@dataclass(frozen=True, kw_only=True)
class Share(Origin):
    case: str  # title
    phase: str  # "forward" or "backward"; empty for the rest
    # name, of this package or of the published layer; "the rest" is PyTorch's operators, and the Python around
    operator: str
    calls: int  # per step
    seconds: float  # per step, median over steps, the profiler's own time among them
    share: float  # of the step
    # the part of ``share`` that matrix products take which exact training has too, if of more rows: dW, the products of
    # attention and of the head. Those with S are none of them
    products: float = 0.0
    seed: int = 0  # of the weights and the batch


@dataclass
class Spent:
    seconds: float = 0.0  # with all that it calls
    calls: int = 0  # how often it was called
    products: float = 0.0  # seconds of the matrix products in it, but for those with S


def shares(asked: Asked, about: dict[str, Any]) -> Iterator[str]:
    """Profile steps of two converted models, and of the published sketch, unless they are there."""
    tiny, out = asked.tiny, asked.out
    path = out / "frontier-shares.csv"
    if path.is_file():
        yield "all shares are there"
        return
    size: dict[str, Any] = {"layers": 2, "width": 128, "vocabulary": 1000} if tiny else {"layers": 4}
    batch = (2, 64) if tiny else (8, 128)
    blocks, shape = partial(roberta, 0.1, **size), f"{batch[0]} × {batch[1]}"
    unpacked = RMMConfig(operations=("linear",), kind="countsketch", ratio=0.1, bits=None)
    made: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Any]]] = {
        f"RoBERTa-base's blocks, {shape}": (blocks, convert),
        f"LLaMA, {shape}": (partial(llama, **size), convert),
        "RoBERTa-base's blocks, CountSketch of 10 %, not packed": (blocks, partial(convert, config=unpacked)),
        "RoBERTa-base's blocks, Gaussian sketch of 10 %": (blocks, partial(use_paper, ratio=0.1)),
        "RoBERTa-base's blocks, Gaussian sketch of 50 %": (blocks, partial(use_paper, ratio=0.5)),
    }
    rows = list[Share]()
    for title, (make, change) in made.items():
        torch.manual_seed(0)
        model = make()
        change(model)
        example = inputs(model, *batch)
        for _ in range(2):
            model(**example).loss.backward()
        rounds = [_one_step(model, example) for _ in range(1 if tiny else _ROUNDS)]
        found = [dataclasses.replace(row, **about) for row in shares_of(title, rounds)]
        rows += found
        yield show(found)
    write_rows(path, rows)
    plot_shares(rows).savefig(out / "frontier-shares.png", dpi=150)
    yield str(out / "frontier-shares.png")


def shares_of(title: str, rounds: Sequence[Mapping[tuple[str, str], Spent]]) -> list[Share]:
    """Take the medians over steps."""
    whole = statistics.median(sum(spent.seconds for spent in one.values()) for one in rounds)
    found = list[Share]()
    for phase, name in dict.fromkeys(key for one in rounds for key in one if key[1] != REST):
        here = [one.get((phase, name), Spent()) for one in rounds]
        seconds, products = (statistics.median(getattr(one, what) for one in here) for what in ("seconds", "products"))
        spent = {"calls": max(one.calls for one in here), "seconds": seconds, "share": seconds / whole}
        found.append(Share(case=title, phase=phase, operator=name, **spent, products=products / whole))
    rest = whole - sum(row.seconds for row in found)
    found.sort(key=lambda row: -row.seconds)
    return [*found, Share(case=title, phase="", operator=REST, calls=1, seconds=rest, share=rest / whole)]


def _one_step(model: nn.Module, batch: dict[str, Any]) -> dict[tuple[str, str], Spent]:
    """What every operator of ours takes in one step, and the rest."""
    model.zero_grad(set_to_none=True)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        with record_function(FORWARD):
            loss = model(**batch).loss
        with record_function(BACKWARD):
            loss.backward()
    events: Any = profiled.events()
    phases = {event.name: event.time_range for event in events if event.name in (FORWARD, BACKWARD)}
    found: dict[tuple[str, str], Spent] = {}
    for event in events:
        outer = _ours(event)
        if outer is None or (outer is not event and event.name not in _PRODUCTS):
            continue
        phase, name = FORWARD if outer.time_range.start < phases[FORWARD].end else BACKWARD, outer.name.split("::")[1]
        spent = found.setdefault((phase, name), Spent())
        if outer is event:
            spent.seconds += event.cpu_time_total / 1e6
            spent.calls += 1
        elif name not in _SKETCHING:
            spent.products += event.cpu_time_total / 1e6
    whole = (phases[BACKWARD].end - phases[FORWARD].start) / 1e6
    found["", REST] = Spent(whole - sum(spent.seconds for spent in found.values()), 1)
    return found


def _ours(event: Any) -> Any:
    """The outermost operator of ours that an event belongs to, or None."""
    found = None
    while event is not None:
        if event.name.startswith(_PREFIXES):
            found = event
        event = event.cpu_parent
    return found


def plot_shares(rows: Sequence[Share]) -> Any:
    """Plot a bar per case: what operators take without matrix products that exact training has too."""
    cases = list(dict.fromkeys(row.case for row in rows))
    figure, (axis,) = figure_of(1, 1, width=9.0, height=1.2 + 0.9 * len(cases))
    names = list(dict.fromkeys(row.operator for row in rows if row.operator != REST))
    for name, color in zip(names, distinct(len(names)), strict=True):
        label = WORDS.get(name, name)
        for case in cases:
            here = [row for row in rows if row.case == case and row.operator != REST]
            before = sum(row.share - row.products for row in here if names.index(row.operator) < names.index(name))
            share = sum(row.share - row.products for row in here if row.operator == name)
            if share:
                axis.barh(case, 100 * share, left=100 * before, color=color, label=label)
                label = None
    axis.invert_yaxis()
    axis.set(xlabel="% of a training step, without matrix products that exact training has too")
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    return figure
