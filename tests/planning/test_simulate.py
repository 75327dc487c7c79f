"""The simulated peak is that of the real step, to the byte."""

import pytest
import torch
from planning_graph_helpers import NETWORKS, llama, network, real_peak
from torch import nn

from rmm_linear.planning import simulate


@pytest.mark.parametrize("name", NETWORKS)
def test_simulated_peak_is_that_of_the_real_step(name):
    model, example = network(name)
    found = simulate(model, example)
    assert found.bytes == real_peak(model, example)
    assert sum(found.by_module.values()) == found.bytes
    assert found.moment.split(" of ")[0] in ("forward", "backward")
    assert max(now for now, _ in found.timeline) == found.bytes


@pytest.mark.parametrize("name", ["cnn", "mlp"])
def test_simulation_leaves_no_trace(name):
    model, example = network(name)
    model.eval()
    buffers = [buffer.clone() for buffer in model.buffers()]
    parameters = list(model.parameters())
    parameters[0].grad = torch.ones_like(parameters[0])
    before = torch.get_rng_state()
    simulate(model, example)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), buffers, strict=True))
    assert parameters[0].grad is not None
    assert parameters[1].grad is None
    assert not model.training


def test_parameter_gradients_are_counted_and_parameters_are_not():
    layer = nn.Linear(1000, 1000, bias=False)
    assert simulate(layer, torch.ones(1, 1000)).bytes // 4 // 1000**2 == 1


def test_a_model_without_trained_parameters_is_refused():
    with pytest.raises(ValueError, match="depends on its trained parameters"):
        simulate(nn.ReLU(), torch.ones(3))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ["roberta", "llama"])
def test_masks_are_those_that_values_ask_for(name, padded):
    """A mask of ones is left out, and attention then needs no copies of keys and values for groups of heads."""
    model, example = network(name)
    if name == "llama":
        torch.manual_seed(0)
        model = llama(num_key_value_heads=1)
    mask = torch.ones_like(example["attention_mask"])
    mask[0, -3:] = 1 - padded
    example = {**example, "attention_mask": mask}
    found = simulate(model, example).bytes
    assert found == real_peak(model, example)
