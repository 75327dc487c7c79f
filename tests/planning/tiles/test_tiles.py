"""Tiles: outputs and gradients are those of the module, in the memory of a slice."""

from __future__ import annotations

import copy
import gc
import pickle
from collections import Counter

import pytest
import torch
from tile_helpers import WIDTH, Block, Gated, Stack, beyond, error, same, step, tiled
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from rmm_linear import convert, revert
from rmm_linear.memory.peak import LiveTensors, Peak
from rmm_linear.planning import simulate
from rmm_linear.planning.blocks.recompute import Recomputed
from rmm_linear.planning.offload.chain import OffloadChain, Offloaded
from rmm_linear.planning.offload.copies import FileCopy
from rmm_linear.planning.step.flops import count_flops
from rmm_linear.planning.step.follow import FollowedTensors
from rmm_linear.planning.step.watch import watch
from rmm_linear.planning.tiles.slices import balanced
from rmm_linear.planning.tiles.tile import Tile

SHAPES = [(1, 1024, WIDTH), (1, 1025, WIDTH), (3, 171, WIDTH), (2, 3, 160, WIDTH), (777, WIDTH)]


@pytest.mark.parametrize("rows", [1, 7, 64, 100, 512])
@pytest.mark.parametrize("count", [1, 63, 64, 65, 129, 1025, 4096])
def test_slices_are_balanced_and_none_is_short(count, rows):
    slices = balanced(count, rows)
    ends = [begin + length for begin, length in slices]
    granule = min(64, rows)
    assert [begin for begin, _ in slices] == [0, *ends[:-1]]
    assert ends[-1] == count
    assert all(begin % granule == 0 for begin, _ in slices)
    assert max(length for _, length in slices) < rows + granule
    assert len(slices) == 1 or min(length for _, length in slices) >= granule


@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_and_input_gradients_are_the_same_to_the_bit(shape):
    module, x = Gated(), torch.randn(shape)
    expected = step(module, x)
    with tiled(module, 128 if len(shape) < 4 else 4):  # narrow rows of heads or of images are many
        found = step(module, x)
    assert same(found, expected)
    assert not any(map(torch.equal, found[2:3], expected[2:3]))  # sums in another order: it did run in slices


def test_few_rows_run_as_they_do_without_a_tile():
    module, x = Gated(p=0.5), torch.randn(1, 128, WIDTH)
    expected = step(module, x)
    with tiled(module):
        assert all(map(torch.equal, step(module, x), expected))
        assert type(module(x).grad_fn).__name__ == "MulBackward0"
        assert module(x[:, :0]).shape == (1, 0, WIDTH)


@pytest.mark.parametrize(
    "make", [lambda x: x.transpose(0, 1), lambda x: x.repeat(1, 1, 2)[..., :WIDTH], lambda x: x[:, ::2]]
)
def test_inputs_that_are_not_contiguous(make):
    module, x = Gated(), torch.randn(40, 24, WIDTH)
    run = lambda x: module(make(x))  # noqa: E731
    expected = step(module, x, run=run)
    with tiled(module, 64):
        assert same(step(module, x, run=run), expected)


def test_memory_is_constant_in_the_number_of_rows():
    module = Gated(WIDTH, 8 * WIDTH)
    plain = beyond(module, torch.randn(1, 8192, WIDTH))
    assert plain > 45  # hidden-sized tensors
    with tiled(module, 128):
        found = {count: beyond(module, torch.randn(1, count, WIDTH)) * count for count in (512, 2048, 8192)}
    assert max(found.values()) == min(found.values())
    assert found[8192] / 8192 < 1.5


@pytest.mark.parametrize("frozen", ["input", "parameters", "some"])
def test_what_needs_no_gradient(frozen):
    module, x = Gated(), torch.randn(1, 512, WIDTH)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(frozen == "input" or (frozen == "some" and name == "up.bias"))
    expected = step(module, x, needs=frozen != "input")
    with tiled(module):
        assert same(step(module, x, needs=frozen != "input"), expected, 1 if frozen == "input" else 2)
        module.requires_grad_(False)
        assert not module(x).requires_grad
        with torch.no_grad():
            assert torch.equal(module(x), expected[0])


class Several(nn.Module):
    """Several streams, one by name, a tensor that all rows share, and a nested output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, index: Tensor, shared: Tensor, *, residual: Tensor) -> dict[str, object]:
        y = self.first(x).tanh() * shared + residual
        return {"y": y, "rows": (self.second(y).flatten(0, -2), index + 1), "none": None, "number": 3}


@pytest.mark.parametrize("shared", [(WIDTH,), (2, 1, WIDTH)])
@pytest.mark.parametrize("used", [("y",), ("rows",), ("y", "rows")])
def test_several_streams_and_outputs(used, shared):
    module, index = Several(), torch.arange(512).view(2, 256)
    given = [torch.randn(2, 256, WIDTH), torch.randn(shared), torch.randn(2, 256, WIDTH)]

    def run(x, shared, residual):
        found = module(x, index, shared, residual=residual)
        assert found["none"] is None
        assert found["number"] == 3
        assert torch.equal(found["rows"][1], index + 1)
        y, rows = found["y"], found["rows"][0].view(2, 256, 3)
        return torch.cat([one for name, one in (("y", y), ("rows", rows)) if name in used], -1)

    expected = step(module, *given, run=run)
    with tiled(module):
        assert same(step(module, *given, run=run), expected, 1)


def test_a_tensor_of_positions_is_not_cut(caplog):
    class Placed(nn.Linear):
        def forward(self, x: Tensor, places: Tensor) -> Tensor:
            return super().forward(x) + places

    module, x, places = Placed(WIDTH, WIDTH), torch.randn(2, 256, WIDTH), torch.randn(256, WIDTH)
    expected = step(module, x, places)
    with tiled(module):
        assert all(map(torch.equal, step(module, x, places), expected))
        assert "runs as a whole" in caplog.text


def test_weight_gradients_of_half_types_have_the_error_of_one_product():
    exact, x = nn.Linear(WIDTH, WIDTH).double(), torch.randn(1, 8192, WIDTH)
    module = copy.deepcopy(exact).bfloat16()
    x = x.bfloat16()
    expected = step(module, x)
    exact.weight.data = module.weight.double().data
    truth = step(exact, x.double())[2]
    with tiled(module, 64):
        found = step(module, x)
    # The product of every slice is rounded, as the whole one is, and their sum once more.
    assert error(found[2], truth) < 1.5 * error(expected[2], truth) < 5e-3
    assert found[2].dtype == torch.bfloat16


def test_dropout_repeats_its_numbers():
    torch.manual_seed(0)
    module, x = Gated(8, 16, p=0.5).double(), torch.randn(1, 128, 8, dtype=torch.float64)
    with tiled(module, 64):

        def run(*given):
            torch.manual_seed(1)
            return module(*given)

        assert torch.autograd.gradcheck(run, x.requires_grad_(), fast_mode=True)
        (weight,) = torch.autograd.grad(run(x).sum(), module.gate.weight)
        numbers = torch.rand(2)
    torch.manual_seed(1)
    parts = torch.cat([module(part) for part in x.split(64, 1)], 1)
    assert torch.allclose(weight, torch.autograd.grad(parts.sum(), module.gate.weight)[0])
    assert torch.equal(numbers, torch.rand(2))  # the backward pass leaves the generator as it is


def test_autocast_and_modes_of_the_backward_pass_are_those_of_the_forward_pass():
    module, x = Gated(p=0.3).eval(), torch.randn(1, 512, WIDTH)

    def run(x):
        with torch.autocast("cpu", torch.bfloat16):
            output = module(x)
        module.train()
        return output

    expected = step(module, x, run=run)
    with tiled(module.eval()):
        found = step(module, x, run=run)
    assert module.training
    assert same(found, expected, 1, 1e-2)
    assert found[1].dtype == found[2].dtype == torch.float32


def test_a_changed_parameter_or_input_is_an_error():
    module, x = Gated(), torch.randn(1, 512, WIDTH)
    with tiled(module):
        output = module(x)
        with torch.no_grad():
            module.up.weight.add_(1)
        with pytest.raises(RuntimeError, match=r"the parameter 'up\.weight' was changed in place"):
            output.sum().backward()


def test_double_backward_is_refused_and_a_retained_graph_is_not():
    module, x = Gated(), torch.randn(1, 512, WIDTH, requires_grad=True)
    with tiled(module):
        output = module(x).sum()
        first, second = (torch.autograd.grad(output, x, retain_graph=True)[0] for _ in range(2))
        assert torch.equal(first, second)
        with pytest.raises(RuntimeError, match="Gated runs in tiles, which do not support double backward"):
            torch.autograd.grad(output, x, create_graph=True)


def test_a_gradient_that_would_be_lost_is_an_error():
    module, outside = Gated(), nn.Parameter(torch.ones(()))
    del module.scale
    module.scale = outside * 2
    with tiled(module), pytest.raises(RuntimeError, match=r"neither\. Pass it as an argument"):
        module(torch.randn(1, 512, WIDTH)).sum().backward()


def test_hooks_see_a_gradient_once_and_modules_inside_once_per_slice():
    module, x, seen = Gated(), torch.randn(1, 512, WIDTH), list[str]()
    module.up.weight.register_hook(lambda g: seen.append("gradient") or g * 2)
    module.up.weight.register_post_accumulate_grad_hook(lambda _: seen.append("accumulated"))
    module.register_forward_hook(lambda *_: seen.append("module"))
    module.up.register_forward_hook(lambda *_: seen.append("inside"))
    expected = step(module, x)
    assert sorted(seen) == ["accumulated", "gradient", "inside", "module"]
    seen.clear()
    with tiled(module):
        assert same(step(module, x), expected)
    assert {name: seen.count(name) for name in seen} == {"module": 1, "inside": 8, "gradient": 1, "accumulated": 1}


def test_gradients_accumulate_and_tied_weights_count_twice():
    module, x = Gated(WIDTH, WIDTH), torch.randn(1, 512, WIDTH)
    module.up.weight = module.gate.weight

    def run(x):
        module(x).square().sum().backward(inputs=[*module.parameters()])
        return module(x)

    expected = step(module, x, run=run)
    with tiled(module):
        assert same(step(module, x, run=run), expected)


@pytest.mark.parametrize("outer", ["recompute", "selective", "offload", "both", "checkpoint", "reentrant"])
def test_tiles_inside_of_recomputed_and_offloaded_blocks(outer, tmp_path):
    model, x = Block(p=0.2), torch.randn(2, 512, WIDTH)
    with tiled(model.mlp), tiled(model.norm):
        expected = step(model, x)
        run, attached = model, []
        if outer in ("recompute", "selective", "both"):
            attached.append(Recomputed(model, "selective" if outer == "selective" else None))
            attached[-1].attach()
        if outer in ("offload", "both"):
            attached.append(Offloaded(model, OffloadChain(tmp_path)))
            attached[-1].attach()
        if outer in ("checkpoint", "reentrant"):
            run = lambda x: checkpoint(model, x, use_reentrant=outer == "reentrant")  # noqa: E731
        found = step(model, x, run=run)
        while attached:
            attached.pop().detach()
    assert all(map(torch.equal, found, expected))


def test_a_recomputed_block_runs_the_tile_at_its_end_no_third_time():
    """Recomputation ends when all that was saved is there again: before the slices, which the backward pass runs."""
    model, x = Block(), torch.randn(2, 512, WIDTH)
    seen = []
    model.mlp.down.register_forward_hook(lambda module, args, output: seen.append(len(args[0].flatten(0, -2))))
    with tiled(model.mlp):
        outer = Recomputed(model)
        outer.attach()
        step(model, x)
        outer.detach()
    assert sum(seen) == 2 * 1024


def test_executors_of_one_module_are_made_before_they_are_attached(tmp_path):
    module, x = Gated(), torch.randn(1, 512, WIDTH)
    executors = [Tile(module, 128), Recomputed(module), Offloaded(module, OffloadChain(tmp_path))]
    expected = step(module, x)
    for one in executors:
        one.attach()
    found = step(module, x)
    assert same(found, expected)
    assert not torch.equal(found[2], expected[2])  # sums in another order: it did run in slices
    for one in reversed(executors):
        one.detach()
    assert "forward" not in vars(module)


def test_nothing_but_autograd_holds_the_inputs_of_tiles():
    model, x = Block(), torch.randn(1, 512, WIDTH, requires_grad=True)
    made = list[StorageWeakRef]()
    model.mlp.register_forward_pre_hook(lambda _, args: made.append(StorageWeakRef(args[0].untyped_storage())))
    with tiled(model.mlp), tiled(model.norm):
        output = checkpoint(model, x, use_reentrant=False)
        assert made[0].expired()
        output.sum().backward()
    assert len(made) == 2
    assert made[1].expired()


def test_copies_have_a_tile_of_their_own():
    model, x = Stack(1), torch.randn(1, 512, WIDTH)
    names = [*model.state_dict()]
    with tiled(model.blocks[0].mlp):
        copied, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        expected = step(model, x)
        assert [*model.state_dict()] == names
    for one in (copied, loaded):
        tile = vars(one.blocks[0].mlp)["forward"]
        assert tile.module is one.blocks[0].mlp
        assert all(map(torch.equal, step(one, x), expected))
        with torch.no_grad():
            one.blocks[0].mlp.down.bias.add_(1)
        assert not torch.equal(one(x), expected[0])
        tile.detach()
        assert "forward" not in vars(one.blocks[0].mlp)


def test_the_simulated_peak_is_the_real_one_without_weights_too():
    model, x = Stack(2, p=0.1), torch.randn(1, 1024, WIDTH)
    tiles = [Tile(part, 128) for block in model.blocks for part in (block.norm, block.mlp)]
    plain = simulate(model, x).bytes
    for one in tiles:
        one.attach()
    found = simulate(model, x).bytes
    real = Peak()
    model.zero_grad(set_to_none=True)
    gc.collect()
    with LiveTensors(real):
        model(x).sum().backward()
    assert found == real.bytes < 0.5 * plain
    # The operations are those of all slices, of which the simulation runs a few.
    assert count_flops(model, x) > 1.2 * count_flops(Stack(2), x)
    assert simulate(model.to("meta"), x.to("meta")).bytes == found


# Converted modules inside.


def at_peak(live: FollowedTensors) -> Counter[str]:
    """Return the bytes that are live at the peak, by the operator and the shape of what has them."""
    found = Counter[str]()
    peak = max(range(len(live.events)), key=lambda place: live.events[place].now)
    for event in live.events[: peak + 1]:
        if event.made is not None:
            found[f"{event.made.func} {event.made.shape}"] += event.change
    return found


@pytest.mark.parametrize("offloads", [None, "accelerator", "files"])
@pytest.mark.parametrize("rows", [1024, 1169])
def test_simulated_slices_stand_for_those_that_do_not_run(rows, offloads, monkeypatch):
    monkeypatch.setattr("rmm_linear.planning.offload.pack.SMALL", 1024)
    with torch.device("meta"):
        model, x = Stack(1), torch.randn(1, rows, WIDTH)
    convert(model)
    chain = OffloadChain("/nowhere" if offloads == "files" else None)
    waiting = [Offloaded(block, chain) for block in model.blocks] if offloads else []
    for one in (*(Tile(part, 128) for block in model.blocks for part in (block.norm, block.mlp)), *waiting):
        one.attach()

    def simulated() -> tuple[int, str, list[int], FollowedTensors]:
        found, live = watch(model, x)
        return found.bytes, found.moment, [one.copied for one in waiting], live

    *found, live = simulated()
    some, there = len(live.events), at_peak(live)
    monkeypatch.setattr("rmm_linear.planning.tiles.tile._simulation", lambda tensors: None)
    *expected, live = simulated()
    every, others = len(live.events), at_peak(live)
    assert found == expected, f"more: {there - others}; less: {others - there}"
    assert some < 0.8 * every
    assert all(found[2])


def test_converted_modules_inside_save_codes_slice_by_slice(caplog):
    model, x = Stack(1), torch.randn(2, 512, WIDTH)
    mlp = model.blocks[0].mlp
    expected = step(model, x)
    convert(model)
    model(x).sum().backward()  # the first step
    whole, peaks = saved_bytes(model, x), beyond(mlp, x)
    caplog.clear()
    with tiled(mlp, 128):
        cut, cut_peak = saved_bytes(model, x), beyond(mlp, x)
        found = [step(model, x, seed=seed) for seed in range(20)]
        assert not caplog.records
    assert cut < 1.1 * whole
    assert cut_peak < 0.7 * peaks
    assert all(torch.equal(one[0], expected[0]) for one in found)
    mean = torch.stack([one[4] for one in found]).mean(0)
    spread = torch.stack([error(one[4], expected[4]) * torch.ones(()) for one in found]).mean()
    assert error(mean, expected[4]) < 0.5 * spread  # unbiased: 1/√20 of one step's
    revert(model)
    assert all(map(torch.equal, step(model, x), expected))


def saved_bytes(model: nn.Module, x: Tensor) -> int:
    """Bytes that hooks for saved tensors see; inner graphs are seen by them."""
    found = dict[int, Tensor]()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: found.setdefault(t.untyped_storage()._cdata, t), lambda t: t
    ):
        output = model(x)
    own = {one.untyped_storage()._cdata for one in (*model.parameters(), *model.buffers())}
    del output
    return sum(one.untyped_storage().nbytes() for key, one in found.items() if key not in own)


def test_converted_inside_needs_its_graph_and_frees_it():
    model, x = Gated(), torch.randn(1, 512, WIDTH, requires_grad=True)
    holder = nn.ModuleDict({"mlp": model})
    convert(holder)
    with tiled(holder["mlp"]):
        output = holder["mlp"](x).sum()
        first, second = (torch.autograd.grad(output, x, retain_graph=kept)[0] for kept in (True, False))
        assert torch.equal(first, second)
        with pytest.raises(RuntimeError, match="backward through"):
            output.backward()


@pytest.mark.parametrize("checkpointed", ["exact", "packed"])
def test_converted_inside_of_a_recomputed_block(checkpointed, tmp_path):
    model, x = Stack(1), torch.randn(2, 512, WIDTH)
    expected = step(model, x)
    convert(model, checkpointed=checkpointed)
    with tiled(model.blocks[0].mlp):
        plain = step(model, x)
        inner = Recomputed(model.blocks[0])
        inner.attach()
        outer = Offloaded(model.blocks[0], OffloadChain(tmp_path))
        outer.attach()
        found = step(model, x)
        outer.detach()
        inner.detach()
    assert torch.equal(found[0], expected[0])
    if checkpointed == "exact":
        assert same(found, expected, 1, 1e-5)
    else:
        assert 0 < error(found[4], expected[4]) < 2 * error(plain[4], expected[4])


def test_offloaded_codes_of_slices_come_back_once(tmp_path, monkeypatch):
    model, x, begun = Stack(1), torch.randn(2, 2048, WIDTH), list[int]()
    convert(model)
    monkeypatch.setattr("rmm_linear.planning.offload.pack.SMALL", 1024)
    with tiled(model.blocks[0].mlp, 512):
        step(model, x)
        expected = step(model, x)
        one = Offloaded(model.blocks[0], OffloadChain(tmp_path))
        one.attach()
        begin = FileCopy.begin
        monkeypatch.setattr(FileCopy, "begin", lambda copy: begun.append(id(copy)) or begin(copy))
        found = step(model, x)
        one.detach()
    assert all(map(torch.equal, found, expected))
    assert len(begun) == len(set(begun)) > 8
