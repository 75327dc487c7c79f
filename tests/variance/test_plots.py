"""The pictures show the numbers that they are given; the notebook runs in its short form."""

import math
import runpy
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
import pytest

from rmm_linear.variance import MemoryNoise
from rmm_linear.variance.plots import (
    plot_bound,
    plot_noise_against_memory,
    plot_noise_by_layer,
    plot_noise_over_training,
)
from rmm_linear.variance.survey.survey import AUTO, PAPER

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "variance.py"


@pytest.fixture(autouse=True)
def pictures():
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    yield plt
    for number in plt.get_fignums():
        plt.figure(number).canvas.draw()  # what cannot be drawn fails here
    plt.close("all")


def probe_table():
    names = [f"encoder.layer.{layer}.{part}.dense" for layer in range(3) for part in ("intermediate", "output")]
    rows = [
        {"step": step, "module": name, "noise": 0.1 * (place + 1) * (1 + step / 50)}
        for step in (0, 50)
        for place, name in enumerate([*names, "classifier"])
    ]
    return pd.DataFrame(rows)


def curve(ax, label):
    (line,) = [line for line in ax.lines if line.get_label() == label]
    return line


def test_noise_over_training_shows_the_median_layer():
    ax = plot_noise_over_training(probe_table())
    np.testing.assert_allclose(curve(ax, "median layer").get_xydata(), [[0, 0.4], [50, 0.8]])
    assert ax.get_yscale() == "log"
    assert curve(ax, "as much as the minibatch").get_ydata()[0] == 1


def test_noise_by_layer_has_every_layer_at_its_place():
    ax = plot_noise_by_layer(probe_table())
    grid = np.ma.filled(ax.images[0].get_array(), np.nan)
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["intermediate.dense", "output.dense", "classifier"]
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["none", "0", "1", "2"]
    expected = 1.5 * 0.1 * np.array([[np.nan, np.nan, 7], [1, 2, np.nan], [3, 4, np.nan], [5, 6, np.nan]])
    np.testing.assert_allclose(grid, expected)


def heat_map(noises):
    """Labels of the columns, text of every cell by place, and the scale's ends."""
    ax = plot_noise_by_layer(pd.DataFrame({"module": list(noises), "noise": list(noises.values())}))
    cells = {(int(y), int(x)): text.get_text() for text in ax.texts for x, y in [text.get_position()]}
    norm = ax.images[0].norm
    return [tick.get_text() for tick in ax.get_xticklabels()], cells, (norm.vmin, norm.vmax)


@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("model.{}.layers.0.fc1", ["encoder.fc1", "decoder.fc1"]),
        (
            "{}.block.0.layer.1.SelfAttention.q",
            ["encoder.layer.1.SelfAttention.q", "decoder.layer.1.SelfAttention.q"],
        ),
        ("{}_model.0.q", ["encoder_model.q", "decoder_model.q"]),
    ],
)
def test_noise_by_layer_keeps_encoder_and_decoder_apart(name, columns):
    found, cells, _ = heat_map({name.format("encoder"): 9.0, name.format("decoder"): 1.0, "head": 2.0})
    assert found == [*columns, "head"]
    assert cells == {(1, 0): "9", (1, 1): "1", (0, 2): "2"}


def test_noise_by_layer_says_in_words_what_is_no_number_and_scales_by_the_rest():
    noises = {"layer.0.a": 0.7, "layer.1.a": 5.0, "layer.0.b": 0.0, "layer.1.b": math.inf, "head": math.nan}
    _, cells, scale = heat_map(noises)
    assert cells == {(1, 0): "0.7", (2, 0): "5", (1, 1): "exact", (2, 1): "infinite", (0, 2): "no value"}
    assert scale == pytest.approx((1 / 5, 5))  # around 1
    _, cells, scale = heat_map(noises | {"layer.2.a": 1e-9})
    assert (cells[3, 0], scale) == ("≤ 0.001", pytest.approx((1 / 5, 5)))


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, 1e-9])
def test_tables_without_any_ordinary_number_can_be_drawn(value):
    frame = pd.DataFrame({"step": [1, 1], "module": ["layer.0.a", "layer.1.a"], "noise": [value] * 2})
    assert len({text.get_text() for text in plot_noise_by_layer(frame).texts}) == 1
    plot_noise_over_training(frame)
    noises = [MemoryNoise("a", "rows", 4, memory, value) for memory in (0.1, 0.2)]
    drawn = curve(plot_noise_against_memory(noises), "rows").get_ydata()
    np.testing.assert_array_equal(drawn, [max(value, 1e-3), math.nan] * 2)


def test_noise_by_tokens_is_not_drawn_among_noise_by_sequences():
    frame = pd.DataFrame(
        {
            "step": [1, 1, 1, 1],
            "module": ["layer.0.a", "layer.1.a", "pooler", "head"],
            "noise": [2.0, 2.0, 90.0, 0.0],
            "samples": ["sequences", "sequences", "tokens", "tokens"],
        }
    )
    over_training, by_layer = plot_noise_over_training(frame), plot_noise_by_layer(frame)
    np.testing.assert_allclose(curve(over_training, "median layer").get_ydata(), [2.0])
    assert [tick.get_text() for tick in by_layer.get_xticklabels()] == ["a", "head"]
    assert "tokens" not in over_training.get_ylabel()
    tokens = plot_noise_over_training(frame[frame["module"] == "pooler"])
    np.testing.assert_allclose(curve(tokens, "median layer").get_ydata(), [90.0])
    assert tokens.get_ylabel().endswith("by tokens")


def test_noise_against_memory_has_every_kind_and_width_at_its_place(pictures):
    noises = [
        MemoryNoise(layer, setting, bits, memory, factor * base / memory)
        for layer, factor in (("a", 1), ("b", 2), ("c", 9))
        for setting, bits, base in (("rows", 16, 0.1), ("rows", 4, 0.0), ("wta", 16, 0.2), (PAPER, 16, 0.5))
        for memory in (0.2, 0.1)
    ]
    _, given = pictures.subplots()
    ax = plot_noise_against_memory([*noises, MemoryNoise("a", AUTO, 4, 0.1, 7.0)], given)
    assert ax is given
    gap, none = (math.nan, math.nan), 1e-3
    for setting, expected in {
        "rows": [(0, 2.0), (1, none), gap, (3, 1.0), (4, none), gap],
        "wta": [(0, 4.0), (1, math.nan), gap, (3, 2.0), (4, math.nan), gap],
        PAPER: [(0, 10), (1, 10), gap, (3, 5), (4, 5), gap],  # next to every width
    }.items():
        np.testing.assert_allclose(curve(ax, setting).get_xydata(), expected)
    assert AUTO not in [line.get_label() for line in ax.lines]
    for minor, expected in ((True, {0: "16", 1: "4", 3: "16", 4: "4"}), (False, {0.5: "10 %", 3.5: "20 %"})):
        labels = [tick.get_text().strip() for tick in ax.get_xticklabels(minor=minor)]
        assert dict(zip(ax.get_xticks(minor=minor), labels, strict=True)) == expected
    assert ax.get_ylim()[0] < none < 1 < ax.get_ylim()[1]
    assert curve(ax, "as much as the minibatch").get_ydata()[0] == 1
    own = plot_noise_against_memory(noises)
    assert own.figure is not given.figure
    with pytest.raises(ValueError, match="needs the variance ratio of at least one layer"):
        plot_noise_against_memory([])


def test_bound_is_scaled_to_the_ratio_that_is_drawn(pictures):
    row = {"step": 1, "rows": 8, "tokens": 17, "alpha": 0.25, "sgd_variance": 2.0, "sketch_variance": 5.0}
    _, given = pictures.subplots()
    ax = plot_bound(pd.DataFrame([{**row, "paper_variance": 3.0}]), given)
    assert ax is given
    assert curve(ax, "exact").get_ydata() == [2.5]
    assert curve(ax, "the paper's formula, (P − g)/K").get_ydata() == [1.5]
    assert curve(ax, "the paper's bound").get_ydata() == [16 / 8 * 5]


@pytest.mark.parametrize("plot", [plot_noise_over_training, plot_noise_by_layer, plot_bound])
def test_a_table_without_what_is_drawn_is_refused(plot):
    with pytest.raises(ValueError, match=r"The table must have the columns .*, got 1 rows of other"):
        plot(pd.DataFrame({"other": [1]}))
    with pytest.raises(ValueError, match="got 0 rows of"):
        plot(probe_table().iloc[:0])


def test_the_notebook_runs_in_its_short_form(monkeypatch, capsys, pictures):
    """Every cell, in order; its study has what the paper says about it, in numbers."""
    monkeypatch.setenv("RMM_NOTEBOOK", "short")
    names = runpy.run_path(str(NOTEBOOK))
    study = names["study"]
    assert list(study["step"]) == [0, 1, 2]  # before training, and after each pass over the same two batches
    assert len(names["batches"]) == 2
    alpha = study["alpha"]
    factor = (1 - alpha) / (1 + alpha)  # (P − g) by (P + g)
    np.testing.assert_allclose(study["paper_variance"], study["sketch_variance"] * factor)
    assert len(names["table"]) == 3 * 12  # six linears in each of two layers, three times
    (band,) = [patch for patch in names["ax"].patches if "published" in patch.get_label()]
    assert (band.get_y(), band.get_y() + band.get_height()) == pytest.approx((0.97, 1.01))
    assert all(0 < ratio <= 1 or ratio == math.inf for row in names["targets"].values() for ratio in row.values())
    printed = capsys.readouterr().out
    assert "at noise 1, a batch of 16 acts like 8" in printed
    assert "| whole gradient" in printed
    assert len(pictures.get_fignums()) == 4
    for number in pictures.get_fignums():
        assert pictures.figure(number).axes[0].get_title().startswith("RoBERTa with 2 layers, generated sentences")
