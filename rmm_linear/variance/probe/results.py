"""The results of a probe: rows of plain numbers, as a pandas table, a csv file or a printed summary."""

from __future__ import annotations

import bisect
import csv
import dataclasses
import io
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rmm_linear._support.files import write_text
from rmm_linear._support.reports import Report
from rmm_linear._support.tables import folded, keyed, named_table
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


class ProbeResults(Report):
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

    def _records(self) -> list[dict[str, Any]]:
        return [dataclasses.asdict(row) for row in self.rows]

    def to_dataframe(self) -> pd.DataFrame:
        """Return the rows as a table.

        Returns:
            A DataFrame with one column per field of :class:`ProbeRow`.
        """
        return super().to_dataframe().reindex(columns=list(COLUMNS))

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
        """Return the medians of the last probed step in one line."""
        if not self.rows:
            return "rmm_linear probe: steps=0"
        step, steps = self.rows[-1].step, len({row.step for row in self.rows})
        medians = (f"{name}={value:.3g}" for name, value in self.medians(step).items())
        return keyed("rmm_linear probe:", (f"steps={steps}", f"step={step}", *medians))

    def __str__(self) -> str:
        """Return the line, and medians with quartiles over steps and layers, for each type of module and over all.

        Layers whose names differ only in numbers share a row; ratios over tokens and over sequences have separate ones.
        If the whole gradient was measured, its last table follows.
        """
        patterns = folded(dict.fromkeys(row.module for row in self.rows))
        return self._text({name: pattern for pattern, names in patterns.items() for name in names})

    def table(self) -> str:
        """Return the same with a row for every layer.

        Returns:
            Text.
        """
        return self._text({row.module: row.module for row in self.rows})

    def _text(self, titles: Mapping[str, str]) -> str:
        groups: dict[tuple[str, str], list[ProbeRow]] = {}
        for row in self.rows:
            groups.setdefault((titles[row.module], row.samples), []).append(row)
        units = sorted({row.samples for row in self.rows}) or [SEQUENCES]
        if len(groups) != 1:
            groups = {("all", one): [row for row in self.rows if row.samples == one] for one in units} | groups
        heads = 0 if len(groups) == 1 else len(units)
        lines = [
            (name, str(len(rows)), samples, _spread([row.noise for row in rows]), _spread([row.alpha for row in rows]))
            for (name, samples), rows in groups.items()
        ]
        header = ("module", "rows", "samples", "variance ratio (quartiles)", "alpha (quartiles)")
        text = f"{self.summary()}\n{named_table(header, lines, heads=heads)}"
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
    return f"{middle:.2g} ({low:.2g}–{high:.2g})"
