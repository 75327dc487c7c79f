"""Plans of fit, compared with single methods.

Part "solvers" compares solvers on the same synthetic blocks: the integer program is the yardstick. Peaks are live
bytes, to which the machine does not matter; times are ratios within one run. Rows of models that do not run now stay in
the csv files.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.library import Option, choose, peak_of
from benchmarks.planning import fit_frontier, fit_images, fit_paper
from benchmarks.planning.fit_images import IMAGES
from benchmarks.planning.fit_paper import LARGE, PLACES
from benchmarks.planning.fit_steps import MODELS, SEED
from benchmarks.planning.networks import small
from benchmarks.records import Origin, add_choices, add_output, known_rows, origin, show, write_rows

SIZES = (12, 24, 48, 96, 200)
SHARES = (0.6, 0.3)
SOLVERS = ("milp", "rounded")
WEIGHT = 1e-3  # seconds that are given for a noise of 1


@dataclass(frozen=True, kw_only=True)
class Solved(Origin):
    """One solver on synthetic blocks with one budget."""

    blocks: int  # number of blocks
    budget: float  # as a share of the peak of keeping all
    solver: str  # "milp" or "rounded"
    seconds: float = 0.0  # time to solve
    cost: float | None = None  # what the plan adds, by the least that any solver adds; empty if nothing fits
    peak: float | None = None  # of the plan, by the budget
    seed: int = 0  # of the blocks


def compare(seed: int = 0, sizes: Sequence[int] = SIZES) -> list[dict[str, Any]]:
    draw = random.Random(seed)
    choose([_block(draw) for _ in range(2)], 10**9, solver="milp")  # imports scipy before the clock runs
    chains = [[_block(draw) for _ in range(count)] for count in sizes]
    return [row for options in chains for share in SHARES for row in _solved(options, share)]


def cost(option: Option) -> float:
    return option.seconds + WEIGHT * option.noise


def _block(draw: random.Random) -> list[Option]:
    """Make a block like a transformer's, with some spread of bytes, times and noise."""
    whole = int(draw.uniform(6, 12) * 2**20)  # bytes saved
    inputs, passing, forward = int(0.08 * whole), int(0.2 * whole), whole / 2e9  # of the block; lost after it; seconds
    options = [Option("keep", whole, whole + passing, 0.0)]
    for ratio, bits in ((1.0, 8), (0.2, 16), (0.1, 8), (0.1, 4)):
        kept = int(whole * (1 - 0.36 * (1 - ratio * bits / 32)))  # 36 % of the bytes are inputs of linear layers
        noise = draw.uniform(0.5, 1.5) * (0.1 / ratio) * (16 / bits) ** 0.5 if ratio < 1 else 0.0
        seconds = (-0.05 if ratio < 1 else 0.02) * forward
        options.append(Option(f"sketch {ratio} {bits}", kept, kept + passing, seconds, noise))
    options.append(Option("selective", int(0.5 * whole), whole + passing, draw.uniform(0.2, 0.4) * forward))
    options.append(Option("recompute", inputs, whole + passing + inputs, forward))
    return options


def _solved(options: list[list[Option]], share: float) -> list[dict[str, Any]]:
    budget = int(share * peak_of(options, [0] * len(options)))
    rows = list[dict[str, Any]]()
    for solver in SOLVERS:
        begin = time.perf_counter()
        chosen = choose(options, budget, cost, solver=solver)
        seconds = time.perf_counter() - begin
        row: dict[str, Any] = {"blocks": len(options), "budget": share, "solver": solver, "seconds": seconds}
        if chosen is not None:
            total = sum(cost(block[index]) for block, index in zip(options, chosen, strict=True))
            row |= {"cost": total, "peak": peak_of(options, chosen) / budget}
        rows.append(row)
    best = min((row["cost"] for row in rows if "cost" in row), default=None)
    return [row | {"cost": row["cost"] / best} if row.get("cost") else row for row in rows]


PARTS = ("frontier", "solvers", "paper", "images")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_choices(parser, "--parts", PARTS)
    add_choices(parser, "--models", (*MODELS, *LARGE, *IMAGES))
    add_choices(parser, "--device", PLACES, "of part paper; all by default")
    add_output(parser)


def run(arguments: argparse.Namespace) -> Iterator[str]:
    about, tiny, out = origin("cpu", arguments.commit), arguments.tiny, arguments.out
    for part in arguments.parts:
        for found in _PARTS[part](arguments, about, tiny):
            path, here = out / f"fit-{part}.csv", {_key(row) for row in found}
            rows = [*(row for row in known_rows(path, type(found[0])) if _key(row) not in here), *found]
            rows.sort(key=_place)
            write_rows(path, rows)
            if part == "frontier":
                fit_frontier.plot(rows).savefig(out / "fit-frontier.png", dpi=150)
            yield show(found) + "\n"


def _key(row: Any) -> Any:
    """Say what rows are measured together: a model, on a device; of solvers all."""
    return (row.model, row.place) if isinstance(row, fit_paper.Paper) else getattr(row, "model", "")


def _place(row: Any) -> Any:
    if isinstance(row, fit_paper.Paper):
        return list(fit_paper.MODELS).index(row.model), list(PLACES).index(row.place)
    titles = [title for title, _ in (*MODELS.values(), *IMAGES.values())]
    return titles.index(row.model) if getattr(row, "model", "") in titles else 0


Rows = Iterator[list[Any]]


def _frontier(arguments: argparse.Namespace, about: dict[str, Any], tiny: bool) -> Rows:
    for title, make in (MODELS[name] for name in arguments.models if name in MODELS):
        yield fit_frontier.frontier(title, make(tiny), about, tiny=tiny)


def _solvers(arguments: argparse.Namespace, about: dict[str, Any], tiny: bool) -> Rows:
    found = compare(SEED, SIZES[:1] if tiny else SIZES)
    yield [Solved(**row, seed=SEED, **about) for row in found]


def _paper(arguments: argparse.Namespace, about: dict[str, Any], tiny: bool) -> Rows:
    for model in ("tiny",) if tiny else (name for name in arguments.models if name in LARGE):
        for device in arguments.device:
            yield [fit_paper.Paper(**row, **about) for row in fit_paper.place(model, device)]


def _images(arguments: argparse.Namespace, about: dict[str, Any], tiny: bool) -> Rows:
    for title, make in small(True).items() if tiny else (IMAGES[name] for name in arguments.models if name in IMAGES):
        yield fit_images.plans(title, make(), about, tiny=tiny)


_PARTS: dict[str, Callable[..., Rows]] = dict(zip(PARTS, (_frontier, _solvers, _paper, _images), strict=True))
