"""The tables of ``docs/training-noise.md``, from the csv files."""

from __future__ import annotations

from pathlib import Path

from benchmarks.frontier.curve_tables import curve_sections
from benchmarks.frontier.long_tables import long_sections
from benchmarks.frontier.page import NOTHING, origins
from benchmarks.frontier.rows import Epoch, Noisy, Point
from benchmarks.records import known_rows


def noise_page(results: Path) -> str:
    """Make the tables.

    Args:
        results: Folder of the csv files.

    Returns:
        A section for every part that was measured.
    """
    epochs = [row for row in known_rows(results / "frontier-accuracy.csv", Epoch) if row.fitted_loss is not None]
    points = known_rows(results / "frontier-curves.csv", Point)
    noises = known_rows(results / "frontier-noise.csv", Noisy)
    parts = [*long_sections(epochs), *curve_sections(points, noises)]
    return "\n\n".join([*parts, origins([*epochs, *points, *noises])]) if parts else NOTHING
