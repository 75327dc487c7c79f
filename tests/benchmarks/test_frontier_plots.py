"""Pictures of the comparison: whatever is told apart by colour is, and names hide no names."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.frontier.methods import METHODS
from benchmarks.frontier.plots import plot_curves, plot_frontier, plot_long, plot_tasks
from benchmarks.frontier.rows import Cost, Epoch, Point
from benchmarks.frontier.shares import REST, Share, plot_shares
from benchmarks.plots import distinct


def epoch(task: str, method: str, score: float, number: int = 1) -> Epoch:
    return Epoch(
        task=task, method=method, seed=0, epoch=number, epochs=2, metric="m", score=score, dev_loss=1.0, train_loss=1.0,
        steps=1, seconds=1.0, batch=32, learning_rate=1e-4, rows=9, settings="", fitted_loss=score,
    )  # fmt: skip


def lines_of(axis: Any) -> dict[str, Any]:
    return {line.get_label(): tuple(line.get_color()) for line in axis.get_lines() if line.get_label()[0] != "_"}


def test_every_method_has_its_point_and_a_name_that_hides_no_other() -> None:
    names = ("exact", "tenth", "narrow", "wide")
    costs = [Cost(task="cola", method=name, kept=1000 - place, time=1.0) for place, name in enumerate(names)]
    epochs = [epoch("cola", name, 0.5, 2) for name in names]
    for figure, panels in ((plot_frontier(epochs, costs), 3), (plot_tasks(epochs, costs), 1)):
        figure.draw_without_rendering()
        assert len(figure.axes) == panels
        for axis in figure.axes:
            assert {text.get_text() for text in axis.texts} == {METHODS[name].title for name in names}
            boxes = [text.get_window_extent() for text in axis.texts]
            assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
    assert plot_frontier(epochs, []) is plot_tasks(epochs, []) is None


def test_means_of_pictures_leave_out_the_task_that_stands_apart() -> None:
    costs = [Cost(task=task, method=name, kept=10, time=1.0) for task in ("cola", "stsb") for name in ("exact", "wide")]
    epochs = [epoch("cola", "exact", 0.5, 2), epoch("cola", "wide", 0.6, 2)]
    epochs += [epoch("stsb", "exact", 0.5, 2), epoch("stsb", "wide", 0.9, 2)]
    scores = plot_frontier(epochs, costs).axes[0]
    assert [name.xy[1] for name in scores.texts if name.get_text() == METHODS["wide"].title] == [pytest.approx(10.0)]
    assert "mean of CoLA" in scores.get_title()
    assert [axis.get_title()[:5] for axis in plot_tasks(epochs, costs).axes] == ["CoLA,", "STS-B"]


def test_no_two_methods_of_curves_look_the_same() -> None:
    methods = [name for name in METHODS if METHODS[name].budget is None][:12]
    points = [
        Point(
            study="images", method=method, seed=0, batch=64, step=step, steps=2, epoch=step / 2, train_loss=1.0,
            dev_loss=1.0 / step, metric="m", score=0.5, seconds=1.0, learning_rate=1e-3, settings="",
        )
        for method in methods
        for step in (1, 2)
    ]  # fmt: skip
    (axis,) = plot_curves(points, {"images": 64}).axes
    found = lines_of(axis)
    assert len(found) == len(methods) == len({*found.values()})
    rows = [
        replace(epoch("cola-long", method, 0.1 * number, number), train_loss=1 + 0.1 * place)
        for place, method in enumerate(methods[:3])
        for number in (1, 2)
    ]
    above = plot_long(rows).axes[0].get_lines()
    assert [list(line.get_ydata()) for line in above] == [pytest.approx([10 * place] * 2) for place in range(3)]
    rows = [epoch("cola-long", method, 0.1 * number, number) for method in methods[:3] for number in (1, 2)]
    for axis in plot_long(rows).axes:
        found = lines_of(axis)
        assert len(found) == 3 == len({*found.values()})


def test_no_two_operators_of_shares_look_the_same() -> None:
    names = [*(f"operator {number}" for number in range(18)), REST]
    rows = [
        Share(case="case", phase="forward", operator=name, calls=1, seconds=1.0, share=1 / len(names)) for name in names
    ]
    (axis,) = plot_shares(rows).axes
    colors = {bar.get_label(): bar.patches[0].get_facecolor() for bar in axis.containers}
    assert len(colors) == len(names) - 1 == len({*colors.values()})  # the rest is what bars leave
    with pytest.raises(ValueError, match="colours to tell apart, got 99 things"):
        distinct(99)
