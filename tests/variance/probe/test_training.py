"""Training does not notice a GradientProbe, and a step that goes wrong leaves nothing behind."""

import gc
import math
from contextlib import nullcontext

import pytest
import torch
from cases import CONFIG
from helpers import Mlp, checkpointed, heavy_tailed, six_features, snapshot, tiny_model
from probe_helpers import by_hand, close, padded_batch, probed, watched
from torch import nn
from torch.utils.checkpoint import checkpoint

from rmm_linear import RMMLinear, convert
from rmm_linear.context.learned import STEPS
from rmm_linear.memory.peak import LiveTensors, Peak
from rmm_linear.variance import GradientProbe
from rmm_linear.variance.probe.call import noises

# Training does not notice


@pytest.mark.parametrize("reentrant", [None, True, False])
@pytest.mark.parametrize("converted", [True, False], ids=["converted", "plain"])
def test_weights_are_the_same_to_the_bit(reentrant, converted):
    found = []
    for every in (None, 1, 2):
        model = checkpointed(use_reentrant=reentrant)
        if converted:
            convert(model, memory=0.3, min_rows=1)  # bits="auto"
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        torch.manual_seed(2)
        with GradientProbe(model, every=every, config=CONFIG) if every else nullcontext() as probe:
            for step in range(8):
                model(six_features() * (step + 1)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        if every:
            assert len(probe.rows) == 3 * 8 // every
        found.append(([p.detach().clone() for p in model.parameters()], torch.get_rng_state()))
    for weights, state in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(weights, found[0][0], strict=True))
        assert torch.equal(state, found[0][1])


def test_between_measurements_a_model_holds_what_it_holds_without_a_probe():
    """Of all inputs of its layers those live on that live on without a probe, and so do the bytes of all tensors."""
    model, batch = tiny_model("roberta", dropout=0.0).train(), padded_batch()
    convert(model, CONFIG)
    layers = [watched(module) for module in model.modules() if isinstance(module, RMMLinear)]

    def step():
        """Return which inputs are alive between the two passes and after them, the peak, and the bytes left."""
        highest = Peak()
        with LiveTensors(highest) as live:
            loss = model(**batch).loss
            between = [not alive[-1].expired() for alive in layers]
            loss.backward()
            del loss
            left = live.now
        return between, [not alive[-1].expired() for alive in layers], highest.bytes, left

    for _ in range(STEPS + 1):  # the first makes the gradients, which stay
        step()
    without = step()
    with GradientProbe(model, every=3) as probe:
        first, second, measured, after = (step() for _ in range(4))
    assert {row.step for row in probe.rows} == {3}
    assert first == second == after == without
    assert all(measured[0])  # a probe that holds is seen
    assert not all(without[0])
    assert measured[2] > without[2]
    assert not any(measured[1])
    assert measured[3] == without[3]  # nor does a copy stay, of X or of Y


@pytest.mark.parametrize("converted", [True, False], ids=["converted", "plain"])
def test_x_lives_from_the_probe_steps_forward_to_its_backward(converted):
    """In a sketched layer nothing else holds X; between measurements the probe does not either."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2))
    if converted:
        convert(model, CONFIG)
    alive = watched(model[1])
    with GradientProbe(model, every=2, config=CONFIG) as probe:
        for step in (1, 2, 3):
            loss = model(six_features()).square().sum()
            assert alive[-1].expired() == (converted and step != 2)
            loss.backward()
            assert alive[-1].expired()
            assert not any(isinstance(value, torch.Tensor) for row in probe.rows for value in vars(row).values())
    assert len(probe.rows) == 2


def test_no_hook_stays_between_probes_but_one_on_the_model():
    model = Mlp()
    before = snapshot(model)
    with GradientProbe(model, every=2, config=CONFIG):
        for _ in range(3):  # the hooks of a probe step go when the next pass begins
            model(torch.randn(40, 12)).sum().backward()
        inside = snapshot(model)
    assert [entry[3:] for entry in inside] == [(0, 1), *[(0, 0)] * 3]
    assert snapshot(model) == before


def test_a_compiled_model_is_whole_but_where_it_is_probed():
    """No hook is there to be traced, and a pass that is probed runs as it is written."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    model = Mlp()
    with GradientProbe(model, every=None, config=CONFIG) as probe:
        compiled = torch.compile(model, backend=backend)
        for step in range(1, 7):
            if step % 3 == 0:
                probe.arm(step)
            compiled(torch.randn(40, 12)).sum().backward()
            if step % 3 == 0:
                probe.settle()
    assert len(graphs) == 1
    assert {row.step for row in probe.rows} == {3, 6}


def test_compiled_code_is_compiled_again_whatever_ends_first():
    """Two probes may be armed at once, one may be dropped, and a loop may settle nothing."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    model, x = Mlp(), torch.randn(40, 12)
    compiled = torch.compile(model, backend=backend)

    def is_eager():
        torch.compiler.reset()
        graphs.clear()
        compiled(x).sum().backward()
        return not graphs

    with GradientProbe(model, every=None, config=CONFIG) as first, GradientProbe(model, every=None) as second:
        first.arm(1)
        second.arm(1)
        assert is_eager()
        first.settle()
        assert is_eager()
        second.settle()
        assert not is_eager()
        first.arm(2)
        assert is_eager()
        assert is_eager()  # the pass behind it ends it
        assert not is_eager()
    dropped = GradientProbe(model, every=None)
    dropped.arm(1)
    assert is_eager()
    del dropped
    gc.collect()
    assert not is_eager()


# Steps that go wrong


def test_a_step_without_backward_leaves_nothing():
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2))
    convert(model, CONFIG)
    alive = watched(model[1])
    with GradientProbe(model, every=1) as probe:
        loss = model(six_features()).sum()
        del loss
        gc.collect()
        assert alive[0].expired()
        model(six_features()).sum().backward()
    assert {row.step for row in probe.rows} == {2}


def test_an_exception_inside_forward_is_passed_on():
    model = Mlp()
    before = snapshot(model)
    with GradientProbe(model, every=1, config=CONFIG) as probe:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.randn(40, 13))
        model(torch.randn(40, 12)).sum().backward()
    assert [row.step for row in probe.rows] == [2, 2]
    assert snapshot(model) == before


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("preserve", [True, False])
def test_an_input_that_is_not_the_same_again_is_reported_once(reentrant, preserve, caplog):
    """Dropout draws other numbers in the recomputation, so whose X that is cannot be told."""

    class Dropped(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.dropout = nn.Linear(6, 6), nn.Dropout(0.5)

        def forward(self, x):
            def region(x):
                return self.layer(self.dropout(x))

            return checkpoint(region, x, use_reentrant=reentrant, preserve_rng_state=preserve)

    model = Dropped()
    with GradientProbe(model, every=1, config=CONFIG) as probe:
        for _ in range(3):
            model(six_features()).sum().backward()
    assert len(probe.rows) == (3 if preserve else 0)
    assert caplog.text.count("layer: activation checkpointing ran it again with another input") == (not preserve)
    assert preserve or "preserve_rng_state must be True" in caplog.text


def test_a_probe_that_was_left_measures_no_more_and_lets_go():
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2))
    convert(model, CONFIG)
    alive = watched(model[1])
    before = snapshot(model)
    with GradientProbe(model, every=1) as probe:
        loss = model(six_features()).sum()
    assert snapshot(model) == before
    assert alive[0].expired()
    loss.backward()
    assert probe.rows == []


def test_a_probe_is_entered_once_at_a_time():
    probe = GradientProbe(Mlp())
    with pytest.raises(RuntimeError, match="entered once at a time"), probe, probe:
        pass
    with probe:  # and can be entered again afterwards
        probe.model(torch.randn(4, 12))
    assert probe.passes == 1


def test_a_graph_that_is_walked_twice_is_measured_once():
    model = Mlp()
    with GradientProbe(model, every=1, config=CONFIG) as probe:
        loss = model(torch.randn(40, 12)).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert len(probe.rows) == 2


def test_an_input_that_is_overwritten_is_reported(caplog):
    """A sketched layer does not mind, but the probe would compute with another X."""
    model = nn.Sequential(nn.Linear(6, 6))
    convert(model, CONFIG)
    with GradientProbe(model, every=1) as probe:
        x = six_features().detach()
        loss = model(x).sum()
        x.add_(1)
        loss.backward()
    assert probe.rows == []
    assert "0: its input was overwritten" in caplog.text


@pytest.mark.parametrize("scale", [1e-15, 1.0, 1e15])
def test_alpha_is_exact_to_float32_whatever_the_scale(scale):
    x, y = heavy_tailed(300, 40, 30, torch.float32)
    alpha = by_hand(x, y, config=CONFIG, samples=None)[0]
    found = noises(scale * x, scale * y, None, None, None).alpha
    assert found == pytest.approx(alpha, rel=1e-6)


ODD = [(0, 12), (1, 12), (1, 1, 12), (3, 0, 12), (12,)]  # no two samples


@pytest.mark.parametrize(
    ("shape", "scale"), [*(((40, 12), scale) for scale in (0.0, math.nan, math.inf)), *((shape, 1.0) for shape in ODD)]
)
@pytest.mark.parametrize("bits", [None, 4])
def test_zeros_few_samples_and_what_is_not_finite_have_no_variance_ratio(shape, scale, bits):
    model = Mlp()
    with GradientProbe(model, every=1, config=CONFIG.replace(bits=bits)) as probe:
        (scale * model(torch.randn(shape)).sum()).backward()
    assert [row.tokens for row in probe.rows] == [torch.Size(shape[:-1]).numel()] * 2
    assert all(math.isnan(row.noise) for row in probe.rows)
    if scale == 0:
        assert [(row.sgd_variance, row.sketch_variance) for row in probe.rows] == [(0, 0), (0, 0)]
        assert all(math.isnan(row.alpha) for row in probe.rows)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(dtype):
    model, x = Mlp().to(dtype), torch.randn(40, 12, dtype=dtype)
    (row,), seen = probed(model, lambda: model(x).square().sum().backward(), config=CONFIG, modules=["first"])
    assert row.bits == 8 * dtype.itemsize
    close(row, *by_hand(*seen["first"][0], config=CONFIG, samples=None)[:3])
