"""The tables of ``docs/planning/graphs.md``, from the csv files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

from benchmarks.graph_networks import PUBLISHED
from benchmarks.graphs import Planned
from benchmarks.records import read_rows
from rmm_linear._support.tables import table

Rows = Mapping[str, Planned]  # by method


def page(results: Path) -> str:
    """Make the tables.

    Args:
        results: Folder of the csv files.

    Returns:
        Three tables, each with what it shows.
    """
    names = ("real", "paper", "order")
    if not all((results / f"graphs-{name}.csv").is_file() for name in names):
        return "Nothing is measured yet: run `python -m benchmarks graphs`."
    parts = {name: _by_network(read_rows(results / f"graphs-{name}.csv", Planned)) for name in names}
    about = next(iter(parts["real"][0].values()))
    origin = (
        f"Measured and simulated on {about.machine}, PyTorch {about.torch}, commit `{about.commit[:12]}`, "
        f"{about.date[:10]}, by `python -m benchmarks graphs`."
    )
    return "\n\n".join(
        (
            "The least peak of a step that runs: live MB, gradients of parameters among them. The plans are those with "
            "the least peak of the allocator, which also sees the workspace: its peak of our plan, measured, and as it "
            "was predicted from a profile of the plain step:",
            _real(parts["real"]),
            "The sizes of Kusumoto et al., simulated; GB of the plain step, and what the least peaks save of it. "
            "Published are their approximate dynamic program and their rebuild of Chen et al., both with liveness "
            "analysis, in Chainer:",
            _paper(parts["paper"]),
            "What another order of the nodes saves, alone and after recomputation:",
            _order(parts["order"]),
            origin,
        )
    )


def _by_network(rows: Sequence[Planned]) -> list[dict[str, Planned]]:
    return [{row.method: row for row in group} for _, group in groupby(rows, key=lambda row: row.network)]


def _share(row: Planned, plain: Planned) -> str:
    return f"{100 * (row.predicted / plain.predicted - 1):.1f} %".replace("-", "−")


def _with_operations(row: Planned, plain: Planned) -> str:
    return f"{_share(row, plain)} (× {row.flops:.2f})"


def _real(networks: Sequence[Rows]) -> str:
    header = ("network", "plain", "ours (operations)", "Chen et al.", "Kusumoto et al.", "allocated", "predicted")
    lines = []
    for rows in networks:
        plain, ours = rows["plain"], rows["cuts"]
        sizes = (f"{size / 1e6:,.1f}" if size else "" for size in (ours.allocated, ours.with_workspace))
        cells = (f"{rows[method].predicted / 1e6:,.1f}, {_with_operations(rows[method], plain)}" for method in _METHODS)
        lines.append((plain.network, f"{plain.predicted / 1e6:,.1f}", *cells, *sizes))
    return table(header, lines)


def _paper(networks: Sequence[Rows]) -> str:
    header = (
        "network, batch",
        "plain",
        "ours (operations)",
        "Chen et al.",
        "Kusumoto et al.",
        "published: theirs, Chen",
    )
    lines = []
    for rows in networks:
        plain = rows["plain"]
        program, chen, before = PUBLISHED[plain.network]
        published = f"{100 * (program / before - 1):.0f} %, {100 * (chen / before - 1):.0f} %".replace("-", "−")
        cells = (_with_operations(rows[method], plain) for method in _METHODS)
        lines.append((plain.network, f"{plain.predicted / 1e9:.2f}", *cells, published))
    return table(header, lines)


def _order(networks: Sequence[Rows]) -> str:
    lines = [
        (rows["plain"].network, _share(rows["order"], rows["plain"]), _share(rows["cuts and order"], rows["cuts"]))
        for rows in networks
    ]
    return table(("network", "alone", "after recomputation"), lines)


_METHODS = ("cuts", "chen", "kusumoto")
