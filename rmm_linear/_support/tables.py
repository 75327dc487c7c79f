"""Tables in Markdown, which is readable in a terminal too; formatted by rich where it is installed, and patterns."""

from __future__ import annotations

import importlib.util
import io
import re
from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lay out a table in Markdown, one line per row whatever its width; a cell holds no line break and no vertical bar.

    Example:
        >>> print(table(("layer", "bytes"), [("query", "12"), ("key", "3")]))
        | layer | bytes |
        |-------|-------|
        | query | 12    |
        | key   | 3     |
    """
    if importlib.util.find_spec("rich"):
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        laid_out = Table(box=box.MARKDOWN)
        for title in header:
            laid_out.add_column(Text(title), no_wrap=True)
        for row in rows:
            laid_out.add_row(*map(Text, row))
        buffer = io.StringIO()
        Console(file=buffer, width=10_000).print(laid_out)
        return buffer.getvalue().strip()
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [header, *rows]]
    rule = "|".join("-" * (width + 2) for width in widths)
    return "\n".join([f"| {lines[0]} |", f"|{rule}|", *(f"| {line} |" for line in lines[1:])])


def pattern_of(name: str) -> str:
    """Return the name that numbered siblings share, with * for numbers, except for one at its beginning or end.

    Example:
        >>> pattern_of("layer.0.query")
        'layer.*.query'
    """
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
