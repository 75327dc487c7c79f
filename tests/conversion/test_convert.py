"""convert and revert: the layers asked for, nothing else, in place, and all of it undone."""

import pytest
import torch
from cases import ROUGH
from helpers import ARCHITECTURES, Mlp, gradients, seeds_of, snapshot, tiny_model, token_ids
from torch import nn
from torch.nn.utils import parametrize

from rmm_linear import RMMLinear, convert, revert

# Everything else about the model stays


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_gradients_but_the_sketched_weights_are_exact(architecture):
    """Embeddings, norms and biases see exact gradients, through every layer and dropout mask."""
    model, ids = tiny_model(architecture).train(), token_ids()
    report = convert(model, dry_run=True, **ROUGH)
    sketched = {f"{name}.weight" for name in report.converted}

    def run():
        model.zero_grad()
        torch.manual_seed(11)
        model(input_ids=ids, labels=ids if architecture in ("gpt2", "llama") else ids[:, 0] % 2).loss.backward()
        return gradients(model)

    before = run()
    convert(model, **ROUGH)
    after = run()
    assert before.keys() == after.keys()
    for name in before.keys() - sketched:
        assert torch.allclose(after[name], before[name], rtol=1e-4, atol=1e-7), name
    many = [n for n in sketched if "classifier" not in n and "pooler" not in n]
    assert all(not torch.allclose(after[name], before[name], rtol=1e-2) for name in many)


def test_parameters_are_the_same_objects_frozen_and_tied_as_before():
    model = Mlp(features=16, hidden=16, outputs=16)
    model.second.weight = model.first.weight
    model.first.bias.requires_grad_(False)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for change in (lambda: convert(model), lambda: revert(model)):
        change()
        now = dict(model.named_parameters(remove_duplicate=False))
        assert now.keys() == parameters.keys()
        assert all(now[name] is parameters[name] for name in now)
        assert model.first.weight is model.second.weight
        assert not model.first.bias.requires_grad


def test_a_tied_module_is_converted_once_and_stays_tied():
    shared = nn.Linear(4, 4)
    model = nn.ModuleDict({"a": shared, "b": shared})
    report = convert(model)
    assert list(report.converted) == ["a"]
    assert model["a"] is model["b"] is shared
    assert type(shared) is RMMLinear


def test_tied_module_matches_by_its_first_name():
    shared = nn.Linear(4, 4)
    with pytest.raises(ValueError, match="matches none"):
        convert(nn.ModuleDict({"a": shared, "b": shared}), target_modules=["b"])


def test_hooks_stay_and_fire():
    model, calls = Mlp(), []
    model.register_forward_hook(lambda *_: calls.append("model"))
    model.first.register_forward_hook(lambda *_: calls.append("first"))
    for change in (lambda: convert(model), lambda: revert(model), lambda: None):
        model(torch.randn(2, 12))
        assert calls == ["first", "model"]
        calls.clear()
        change()


def test_revert_leaves_no_trace():
    model = tiny_model("gpt2")
    before = snapshot(model)
    convert(model)
    assert snapshot(model) != before
    assert revert(model) is model
    assert snapshot(model) == before


def test_a_layer_that_was_parametrized_after_its_conversion_stays_so():
    """PyTorch made a class of ours for it, which has the weight as a property."""
    model, twin, x = Mlp(), Mlp(), torch.randn(50, 12)
    twin.load_state_dict(model.state_dict())
    convert(model, **ROUGH)
    for one in (model, twin):
        parametrize.register_parametrization(one.first, "weight", nn.Softplus())
    revert(model)
    assert isinstance(model.first, nn.Linear)
    assert not isinstance(model.first, RMMLinear)
    for one in (model, twin):
        one(x).square().mean().backward()
    exact = gradients(twin)
    assert exact.keys() == gradients(model).keys()
    assert all(torch.equal(gradients(model)[name], exact[name]) for name in exact)


def test_revert_of_a_part_leaves_the_rest_working():
    """The dropout masks too: the rest still belongs to a step of the whole model."""
    model, x = Mlp(dropout=0.5), torch.randn(50, 12)
    torch.manual_seed(4)
    output = model(x)
    convert(model, **ROUGH)
    revert(nn.ModuleList([model.second]))
    assert (type(model.first), type(model.second)) == (RMMLinear, nn.Linear)
    torch.manual_seed(4)
    assert torch.equal(model(x), output)
    seeds = seeds_of(lambda: [model(x) for _ in range(3)])
    assert len(set(seeds)) == 3
    revert(model)
    assert not model._forward_pre_hooks


def test_a_backward_pass_may_come_after_revert():
    """What was compressed is used; what the conversion would have learned is gone with it."""
    model = tiny_model("roberta", dropout=0.2).train()
    found = []
    for reverts in (False, True):
        report = convert(model, min_rows=4)
        report.context.salt = 1
        model.zero_grad()
        torch.manual_seed(3)
        loss = model(input_ids=token_ids(), labels=torch.tensor([0, 1, 0, 1])).loss
        if reverts:
            revert(model)
        loss.backward()
        found.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
        if not reverts:
            revert(model)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
