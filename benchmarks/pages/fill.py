"""Fill the tables of the pages: ``<!-- table: NAME -->`` to ``<!-- end -->``, wherever they stand in README and docs/.

A region holds one table of :data:`TABLES`, or with a name that ends in "-origin" a line that says where a csv file
comes from.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from pathlib import Path

from benchmarks.pages import frontier, frontier_noise, gpu, long, planning, suites
from benchmarks.pages.render import Table
from benchmarks.records import RESULTS, ROOT

TABLES: dict[str, Table] = {
    **suites.TABLES,
    **frontier.TABLES,
    **frontier_noise.TABLES,
    **planning.TABLES,
    **long.TABLES,
    **gpu.TABLES,
}
# Origins of several csv files; all others are named after their one file.
_ORIGINS = {
    "frontier": ("frontier-cost", "frontier-accuracy"),
    "training-noise": ("frontier-accuracy", "frontier-curves", "frontier-noise", "frontier-cost"),
    "graphs": ("graphs-real", "graphs-paper", "graphs-order"),
}
_BEGIN = re.compile(r"^<!-- table: (\S+) -->$")
_END = "<!-- end -->"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page is out of date")


def run(arguments: argparse.Namespace) -> int:
    if update(check=arguments.check):
        return 0
    print("A page is out of date. Run: python -m benchmarks table", file=sys.stderr)
    return 1


def update(*, check: bool = False, root: Path = ROOT, results: Path = RESULTS) -> bool:
    """Write the tables into their pages; return whether the pages have the tables of the results."""
    found = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    old = {page: page.read_text(encoding="utf-8") for page in found if page.is_file()}
    new = {page: filled(text, page.relative_to(root), results) for page, text in old.items()}
    stale = [page for page in old if old[page] != new[page]]
    for page in () if check else stale:
        page.write_text(new[page], encoding="utf-8")
    return not (check and stale)


def filled(text: str, page: Path, results: Path = RESULTS) -> str:
    """Return a page's text with the tables of the results; errors name the page."""
    lines, inside = list[str](), ""
    for line in text.split("\n"):
        begin = _BEGIN.match(line)
        if begin and inside:
            raise ValueError(f"{page}: the table {inside} must end with {_END} before {begin[1]} begins.")
        if begin:
            inside = begin[1]
            lines += [line, *_content(inside, page, results).split("\n")]
        elif line == _END:
            inside = ""
        if not inside or line == _END:
            lines.append(line)
    if inside:
        raise ValueError(f"{page}: the table {inside} must end with {_END}, which is missing.")
    return "\n".join(lines)


def _content(name: str, page: Path, results: Path) -> str:
    stem = name.removesuffix("-origin")
    try:
        if stem != name:
            return origin([results / f"{one}.csv" for one in _ORIGINS.get(stem, (stem,))])
        if name in TABLES:
            return TABLES[name](results)
    except FileNotFoundError as error:
        raise ValueError(f"{page}: the table {name} needs {error.filename}. Run its benchmark first.") from error
    raise ValueError(f"{page}: there is no table {name}. It must be one of {', '.join(TABLES)}.")


def origin(paths: list[Path]) -> str:
    """Say in a line where the rows of csv files come from; the files have the commits."""
    rows = list[dict[str, str]]()
    for path in paths:
        with path.open(encoding="utf-8", newline="") as file:
            rows += csv.DictReader(file)

    def every(column: str) -> str:
        return ", ".join(dict.fromkeys(row[column] for row in rows if row[column]))

    if every("machine"):
        threads = max(int(row["threads"]) for row in rows)
        made = "Simulated" if paths[0].stem in ("fit-paper", "long-longest") else "Measured"
        where = f"{made} on {every('machine')}, {threads} thread{'s' * (threads != 1)}"
    else:
        where = f"{every('device').capitalize()}: Triton {every('triton')}"
    return f"{where}, PyTorch {every('torch')}, {max(row['date'] for row in rows)[:10]}."
