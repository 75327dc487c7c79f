"""The results of a probe: rows of plain numbers, as a pandas table, a csv file or a printed summary."""

from __future__ import annotations

import bisect
import csv
import dataclasses
import io
import math
import os
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rmm_linear._support.files import write_text
from rmm_linear._support.installing import INSTALL_EXTRA
from rmm_linear._support.tables import table
from rmm_linear.variance.whole_model import GradientNoise

if TYPE_CHECKING:
    import pandas as pd


SEQUENCES, TOKENS = "sequences", "tokens"


@dataclass(frozen=True)
class ProbeRow:
    """The variances of one layer's gradient in one forward pass.

    Attributes:
        step: Number of the probed step.
        module: Dotted name of the layer in the model.
        kind: Family of the sketch.
        rows: K; N if every row is stored.
        bits: Width of a stored element; 16 or 32 is the dtype itself.
        tokens: N.
        samples: Unit of sampling in ``sgd_variance`` and ``noise``: :data:`SEQUENCES`, or :data:`TOKENS` if the rows
            are not known to be tokens of sequences, as in heads, or there is only one sequence.
        alpha: g/P of this X and Y, in [0, 1]: how correlated they are.
        sgd_variance: D²_SGD over ``samples``, in squared units of the weight gradient.
        sgd_variance_tokens: D²_SGD over the valid tokens, as in the paper, in the same units.
        sketch_variance: D²_sketch, in the same units.
        noise: The variance ratio D²_sketch / D²_SGD over ``samples``; below 1, the sketch adds less variance than the
            minibatch has. NaN for 0/0.
    """

    step: int
    module: str
    kind: str
    rows: int
    bits: float
    tokens: int
    samples: str
    alpha: float
    sgd_variance: float
    sgd_variance_tokens: float
    sketch_variance: float
    noise: float


@dataclass(frozen=True)
class WholeRow:
    """The variances that one operation adds in one block, to the gradient of all its parameters.

    Attributes:
        step: Number of the step.
        block: Name of the block, as in :meth:`GradientNoise.by_depth`.
        operation: The operation, or "all".
        noise: Σ D² of the compressed activations over the block's parameters.
        sgd: Σ D²_SGD over them, over sequences.
        ratio: ``noise`` / ``sgd``.
    """

    step: int
    block: str
    operation: str
    noise: float
    sgd: float
    ratio: float


COLUMNS = tuple(field.name for field in dataclasses.fields(ProbeRow))
WHOLE_COLUMNS = tuple(field.name for field in dataclasses.fields(WholeRow))


class ProbeResults:
    """Rows, one per layer and probed step, ordered by step and then by position in the model.

    Attributes:
        rows: The rows.
        whole: Step to the variances of the whole gradient, where they were measured.

    Example:
        >>> results = ProbeResults()
        >>> sketch, variances = ("countsketch", 205, 32, 2048), {"sgd_variance": 4.0, "sgd_variance_tokens": 2.0}
        >>> found = {"alpha": 0.02, **variances, "sketch_variance": 1.0, "noise": 0.25}
        >>> results.rows.append(ProbeRow(50, "encoder.0.dense", *sketch, samples="sequences", **found))
        >>> results.medians(50)
        {'noise': 0.25, 'alpha': 0.02}
    """

    def __init__(self) -> None:
        """Start with no rows."""
        self.rows: list[ProbeRow] = []
        self.whole: dict[int, GradientNoise] = {}

    def medians(self, step: int) -> dict[str, float]:
        """Return the medians over the layers of one step; NaN is ignored.

        Ratios over tokens and ratios over sequences cannot be compared. Those over tokens are used only if no layer has
        any over sequences.

        Args:
            step: Number of the step.

        Returns:
            "noise" and "alpha", each omitted if no layer has a value.
        """
        rows = self.of_step(step)
        rows = [row for row in rows if row.samples == SEQUENCES] or rows
        found = {name: _numbers(getattr(row, name) for row in rows) for name in ("noise", "alpha")}
        return {name: statistics.median(values) for name, values in found.items() if values}

    def of_step(self, step: int) -> list[ProbeRow]:
        """Return the rows of one step.

        Args:
            step: Number of the step.

        Returns:
            The rows, found by bisection, because they are ordered by step.
        """
        begin, end = (bisect.bisect_left(self.rows, last, key=lambda row: row.step) for last in (step, step + 1))
        return self.rows[begin:end]

    def to_dataframe(self) -> pd.DataFrame:
        """Return the rows as a table.

        Returns:
            A DataFrame with one column per field of :class:`ProbeRow`.

        Raises:
            ImportError: If pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise ImportError(
                f"to_dataframe needs pandas, which is not installed. Run {INSTALL_EXTRA}, or use to_csv."
            ) from error
        return pd.DataFrame([dataclasses.asdict(row) for row in self.rows], columns=list(COLUMNS))

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write the rows as a csv file, atomically and without loss of precision.

        Args:
            path: File to write.
        """
        _write_csv(path, COLUMNS, self.rows)

    def whole_rows(self) -> list[WholeRow]:
        """Return the variances of the whole gradient as rows, one per step, block and operation.

        Returns:
            The rows; ``pandas.DataFrame`` takes them as they are.
        """
        return [
            WholeRow(step, block, operation, *totals, noise.by_depth(operation)[block])
            for step, noise in self.whole.items()
            for operation in noise.stand_ins
            for block, totals in noise.totals(operation).items()
        ]

    def whole_to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`whole_rows` as a csv file, as :meth:`to_csv` writes the rows of layers.

        Args:
            path: File to write.
        """
        _write_csv(path, WHOLE_COLUMNS, self.whole_rows())

    def summary(self) -> str:
        """Return a table of medians with quartiles over steps and layers, for each type of module and over all.

        Returns:
            Text. Layers whose names differ only in numbers share a row; ratios over tokens and over sequences have
            separate rows. If the whole gradient was measured, its last table follows.
        """
        groups: dict[tuple[str, str], list[ProbeRow]] = {}
        for row in self.rows:
            name = re.sub(r"(?<![^.])\d+(?![^.])", "*", row.module)
            groups.setdefault((name, row.samples), []).append(row)
        if len(groups) != 1:
            for samples in sorted({row.samples for row in self.rows}) or [SEQUENCES]:
                groups["all", samples] = [row for row in self.rows if row.samples == samples]
        header = (
            "module",
            "measurements",
            "minibatch of",
            "variance ratio, median (quartiles)",
            "alpha, median (quartiles)",
        )
        lines = [
            (name, str(len(rows)), samples, _spread([row.noise for row in rows]), _spread([row.alpha for row in rows]))
            for (name, samples), rows in groups.items()
        ]
        text = table(header, lines)
        if self.whole:
            step, noise = list(self.whole.items())[-1]
            text += f"\n\nwhole gradient at step {step}, variance ratio D2 / D2_SGD by block and operation\n{noise}"
        return text


def _write_csv(path: str | os.PathLike[str], columns: tuple[str, ...], rows: Sequence[Any]) -> None:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(dataclasses.astuple(row) for row in rows)
    write_text(path, buffer.getvalue())


def _numbers(values: Any) -> list[float]:
    return [value for value in values if not math.isnan(value)]


def _spread(values: list[float]) -> str:
    numbers = sorted(_numbers(values))
    if not numbers:
        return "none"
    if math.isinf(numbers[-1]):  # infinities cannot be interpolated
        return f"{statistics.median_low(numbers):.3g}"
    low, middle, high = statistics.quantiles(numbers, n=4, method="inclusive") if len(numbers) > 1 else numbers * 3
    return f"{middle:.3g} ({low:.3g} to {high:.3g})"
