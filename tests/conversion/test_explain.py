"""The ledger by module, explain, example-driven conversion, and peak memory."""

import gc

import pytest
import torch
from cases import ROUGH
from helpers import tiny_model
from torch import nn

from rmm_linear import RMMLinear, convert
from rmm_linear.memory import explain, peak, track_saved


class Shapes(nn.Module):
    """Linears whose inputs are kept by nobody else, by a sibling, and by an activation."""

    def __init__(self):
        super().__init__()
        self.inner, self.left, self.right, self.after = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        hidden = self.inner(x)
        return self.after(torch.tanh(self.left(hidden) * self.right(hidden)))


def test_the_ledger_names_keepers_and_marks_shared_storages():
    model = Shapes()
    with track_saved(model) as kept:
        output = model(torch.randn(100, 16))
    size = 100 * 16 * 4
    # left and right each give the product an operand, tanh keeps its output, which `after` reads.
    assert kept.by_module == {"inner": size, "left": size, "": 3 * size}
    assert kept.shared == {"left": size, "": size}
    assert kept.total == 5 * size
    assert kept.to_dict() == {"total": kept.total, "by_module": kept.by_module, "shared": kept.shared}
    assert "left" in kept.table()
    assert "(model)" in kept.table()
    del output


def test_the_ledger_leaves_no_hooks():
    model = Shapes()
    with pytest.raises(RuntimeError), track_saved(model):
        model(torch.randn(3, 5))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_explain_says_what_changes_and_why_not():
    model, x = Shapes(), torch.randn(100, 16)
    size, sketch = 100 * 16 * 4, 25 * 16 * 4 + 8
    found = explain(model, x, **ROUGH)
    assert (found.layers["inner"].before, found.layers["inner"].after) == (size, sketch)
    assert (found.layers["left"].before, found.layers["left"].after) == (size, sketch)
    assert (found.layers["right"].before, found.layers["right"].after) == (0, 0)
    assert found.layers["after"].reason == "Tanh saves this tensor anyway"
    assert found.layers["after"].after == sketch
    assert found.before == 5 * size
    assert found.after == 3 * size + 3 * sketch
    assert f"kept_before={5 * size}" in str(found)
    assert found.to_dict()["layers"]["after"]["reason"] == found.layers["after"].reason


def test_explain_disturbs_nothing():
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(), nn.Linear(16, 4)).eval()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    explain(model, torch.ones(100, 16), **ROUGH)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not any(module.training for module in model.modules())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not any(isinstance(module, RMMLinear) for module in model.modules())
    assert all(p.grad is None for p in model.parameters())


def test_explain_reverts_when_the_batch_is_bad():
    model = Shapes()
    with pytest.raises(RuntimeError):
        explain(model, torch.randn(3, 5), **ROUGH)
    assert not any(isinstance(module, RMMLinear) for module in model.modules())


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_attention_output_is_skipped_where_attention_keeps_it(attention):
    model = tiny_model("roberta", dropout=0.0)
    model.set_attn_implementation(attention)
    ids = torch.randint(3, 64, (8, 32))
    report = convert(model, example={"input_ids": ids}, **ROUGH)
    outputs = [name for name in report.skipped if name.endswith("attention.output.dense")]
    if attention == "sdpa":
        assert len(outputs) == 2
        assert report.skipped[outputs[0]] == "scaled_dot_product_attention saves this tensor anyway"
    else:
        assert outputs == []
    assert sum("query" in name for name in report.converted) == 2


def test_an_example_never_adds_bytes():
    model = tiny_model("roberta", dropout=0.0).train()
    batch = {"input_ids": torch.randint(3, 64, (8, 32))}

    def kept():
        with track_saved(model) as ledger:
            output = model(**batch)
        del output
        return ledger.total

    before = kept()
    convert(model, example=batch, **ROUGH)
    assert kept() < before


def test_an_example_on_which_nothing_is_saved_is_an_error():
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    with pytest.raises(ValueError, match=r"on this example none does .*Tanh saves this tensor anyway"):
        convert(model, example=torch.randn(100, 16), target_modules=["2"], **ROUGH)
    assert type(model[2]) is nn.Linear


def test_peak_counts_what_lives_at_once():
    gc.collect()
    with peak("cpu") as measured:
        a = torch.ones(1000)
        b = a + 1
        del a
        c = b.view(10, 100) * 2
        del b, c
        torch.ones(10)
    assert measured.bytes == 2 * 4000
    assert measured.measure == "cpu live tensors"


def test_peak_sees_the_backward_pass():
    layer, x = nn.Linear(64, 64), torch.randn(1000, 64)
    with peak("cpu") as forward:
        output = layer(x)
    with peak("cpu") as both:
        layer(x).square().sum().backward()
    assert forward.bytes == 1000 * 64 * 4
    assert both.bytes >= 2 * 1000 * 64 * 4
    del output
