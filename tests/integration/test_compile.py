"""torch.compile of linear layers: whole graphs, fresh sketches, one Z for siblings, gradients of the eager model.

The graphs run in PyTorch (the "aot_eager" pipeline: traced, split and merged as for Inductor, without its code
generation); test_compiled_models.py has all operations, and runs Inductor's code.
"""

import pytest
import torch
from cases import LINEAR, QUARTER, ROUGH_BODY
from compile_helpers import SEED, Graphs, batch, step
from helpers import checkpointed, enable_checkpointing, heavy_tailed, tiny_model
from statistical import assert_unbiased
from torch import nn

from rmm_linear import RMMConfig, RMMLinear, convert, sketched_linear

pytestmark = pytest.mark.usefixtures("no_graphs_left")

# Functions and layers


@pytest.mark.parametrize(
    ("kind", "bits"),
    [("countsketch", 4), ("wta", None)]
    + [pytest.param(*case, marks=pytest.mark.stack) for case in (("gaussian", None), ("rows", 8), ("hadamard", None))],
)
def test_a_function_is_that_of_eager_code_for_the_same_seed(kind, bits):
    """With a mask, in lengths that are compiled once as they are and once for all."""
    config = RMMConfig(kind=kind, ratio=0.25, min_rows=4, bits=bits)
    weight = torch.zeros(3, 5, requires_grad=True)

    def run(x, mask):
        return sketched_linear(x, weight, config=config, seed=SEED, token_mask=mask)

    graphs = Graphs()
    compiled = graphs.compile(run)
    for length in (12, 16, 20):
        x, y = (part.view(4, length, -1) for part in heavy_tailed(4 * length, 5, 3, torch.float32))
        mask = torch.ones(4, length, dtype=torch.bool)
        mask[2, 7:] = False
        found = []
        for function in (run, compiled):
            weight.grad = None
            function(x, mask).backward(y)
            found.append(weight.grad)
        assert torch.equal(*found)
        assert found[0].abs().sum() > 0
    assert len(graphs.counts) == 4  # forward and backward of two graphs


def test_in_eval_mode_compiled_layers_are_exact():
    """The compiler asks for the gradient with respect to the weight beforehand, so eager code's error has no place."""
    layer = RMMLinear(5, 3, config=RMMConfig(**ROUGH_BODY)).eval()
    x, y = heavy_tailed(40, 5, 3, torch.float32)
    Graphs().compile(layer)(x).backward(y)
    assert torch.allclose(layer.weight.grad, y.T @ x, rtol=1e-5, atol=1e-4)


# Whole models


@pytest.mark.parametrize(
    "fields",
    [{"memory": 0.25, "bits": 4}, pytest.param({"ratio": 0.25}, marks=pytest.mark.stack)],
    ids=["packed", "ratio"],
)
def test_a_converted_model_is_one_graph_with_the_gradients_of_eager_code(one_seed, fields):
    """Padding left out, one Z for query, key and value, and no compilation beyond the one for all lengths."""
    model = tiny_model("roberta", dropout=0.0, layers=1).train()
    report = convert(model, kind="countsketch", min_rows=8, **LINEAR, **fields)
    report.context.learned.clear()  # eager code would learn which rows have a gradient
    report.context.checks.is_done = True  # and which layers free nothing
    graphs = Graphs()
    compiled = graphs.compile(model)
    for length in (20, 24, 28, 36):
        (loss, eager), (again, ours) = step(model, batch(length)), step(compiled, batch(length))
        # Traced products can have their operands in another layout, and so another order of summation.
        assert torch.allclose(loss, again, rtol=1e-5, atol=0)
        assert {name.removeprefix("_orig_mod.") for name in ours} == eager.keys()
        for name, found in ours.items():
            assert torch.allclose(found, eager[name.removeprefix("_orig_mod.")], rtol=1e-5, atol=1e-7), name
    assert len(graphs.counts) == 4
    forward, backward = graphs.counts[:2]
    # query, key and value share one; attention.output, intermediate and output have one each. The classifier is exact.
    assert forward == {"rmm_linear.fresh_sketch.default": 4}
    assert backward == {"rmm_linear.stored_product.default": 6}


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
def test_layers_share_a_sketch_of_what_is_an_output_too(autocast):
    """As the hidden states that a model is asked to return are; compilers do not merge views of them."""

    class Siblings(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.key, self.value = (nn.Linear(6, 6) for _ in range(3))

        def forward(self, x):
            hidden = self.inner(x).tanh()
            return self.key(hidden) + self.value(hidden), hidden

    model = Siblings()
    convert(model, target_modules=["inner", "key", "value"], **ROUGH_BODY)
    graphs = Graphs()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        output, hidden = graphs.compile(model)(torch.randn(4, 10, 6))
    (output.float().sum() + hidden.float().sum()).backward()
    # One for the first layer, which the compiler makes in the backward pass from what it was given, and one for both.
    made = [counts["rmm_linear.fresh_sketch.default"] for counts in graphs.counts]
    assert len(made) == 2
    assert sum(made) == 2


@pytest.mark.stack
def test_a_converted_model_is_compiled_once_whatever_the_optimizer_does():
    model = tiny_model("roberta", dropout=0.0, layers=1).train()
    convert(model, min_rows=8)
    graphs = Graphs()
    compiled = graphs.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(6):
        losses.append(step(compiled, batch(20))[0])
        optimizer.step()
    assert losses[-1] < losses[0]
    assert len(graphs.counts) == 2


def test_padding_that_carries_a_gradient_is_refused():
    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(5, 3)

        def forward(self, x, attention_mask=None):
            return self.layer(x).square().mean()

    model = Pooled()
    convert(model, **ROUGH_BODY)
    mask = torch.ones(4, 10)
    compiled = Graphs().compile(model)
    compiled(torch.randn(4, 10, 5), attention_mask=mask).backward()
    mask[1, 6:] = 0
    with pytest.raises(RuntimeError, match=r"Padding must not reach the loss.* mask_padding=False"):
        compiled(torch.randn(4, 10, 5), attention_mask=mask).backward()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_inside_of_a_graph_is_unbiased(reentrant):
    """The recomputation takes the seed of the forward pass, or Z and seed of its own: z = 4 on the projection."""
    model = checkpointed(use_reentrant=reentrant, dropout=0.0)
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
    model(x.requires_grad_()).square().sum().backward()
    exact = model.block[0].weight.grad.clone()
    convert(model, **ROUGH_BODY)
    compiled = Graphs().compile(model)

    def gradient(_):
        model.zero_grad()
        compiled(x).square().sum().backward()
        return model.block[0].weight.grad

    torch.manual_seed(4)
    assert_unbiased(gradient, exact, draws=150, widest=0.1)


@pytest.fixture(params=[pytest.param(True, marks=pytest.mark.stack), False])
def compiled_with_checkpoints(request):
    """Makes a converted model with checkpoints in one graph; 5 of 20 tokens are real, and 30 % of the rows are kept."""

    def make(architecture, dropout):
        model = tiny_model(architecture, dropout=dropout, layers=1).double().train()
        inputs = batch(20)
        inputs["attention_mask"] = torch.zeros_like(inputs["input_ids"]).index_fill_(1, torch.arange(5), 1)
        exact = step(model, inputs)[1]
        report = convert(model, kind="countsketch", **{**QUARTER, "ratio": 0.3})
        enable_checkpointing(model, request.param)
        model.config.use_cache = False
        names = [name for name in report.converted if "layer" in name]  # heads see one row per sequence
        weights = {f"{name}.weight": model.get_submodule(name).weight for name in names}
        return Graphs().compile(model), inputs, weights, exact

    return make


@pytest.mark.thorough
def test_compiled_recomputations_leave_padding_out(compiled_with_checkpoints):
    """Exact if and only if they do; LLaMA's norms round to float32."""
    compiled, inputs, weights, exact = compiled_with_checkpoints("llama", 0.0)
    step(compiled, inputs)
    assert len(weights) == 7
    for name, weight in weights.items():
        assert (weight.grad - exact[name]).norm() < 1e-5 * exact[name].norm(), name


@pytest.mark.stack
def test_compiled_recomputations_repeat_the_dropout(compiled_with_checkpoints):
    """A step's gradient along a direction is the difference quotient of its loss, which has the same dropout."""
    compiled, inputs, weights, _ = compiled_with_checkpoints("bert", 0.3)
    directions = {name: torch.randn_like(weight) for name, weight in weights.items()}

    def loss_moved(length):
        with torch.no_grad():
            for name, weight in weights.items():
                weight += length * directions[name]
        torch.manual_seed(3)
        return step(compiled, inputs)[0].item()

    loss_moved(0)
    slope = sum((weight.grad * directions[name]).sum() for name, weight in weights.items()).item()
    change = (loss_moved(1e-5) - loss_moved(-2e-5)) / 2e-5
    assert slope == pytest.approx(change, rel=1e-5)  # other dropout would be seen in the first digit


# PyTorch hides this warning of its own while it traces, but not from those who made it an error.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_blocks_that_are_compiled_by_themselves_are_unbiased():
    model = tiny_model("roberta", dropout=0.0, layers=2).train()
    exact = step(model, batch(20))[1]
    convert(model, **ROUGH_BODY)
    graphs = Graphs()
    for block in model.roberta.encoder.layer:
        block.compile(fullgraph=True, backend=graphs.backend)
    torch.manual_seed(1)
    name = "roberta.encoder.layer.1.intermediate.dense.weight"
    assert_unbiased(lambda _: step(model, batch(20))[1][name], exact[name], draws=40, widest=0.2)
    assert len(graphs.counts) == 4  # one graph for each block, which has hooks with numbers of their own
