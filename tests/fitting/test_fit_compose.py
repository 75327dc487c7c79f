"""Fitted models in what training is made of: DDP, FSDP2, autocast, LoRA, torch.compile, generation."""

import copy

import pytest
import torch
from fit_cases import differing, network, planned, rows, stack, step, tokens, twins
from peft_helpers import lora
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import rmm_linear

EXACT = ("keep", "recompute")


@pytest.mark.filterwarnings("ignore")
def test_a_model_under_data_parallel_is_fitted_inside_and_its_buckets_count(process_group):
    """Its hooks see every gradient once, whatever is recomputed."""
    model, twin = twins(stack(2).train())
    wrapped = DistributedDataParallel(model)
    report = rmm_linear.fit(wrapped, rows(), 0.75, allow=EXACT)
    assert report.static.ddp_buckets == report.static.gradients > 0
    assert model.rmm_plan is report.plan
    assert not report.is_exact
    for _ in range(2):
        found = {name.replace(" module.", " "): value for name, value in step(wrapped, rows()).items()}
        assert differing(found, step(twin, rows())) == []
    rmm_linear.revert(wrapped)
    assert not hasattr(model, "rmm_plan")


@pytest.mark.filterwarnings("ignore")
def test_a_model_that_is_sharded_already_is_fitted(process_group):
    """By simulated steps in which FSDP's own code runs; its real step is the check."""
    (model, twin), mesh = twins(stack(2).train()), init_device_mesh("cpu", (1,))
    for part in (model[1], model[2], model):
        fully_shard(part, mesh=mesh)
    report = rmm_linear.fit(model, rows(), 0.85, optimizer=torch.optim.AdamW, allow=EXACT)
    assert not report.is_exact
    assert report.simulated_peak == report.measured_peak <= report.memory
    assert any("their time is not known for a sharded model" in note for note in report.notes)
    found = {name: getattr(one, "full_tensor", one.clone)() for name, one in step(model, rows()).items()}
    assert differing(found, step(twin, rows())) == []
    rmm_linear.revert(model)
    with pytest.raises(ValueError, match="takes a model that is not sharded yet"):
        rmm_linear.max_batch(model, rows(), "1GB")


@pytest.mark.parametrize(
    ("choice", "setting"),
    [("recompute", ""), ("selective", ""), ("nested", ""), ("offload", ""), ("convert", "others")],
)
def test_a_planned_model_may_be_sharded_and_reverted(choice, setting, process_group, tmp_path):
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


@pytest.mark.one_of(2)
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


@pytest.mark.one_of(3)
@pytest.mark.parametrize("rows", [(slice(None), slice(0, 2)), (slice(0, 1), slice(None)), (slice(None), slice(None))])
def test_a_language_model_as_it_comes_with_one_token_one_sequence_or_more(rows):
    """Its cache of keys and values is filled in every call of a layer."""
    model, example = network("llama")
    model.config.use_cache = True
    ids = example["input_ids"][rows]
    report = rmm_linear.fit(model, {"input_ids": ids, "labels": ids}, "1MB", allow=("pack", "recompute"))
    assert report.fits
    assert not report.is_exact
    assert report.time > 0
