"""All operations in compiled code: one graph, outputs of the exact model, bytes of eager code, unbiased gradients."""

import pytest
import torch
from cases import WHOLE_BODY
from compile_helpers import Graphs
from helpers import ALL_ARCHITECTURES, batch_of, gradients, tiny_model
from statistical import assert_unbiased

from rmm_linear import convert

pytestmark = pytest.mark.usefixtures("no_graphs_left")

# Stand-ins in the graph of a model of one layer.
STAND_INS = {
    "roberta": {"pack_norm": 3, "pack_derivative": 1, "pack_attention": 1, "fresh_sketch": 4},
    "bert": {"pack_norm": 3, "pack_derivative": 2, "pack_attention": 1, "fresh_sketch": 4},
    "gpt2": {"pack_norm": 3, "pack_derivative": 1, "pack_attention": 1, "fresh_sketch": 4},
    "llama": {"pack_norm": 3, "keep_gated": 1, "pack_attention": 1, "fresh_sketch": 4},
    "vit": {"pack_norm": 3, "pack_derivative": 1, "pack_attention": 1, "fresh_sketch": 4},
    "t5": {"pack_norm": 7, "pack_derivative": 2, "pack_attention": 3, "fresh_sketch": 11},
}
# A view of the pooled tokens keeps the last hidden state in graphs: N · H float32, which eager code does not keep.
POOLED = 4 * 20 * 64 * 4
one_or_all = pytest.mark.parametrize(
    "architecture",
    ["roberta", *(pytest.param(name, marks=pytest.mark.stack) for name in ALL_ARCHITECTURES if name != "roberta")],
)


def made(architecture, *, whole, dropout=0.0):
    model = tiny_model(architecture, dropout=dropout, layers=1, width=64).train()
    model.config.use_cache = False
    if whole:
        convert(model, **{**WHOLE_BODY, "bits": 4})
    return model


def inputs_of(architecture):
    """Without padding, which compiled code does not leave out of packed stand-ins."""
    batch = batch_of(architecture)
    batch.pop("attention_mask", None)
    return batch


def saved_bytes(model, run):
    """Of the storages that ``run()`` saves, parameters and buffers aside; and what it returns."""
    given = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in given:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = run()
    return sum(storages.values()), output


@one_or_all
def test_a_model_is_one_graph_with_the_exact_outputs_and_the_bytes_of_eager_code(architecture):
    batch = inputs_of(architecture)
    exact, model = made(architecture, whole=False), made(architecture, whole=True)
    expected = Graphs().compile(exact)(**batch).logits
    graphs = Graphs()
    compiled = graphs.compile(model)
    eager, _ = saved_bytes(model, lambda: model(**batch).logits)
    found, logits = saved_bytes(model, lambda: compiled(**batch).logits)
    assert torch.equal(logits, expected)
    assert graphs.counts[0] == {f"rmm_linear.{name}.default": n for name, n in STAND_INS[architecture].items()}
    assert found < 1.05 * eager + POOLED
    whole, _ = saved_bytes(exact, lambda: exact(**batch).logits)
    assert found < 0.25 * whole
    logits.square().mean().backward()
    assert len(graphs.counts) == 2
    assert all(one.isfinite().all() for one in gradients(model).values())


@pytest.mark.stack
@pytest.mark.parametrize("architecture", ALL_ARCHITECTURES)
def test_compiled_gradients_are_unbiased(architecture):
    batch = inputs_of(architecture)
    exact, model = made(architecture, whole=False), made(architecture, whole=True)
    exact(**batch).logits.square().mean().backward()
    compiled = Graphs().compile(model)

    def draw(_):
        model.zero_grad()
        compiled(**batch).logits.square().mean().backward()
        return gradients(model)

    torch.manual_seed(2)
    values = assert_unbiased(draw, gradients(exact), draws=25, widest=0.1)
    assert len(set(values.tolist())) == 25  # another draw in every step


@pytest.mark.stack
def test_compiled_dropout_repeats_its_mask():
    """The gradient along a direction is the difference quotient of the loss, which has the same dropout."""
    model = made("roberta", whole=False, dropout=0.3).double()
    convert(model, operations="dropout")
    graphs = Graphs()
    compiled, weight = graphs.compile(model), model.get_parameter("roberta.encoder.layer.0.output.dense.weight")
    direction = torch.randn_like(weight)

    def loss(moved):
        with torch.no_grad():
            weight.add_(direction, alpha=moved)
        torch.manual_seed(3)
        return compiled(**inputs_of("roberta")).logits.square().mean()

    loss(0).backward()
    slope = float((weight.grad * direction).sum())
    change = (loss(1e-5).item() - loss(-2e-5).item()) / 2e-5
    assert "rmm_linear.pack_mask.default" in graphs.counts[0]
    assert slope == pytest.approx(change, rel=1e-5)


@pytest.mark.stack
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["float32", "autocast"])
def test_inductors_outputs_are_those_of_the_exact_model(autocast):
    outputs = []
    for whole in (False, True):
        torch.compiler.reset()
        model = made("roberta", whole=whole)
        with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
            output = torch.compile(model, fullgraph=True)(**inputs_of("roberta")).logits
        output.float().square().mean().backward()
        assert all(one.isfinite().all() for one in gradients(model).values())
        outputs.append(output.detach())
    assert torch.equal(*outputs)
