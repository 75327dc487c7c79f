"""All operations in compiled code: one graph, outputs of the exact model, bytes of eager code, unbiased gradients.

Inductor's code at the end, and CUDA graphs: the gradients of eager code, fresh sketches.
"""

import itertools

import pytest
import torch
import torch._functorch.config
from cases import ROUGH_BODY, WHOLE_BODY
from compile_helpers import Graphs
from helpers import ALL_ARCHITECTURES, batch_of, checkpointed, gradients, heavy_tailed, step, tiny_model
from statistical import assert_unbiased
from torch._dynamo.utils import counters

from rmm_linear import RMMConfig, RMMLinear, convert

pytestmark = pytest.mark.usefixtures("no_graphs_left")

# Operators of ours in the forward graph of a model of one layer.
OPERATORS = {
    "roberta": {"pack_norm": 3, "pack_derivative": 1, "pack_attention": 1, "fresh_sketch": 4},
    "bert": {"pack_norm": 3, "pack_derivative": 2, "pack_attention": 1, "fresh_sketch": 4},
    "gpt2": {"pack_norm": 3, "pack_derivative": 1, "pack_attention": 1, "fresh_sketch": 4},
    "llama": {"pack_norm": 3, "keep_gated": 1, "pack_attention": 1, "fresh_sketch": 4},
    "vit": {"pack_norm": 3, "pack_derivative": 1, "pack_attention": 1, "fresh_sketch": 4},
    "t5": {"pack_norm": 7, "pack_derivative": 2, "pack_attention": 3, "fresh_sketch": 11},
    "resnet": {"encode_matrix": 4, "pack_channels": 6, "pack_derivative": 5, "max_pool": 1},
}
# A view of the pooled tokens keeps the last hidden state in graphs: N · H float32, which eager code does not keep.
POOLED = 4 * 20 * 64 * 4


def made(architecture, *, whole, dropout=0.0):
    model = tiny_model(architecture, dropout=dropout, layers=1, width=64).train()
    model.config.use_cache = False
    if whole:
        convert(model, **{**WHOLE_BODY, "bits": 4})
    return model


def inputs_of(architecture):
    """Without padding, which compiled code does not leave out of what it compresses."""
    batch = batch_of(architecture)
    batch.pop("attention_mask", None)
    return batch


def saved_bytes(model, run, batch):
    """Of the storages that ``run()`` saves, parameters, buffers and the batch aside; and what it returns."""
    given = {one.untyped_storage().data_ptr() for one in (*model.parameters(), *model.buffers(), *batch.values())}
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in given:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = run()
    return sum(storages.values()), output


@pytest.mark.stack
@pytest.mark.parametrize("architecture", OPERATORS)
def test_a_model_is_one_graph_with_the_exact_outputs_and_the_bytes_of_eager_code(architecture):
    batch = inputs_of(architecture)
    exact, model = made(architecture, whole=False), made(architecture, whole=True)
    expected = Graphs().compile(exact)(**batch).logits
    graphs = Graphs()
    compiled = graphs.compile(model)
    eager, _ = saved_bytes(model, lambda: model(**batch).logits, batch)
    found, logits = saved_bytes(model, lambda: compiled(**batch).logits, batch)
    assert torch.equal(logits, expected)
    assert graphs.counts[0] == {f"rmm_linear.{name}.default": n for name, n in OPERATORS[architecture].items()}
    assert found < 1.05 * eager + POOLED
    whole, _ = saved_bytes(exact, lambda: exact(**batch).logits, batch)
    assert found < 0.25 * whole
    logits.square().mean().backward()
    assert len(graphs.counts) == 2
    assert all(one.isfinite().all() for one in gradients(model).values())


@pytest.mark.stack
@pytest.mark.parametrize("architecture", OPERATORS)
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


@pytest.mark.stack
@pytest.mark.parametrize("architecture", ALL_ARCHITECTURES)
def test_inductor_makes_the_gradients_of_eager_code(one_seed, architecture):
    model = tiny_model(architecture, dropout=0.0).train()
    convert(model, **ROUGH_BODY)
    compiled = torch.compile(model, fullgraph=True)
    for length in (20, 24) if architecture != "vit" else (20,):
        results = []
        for network in (model, compiled):
            results.append(step(network, architecture, batch=batch_of(architecture, length)))
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
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")  # Inductor's, of float32 on new devices
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")  # Inductor's too, of its first one
def test_reduce_overhead_draws_a_new_sketch_in_every_replay_and_is_unbiased():
    device = torch.device("cuda")
    layer = RMMLinear(64, 32, config=RMMConfig(ratio=0.25, min_rows=8), device=device)
    compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    x, y = (part.float().to(device) for part in heavy_tailed(256, 64, 32))

    def gradient(_):
        torch.compiler.cudagraph_mark_step_begin()
        layer.zero_grad()
        compiled(x).backward(y)
        return layer.weight.grad.clone()  # the graph's own memory, which the next replay overwrites

    skipped = counters["inductor"]["cudagraph_skips"]
    for _ in range(3):  # compiled, run once without a graph, captured
        gradient(0)
    replays = []
    for _ in range(2):
        torch.manual_seed(1)
        replays.append([gradient(0) for _ in range(3)])
    assert counters["inductor"]["cudagraph_skips"] == skipped
    assert all(map(torch.equal, *replays))
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(replays[0], 2))
    values = assert_unbiased(gradient, y.T @ x, draws=200, widest=0.1)
    assert len(set(values.tolist())) > 190
