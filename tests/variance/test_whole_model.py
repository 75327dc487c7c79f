"""gradient_noise: measured noise of a whole gradient equals the closed forms where there are some."""

import pytest
import torch
from helpers import tiny_model, token_ids
from torch import nn

from rmm_linear import convert
from rmm_linear.config import RMMConfig
from rmm_linear.variance import sgd_variance, sketch_variance
from rmm_linear.variance.whole_model import gradient_noise


class Regression(nn.Module):
    """A linear layer by the mean of squares, so that X, Y and every sequence's gradient are known."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(12, 5, bias=False)

    def forward(self, x, labels):
        output = self.dense(x)
        return type("Output", (), {"loss": (output - labels).square().mean(), "logits": output})()


def batch():
    generator = torch.Generator().manual_seed(3)
    return {"x": torch.randn(8, 20, 12, generator=generator), "labels": torch.randn(8, 20, 5, generator=generator)}


def test_a_linear_layer_has_the_noise_of_the_closed_forms():
    torch.manual_seed(0)
    model, inputs = Regression(), batch()
    config = RMMConfig(kind="gaussian", ratio=0.2, min_rows=1, operations="linear")
    found = gradient_noise(model, inputs, config, draws=300)
    x = inputs["x"].reshape(160, 12)
    y = (2 * (model.dense(inputs["x"]) - inputs["labels"]) / (160 * 5)).reshape(160, 5).detach()
    # 60 entries, each from 300 draws: the mean of their squares has a standard error of about √(2 / (300 · 20)) = 2 %.
    assert found.stand_ins["all"]["dense.weight"] == pytest.approx(
        float(sketch_variance(x, y, kind="gaussian", rows=32)), rel=0.1
    )
    assert found.sgd["dense.weight"] == pytest.approx(float(sgd_variance(x, y, samples=(8, 20))), rel=1e-5)
    assert found.stand_ins["linear"] == found.stand_ins["all"]
    assert found.whole() == found.stand_ins["all"]["dense.weight"] / found.sgd["dense.weight"]


@pytest.fixture(scope="module")
def measured():
    torch.manual_seed(1)
    model = tiny_model("roberta", dropout=0.1)
    ids = token_ids()
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.arange(len(ids)) % 2}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    model.eval()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    noise = gradient_noise(model, inputs, RMMConfig(min_rows=4), draws=2)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad.eq(1).all() for parameter in model.parameters())
    assert not any(module.training for module in model.modules())
    return noise


def test_exact_stand_ins_have_no_noise(measured):
    assert max(measured.stand_ins["dropout"].values()) == 0
    assert measured.whole("linear") > 0


def test_biases_of_sketched_layers_are_exact(measured):
    """Also below them: with linear layers alone, all gradients of inputs are exact."""
    noise = measured.stand_ins["linear"]
    assert max(value for name, value in noise.items() if name.endswith("bias")) == 0
    assert max(value for name, value in noise.items() if "embeddings" in name) == 0


def test_the_table_has_a_row_per_block(measured):
    text = str(measured)
    for row in ("roberta.encoder.layer.0", "roberta.encoder.layer.1", "roberta.embeddings", "whole gradient"):
        assert row in text
    assert "linear" in text
    depth = measured.by_depth("linear")
    assert depth["roberta.embeddings"] == 0 < depth["roberta.encoder.layer.0"]


def test_a_converted_model_is_refused():
    model = Regression()
    convert(model, min_rows=1)
    with pytest.raises(ValueError, match=r"not converted\. Call rmm_linear\.revert"):
        gradient_noise(model, batch())
    with pytest.raises(ValueError, match="at least 2 sequences, got 1"):
        gradient_noise(Regression(), {name: value[:1] for name, value in batch().items()})
