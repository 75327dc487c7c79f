"""rmm_linear.tile: what it reports, what it composes with, and what undoes it."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from helpers import tiny_model, token_ids
from peft_helpers import lora
from tile_helpers import WIDTH, Block, Stack, error, step
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import rmm_linear
from rmm_linear import convert, revert, tile
from rmm_linear.planning import BlockPlan, PlannedBlock, apply

ROWS = 64


def batch(model):
    ids = token_ids(8, 32)
    mask = torch.ones_like(ids)
    mask[1, 12:] = mask[3, 5:] = 0
    is_classifier = "Sequence" in type(getattr(model, "base_model", model)).__name__ or "Classification" in repr(
        type(model)
    )
    labels = torch.arange(8) % 2 if is_classifier else ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def trained(model, given, seed=0):
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    loss = model(**given).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def close(found, expected, limit=1e-5):
    scale = max(float(one.norm()) for one in expected[1:])  # that of keys' biases is noise alone
    return len(found) == len(expected) and all(
        float((a - b).norm()) < limit * scale for a, b in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("name", ["bert", "llama", "mixtral", "t5"])
def test_losses_are_the_same_to_the_bit_and_gradients_to_rounding(name):
    model = tiny_model(name, dropout=0.0, layers=1).train()
    given = batch(model)
    expected, names = trained(model, given), [*model.state_dict()]
    report = tile(model, ROWS)
    found = trained(model, given)
    assert torch.equal(found[0], expected[0])
    assert close(found, expected)
    assert not all(map(torch.equal, found, expected))  # sums in another order: it did run in slices
    assert [*model.state_dict()] == names
    assert report.summary().startswith(f"rmm_linear: tiled={len(report.tiled)} ")
    assert "attn" in str(report) or "Attention" in str(report) or "attention" in str(report)
    assert report.to_dict()["rows"] == ROWS
    copied = copy.deepcopy(model)
    assert close(trained(copied, given), expected)
    revert(model)
    assert all(map(torch.equal, trained(model, given), expected))
    assert not any(name in vars(part) for part in model.modules() for name in ("forward", "feed_forward_chunk"))


def test_adapters_train_alone():
    model = lora("llama", layers=1)
    given = batch(model)
    expected = trained(model, given)
    tile(model, ROWS)
    found = trained(model, given)
    assert torch.equal(found[0], expected[0])
    assert close(found, expected)


def test_report():
    model = Stack(2)
    report = tile(model, rows=256, modules=["mlp"])
    assert report.tiled == {"blocks.0.mlp": "3 linear layers", "blocks.1.mlp": "3 linear layers"}
    assert str(report).splitlines()[0] == "rmm_linear: tiled=2 norms=0 experts=0 others=2 refused=0 rows=256"
    assert "| blocks.{0-1}.mlp | 2     | in slices: 3 linear layers |" in str(report)
    assert "forward" not in vars(model.blocks[0].norm)
    revert(model)
    assert tile(model, modules=r"blocks\.1\..*").tiled.keys() == {"blocks.1.norm", "blocks.1.mlp"}


def test_errors():
    model = Stack(1)
    with pytest.raises(TypeError, match="model must be"):
        tile("model")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="rows must be at least 1, got 0"):
        tile(model, 0)
    with pytest.raises(ValueError, match=r"modules must match one of the 2 .* Did you mean 'blocks.0.mlp'"):
        tile(model, modules=["blocks.0.mpl"])
    with pytest.raises(ValueError, match="tile needs a norm, experts or"):
        tile(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    tile(model)
    with pytest.raises(ValueError, match=r"got one with tiles already\. Call rmm_linear\.revert"):
        tile(model)
    revert(model)
    with pytest.raises(ValueError, match="revert takes a converted model"):
        revert(model)
    plan = BlockPlan([PlannedBlock("blocks.0", "recompute")])
    with apply(plan, model), pytest.raises(ValueError, match="got one with a plan already"):
        tile(model)


def test_a_plan_over_tiles_is_undone_before_them():
    model, x = Stack(2), torch.randn(2, 256, WIDTH)
    tile(model, ROWS)
    expected = step(model, x)
    plan = BlockPlan([PlannedBlock("blocks.0", "recompute"), PlannedBlock("blocks.1", "keep")])
    with apply(plan, model):
        assert all(map(torch.equal, step(model, x), expected))
    assert all(map(torch.equal, step(model, x), expected))
    plan.apply(model)
    revert(model)
    assert not any("forward" in vars(part) for part in model.modules())


@pytest.mark.parametrize("is_first", [True, False])
def test_before_and_after_convert(is_first):
    model, x = Stack(1), torch.randn(2, 256, WIDTH)
    expected = step(model, x)
    calls = [lambda: tile(model, 128).tiled, lambda: convert(model).packed]
    assert [len(call()) for call in (calls if is_first else reversed(calls))] == [2, 2]
    found = step(model, x)
    assert torch.equal(found[0], expected[0])
    assert 1e-4 < error(found[3], expected[3]) < 1
    revert(model)
    assert all(map(torch.equal, step(model, x), expected))


def test_convert_finds_in_tiles_without_values_what_it_finds_without_tiles():
    model = tiny_model("llama", layers=1).to("meta")
    expected = {name: entry.operation for name, entry in convert(model).packed.items()}
    revert(model)
    tile(model, ROWS)
    assert {name: entry.operation for name, entry in convert(model).packed.items()} == expected
    assert "forward" in vars(model.model.layers[0].mlp)


def test_padding_is_kept_in_codes_of_slices_and_gradients_are_unbiased():
    model = tiny_model("roberta", dropout=0.0, layers=1).train()
    given = batch(model)
    expected = trained(model, given)
    tile(model, 128)
    convert(model, target_modules="all-linear", operations=["linear"])
    found = [trained(model, given, seed) for seed in range(24)]  # first steps learn which rows have a gradient
    name = "roberta.encoder.layer.0.intermediate.dense.weight"
    place = 1 + [n for n, p in model.named_parameters() if p.grad is not None].index(name)
    mean = torch.stack([one[place] for one in found]).mean(0)
    each = sum(error(one[place], expected[place]) for one in found) / len(found)
    assert all(torch.equal(one[0], expected[0]) for one in found)
    assert 0 < error(mean, expected[place]) < 0.45 * each  # 1/√24, and chance


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo reads it of what a tile returns
def test_compiled_around_tiles(no_graphs_left):
    model, x = Block(), torch.randn(2, 256, WIDTH)
    tile(model, ROWS)
    expected = step(model, x)
    compiled = torch.compile(model, backend="aot_eager")
    found = step(model, x, run=compiled)
    assert all(error(a, b) < 1e-5 for a, b in zip(found, expected, strict=True))


def test_ddp_marks_every_parameter_once(process_group):
    model, x, seen = Stack(1), torch.randn(2, 256, WIDTH), list[str]()
    expected = step(model, x)
    tile(model, ROWS)
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
    wrapped = DistributedDataParallel(model)
    for needs in (True, False):
        assert close(step(model, x, run=wrapped, needs=needs)[1 + needs :], expected[2:])
    assert sorted(seen) == sorted(2 * [name for name, _ in model.named_parameters()])
    model.zero_grad()
    model(x).square().sum().backward()
    once = [x, *(one.grad.clone() for one in model.parameters() if one.grad is not None)]
    with wrapped.no_sync():
        wrapped(x).square().sum().backward()
    wrapped(x).square().sum().backward()
    assert close([x, *(one.grad / 3 for one in model.parameters() if one.grad is not None)], once)


class Gathered(TorchDispatchMode):
    """Counts what FSDP2 does: gathering, and waiting for what it gathers."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "profiler" and args and str(args[0]).startswith("FSDP::"):
            self.counts[args[0]] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="fully_shard of PyTorch 2.6 needs a GPU")
@pytest.mark.parametrize("is_first", [True, False])
def test_fully_shard_gathers_as_often_as_without_tiles(process_group, is_first):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    x = torch.randn(2, 256, WIDTH)
    torch.manual_seed(0)
    plain = Stack(2)
    mesh = init_device_mesh("cpu", (1,))

    def sharded(model):
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    def counted(model):
        with Gathered() as mode:
            found = step(model, x)
        return [getattr(one, "full_tensor", lambda one=one: one)() for one in found], mode.counts

    expected, counts = counted(sharded(copy.deepcopy(plain)))
    model = copy.deepcopy(plain)
    if is_first:
        tile(model, ROWS)
    sharded(model)
    if not is_first:
        assert len(tile(model, ROWS).tiled) == 4
    found, own = counted(model)
    assert torch.equal(found[0], expected[0])
    assert close(found, expected)
    assert own == counts
    assert sum(counts.values()) > 4


def test_public_names():
    assert {"tile", "TileReport"} <= {*rmm_linear.__all__}
