"""Tables as text: by rich where it is installed, plain otherwise."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lay out a table.

    Args:
        header: Title of every column.
        rows: Cells, as many in each row as there are columns.

    Returns:
        The table, without a final line break.
    """
    if importlib.util.find_spec("rich"):
        from rich.console import Console
        from rich.table import Table

        drawn = Table(*header)
        for row in rows:
            drawn.add_row(*row)
        buffer = io.StringIO()
        Console(file=buffer, width=140).print(drawn)
        return buffer.getvalue().rstrip()
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [header, *rows]]
    return "\n".join(line.rstrip() for line in lines)
