"""What all reports have: ``print`` shows them in short, ``table()`` whole, ``to_dataframe()`` has the numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import chain, groupby, repeat
from typing import TYPE_CHECKING, Any

from rmm_linear._support.installing import INSTALL_EXTRA

if TYPE_CHECKING:
    import pandas as pd


class Report:
    """A result that people read, in a terminal or in a notebook; at most 100 columns wide."""

    def summary(self) -> str:
        """Return the report's first line: ``key=value`` pairs to grep for."""
        raise NotImplementedError

    def table(self) -> str:
        """Return the whole report; ``print`` shows it in short."""
        return self._text(is_whole=True)

    def _text(self, *, is_whole: bool) -> str:
        """Write the report in short, or whole; one that has a single form has :meth:`table` instead."""
        return self.table()

    def _records(self) -> Sequence[Mapping[str, Any]]:
        """Return the rows of :meth:`to_dataframe`."""
        raise NotImplementedError

    def to_dataframe(self) -> pd.DataFrame:
        """Return the report's rows as a table of numbers and names; bytes and seconds have no unit.

        Returns:
            A pandas DataFrame.

        Raises:
            ImportError: If pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise ImportError(f"to_dataframe needs pandas, which is not installed. Run {INSTALL_EXTRA}.") from error
        return pd.DataFrame.from_records([*self._records()])

    def __str__(self) -> str:
        return self._text(is_whole=False)

    def __repr__(self) -> str:
        first, *more = self.summary().split("\n")
        return f"<{type(self).__name__}: {first}{' …' if more else ''}>"

    def _repr_html_(self) -> str:
        """Return what ``print`` shows, with tables of HTML, for notebooks."""
        shown = [line for line in str(self).split("\n") if not line.startswith("|-")]
        parts = [
            _table(group) if is_table else f"<pre>{escape(chr(10).join(group))}</pre>"
            for is_table, lines in groupby(shown, lambda line: line.startswith("| "))
            if any(group := [line for line in lines if line])
        ]
        return "\n".join(parts)


def _table(lines: Sequence[str]) -> str:
    rows = [[escape(cell.strip()) for cell in line.strip("|").split("|")] for line in lines]
    head, *body = [
        "".join(f"<{tag}>{cell}</{tag}>" for cell in row)
        for tag, row in zip(chain(["th"], repeat("td")), rows, strict=False)
    ]
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(f'<tr>{row}</tr>' for row in body)}</tbody></table>"
