"""Flash attention by groups of heads: the same to the bit, in less memory, and nothing else is taken."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from rmm_linear.planning import BlockPlan, PlannedBlock, simulate
from rmm_linear.planning.blocks.recompute import Recomputed
from rmm_linear.planning.step.flash import flash_workspace
from rmm_linear.planning.tiles import attention
from rmm_linear.planning.tiles.attention import FlashByHeads, GroupedHeads, groups_of, heads_of
from rmm_linear.planning.tiles.operators import Names


class Heads(nn.Module):
    """Attention of eight heads that share two keys."""

    def __init__(self, **settings) -> None:
        super().__init__()
        self.first, self.last, self.settings = nn.Linear(64, 96), nn.Linear(64, 64), settings

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.first(x).split([64, 16, 16], -1)
        query, key, value = (one.unflatten(-1, (-1, 8)).transpose(1, 2) for one in (query, key, value))
        found = F.scaled_dot_product_attention(query, key, value, **{"enable_gqa": True, **self.settings})
        return self.last(found.transpose(1, 2).flatten(2))


def step(module, x):
    x = x.clone().requires_grad_()
    output = module(x)
    return [output.detach(), *torch.autograd.grad(output.float().square().sum(), [x, *module.parameters()])]


def ran_by_groups(module, x):
    found, todo = False, [module(x).grad_fn]
    while todo:
        node = todo.pop()
        found |= type(node).__name__ == "FlashByHeadsBackward"
        todo += [one for one, _ in node.next_functions if one is not None]
    return found


@pytest.fixture
def few_rows(monkeypatch):
    monkeypatch.setattr(attention, "_ROWS", 64)


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("settings", [{"is_causal": True}, {"scale": 0.5}], ids=str)
def test_outputs_and_gradients_are_the_same_to_the_bit(settings):
    module, x = Heads(**settings).bfloat16(), torch.randn(2, 70, 64, dtype=torch.bfloat16)
    expected = step(module, x)
    grouped = GroupedHeads(module)
    grouped.attach()
    assert ran_by_groups(module, x)
    assert all(map(torch.equal, step(module, x), expected))
    grouped.detach()
    assert not ran_by_groups(module, x)


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize(
    ("settings", "dtype", "rows", "is_grouped"),
    [
        ({"is_causal": True}, torch.float16, 70, True),
        ({"is_causal": True}, torch.float32, 70, False),
        ({"dropout_p": 0.5}, torch.bfloat16, 70, False),
        ({"attn_mask": torch.ones(70, 70, dtype=torch.bool)}, torch.bfloat16, 70, False),
        ({"is_causal": True}, torch.bfloat16, 3, False),
    ],
)
def test_what_is_taken_and_what_is_not(settings, dtype, rows, is_grouped):
    """Nor is an error hidden: heads that share keys are refused where nobody allows it."""
    module, x = Heads(**settings).to(dtype), torch.randn(2, rows, 64, dtype=dtype)
    GroupedHeads(module).attach()
    assert ran_by_groups(module, x) is is_grouped
    with torch.no_grad():
        module(x)
    module.settings = {**settings, "enable_gqa": False}
    with pytest.raises(RuntimeError):
        module(x)


@pytest.mark.usefixtures("few_rows")
def test_autocast_is_that_of_attention():
    module, x = Heads(is_causal=True), torch.randn(2, 70, 64)
    GroupedHeads(module).attach()
    with torch.autocast("cpu", torch.bfloat16):
        found = step(module, x)
        vars(module).pop("forward")
        assert all(map(torch.equal, found, step(module, x)))


def test_groups_divide_the_heads_of_the_keys_and_leave_enough_rows():
    def count(heads: int, keys: int, rows: int) -> int:
        made = [torch.empty(1, n, rows, 128, dtype=torch.bfloat16, device="meta") for n in (heads, keys)]
        return groups_of(*made)

    assert [count(32, 8, rows) for rows in (2048, 4096, 8192, 16384, 10**6)] == [1, 2, 4, 8, 8]
    assert [count(heads, keys, 10**6) for heads, keys in ((6, 6), (32, 1), (28, 4))] == [6, 1, 4]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_operators_of_both_devices_and_the_bytes_of_their_backward_pass(device, monkeypatch):
    """Per token: 32 heads of 128 in float32, a sum per head, and keys and values of 32 heads in 16 bits."""
    monkeypatch.setattr(Tensor, "copy_", lambda one, other: one)  # which looks for the device
    found, kept = [], SimpleNamespace(save_for_backward=lambda *tensors: setattr(kept, "saved_tensors", tensors))

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found.append(flash_workspace(func, args, is_meta=device == "cpu"))
            return func(*args, **(kwargs or {}))

    with FakeTensorMode(), torch.no_grad():
        given = [
            torch.empty(1, 256, heads, 128, dtype=torch.bfloat16, device=device).transpose(1, 2) for heads in (32, 8, 8)
        ]
        for groups in (1, 8):
            output = FlashByHeads.forward(kept, *given, True, None, groups)
            with Watch():
                gradients = FlashByHeads.backward.__wrapped__(kept, torch.empty_like(output))[:3]
            assert [one.shape for one in gradients] == [one.shape for one in given]
    whole, *each = [one for one in found if one]
    assert whole == 256 * (32 * 129 * 4 + 2 * 32 * 128 * 2)
    assert len(each) == 8
    assert max(each) <= whole / 8 + 2 * 256 * 4 * 128 * 2  # and copies of the parts of output and gradient


def test_a_planned_block_without_weights_takes_less():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Heads(is_causal=True) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + layer(x)
            return x

    with torch.device("meta"):
        model, x = Model().bfloat16(), torch.empty(1, 65536, 64, dtype=torch.bfloat16)
    assert not heads_of(Heads())
    expected = simulate(model, x)
    with BlockPlan([PlannedBlock(f"layers.{n}", "recompute + tile", rows=1024) for n in range(2)]).applied(model):
        found = simulate(model, x)
    saved = 65536 * (8 * (32 + 1) * 4 + 2 * 8 * 8 * 2) / 2  # of one of two groups: heads of 8 are rounded to 32
    assert expected.bytes - found.bytes >= 0.9 * saved


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize(("saves", "count"), [(None, 2), ("attention", 1)])
def test_recomputation_runs_it_again_unless_its_results_are_saved(saves, count):
    module, x = Heads(is_causal=True).bfloat16(), torch.randn(2, 70, 64, dtype=torch.bfloat16)
    expected = step(module, x)
    GroupedHeads(module).attach()
    Recomputed(module, saves).attach()
    with Names() as ran:
        assert all(map(torch.equal, step(module, x), expected))
    assert ran.names.count("_scaled_dot_product_flash_attention_for_cpu") == count
    assert ran.names.count("_scaled_dot_product_flash_attention_for_cpu_backward") == 2
