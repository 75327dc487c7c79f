"""The peak of a step whose loss is computed in chunks is that of its real storages: shapes alone take no bytes."""

import pytest
import torch
from planning_graph_helpers import real_peak
from storage_counter import highest
from torch import fx, nn
from transformers import LlamaConfig, LlamaForCausalLM

from rmm_linear import convert, fit
from rmm_linear.planning import measure, simulate
from rmm_linear.planning.graphs.record import graph_costs
from rmm_linear.planning.step.step import run_step

BATCH, TOKENS, WORDS = 4, 256, 8000
LOGITS = BATCH * TOKENS * WORDS * 4  # bytes in float32


def llama(device="cpu", dtype=torch.float32):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        use_cache=False,
    )  # fmt: skip
    with torch.device(device):
        return LlamaForCausalLM(config).to(dtype).train()


def texts(device="cpu"):
    ids = torch.randint(0, WORDS, (BATCH, TOKENS), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids.to(device), "labels": ids.to(device)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("operations", [None, ("logits",), "all"], ids=["exact", "chunks", "packed"])
def test_the_peak_is_that_of_the_storages_on_the_cpu(operations, dtype):
    models = llama(dtype=dtype), llama("meta", dtype)
    if operations is not None:
        for model in models:
            convert(model, **({} if operations == "all" else {"operations": operations}))
    real, meta = models
    example = texts()
    run_step(real, example)  # what a first step tries is no part of a step
    expected = highest(real, example, lambda: run_step(real, example))
    assert real_peak(real, example) == expected
    assert simulate(real, example).bytes == expected
    assert simulate(meta, texts("meta")).bytes == expected
    assert (expected > LOGITS) == (operations is None)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_fit_meets_a_budget_below_the_logits(device):
    model = llama(device)
    memory = LOGITS + sum(parameter.nbytes for parameter in model.parameters())
    report = fit(model, texts(device), memory=memory, max_noise=1e9)
    assert report.fits
    assert report.exact_peak > memory
    if device == "cpu":
        run_step(model, texts())
        assert highest(model, texts(), lambda: run_step(model, texts())) < LOGITS


class Shapes(nn.Module):
    """Saves a tensor without bytes beside its input."""

    def forward(self, x):
        shapes = x.new_empty(1000, device="meta", requires_grad=True).exp()
        return x.sigmoid().view(-1)[: shapes.shape[0]]


def test_planners_count_no_tensors_on_the_meta_device():
    x = torch.ones(10, 100, requires_grad=True)
    model = nn.Sequential(nn.Sequential(nn.Linear(100, 100), Shapes()), nn.Sequential(nn.Linear(1000, 1)))
    assert sum(sum(block.storages) for block in measure(model, x).blocks) == 2 * x.nbytes  # input, sigmoid's output
    costs = graph_costs(fx.symbolic_trace(Shapes()), [x])
    assert set(costs.size.values()) == {0, x.nbytes}
    assert sum(costs.size.values()) == x.nbytes
    on_meta = graph_costs(fx.symbolic_trace(Shapes()), [x.to("meta")])  # stands for a real one
    assert sum(on_meta.size.values()) > x.nbytes
