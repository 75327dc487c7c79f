"""What waits on the host: its limit, the speed of the link, and what binds."""

import pytest
import torch
from composed_helpers import example, model_of
from fit_cases import network, rows, stack
from torch import nn

import rmm_linear
from rmm_linear import Shards
from rmm_linear.fitting import options
from rmm_linear.fitting.link import Link, read_bandwidth
from rmm_linear.fitting.settings import Conversions
from rmm_linear.planning import load_plan
from rmm_linear.planning.blocks.find import find_blocks

ALLOW = ("keep", "recompute", "offload")


def test_copies_add_what_the_passes_do_not_hide():
    link = Link(10.0)
    assert link.added(100, 4.0, 8.0) == 6.0 + 2.0
    assert link.added(100, 20.0, 20.0) == 0.0
    assert Link(10.0, unit=3.0).added(100, 12.0, 24.0) == 18.0 + 6.0  # three operations per second


@pytest.mark.parametrize("value", ["25", "fast", "25GB/h", 0, -1.0, float("inf"), True, None, "0GB/s"])
def test_a_bandwidth_that_is_none_is_refused_with_the_rule(value):
    if value == "25":
        assert read_bandwidth(value) == 25.0
        return
    with pytest.raises((ValueError, TypeError), match=r"bandwidth must be .*25GB/s"):
        read_bandwidth(value)


def test_a_model_without_values_offloads_and_says_what_binds():
    def fit(host):
        report = rmm_linear.fit(
            model_of(6, "meta"), example("meta", 16), "least", allow=ALLOW, host_memory=host, bandwidth="100TB/s"
        )
        assert report.plan.host == sum(block.host for block in report.plan.blocks)
        return report

    free = fit(None)
    half, none = fit(free.plan.host // 2), fit("200KB")
    assert 0 < half.plan.host <= free.plan.host // 2
    assert none.plan.host == 0
    assert ["offload" in report.summary() for report in (free, half, none)] == [True, True, False]
    assert free.peak < half.peak < none.peak
    assert free.binds == "the device's memory"
    assert half.binds.startswith("host memory (")
    assert "What binds is host memory" in str(half)
    assert f"host={rmm_linear._support.sizes.show_bytes(half.host)}" in half.summary()


@pytest.mark.thorough
def test_a_slow_link_is_said_and_costs_time():
    fast, slow = (
        rmm_linear.fit(model_of(5, "meta"), example("meta"), 0.7, allow=("keep", "offload"), bandwidth=speed)
        for speed in ("100TB/s", "1MB/s")
    )
    assert fast.binds == "the device's memory"
    assert slow.binds.startswith("the link to the host (copies add ")
    assert fast.time == pytest.approx(1.0, abs=0.01)
    assert slow.time > 2


def test_what_shards_put_on_the_host_counts_there():
    model, shards = model_of(2, "meta"), Shards(1, cpu_offload=True)
    whole = sum(parameter.nbytes for parameter in model.parameters())
    report = rmm_linear.fit(model, example("meta"), "least", optimizer=torch.optim.AdamW, shards=shards, allow=ALLOW)
    assert report.static.host == 4 * whole + 4 * len([*model.parameters()])  # and a step's number of each parameter
    assert report.static.parameters == 0
    rmm_linear.revert(model)
    with pytest.raises(ValueError, match=r"host_memory=1000 cannot be met: parameters, gradients and the optimizer"):
        rmm_linear.fit(model, example("meta"), "least", shards=shards, host_memory=1000)


def test_files_are_limited_too_and_the_plan_is_saved_with_its_words(tmp_path):
    model, batch = stack().train(), rows(2048)
    allow = ("keep", "recompute", "offload")
    free = rmm_linear.fit(model, batch, "least", allow=allow, folder=str(tmp_path / "files"))
    assert free.plan.host
    free.plan.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json", folder=tmp_path / "files").blocks == free.plan.blocks
    rmm_linear.revert(model)
    limit = free.plan.host // 2
    less = rmm_linear.fit(model, batch, "least", allow=allow, folder=str(tmp_path / "files"), host_memory=limit)
    assert less.plan.host <= limit
    assert less.measured_peak >= free.measured_peak
    assert {word for block in free.plan.blocks for word in block.words} <= {*allow, "selective", "nested"}


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["llama", "roberta"])
def test_single_words_come_first_and_compositions_where_nothing_else_fits(kind, tmp_path):
    """The least that single words reach is met without compositions; below it, they are tried."""
    model, batch = network(kind)
    allow, folder = ("keep", "recompute", "sketch", "pack", "offload"), str(tmp_path)
    least = rmm_linear.fit(model, batch, "least", allow=allow, folder=folder, max_noise=1e9)
    rmm_linear.revert(model)
    again = rmm_linear.fit(model, batch, least.peak, allow=allow, folder=folder, max_noise=1e9)
    assert again.fits
    rmm_linear.revert(model)
    with pytest.raises(ValueError, match="cannot be met: the least is"):
        rmm_linear.fit(model, batch, int(0.7 * least.peak), allow=allow, folder=folder, max_noise=1e9)


@pytest.mark.thorough
def test_tiles_go_below_what_single_words_need(monkeypatch):
    torch.manual_seed(0)
    parts = [(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(3)]
    model, batch = nn.Sequential(*(nn.Sequential(*part) for part in parts)), torch.randn(2048, 32)

    def gradients():
        model.zero_grad()
        model(batch).square().mean().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    expected = gradients()
    with monkeypatch.context() as patched:
        patched.setattr(options.Candidates, "_add_compositions", lambda self: None)
        words = rmm_linear.fit(model, batch, "least", allow=("keep", "recompute", "tile"))
    rmm_linear.revert(model)
    tiled = rmm_linear.fit(model, batch, "least", allow=("keep", "recompute", "tile"))
    assert tiled.peak < 0.8 * words.peak
    assert any("tile" in block.words and block.rows == 128 for block in tiled.plan.blocks)
    assert tiled.measured_peak == pytest.approx(tiled.simulated_peak, rel=0.01)
    for found, exact in zip(gradients(), expected, strict=True):  # up to the order of sums of 2,048 products
        assert (found - exact).norm() <= 2048**0.5 * 2**-23 * exact.norm()
    rmm_linear.revert(model)
    # Of short sequences nothing runs in slices: a slice of 64 rows would be half of them.
    short = rmm_linear.fit(model, batch[:128], "least", allow=("keep", "recompute", "tile"))
    assert not any("tile" in block.words for block in short.plan.blocks)


def test_the_loss_in_chunks_counts_as_slices_and_is_exact():
    model, _ = network("llama")
    names = find_blocks(model)
    conversions = Conversions(model, names)
    for allowed, expected in ((("keep", "tile"), ["lm_head"]), (("keep",), []), (("pack",), names)):
        found = {name: conversions.settings(name, allowed) for name in names}
        able = [name for name, settings in found.items() if settings]
        assert set(able) <= {*expected}
        assert ("lm_head" in able) == ("lm_head" in expected)
    assert conversions.is_exact("lm_head", conversions.settings("lm_head", ("tile",))[0])
