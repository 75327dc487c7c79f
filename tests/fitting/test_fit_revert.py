"""A fit leaves nothing but its plan, and revert(model) gives back the model that was there before, to the bit."""

import contextlib
import copy
import random

import pytest
import torch
from fit_cases import (
    Normed,
    assert_untouched,
    differing,
    network,
    planned,
    rows,
    snapshot,
    stack,
    step,
    structure,
    twins,
)
from torch import nn

import rmm_linear
from rmm_linear.conversion.exact import converted_modules
from rmm_linear.fitting.resident import Resident
from rmm_linear.planning import BlockPlan, PlannedBlock

CHOICES = [
    ("keep", ""),
    ("recompute", ""),
    ("selective", ""),
    ("nested", ""),
    ("offload", ""),
    ("convert", "linears"),
    ("convert", "others"),
    ("convert", "wide"),
    ("convert", "tenth"),
    ("convert", "narrow"),
]
MIXED = {"memory": 0.75, "allow": ("keep", "recompute", "sketch", "pack"), "max_noise": 1e9}


def assert_is_twin(model, twin, example):
    assert structure(model) == structure(twin)
    assert differing(step(model, example), step(twin, example)) == []


@pytest.mark.diagonal
@pytest.mark.parametrize(("choice", "setting"), CHOICES)
@pytest.mark.parametrize("kind", ["stack", "roberta", "llama"])
def test_a_reverted_model_is_its_twin(kind, choice, setting, tmp_path):
    """Classes, attributes, configuration, loss, gradients, buffers and random numbers, after a step by the plan."""
    model, example = network(kind)
    model, twin = twins(model)
    state = copy.deepcopy(model.state_dict())
    planned(model, choice, setting, tmp_path)
    if choice != "keep":
        assert structure(model) != structure(twin)
    step(model, example, seed=5)
    model.load_state_dict(state)
    model.zero_grad()
    assert rmm_linear.revert(model) is model
    assert_is_twin(model, twin, example)
    with pytest.raises(ValueError, match="without converted modules"):
        rmm_linear.revert(model)


@pytest.mark.parametrize(
    ("memory", "allow"),
    [(1.0, ("keep",)), (0.9, ("recompute",)), (0.8, ("sketch", "pack")), (0.9, ("offload",))],
)
def test_revert_after_a_fit(memory, allow, tmp_path):
    """Of every kind; where every block stays as it is, there is a plan to revert too."""
    model, twin = twins(stack().train())
    example = rows(2048) if "offload" in allow else rows()  # small tensors are not offloaded
    report = rmm_linear.fit(model, example, memory, allow=allow, max_noise=1e9, folder=str(tmp_path))
    assert report.is_exact == (allow == ("keep",))
    assert report.fits
    with pytest.raises(ValueError, match=r"Call rmm_linear\.revert\(model\) first"):
        rmm_linear.fit(model, example, memory)
    rmm_linear.revert(model)
    assert_is_twin(model, twin, example)
    assert "rmm_plan" not in vars(model)


def with_gradients():
    model = stack(2).train()
    model(rows()).sum().backward()
    return model


def partly_in_eval():
    model = stack().train()
    model[1].eval()
    model[2].norm.eval()
    model[3].inside.eval()
    return model


def partly_frozen():
    model = stack(2).eval()
    model[1].requires_grad_(False)
    model[2].inside[0].weight.requires_grad_(False)
    return model


@pytest.mark.one_of(3)
@pytest.mark.parametrize("make", [with_gradients, partly_in_eval, partly_frozen])
def test_a_fit_changes_nothing_but_what_the_plan_does(make):
    model = make()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    example, batch, before = rows(), rows(), snapshot(model)
    state = copy.deepcopy(optimizer.state_dict())
    report = rmm_linear.fit(model, example, optimizer=optimizer, **MIXED)
    assert not report.is_exact
    rmm_linear.revert(model)
    assert_untouched(model, before)
    assert torch.equal(example, batch)
    assert str(optimizer.state_dict()) == str(state)


def test_layers_in_eval_mode_train_by_a_plan_that_converts_the_others():
    model = partly_in_eval()
    planned(model, "convert", "tenth")
    found = step(model, rows())
    assert all(f"gradient of {name}" in found for name, _ in model.named_parameters())
    assert {type(one).__module__.partition(".")[0] for one in model[1].modules()} == {"torch", "fit_cases"}
    assert type(model[2].inside[0]) is not nn.Linear


class Reckless(nn.Module):
    """Changes its input, draws numbers outside of PyTorch, and replaces a buffer."""

    def __init__(self):
        super().__init__()
        self.inner = stack(2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        random.random()
        self.calls = self.calls + 1
        with torch.no_grad():
            x.add_(1)
        return self.inner(x)


@pytest.mark.parametrize("memory", [0.8, 1.0])
def test_the_batch_buffers_and_random_numbers_of_python_stay(memory):
    model, example = Reckless().train(), rows().requires_grad_()
    buffer, value, numbers = model.calls, model.calls.clone(), random.getstate()
    rmm_linear.fit(model, example, **{**MIXED, "memory": memory})
    assert torch.equal(example, rows())
    assert example.grad is None
    assert model.calls is buffer
    assert torch.equal(buffer, value)
    assert random.getstate() == numbers


class Bomb(nn.Module):
    """Fails at its call of a given number, or in the first backward pass from then on."""

    calls, at, error, in_backward = 0, -1, RuntimeError, False

    def __init__(self):
        super().__init__()
        self.inner = Normed()

    def forward(self, x):
        Bomb.calls += 1
        output = self.inner(x)
        if Bomb.in_backward and Bomb.calls >= Bomb.at and output.requires_grad:
            output.register_hook(self.fail)
        elif not Bomb.in_backward and Bomb.calls == Bomb.at:
            raise Bomb.error("bomb")
        return output

    def fail(self, gradient):
        raise Bomb.error("bomb")


def bombs():
    model = nn.Sequential(nn.Linear(8, 16), Bomb(), Bomb(), nn.Linear(16, 2)).train()
    model(rows()).sum().backward()
    Bomb.calls = 0
    return model


@pytest.mark.diagonal
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("share", [0.0, 0.4, 0.7, 1.0])
def test_a_fit_that_is_interrupted_leaves_the_model_as_it_was(error, share, monkeypatch):
    """At any moment of it: while it measures memory, simulates, times, measures noise, or checks."""
    calls = 90  # of some 100
    model = bombs()
    before = snapshot(model)
    monkeypatch.setattr(Bomb, "at", 1 + int(share * calls))
    monkeypatch.setattr(Bomb, "error", error)
    monkeypatch.setattr(Bomb, "in_backward", share > 0.5)
    # Options that raise a RuntimeError may be left out.
    with pytest.raises(error, match="bomb") if error is KeyboardInterrupt else contextlib.suppress(error):
        rmm_linear.fit(model, rows(), **MIXED)
        rmm_linear.revert(model)
    assert Bomb.calls >= Bomb.at
    assert_untouched(model, before)
    assert "rmm_plan" not in vars(model)


def test_a_fit_that_is_refused_leaves_the_model_as_it_was():
    model = with_gradients()
    before = snapshot(model)
    with pytest.raises(ValueError, match="memory=30000 cannot be met: the least is"):
        rmm_linear.fit(model, rows(), 30000, allow=("keep", "recompute", "pack"))
    assert_untouched(model, before)
    with pytest.raises(ValueError, match="depends on its trained parameters"):
        rmm_linear.fit(model.requires_grad_(False), rows(), 0.5)
    assert "rmm_plan" not in vars(model)


def test_a_measured_peak_above_the_budget_is_planned_for(monkeypatch):
    """Also where the exact model was simulated to fit."""
    model = stack(2, dropout=0.0).train()
    exact = rmm_linear.fit(model, rows(), "1GB")
    rmm_linear.revert(model)
    measured = Resident.measured
    monkeypatch.setattr(Resident, "measured", lambda *args: int(1.2 * measured(*args)))
    report = rmm_linear.fit(model, rows(), int(1.1 * exact.exact_peak), allow=("keep", "recompute"))
    assert report.fits
    assert not report.is_exact
    rmm_linear.revert(model)
    with pytest.raises(ValueError, match=r"cannot be met: the least is"):
        rmm_linear.fit(model, rows(), 0.5, allow=("keep", "recompute"))


def test_a_second_plan_is_refused_and_revert_undoes_what_came_after_a_plan():
    model = stack(2).train()
    first, second = (BlockPlan([PlannedBlock(name, "recompute")]) for name in ("1", "2"))
    first.apply(model)
    with pytest.raises(ValueError, match="another plan already"):
        second.apply(model)
    assert model.rmm_plan is first
    rmm_linear.convert(model)
    rmm_linear.revert(model)
    assert not hasattr(model, "rmm_plan")
    assert not converted_modules(model)
    assert "forward" not in vars(model[1])
