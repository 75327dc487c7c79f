"""Steps of one of several devices: as PyTorch's own engines take, whose collectives move nothing here."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental._context_parallel import _attention as rings
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM

from rmm_linear import Shards, fit, max_length
from rmm_linear.fitting.static_memory import static_memory
from rmm_linear.memory import peak
from rmm_linear.planning import simulate
from rmm_linear.planning.step.ring import Ring
from rmm_linear.planning.step.step import run_step

_aten = torch.ops.aten
FORWARD = _aten._scaled_dot_product_flash_attention_for_cpu
BACKWARD = _aten._scaled_dot_product_flash_attention_for_cpu_backward
EXACT = ("keep", "recompute")


@pytest.fixture
def ranks():
    """Make this process one rank of many."""

    def make(rank, count):
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=count)
        return torch.distributed.group.WORLD

    yield make
    torch.distributed.destroy_process_group()


def llama(device="meta", layers=3):
    with torch.device(device):
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": layers, "vocab_size": 96}
        config = LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=4, use_cache=False)
        return LlamaForCausalLM(config).train()


def texts(length=128, rows=1, device="meta"):
    ids = torch.ones(rows, length, dtype=torch.long, device=device)
    return {"input_ids": ids, "labels": ids}


def bytes_of(run):
    with peak("cpu") as found:
        kept = run()
    return found.bytes, kept


@pytest.fixture
def held(monkeypatch):
    """What is sent is there until it is waited for, as with gloo and NCCL; here it could go at once."""
    sent, wait = [], rings._maybe_wait
    for name in ("permute_tensor", "all_gather_single"):
        collective = getattr(rings.ft_c, name)

        def send(tensor, *args, collective=collective, **kwargs):
            sent.append(tensor)
            return collective(tensor, *args, **kwargs)

        monkeypatch.setattr(rings.ft_c, name, send)
    monkeypatch.setattr(rings, "_maybe_wait", lambda tensor: (sent.clear(), wait(tensor))[1])
    return sent


@pytest.mark.parametrize("rotate", ["allgather", "alltoall"])
@pytest.mark.parametrize("pairs", [2, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [2, 3, 8])
def test_a_ring_takes_what_pytorchs_does(ranks, held, count, dtype, pairs, rotate):
    """On the rank that takes most: the first one, or one in the middle."""
    rings.set_rotate_method(rotate)
    heads = (8, pairs, pairs)
    query, key, value = (torch.randn(1, 32, one, 16).to(dtype).transpose(1, 2) for one in heads)

    def forward(*given, is_causal):
        return FORWARD(*given, 0.0, is_causal)

    def backward(query, key, value, out, logsumexp, grad_out, is_causal):
        return BACKWARD(grad_out, query, key, value, out, logsumexp, 0.0, is_causal)

    found, gradient = [], torch.ones_like(query)
    for rank in (0, 1):
        group = ranks(rank, count)
        there, kept = bytes_of(
            lambda group=group: rings._templated_ring_attention(group, 2, forward, query, key, value, is_causal=True)
        )
        back, _ = bytes_of(
            lambda group=group, kept=kept: rings._templated_ring_attention_backward(
                group, 2, backward, gradient, "grad_out", query, key, value, *kept, is_causal=True
            )
        )
        found.append((there, back))
        held.clear()
        if rank == 0:
            torch.distributed.destroy_process_group()
    rings.set_rotate_method("allgather")
    ring, given = Ring(count, rotate == "allgather"), (query, key, value)
    results = query.nbytes + 8 * 32 * 4
    there, back = (max(sizes) for sizes in zip(*found, strict=True))
    assert ring.workspace(FORWARD.default, given, None, 0) + results == there
    assert ring.workspace(BACKWARD.default, (query, *given), None, 0) + sum(one.nbytes for one in given) == back


@pytest.mark.parametrize("count", [2, 4])
def test_tensor_parallelism_takes_what_pytorchs_does(ranks, count):
    ranks(0, count)
    model, whole = llama("cpu"), simulate(llama(), texts()).bytes
    plan = {name: ColwiseParallel() for name in ("self_attn.[qkv]_proj", "mlp.gate_proj", "mlp.up_proj")}
    plan |= {name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
    for block in model.model.layers:
        parallelize_module(block, init_device_mesh("cpu", (count,)), plan)
    measured, _ = bytes_of(lambda: run_step(model, texts(device="cpu")))
    found = simulate(llama(), texts(), shards=Shards(tensor=count)).bytes
    assert found == pytest.approx(measured, rel=0.01)
    assert found < 0.9 * whole
    assert static_memory(llama(), shards=Shards(tensor=count)).parameters == static_memory(model).parameters


def test_stages_have_the_weights_of_the_whole_and_hold_micro_batches():
    model, stages = llama(layers=4), [Shards(stages=2, stage=stage, microbatches=6) for stage in (0, 1)]
    assert sum(static_memory(model, shards=one).parameters for one in stages) == static_memory(model).parameters
    found = [simulate(model, texts(), shards=one) for one in stages]
    assert "stage 1 of 2" in found[1].moment
    for one in found:
        assert sum(one.by_module.values()) == one.bytes
    all_first = simulate(model, texts(), shards=Shards(stages=2, microbatches=6, schedule="GPipe"))
    more = {name: all_first.by_module[name] - found[0].by_module[name] for name in all_first.by_module if name}
    assert all_first.bytes - found[0].bytes == sum(more.values())
    assert more["model.layers.0"] == 2 * found[0].by_module["model.layers.0"]  # 6 instead of 2


def test_a_plan_for_one_rank_is_applied_to_the_whole_model():
    model = llama(layers=1)
    before = {name: (one, one.shape) for name, one in model.named_parameters()}
    alone = fit(model, texts(256), "least", allow=EXACT)
    alone.plan.revert()
    report = fit(model, texts(256), "least", allow=EXACT, shards=Shards(2, context=2, tensor=2))
    assert report.peak < 0.6 * alone.peak
    assert "rmm_plan" in vars(model)
    report.plan.revert()
    assert {name: (one, one.shape) for name, one in model.named_parameters()}.items() == before.items()
    assert model.model.layers[0].self_attn.q_proj.out_features == 64
    assert simulate(model, texts(), shards=Shards()).bytes == simulate(model, texts()).bytes


def test_lengths_are_those_of_whole_sequences():
    model, shards = llama(layers=1), Shards(context=4)
    found = max_length(model, texts(), "1MB", allow=["keep"], shards=shards, multiple=12)
    assert found.length % 24 == 0  # two parts on every rank
    parameters = static_memory(model).parameters
    peaks = [simulate(model, texts(length), shards=shards).bytes for length in (found.length, found.length + 24)]
    assert peaks[0] + parameters <= 1e6 < 1.03 * (peaks[1] + parameters)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"context": 0}, "context must be at least 1"),
        ({"rotate": "gather"}, "rotate must be one of allgather, alltoall, got 'gather'"),
        ({"schedule": "Gpipe"}, "got 'Gpipe'.* Did you mean 'GPipe'"),
        ({"ranks": 8, "context": 3}, "context must divide ranks=8"),
        ({"stages": 2, "stage": 2}, "stage must be less than stages=2, got 2"),
        ({"cpu_offload": True}, "cpu_offload is of fully_shard"),
        ({"tensor": 2, "tensor_plan": {"q_proj": "rows"}}, "colwise or rowwise to a module, got 'rows'"),
    ],
)
def test_what_no_cluster_can_be(changes, said):
    with pytest.raises(ValueError, match=said):
        Shards(**changes)


def test_what_is_no_cluster():
    with pytest.raises(TypeError, match="tensor_plan must be a mapping"):
        Shards(tensor=2, tensor_plan="colwise")
    model, batch = nn.Linear(4, 4, device="meta"), torch.ones(2, 4)
    for run in (simulate, max_length, lambda *args, **named: fit(*args, "1MB", **named)):
        with pytest.raises(TypeError, match=r"shards must be Shards or None, got 8.*Shards\(8\)"):
            run(model, batch, *([] if run is not max_length else ["1MB"]), shards=8)
    with pytest.raises(TypeError, match="shards must be"):
        static_memory(model, shards=8)


@pytest.mark.parametrize(
    ("shards", "said"),
    [
        (Shards(context=48), "128 tokens. Use a multiple of 96"),
        (Shards(tensor=8), "tensor must divide num_key_value_heads, which is 4, got 8"),
        (Shards(tensor=2, tensor_plan={"k_projection": "colwise"}), "'k_projection', which matches none"),
        (Shards(tensor=2, tensor_plan={"layers.*.mlp": "colwise"}), "got LlamaMLP for 'model.layers.0.mlp'"),
        (Shards(stages=4), "at most the model's 3 repeated blocks, got 4"),
    ],
)
def test_what_a_model_cannot_be_divided_by(shards, said):
    with pytest.raises(ValueError, match=said):
        simulate(llama(), texts(), shards=shards)


def test_other_models_that_cannot_be_divided():
    model, rows = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).to("meta"), torch.ones(2, 64, 8)
    with pytest.raises(ValueError, match="which comes without a plan"):
        simulate(model, rows, shards=Shards(tensor=2))
    with pytest.raises(ValueError, match="a model that never calls it so"):
        simulate(model, rows, shards=Shards(context=2))
    with pytest.raises(ValueError, match="got one with weights"):
        simulate(llama("cpu"), texts(device="cpu"), shards=Shards(context=2))
    with pytest.raises(ValueError, match="Plan the module of each stage"):
        fit(llama(), texts(), "least", shards=Shards(stages=2))
    plan = Shards(tensor=2, tensor_plan={"0": "colwise", "2": "rowwise"})
    assert static_memory(model, shards=plan).parameters == 4 * (8 * 8 + 4 + 8)
