"""Lay out rows of results as Markdown tables: columns of a title and a cell each, or one cell by two keys."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.library import table
from benchmarks.records import Record, read_rows

Table = Callable[[Path], str]
Cell = Callable[[Any], str]


def from_csv(stem: str, kind: type[Record], make: Callable[[list[Record]], str]) -> Table:
    """Return what reads a csv file of a folder and makes a table of its rows."""
    return lambda results: make(read_rows(results / f"{stem}.csv", kind))


def columns(rows: Iterable[Any], spec: Mapping[str, Cell]) -> str:
    """Lay out a line per row; the spec is title to cell."""
    return table(list(spec), [[cell(row) for cell in spec.values()] for row in rows])


def pivot(rows: Iterable[Any], down: Cell, across: Cell, cell: Cell, corner: str = "") -> str:
    """Lay out one cell per row, where its keys cross; both keys in the order in which they come."""
    there = [*rows]
    cells = {(down(row), across(row)): cell(row) for row in there}
    heads = dict.fromkeys(map(across, there))
    lines = [(key, *(cells.get((key, head), "") for head in heads)) for key in dict.fromkeys(map(down, there))]
    return table((corner, *heads), lines)


def of(name: str, spec: str = "", factor: float = 1) -> Cell:
    """Return the cell of an attribute: empty for None, numbers times a factor and with a real minus."""
    return lambda row: number(getattr(row, name), spec, factor)


def number(value: Any, spec: str = "", factor: float = 1) -> str:
    """Write a value; see :func:`of`."""
    if value is None or isinstance(value, str):
        return value or ""
    text = format(value * factor if factor != 1 else value, spec)
    return f"−{text[1:]}" if text.startswith("-") else text


def megabytes(name: str) -> Cell:
    """Return the cell of a number of bytes."""
    return of(name, ",.1f", 1e-6)
