"""Training does not notice a GradientProbe, and a step that goes wrong leaves nothing behind."""

import gc
import math
from contextlib import nullcontext

import pytest
import torch
from cases import CONFIG
from helpers import Mlp, checkpointed, gradients, heavy_tailed, six_features, snapshot, tiny_model
from probe_helpers import by_hand, close, padded_batch, recorded, values
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from rmm_linear import RMMLinear, convert
from rmm_linear.memory import peak
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


@pytest.mark.parametrize("converted", [True, False], ids=["converted", "plain"])
def test_a_models_weights_are_the_same_to_the_bit(converted):
    found = []
    for probed in (False, True):
        model = tiny_model("roberta").train()
        if converted:
            convert(model, memory=0.3, min_rows=1)
        torch.manual_seed(2)
        with GradientProbe(model, every=1, config=CONFIG) if probed else nullcontext():
            model(**padded_batch()).loss.backward()
        found.append(gradients(model))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def bytes_alive():
    """Of all tensors that Python can reach, whoever holds them; a compiler's fakes, which hold nothing, left out."""
    gc.collect()  # what tests before this one have left in cycles
    plain = (torch.Tensor, torch.nn.Parameter)
    tensors = [thing for thing in gc.get_objects() if type(thing) in plain and not torch._is_functional_tensor(thing)]
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.layout == torch.strided]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def test_between_looks_a_model_keeps_what_it_keeps_without_a_probe():
    """Of all inputs of its layers those live on that live on without a probe, and so do the bytes of all tensors."""
    model, batch = tiny_model("roberta", dropout=0.0).train(), padded_batch()
    convert(model, CONFIG)
    inputs = []
    for module in model.modules():
        if isinstance(module, RMMLinear):
            module.register_forward_pre_hook(
                lambda module, args: inputs.append(StorageWeakRef(args[0].untyped_storage()))
            )

    def step():
        """Which inputs are alive between the two passes and after them, the peak of the step, and what stays of it."""
        inputs.clear()
        with peak("cpu") as highest:
            loss = model(**batch).loss
            between = [not ref.expired() for ref in inputs]
            loss.backward()
        del loss
        return between, [not ref.expired() for ref in inputs], highest.bytes, bytes_alive()

    step()  # makes the gradients, which stay
    without = step()
    with GradientProbe(model, every=3) as probe:
        first, second, look, after = (step() for _ in range(4))
    assert {row.step for row in probe.rows} == {3}
    assert first == second == after == without
    assert all(look[0])  # a probe that holds is seen
    assert not all(without[0])
    assert look[2] > without[2]
    assert not any(look[1])
    assert look[3] == without[3]  # nor does a copy stay, of X or of Y


@pytest.mark.parametrize("converted", [True, False], ids=["converted", "plain"])
def test_x_lives_from_the_probe_steps_forward_to_its_backward(converted):
    """In a sketched layer nobody else holds X; between probes the probe does not either."""
    model, alive = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2)), []
    if converted:
        convert(model, CONFIG)
    model[1].register_forward_pre_hook(lambda module, args: alive.append(StorageWeakRef(args[0].untyped_storage())))
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


# Steps that go wrong


def test_a_step_without_backward_leaves_nothing():
    model, alive = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2)), []
    convert(model, CONFIG)
    model[1].register_forward_pre_hook(lambda module, args: alive.append(StorageWeakRef(args[0].untyped_storage())))
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
    """Dropout draws anew in the recomputation, so nobody can tell whose X that is."""

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


def test_a_probe_that_was_left_looks_no_more_and_lets_go():
    model, alive = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2)), []
    convert(model, CONFIG)
    before = snapshot(model)
    handle = model[1].register_forward_pre_hook(
        lambda module, args: alive.append(StorageWeakRef(args[0].untyped_storage()))
    )
    with GradientProbe(model, every=1) as probe:
        loss = model(six_features()).sum()
    handle.remove()
    assert snapshot(model) == before
    assert alive[0].expired()
    loss.backward()
    assert probe.rows == []


def test_two_probes_at_once_see_the_same():
    model = Mlp()
    before = snapshot(model)
    with GradientProbe(model, every=1, config=CONFIG) as outer:
        with GradientProbe(model, every=2, config=CONFIG) as inner:
            for _ in range(2):
                model(torch.randn(40, 12)).square().sum().backward()
        model(torch.randn(40, 12)).square().sum().backward()
    assert snapshot(model) == before
    assert inner.rows == [row for row in outer.rows if row.step == 2]
    assert [row.step for row in outer.rows] == [1, 1, 2, 2, 3, 3]


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


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("bits", [None, 4])
def test_what_is_not_finite_has_no_noise_and_raises_nothing(value, bits):
    model, x = Mlp(), torch.randn(40, 12)
    x[3, 4] = value
    config = CONFIG.replace(bits=bits)
    with GradientProbe(model, every=1, config=config) as probe:
        model(x).sum().backward()
    assert len(probe.rows) == 2
    assert all(math.isnan(number) for row in probe.rows for number in values(row))


@pytest.mark.parametrize("scale", [1e-15, 1.0, 1e15])
def test_alpha_is_exact_to_float32_whatever_the_scale(scale):
    x, y = heavy_tailed(300, 40, 30, torch.float32)
    alpha = by_hand(x, y, config=CONFIG, samples=None)[0]
    found = noises(scale * x, scale * y, None, None, None).alpha
    assert found == pytest.approx(alpha, rel=1e-6)


def test_a_gradient_of_zeros_has_no_noise():
    model = Mlp()
    with GradientProbe(model, every=1, config=CONFIG) as probe:
        (0 * model(torch.randn(40, 12)).sum()).backward()
    assert [(row.sgd_variance, row.sketch_variance) for row in probe.rows] == [(0, 0), (0, 0)]
    assert all(math.isnan(row.noise) and math.isnan(row.alpha) for row in probe.rows)


@pytest.mark.parametrize("shape", [(0, 12), (1, 12), (1, 1, 12), (3, 0, 12), (12,)])
def test_odd_shapes(shape):
    model = Mlp()
    with GradientProbe(model, every=1, config=CONFIG) as probe:
        model(torch.randn(shape)).sum().backward()
    assert [row.tokens for row in probe.rows] == [torch.Size(shape[:-1]).numel()] * 2
    assert all(math.isnan(row.noise) for row in probe.rows)  # no two samples


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(dtype):
    model = Mlp().to(dtype)
    x = torch.randn(40, 12, dtype=dtype)
    with GradientProbe(model, every=1, config=CONFIG, modules=["first"]) as probe:
        seen = recorded(model, lambda: model(x).square().sum().backward())
    ((x, y),) = seen["first"]
    assert probe.rows[0].bits == 8 * dtype.itemsize
    close(probe.rows[0], *by_hand(x, y, config=CONFIG, samples=None)[:3])
