"""Plans of fit: ``python -m benchmarks fit``.

Peaks are live bytes, to which the machine does not matter; times are ratios within one run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import fit_frontier, fit_neighbours, fit_paper, fit_plots, fit_solvers
from benchmarks.fit_models import MODELS, SEED
from benchmarks.fit_paper import LARGE, Paper
from benchmarks.fit_paper_models import PLACES
from benchmarks.fit_rows import Fitted, Neighbour, Solved
from benchmarks.records import origin, read_rows, show, write_rows

PARTS = ("frontier", "neighbours", "solvers", "paper")
_BESIDE_NEIGHBOURS = ("roberta", "llama")


@dataclass(frozen=True)
class _Run:
    """What all parts are told."""

    out: Path
    models: Sequence[str]
    devices: Sequence[str]
    about: dict[str, Any]
    tiny: bool


def run(
    out: Path,
    parts: Sequence[str],
    models: Sequence[str] = (*MODELS, *LARGE),
    devices: Sequence[str] = tuple(PLACES),
    *,
    commit: str = "",
    tiny: bool = False,
) -> Iterator[str]:
    """Run parts one after the other.

    Args:
        out: Folder of the csv files. Rows of models that do not run now stay there.
        parts: Of :data:`PARTS`.
        models: Of :data:`benchmarks.fit_models.MODELS`, and for "paper" of :data:`benchmarks.fit_paper.LARGE`.
        devices: For "paper": of :data:`benchmarks.fit_paper_models.PLACES`.
        commit: Commit to write into the csv files; without one, git is asked.
        tiny: Whether sizes are small, to try the command.

    Yields:
        What was found, as a table for each model.
    """
    made = _Run(out, models, devices, origin("cpu", commit), tiny)
    for part in parts:
        yield from {"frontier": _frontier, "neighbours": _neighbours, "solvers": _solvers, "paper": _paper}[part](made)


def _frontier(run: _Run) -> Iterator[str]:
    path = run.out / "fit-frontier.csv"
    rows = read_rows(path, Fitted) if path.is_file() else []
    for name in (name for name in run.models if name in MODELS):
        title, make = MODELS[name]
        found = fit_frontier.frontier(title, make(run.tiny), run.about, tiny=run.tiny)
        rows = _in_order([row for row in rows if row.model != title] + found)
        write_rows(path, rows)
        fit_plots.plot_frontier(rows).savefig(run.out / "fit-frontier.png", dpi=150)
        yield show(found)


def _neighbours(run: _Run) -> Iterator[str]:
    path = run.out / "fit-neighbours.csv"
    rows = read_rows(path, Neighbour) if path.is_file() else []
    for name in (name for name in run.models if name in _BESIDE_NEIGHBOURS):
        title, make = MODELS[name]
        found = fit_neighbours.neighbours(title, make(run.tiny), run.about, tiny=run.tiny)
        rows = _in_order([row for row in rows if row.model != title] + found)
        write_rows(path, rows)
        yield show(found)


def _solvers(run: _Run) -> Iterator[str]:
    sizes = fit_solvers.SIZES[:1] if run.tiny else fit_solvers.SIZES
    rows = [Solved(**row, seed=SEED, **run.about) for row in fit_solvers.compare(SEED, sizes)]
    write_rows(run.out / "fit-solvers.csv", rows)
    yield show(rows)


def _paper(run: _Run) -> Iterator[str]:
    path = run.out / "fit-paper.csv"
    rows = read_rows(path, Paper) if path.is_file() else []
    for model in ("tiny",) if run.tiny else (name for name in run.models if name in LARGE):
        for device in run.devices:
            found = [Paper(**row, **run.about) for row in fit_paper.place(model, device)]
            rows = fit_paper.in_order([row for row in rows if (row.model, row.place) != (model, device)] + found)
            write_rows(path, rows)
            yield show(found)


def _in_order(rows: Sequence[Any]) -> list[Any]:
    titles = [title for title, _ in MODELS.values()]
    return sorted(rows, key=lambda row: titles.index(row.model))
