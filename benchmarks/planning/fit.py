"""Plans of fit, compared with single methods and with PyTorch's own means.

Peaks are live bytes, to which the machine does not matter; times are ratios within one run. Rows of models that do not
run now stay in the csv files.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.planning import fit_frontier, fit_neighbours, fit_paper, fit_solvers
from benchmarks.planning.fit_paper import LARGE, PLACES
from benchmarks.planning.fit_steps import MODELS, SEED
from benchmarks.records import add_choices, add_output, known_rows, origin, show, write_rows

PARTS = ("frontier", "neighbours", "solvers", "paper")
_COMPARED_WITH_NEIGHBOURS = ("roberta", "llama")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_choices(parser, "--parts", PARTS)
    add_choices(parser, "--models", (*MODELS, *LARGE))
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
    return [title for title, _ in MODELS.values()].index(row.model) if hasattr(row, "model") else 0


Rows = Iterator[list[Any]]


def _frontier(arguments: argparse.Namespace, about: dict[str, Any], tiny: bool) -> Rows:
    for title, make in (MODELS[name] for name in arguments.models if name in MODELS):
        yield fit_frontier.frontier(title, make(tiny), about, tiny=tiny)


def _neighbours(arguments: argparse.Namespace, about: dict[str, Any], tiny: bool) -> Rows:
    for title, make in (MODELS[name] for name in arguments.models if name in _COMPARED_WITH_NEIGHBOURS):
        yield fit_neighbours.neighbours(title, make(tiny), about, tiny=tiny)


def _solvers(arguments: argparse.Namespace, about: dict[str, Any], tiny: bool) -> Rows:
    found = fit_solvers.compare(SEED, fit_solvers.SIZES[:1] if tiny else fit_solvers.SIZES)
    yield [fit_solvers.Solved(**row, seed=SEED, **about) for row in found]


def _paper(arguments: argparse.Namespace, about: dict[str, Any], tiny: bool) -> Rows:
    for model in ("tiny",) if tiny else (name for name in arguments.models if name in LARGE):
        for device in arguments.device:
            yield [fit_paper.Paper(**row, **about) for row in fit_paper.place(model, device)]


_PARTS: dict[str, Callable[..., Rows]] = dict(zip(PARTS, (_frontier, _neighbours, _solvers, _paper), strict=True))
