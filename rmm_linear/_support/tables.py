"""Tables in Markdown, which is readable in a terminal too: at most 100 columns wide, like rows together."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import product
from textwrap import fill

WIDTH = 100
_LEAST = 14  # columns of text are cut to no less; where that does not do, a table is divided
_REASON = 16  # the last column, which has the reasons, is cut to this before names are


def table(header: Sequence[str], rows: Iterable[Sequence[str]], width: int = WIDTH) -> str:
    """Lay out a table in Markdown, at most so wide: cells that do not fit are cut, and follow below it as footnotes.

    Example:
        >>> print(table(("layer", "bytes"), [("query", "12"), ("key", "3")]))
        | layer | bytes |
        |-------|-------|
        | query | 12    |
        | key   | 3     |
        >>> print(table(("layer", "why"), [("query", "another operation saves the same tensor")], 34))
        | layer | why                    |
        |-------|------------------------|
        | query | another operation… [1] |
        <BLANKLINE>
        [1] another operation saves the
            same tensor
    """
    cells = [[" ".join(cell.split()).replace("|", "¦") for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    room = width - 3 * len(widths) - 1
    if sum(min(one, _LEAST) for one in widths) > room and len(widths) > 3:
        half = 1 + len(widths) // 2
        parts = [row[:half] for row in cells], [[row[0], *row[half:]] for row in cells]
        return "\n\n".join(table(part[0], part[1:], width) for part in parts)
    while sum(widths) > room and widths[-1] > _REASON:
        widths[-1] -= 1
    while sum(widths) > room:
        widths[widths.index(max(widths))] -= 1
    notes = dict[str, int]()
    shown = [[_cut(cell, size, notes) for cell, size in zip(row, widths, strict=True)] for row in cells]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    lines = [" | ".join(cell.ljust(size) for cell, size in zip(row, widths, strict=True)) for row in shown]
    rule = "|".join("-" * (size + 2) for size in widths)
    laid_out = [f"| {lines[0]} |", f"|{rule}|", *(f"| {line} |" for line in lines[1:])]
    return "\n".join(
        [*laid_out, *([""] if notes else []), *(wrapped(f"[{n}] {text}", 4, width) for text, n in notes.items())]
    )


def _cut(cell: str, size: int, notes: dict[str, int]) -> str:
    """Cut a cell behind a word, or a name in its middle, and give it the number of a footnote."""
    if len(cell) <= size:
        return cell
    mark = f"… [{notes.setdefault(cell, len(notes) + 1)}]"
    room = max(size - len(mark), 1)
    if " " in cell[: room + 1]:
        return cell[: room + 1].rsplit(" ", 1)[0].rstrip(",;:") + mark
    return _shortened(cell.split(" ")[0], room) + mark.removeprefix("…")


def _shortened(name: str, size: int) -> str:
    """Cut a name in its middle."""
    return name if len(name) <= size else f"{name[: size // 3]}…{name[len(name) - size + size // 3 + 1 :]}"


def wrapped(text: str, indent: int = 0, width: int = WIDTH) -> str:
    """Wrap a sentence of a report, every line but the first indented."""
    return fill(text, width, subsequent_indent=" " * indent, break_on_hyphens=False)


def keyed(prefix: str, parts: Iterable[str]) -> str:
    """Join ``key=value`` pairs into a line behind a prefix, and into indented ones where they are many.

    Example:
        >>> keyed("rmm_linear:", ["converted=2", "peak=8 MiB"])
        'rmm_linear: converted=2 peak=8 MiB'
    """
    lines = [prefix]
    for part in (_shortened(one, WIDTH - len(prefix) - 1) for one in parts):
        if len(lines[-1]) + len(part) >= WIDTH and lines[-1] not in (prefix, " "):
            lines.append(" ")
        lines[-1] += f" {part}"
    return "\n".join(lines)


def folded(names: Iterable[str]) -> dict[str, list[str]]:
    """Group names that differ in numbers only, which are written as ranges: a pattern stands for all its names.

    Example:
        >>> folded(["layer.0.query", "layer.1.query", "head", "layer.3.query"])
        {'layer.{0-1,3}.query': ['layer.0.query', 'layer.1.query', 'layer.3.query'], 'head': ['head']}
    """
    groups: dict[tuple[str | None, ...], dict[tuple[int, ...], str]] = {}
    for name in names:
        parts = [int(part) if _is_number(part) else part for part in name.split(".")]
        numbers = tuple(part for part in parts if isinstance(part, int))
        groups.setdefault(tuple(None if isinstance(part, int) else part for part in parts), {})[numbers] = name
    found: dict[str, list[str]] = {}
    for words, members in groups.items():
        for places in _products(members):
            ranges = iter(map(_ranges, places))
            pattern = ".".join(next(ranges) if word is None else word for word in words)
            found[pattern] = [members[numbers] for numbers in product(*places)]
    return found


def _is_number(part: str) -> bool:
    return part.isdecimal() and str(int(part)) == part


def _products(members: Collection[tuple[int, ...]]) -> list[tuple[Sequence[int], ...]]:
    """Divide tuples of numbers into products of sets."""
    if members and not next(iter(members)):
        return [()]
    by_first: dict[int, list[tuple[int, ...]]] = {}
    for first, *rest in sorted(members):
        by_first.setdefault(first, []).append(tuple(rest))
    alike: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for first, rests in by_first.items():
        alike.setdefault(tuple(rests), []).append(first)
    return [(firsts, *rest) for rests, firsts in alike.items() for rest in _products(rests)]


def _ranges(numbers: Sequence[int]) -> str:
    """Write ascending numbers: 3, or {0-2,5}."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    text = ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return text if len(numbers) == 1 else f"{{{text}}}"


def grouped(rows: Iterable[Sequence[str]]) -> list[tuple[str, list[str], tuple[str, ...]]]:
    """Group rows, a name and cells each, that differ in numbers of the name only: pattern, names, and cells.

    Example:
        >>> grouped([("a.0", "4 bits"), ("b", "exact"), ("a.1", "4 bits")])
        [('a.{0-1}', ['a.0', 'a.1'], ('4 bits',)), ('b', ['b'], ('exact',))]
    """
    alike: dict[tuple[str, ...], list[str]] = {}
    places: dict[str, int] = {}
    for place, (name, *cells) in enumerate(rows):
        alike.setdefault(tuple(cells), []).append(name)
        places.setdefault(name, place)
    found = [(pattern, of, cells) for cells, names in alike.items() for pattern, of in folded(names).items()]
    return sorted(found, key=lambda one: places[one[1][0]])


def prefix_of(names: Sequence[str]) -> str:
    """Return the parts that all names begin with, the last one of a name and what is numbered left out; or ""."""
    parts = [name.split(".") for name in names]
    common = 0
    while len(parts) > 1 and all(len(one) > common + 1 and one[common] == parts[0][common] for one in parts):
        common += 1
    ends = [
        place for place in range(common + 1) if any(one[place][:1].isdecimal() or "{" in one[place] for one in parts)
    ]
    common = max(ends[0] - 1, 0) if ends else common
    prefix = "".join(f"{part}." for part in parts[0][:common]) if parts else ""
    return prefix if len(prefix) > 9 else ""


def named_table(header: Sequence[str], rows: Sequence[Sequence[str]], heads: int = 0) -> str:
    """Lay out a table whose first cells are names of modules: what all begin with is said below it, once."""
    prefix = prefix_of([row[0] for row in rows[heads:]])
    filled = [place for place in range(len(header)) if not place or any(row[place] for row in rows)]
    named = [(row[0].removeprefix(prefix) or "(model)", *row[1:]) for row in rows]
    laid_out = table([header[place] for place in filled], [[row[place] for place in filled] for row in named])
    return f"{laid_out}\nNames begin with {prefix}" if prefix else laid_out
