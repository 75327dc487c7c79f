"""explain and conversion by example: what changes, what does not and why, and that nothing is disturbed."""

import pytest
import torch
from cases import ROUGH
from helpers import Shapes, tiny_model
from torch import nn

from rmm_linear import RMMLinear, convert
from rmm_linear.memory import explain, track_saved


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
    with pytest.raises(
        ValueError, match=r"of the operations linear, and this model has none .*Tanh saves this tensor anyway"
    ):
        convert(model, example=torch.randn(100, 16), target_modules=["2"], **ROUGH)
    assert type(model[2]) is nn.Linear
