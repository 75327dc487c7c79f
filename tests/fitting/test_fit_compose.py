"""Fitted models in what training is made of: DDP, FSDP2, autocast, LoRA, torch.compile, generation. Bad arguments."""

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed_helpers import start_ranks
from fit_cases import Normed, differing, network, planned, rows, stack, step, tokens, twins
from peft_helpers import lora
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import rmm_linear

EXACT = ("keep", "recompute")
WORKER = Path(__file__).with_name("compose_worker.py")


@pytest.fixture
def alone(tmp_path):
    """A group of one process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_data_parallel_gradients_are_the_mean_of_those_of_the_plan(tmp_path):
    found, _ = start_ranks(WORKER, tmp_path, folder=tmp_path)
    assert found == [{"is_exact": False, "alike": True}] * 2


@pytest.mark.filterwarnings("ignore")
def test_a_model_that_is_wrapped_already_is_fitted_inside_and_its_buckets_count(alone):
    model = stack(2).train()
    report = rmm_linear.fit(DistributedDataParallel(model), rows(), 0.75, allow=EXACT)
    assert report.static.ddp_buckets == report.static.gradients > 0
    assert model.rmm_plan is report.plan
    rmm_linear.revert(DistributedDataParallel(model))
    assert not hasattr(model, "rmm_plan")


@pytest.mark.filterwarnings("ignore")
def test_a_model_that_is_sharded_already_is_refused_with_the_remedy(alone):
    model = stack(1).train()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(ValueError, match=r"shard"):
        rmm_linear.fit(model, rows(), 0.75, allow=EXACT)


@pytest.mark.parametrize(
    ("choice", "setting"),
    [("recompute", ""), ("selective", ""), ("nested", ""), ("offload", ""), ("convert", "others")],
)
def test_a_planned_model_may_be_sharded_and_reverted(choice, setting, alone, tmp_path):
    model, plain = twins(stack(2).train())
    planned(model, choice, setting, tmp_path)
    twin = copy.deepcopy(model)
    mesh, example = init_device_mesh("cpu", (1,)), rows(2048)
    for part in (model[1], model[2], model):
        fully_shard(part, mesh=mesh)

    def full(found):
        return {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in found.items()}

    assert differing(full(step(model, example)), step(twin, example)) == []
    rmm_linear.revert(model)
    model.load_state_dict({name: value for name, value in model.state_dict().items()})
    for buffer, first in zip(model.buffers(), plain.buffers(), strict=True):
        buffer.copy_(first)
    assert differing(full(step(model, example)), step(plain, example)) == []


def test_autocast_in_a_function_as_the_example():
    model, twin = twins(stack(2).train())

    def loss(model):
        with torch.autocast("cpu", torch.bfloat16):
            return model(rows()).float().square().mean()

    report = rmm_linear.fit(model, lambda: loss(model), 0.8, allow=(*EXACT, "pack"))
    assert any("a function as the example" in note for note in report.notes)
    rmm_linear.revert(model)
    rmm_linear.fit(model, lambda: loss(model), 0.8, allow=EXACT)
    for one in (model, twin):
        torch.manual_seed(1)
        loss(one).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize(("share", "allow"), [(0.85, EXACT), (0.8, ("keep", "sketch", "pack"))])
def test_adapters(share, allow):
    """Frozen weights get no gradient; noise is that of the adapters."""
    model, twin = twins(lora("llama", layers=1))
    model.base_model.model.config.use_cache = twin.base_model.model.config.use_cache = False
    example = tokens("llama")
    report = rmm_linear.fit(model, example, share, allow=allow, max_noise=1e9)
    assert not report.is_exact
    found, expected = step(model, example), step(twin, example)
    trained = {name for name in expected if name.startswith("gradient")}
    assert {name for name in found if name.startswith("gradient")} == trained
    assert all("lora_" in name for name in trained)
    if allow == EXACT:
        assert differing(found, expected) == []
    else:
        assert report.noise > 0
        # Whichever options were the fastest here: the errors of some draws cancel.
        draws = [(step(model, example, seed), step(twin, example, seed)) for seed in range(24)]
        for name in trained:
            errors = torch.stack([one[name] - other[name] for one, other in draws])
            assert errors.mean(0).square().sum() <= 4 / 24 * errors.square().sum() / 24


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("whole", [True, False])
def test_compiled_after_a_fit(whole):
    torch._dynamo.reset()
    model, twin = twins(stack(2, dropout=0.0).train())
    report = rmm_linear.fit(model, rows(), 0.8, allow=EXACT)
    assert not report.is_exact
    run = torch.compile(model, backend="aot_eager") if whole else model
    if not whole:
        model[1].compile(backend="aot_eager")
    for one, call in ((model, run), (twin, twin)):
        call(rows()).square().mean().backward()
        assert all(parameter.grad is not None for parameter in one.parameters())
    torch._dynamo.reset()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_accumulated_gradients_with_an_evaluation_in_between():
    model, twin = twins(stack(2).train())
    rmm_linear.fit(model, rows(), 0.8, allow=EXACT)
    outputs = []
    for one in (model, twin):
        torch.manual_seed(1)
        one(rows()).square().mean().backward()
        one.eval()
        with torch.no_grad():
            outputs.append(one(rows()))
        one.train()
        one(rows()[:32]).square().mean().backward()
    assert torch.equal(*outputs)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), twin.buffers(), strict=True))


@pytest.mark.parametrize("choice", ["nested", "convert"])
def test_generation_is_that_of_the_exact_model(choice):
    model, twin = twins(network("llama")[0])
    example = tokens("llama")
    planned(model, choice, "tenth" if choice == "convert" else "")
    step(model, example)
    for one in (model, twin):
        one.eval()
        one.config.use_cache = True
    ids = example["input_ids"][:, :5]
    made = [one.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=1) for one in (model, twin)]
    assert torch.equal(*made)


def test_checkpointing_of_the_model_itself_stays():
    """Recomputation in a block that recomputes already is of no use, and harmless: gradients are those of the twin."""
    model, example = network("llama")
    model.gradient_checkpointing_enable()
    model, twin = twins(model)
    planned(model, "recompute")
    found, expected = step(model, example), step(twin, example)
    assert differing(found, expected) == []
    rmm_linear.revert(model)
    assert model.is_gradient_checkpointing


def test_a_cache_of_keys_and_values():
    """Of a language model as it comes; it is filled in every call of a layer."""
    model, example = network("llama")
    model.config.use_cache = True
    report = rmm_linear.fit(model, example, 0.8, allow=("keep", "pack"), max_noise=1e9)
    assert report.fits
    assert report.time > 0


def test_a_block_that_runs_on_one_token_or_on_one_sequence():
    _, example = network("llama")
    for ids in (example["input_ids"][:, :2], example["input_ids"][:1]):
        model, _ = network("llama")
        report = rmm_linear.fit(model, {"input_ids": ids, "labels": ids}, "1MB", allow=("pack", "recompute"))
        assert report.fits
        assert not report.is_exact


class Plain(nn.Module):
    """No module of its own is called."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 2))

    def forward(self, x):
        return x @ self.weight


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"memory": 0.0}, ValueError, r"must be in \(0, 1\], got 0.0"),
        ({"memory": -0.5}, ValueError, r"must be in \(0, 1\], got -0.5"),
        ({"memory": float("nan")}, ValueError, r"must be in \(0, 1\], got nan"),
        ({"memory": 1.5}, ValueError, "Use an integer or a text"),
        ({"memory": 1}, ValueError, "memory=1 cannot be met: .* are needed before anything is saved"),
        ({"memory": -8}, ValueError, "at least one byte, got -8"),
        ({"memory": True}, TypeError, "must be a number of bytes or a text, got True"),
        ({"memory": "8 gigs"}, ValueError, "memory must be a size, got '8 gigs'"),
        ({"memory": None}, TypeError, "got neither"),
        ({"allow": ["recomput"]}, ValueError, "Did you mean 'recompute'"),
        ({"allow": "keep,recompute"}, ValueError, "allow must be of keep, sketch"),
        ({"allow": "keep"}, ValueError, 'cannot be met: the least is .*"recompute" in allow'),
        ({"memory": None, "time": 0}, ValueError, "time must be positive, .* got 0"),
        ({"memory": None, "time": float("nan")}, ValueError, "time must be positive"),
        ({"memory": None, "time": 0.01}, ValueError, "time=0.01 cannot be met by any plan"),
        ({"memory": 0.3, "time": 1.0, "allow": EXACT}, ValueError, r"cannot be met in time=1: the least is"),
        ({"max_noise": 0}, ValueError, "max_noise must be positive, got 0"),
        ({"max_noise": float("nan")}, ValueError, "max_noise must be positive, got nan"),
        ({"objective": "speed"}, ValueError, "objective must be one of time, noise, got 'speed'"),
        ({"optimizer": "adam"}, TypeError, "optimizer must be an instance"),
        ({"model": "model"}, TypeError, r"must be a torch\.nn\.Module, got str"),
        ({"model": Plain()}, ValueError, r"none of its modules is called by itself.*nn\.Sequential"),
        ({"model": nn.Sequential(nn.Linear(8, 2)).requires_grad_(False)}, ValueError, "Set requires_grad"),
        ({"example": {"x": rows()}}, TypeError, "unexpected keyword argument"),
        ({"example": rows(0)}, ValueError, "cannot be met"),
    ],
)
def test_wrong_arguments(changes, error, text):
    model = nn.Sequential(nn.Linear(8, 16), Normed(), nn.Linear(16, 2))
    arguments = {"model": model, "example": rows(), "memory": 0.5, **changes}
    with pytest.raises(error, match=text):
        rmm_linear.fit(**arguments)
    assert "rmm_plan" not in vars(model)


@pytest.mark.parametrize("changes", [{"memory": "8GB"}, {"memory": None, "time": 1.0, "allow": ["keep"]}])
def test_arguments_at_their_ends(changes):
    report = rmm_linear.fit(stack(1).train(), rows(), max_noise=float("inf"), **{"memory": 1.0, **changes})
    assert report.is_exact
    assert report.fits
