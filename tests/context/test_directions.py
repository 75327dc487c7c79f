"""Fixed directions: unbiased, less noise, refreshed between steps, never from the step that they are used in."""

import pytest
import torch
from helpers import selective
from statistical import assert_unbiased
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from rmm_linear import RMMConfig, convert, load_sketch_state, sketch_state
from rmm_linear.context.directions import Directions
from rmm_linear.conversion.state import sketch_tensors
from rmm_linear.memory import track_saved
from rmm_linear.sketches import TokenMask
from rmm_linear.variance import GradientProbe

ROWS, FEATURES, COUNT, OUT = 80, 64, 4, 50


class Layers(nn.Module):
    """Three layers that read one input, as query, key and value do."""

    def __init__(self, out=OUT):
        super().__init__()
        self.query, self.key, self.last = nn.Linear(FEATURES, out), nn.Linear(FEATURES, out), nn.Linear(out, 3)

    def forward(self, x, attention_mask=None):
        return self.last(self.query(x) + self.key(x))


def directed(rows=ROWS, seed=0):
    """Rows that lie near four directions, which are the same for every seed."""
    basis = torch.randn(COUNT, FEATURES, generator=torch.Generator().manual_seed(99))
    generator = torch.Generator().manual_seed(seed)
    x = 5 * torch.randn(rows, COUNT, generator=generator) @ basis + torch.randn(rows, FEATURES, generator=generator)
    return x.view(4, rows // 4, FEATURES)


def converted(out=OUT, **fields):
    torch.manual_seed(0)
    model = Layers(out)
    report = convert(model, RMMConfig(operations=("linear",), min_rows=8, directions=COUNT, **fields))
    return model, report.context


def step(model, x, seed=0, mask=None):
    model.zero_grad()
    torch.manual_seed(seed)
    y = torch.randn(4, x.shape[1], 3, generator=torch.Generator().manual_seed(7))
    y = y if mask is None else y * mask.unsqueeze(-1)
    (model(x, mask) * y).sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if "weight" in name}


@pytest.mark.diagonal
@pytest.mark.parametrize("bits", [4, 3, 1.6])
@pytest.mark.parametrize(("masked", "out"), [(False, OUT), (True, OUT), (True, 80)], ids=["all", "padding", "wide"])
def test_the_gradient_is_unbiased_with_less_noise(bits, masked, out):
    model, context = converted(out, bits=bits)
    x = directed()
    mask = (torch.arange(20) < torch.tensor([20, 15, 18, 12]).unsqueeze(1)).long() if masked else None
    exact_model = Layers(out)
    exact_model.load_state_dict(model.state_dict())
    exact = step(exact_model, x, mask=mask)["query.weight"]
    before = float((step(model, x, 0, mask)["query.weight"] - exact).square().sum())
    for seed in range(4):
        step(model, directed(seed=seed + 1), mask=mask)
    assert context.directions[0].basis.shape == (FEATURES, COUNT)
    for one in context.directions.values():
        one.is_learning = False
    assert_unbiased(lambda seed: step(model, x, seed, mask)["query.weight"], exact, draws=50, widest=0.04)
    after = sum(float((step(model, x, seed, mask)["query.weight"] - exact).square().sum()) for seed in range(20)) / 20
    assert after < before / 5  # 1 / 26 of the energy is outside of the directions


def test_the_probe_takes_them_out_too():
    model, context = converted(bits=3)
    x = directed()
    exact_model = Layers()
    exact_model.load_state_dict(model.state_dict())
    exact = step(exact_model, x)
    for seed in range(4):
        step(model, directed(seed=seed + 1))
    for one in context.directions.values():
        one.is_learning = False
    with GradientProbe(model, every=1) as probe:
        step(model, x)
    found = {row.module: row.sketch_variance for row in probe.rows}
    for name in ("query", "key"):  # the key reads what was saved for the query
        weight = f"{name}.weight"
        drawn = sum(float((step(model, x, seed)[weight] - exact[weight]).square().sum()) for seed in range(40)) / 40
        assert 0.7 < found[name] / drawn < 1.4  # with all of X it is 20 times as large


def test_a_basis_is_used_from_the_step_after_the_one_that_has_shown_it():
    model, context = converted()
    model(directed()).sum().backward()
    first = context.directions[0]
    random = first.basis
    torch.testing.assert_close(random.T @ random, torch.eye(COUNT), atol=1e-5, rtol=0)
    assert first.pending is not None
    model(directed()).sum().backward()
    used = first.basis
    assert used is not random
    assert first.pending is not used
    assert context.directions[1].calls == 0  # the key reads what was saved for the query
    torch.testing.assert_close(used.T @ used, torch.eye(COUNT), atol=1e-5, rtol=0)
    model(directed()).sum()  # without a backward pass, a recomputation may be to come
    model(directed()).sum().backward()
    assert first.basis is not used


def test_bytes_are_the_formula():
    model, _ = converted(bits=3)
    x = directed().requires_grad_()
    config = RMMConfig(bits=3, min_rows=8, directions=COUNT)
    small = RMMConfig(bits=3, min_rows=8)
    expected = config.spec(ROWS, FEATURES, 4).bytes(ROWS, FEATURES, 4, config.directions)
    assert expected == small.spec(ROWS, FEATURES, 4).bytes(ROWS, FEATURES, 4) + ROWS * (COUNT + 1)
    last = small.spec(ROWS, OUT, 4).bytes(ROWS, OUT, 4)
    for _ in range(3):  # from the first step on
        with track_saved(model) as ledger:
            output = model(x)
        assert ledger.total == expected + last  # the basis is kept from step to step
        output.sum().backward()


def test_narrow_inputs_and_sketches_have_no_directions():
    model, context = converted(memory=0.03, bits=8)
    for _ in range(3):
        step(model, directed())
    assert all(one.basis is None for one in context.directions.values())
    model, context = converted()
    for _ in range(3):
        step(model, directed())
    assert context.directions[0].basis is not None
    assert context.directions[2].basis is None
    assert not Directions(0).fits(10_000)
    assert Directions(16).fits(256)
    assert not Directions(16).fits(255)


def test_a_resumed_run_goes_on_to_the_bit():
    model, _ = converted()
    for seed in range(3):
        step(model, directed(seed=seed))
    other, context = converted()
    other.load_state_dict(model.state_dict())
    load_sketch_state(other, sketch_state(model), sketch_tensors(model))
    for seed in range(3, 9):
        x = directed(seed=seed)
        gradients, others = step(model, x, seed), step(other, x, seed)
        assert all(torch.equal(gradients[name], others[name]) for name in gradients)
    assert context.directions[0].calls == 9
    with pytest.raises(ValueError, match="of layers with fixed directions"):
        load_sketch_state(plain(), sketch_state(plain()), sketch_tensors(model))


def plain():
    model = Layers()
    convert(model, RMMConfig(operations=("linear",), min_rows=8))
    return model


def test_an_input_that_overflows_teaches_nothing():
    one = Directions(COUNT)
    one.basis_for(torch.full((10, FEATURES), float("inf")), None)
    assert one.pending is None
    one.basis_for(directed()[0], TokenMask.of(torch.ones(20)).index)
    assert one.pending is not None


@pytest.mark.parametrize("steps", [0, 2], ids=["fresh", "learned"])
def test_a_simulated_step_saves_as_much(steps):
    model, _ = converted(bits=3)
    for seed in range(steps):
        step(model, directed(seed=seed))
    mode = FakeTensorMode()

    def codes(run):
        kept = []
        with saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor.detach(), lambda tensor: tensor):
            run()
        return [tuple(tensor.shape) for tensor in kept if tensor.dtype == torch.uint8]

    x, parameters = mode.from_tensor(directed()), dict(model.named_parameters())
    with mode:
        fakes = {name: mode.from_tensor(parameter) for name, parameter in parameters.items()}
        simulated = codes(lambda: torch.func.functional_call(model, fakes, (x,)))
    assert (ROWS, COUNT) in simulated
    assert simulated == codes(lambda: model(directed()))


def test_selective_checkpoints_find_their_operators_again():
    """Directions are refreshed in the second and fourth forward pass, and in no recomputation."""
    policy = selective(lambda op: op is torch.ops.aten.mm.default or op is torch.ops.aten.addmm.default)
    model, context = converted(bits=3, checkpointed="packed")
    for seed in range(6):
        x = directed(seed=seed)
        model.zero_grad()
        torch.manual_seed(seed)
        checkpoint(model, x, use_reentrant=False, context_fn=policy).square().sum().backward()
        assert model.query.weight.grad.isfinite().all()
    assert context.directions[0].calls == 6


def test_a_reentrant_checkpoint_learns_none_and_pays_for_none():
    model, context = converted(bits=3, checkpointed="packed")
    for seed in range(3):
        checkpoint(model, directed(seed=seed).requires_grad_(), use_reentrant=True).square().sum().backward()
    assert model.query.weight.grad.isfinite().all()
    assert all(one.basis is None for one in context.directions.values())


def test_nothing_is_learned_while_a_graph_is_captured(monkeypatch):
    model, context = converted()
    monkeypatch.setattr("rmm_linear.context.directions.is_capturing", lambda device: True)
    for seed in range(3):
        step(model, directed(seed=seed))
    assert context.directions[0].basis is None
    assert not context.directions[0].calls
