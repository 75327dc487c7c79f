"""The tables of ``docs/training-noise.md``, from the csv files."""

from __future__ import annotations

from pathlib import Path

from benchmarks.frontier.curve_tables import curve_sections
from benchmarks.frontier.long_tables import TASK, long_sections
from benchmarks.frontier.page import NOTHING, origins
from benchmarks.frontier.predictions import TITLES
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
    if not parts:
        return NOTHING
    missing = [] if any(row.task == TASK for row in epochs) else ["ten epochs of CoLA"]
    missing += [title for study, title in TITLES.items() if all(row.study != study for row in points)]
    later = [f"Not measured yet: {', '.join(missing)}."] if missing else []
    return "\n\n".join([*parts, *later, origins([*epochs, *points, *noises])])
