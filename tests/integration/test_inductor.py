"""Inductor's code, and CUDA graphs: the gradients of eager code, fresh sketches, unbiased."""

import pytest
import torch
import torch._functorch.config
from cases import ROUGH_BODY
from helpers import ALL_ARCHITECTURES, batch_of, checkpointed, gradients, heavy_tailed, loss_of, tiny_model
from statistical import assert_unbiased

from rmm_linear import RMMConfig, RMMLinear, convert

pytestmark = pytest.mark.usefixtures("no_graphs_left")


@pytest.mark.stack
@pytest.mark.parametrize("architecture", ALL_ARCHITECTURES)
def test_inductor_makes_the_gradients_of_eager_code(one_seed, architecture):
    model = tiny_model(architecture, dropout=0.0).train()
    convert(model, **ROUGH_BODY)
    compiled = torch.compile(model, fullgraph=True)
    for length in (20, 24) if architecture != "vit" else (20,):
        results = []
        for network in (model, compiled):
            network.zero_grad()
            loss = loss_of(network, architecture, batch_of(architecture, length))
            loss.backward()
            results.append((loss.detach(), gradients(network)))
        (loss, eager), (again, ours) = results
        assert torch.allclose(loss, again, rtol=1e-5)
        for name, found in ours.items():
            assert torch.allclose(found, eager[name.removeprefix("_orig_mod.")], rtol=1e-3, atol=1e-6), name


@pytest.mark.stack
@pytest.mark.parametrize("options", [{}, {"activation_memory_budget": 0.1}], ids=["default", "little memory"])
def test_inductor_draws_a_new_sketch_and_is_unbiased(options):
    """Also where the compiler recomputes all it can."""
    model = checkpointed(dropout=0.0)
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
    model(x).square().sum().backward()
    exact = model.block[2].weight.grad.clone()
    convert(model, **ROUGH_BODY)
    compiled = torch.compile(model, fullgraph=True)

    def gradient(_):
        model.zero_grad()
        compiled(x).square().sum().backward()
        return model.block[2].weight.grad

    torch.manual_seed(4)
    with torch._functorch.config.patch(options):
        values = assert_unbiased(gradient, exact, draws=300, widest=0.1)
    assert len(set(values.tolist())) > 290


@pytest.mark.gpu
def test_reduce_overhead_draws_a_new_sketch_in_every_replay_and_is_unbiased():
    device = torch.device("cuda")
    layer = RMMLinear(64, 32, config=RMMConfig(ratio=0.25, min_rows=8), device=device)
    compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    x, y = (part.float().to(device) for part in heavy_tailed(256, 64, 32))

    def gradient(_):
        torch.compiler.cudagraph_mark_step_begin()
        layer.zero_grad()
        compiled(x).backward(y)
        return layer.weight.grad

    values = assert_unbiased(gradient, y.T @ x, draws=200, widest=0.1)
    assert len(set(values.tolist())) > 190
