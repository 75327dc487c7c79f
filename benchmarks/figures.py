"""What all pictures share: figures without a display, colours that differ, where rows come from, plain ticks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.library import INSTALL_EXTRA
from benchmarks.records import Origin

BLUE, RED, GREEN, PINK, LIGHT, ORANGE = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00"


def figure_of(down: int, across: int, width: float = 4.6, height: float = 3.9) -> tuple[Any, list[Any]]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"Pictures need matplotlib. Run {INSTALL_EXTRA}.") from error
    figure = Figure(figsize=(width * across + 0.6, height * down + 1.2), layout="constrained")
    return figure, list(figure.subplots(down, across, squeeze=False).flat)


def distinct(count: int) -> list[Any]:
    from matplotlib import colormaps

    every = [*colormaps["tab10"].colors, *colormaps["Dark2"].colors, *colormaps["Pastel1"].colors]  # pyright: ignore[reportAttributeAccessIssue]
    if count > len(every):
        raise ValueError(f"There are {len(every)} colours to tell apart, got {count} things to draw.")
    return every[:count]


def headed(figure: Any, title: str, rows: Sequence[Origin]) -> Any:
    """Put a title above a figure, with where its rows come from."""
    about = rows[0]
    threads = "" if about.device == "cuda" else f", {about.threads} thread{'s' * (about.threads != 1)}"
    figure.suptitle(f"{title}\n{about.machine}{threads}, PyTorch {about.torch}", fontsize=11)
    return figure


def x_ticks(axis: Any, values: Sequence[float], labels: Sequence[str], **how: Any) -> None:
    """Name these values of a logarithmic axis and no others."""
    axis.set_xscale("log")
    axis.set_xticks(values, labels, **how)
    axis.set_xticks([], minor=True)


def legend_of(figure: Any, axes: Sequence[Any], **how: Any) -> None:
    """Put one legend for all axes below a figure."""
    labels = {name: handle for axis in axes for handle, name in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(labels.values(), labels.keys(), loc="outside lower center", fontsize=9, **how)
