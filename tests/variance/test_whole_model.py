"""gradient_noise: measured noise of a whole gradient equals the closed forms where there are some."""

import random

import numpy
import pytest
import torch
from helpers import enable_checkpointing, snapshot, tiny_model, token_ids
from probe_helpers import padded_batch
from statistical import Z, z_scores
from torch import nn

from rmm_linear import RMMLinear, convert
from rmm_linear.config import RMMConfig
from rmm_linear.context.learned import STEPS
from rmm_linear.variance import sgd_variance, sketch_variance
from rmm_linear.variance.passes import Passes, _parts, measuring
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


@pytest.mark.parametrize("count", [12, 11])
def test_few_passes_over_many_sequences_find_the_same_variance_on_average(count):
    """Of three sequences each; of 11, two are left out. Over all orders of the sequences, the means are equal."""
    torch.manual_seed(2)
    model, found = Regression(), []
    x, labels = torch.randn(count, 4, 12), torch.randn(count, 4, 5)
    exact = Passes(model, {"x": x, "labels": labels}).sgd_variance()["dense.weight"]
    for _ in range(400):
        order = torch.randperm(count)
        found.append(Passes(model, {"x": x[order], "labels": labels[order]}).sgd_variance(5)["dense.weight"])
    values = torch.tensor(found, dtype=torch.float64)
    assert abs(float(z_scores(values, exact))) < Z
    assert float(values.std()) / 20 < 0.03 * exact


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


def test_exact_operations_are_measured_if_there_are_no_others(measured):
    assert list(measured.stand_ins) == ["all", "linear", "activation", "norm", "attention"]
    assert all(measured.whole(operation) > 0 for operation in measured.stand_ins)
    inputs = {**padded_batch(), "labels": torch.arange(4) % 2}
    model = tiny_model("roberta", dropout=0.1)
    alone = gradient_noise(model, inputs, RMMConfig(operations="dropout"), draws=1)
    assert list(alone.stand_ins) == ["all", "dropout"]
    assert max(alone.stand_ins["dropout"].values()) == 0
    assert min(alone.sgd.values()) >= 0 < sum(alone.sgd.values())


def test_an_override_of_one_operation_is_no_reason_to_leave_another_out():
    config = RMMConfig(min_rows=4, overrides={r".*query": {"ratio": 0.5}})
    found = gradient_noise(tiny_model("roberta", dropout=0.0), padded_batch(), config, draws=1)
    assert found.whole("norm") > 0


def test_biases_of_sketched_layers_are_exact(measured):
    """Also below them: with linear layers alone, all gradients of inputs are exact."""
    noise = measured.stand_ins["linear"]
    assert max(value for name, value in noise.items() if name.endswith("bias")) == 0
    assert max(value for name, value in noise.items() if "embeddings" in name) == 0
    depth = measured.by_depth("linear")
    assert depth["roberta.embeddings"] == 0 < depth["roberta.encoder.layer.0"]
    for row in (*depth, "whole gradient", "linear"):
        assert row in str(measured)


@pytest.mark.parametrize("architecture", ["roberta", "llama"])
def test_a_converted_model_has_the_noise_of_the_same_conversion(architecture):
    """Seeds follow from the generator's state and the module's index, so the very same draws are compared."""
    inputs, config = padded_batch(), RMMConfig(min_rows=4)
    if architecture == "llama":
        inputs["labels"] = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    found = []
    for is_converted in (False, True):
        model = tiny_model(architecture, dropout=0.1)
        if is_converted:
            convert(model.train(), config)
            for _ in range(STEPS + 2):  # learns what one that is converted to be measured learns
                model(**inputs).loss.backward()
        torch.manual_seed(8)
        found.append(gradient_noise(model, inputs, None if is_converted else config, draws=1))
    assert found[0] == found[1]
    assert list(found[0].stand_ins) == ["all", "linear", "activation", "norm", "attention"]


def test_checkpointing_has_the_same_noise():
    """Without reentrance, which torch refuses under autograd.grad: activations are compressed in the recomputation."""
    found = []
    for is_checkpointed in (False, True):
        model = tiny_model("roberta", dropout=0.1)
        convert(model, min_rows=4, checkpointed="packed")
        if is_checkpointed:
            enable_checkpointing(model, reentrant=False)
        torch.manual_seed(8)
        found.append(gradient_noise(model, padded_batch(), draws=20, by_operation=False))
    assert found[1].sgd == pytest.approx(found[0].sgd, rel=1e-4)
    # Other seeds: ‖error‖² of one draw varies by about half of itself, so the means of 20 by a sixth of one another.
    assert found[1].whole() == pytest.approx(found[0].whole(), rel=0.5)


def test_a_loss_divided_by_the_number_of_items_is_a_sum_over_sequences():
    """As transformers' Trainer has its language models compute it."""
    inputs = padded_batch()
    inputs["labels"] = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    model, config = tiny_model("gpt2", dropout=0.0), RMMConfig(operations="norm")
    items = int((inputs["labels"][:, 1:] != -100).sum())
    mean, total = (
        gradient_noise(model, {**inputs, **more}, config, draws=1) for more in ({}, {"num_items_in_batch": items})
    )
    assert total.stand_ins["all"] == pytest.approx(mean.stand_ins["all"], rel=1e-3)
    assert sum(total.sgd.values()) == pytest.approx(sum(mean.sgd.values()), rel=1e-3)


class _Mean(nn.Module):
    """A classifier whose loss is a mean, whatever number it is given; with noise from NumPy, and BatchNorm if asked."""

    def __init__(self, norm):
        super().__init__()
        self.dense, self.norm, self.head = nn.Linear(6, 32), norm, nn.Linear(32, 3)

    def forward(self, x, labels, num_items_in_batch=None):
        hidden = self.norm(self.dense(x + random.random() + numpy.random.rand()))  # noqa: NPY002
        return {"loss": nn.functional.cross_entropy(self.head(hidden.tanh()), labels)}


def test_a_mean_stays_one_whatever_number_of_items_is_given():
    """transformers' Trainer gives it to models that ignore it."""
    batch = {"x": torch.randn(16, 6), "labels": torch.arange(16) % 3}
    found = [Passes(_Mean(nn.Identity()).train(), {**batch, **more}) for more in ({}, {"num_items_in_batch": 16})]
    found[1].model.load_state_dict(found[0].model.state_dict())
    found[1].others = found[0].others
    assert found[1].sgd_variance() == pytest.approx(found[0].sgd_variance(), rel=1e-6)


def test_numbers_of_python_and_numpy_repeat_and_go_on():
    model, batch = _Mean(nn.Identity()).train(), {"x": torch.randn(16, 6), "labels": torch.arange(16) % 3}
    drawn = random.getstate(), numpy.random.get_state()[1].tolist()  # noqa: NPY002
    with measuring(model):
        passes = Passes(model, batch)
        found = [passes.gradients() for _ in range(2)]
    assert all(map(torch.equal, *found))
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == drawn  # noqa: NPY002


def test_a_batch_that_is_normalized_is_said_to_be_another_one_by_one(caplog):
    batch = {"x": torch.randn(16, 6), "labels": torch.arange(16) % 3}
    model = _Mean(nn.GroupNorm(1, 32)).train()
    gradient_noise(model, batch, RMMConfig(min_rows=1), draws=1)
    assert "BatchNorm" not in caplog.text
    model = _Mean(nn.BatchNorm1d(32)).train()
    with pytest.raises(ValueError, match="more than 1 value"):
        gradient_noise(model, batch, RMMConfig(min_rows=1), draws=1)
    assert sum("BatchNorm" in one for one in caplog.messages) == 1
    caplog.clear()
    model.norm.eval()
    gradient_noise(model, batch, RMMConfig(min_rows=1), draws=1)
    assert "BatchNorm" not in caplog.text


def test_answers_are_not_cut_where_questions_are_padded():
    """The parts of a batch's gradient add up to it: the mask of an encoder says nothing of the decoder's labels."""
    generator = torch.Generator().manual_seed(1)
    ids, labels = torch.randint(3, 64, (2, 4, 20), generator=generator)
    mask = (torch.arange(20) < torch.tensor([[5], [9], [20], [12]])).long()
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels.where(torch.arange(20) < 15, -100)}
    passes = Passes(tiny_model("t5", dropout=0.0).train(), batch)
    weights, gradients = [], []
    for inputs, weight in _parts(passes.model, batch, 1):
        weights.append(weight)
        gradients.append(passes._gradients(inputs))
    assert weights == [15.0] * 4
    for place, whole in enumerate(passes.gradients()):
        assert torch.allclose(sum(one[place] for one in gradients) / 4, whole, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda model, inputs: convert(model, min_rows=1),
            r"config must be None for a converted model.*revert\(model\)",
        ),
        (lambda model, inputs: inputs.update({k: v[:1] for k, v in inputs.items()}), "at least 2 sequences, got 1"),
        (lambda model, inputs: model.requires_grad_(False), "trained parameters, got one where all are frozen"),
        (lambda model, inputs: setattr(model, "dense", RMMLinear(12, 5)), "layers that convert made, got one made by"),
        (lambda model, inputs: model.register_forward_hook(lambda *_: {}), "has a scalar loss, got dict without one"),
    ],
    ids=["config", "one sequence", "frozen", "made by hand", "no loss"],
)
def test_what_cannot_be_measured_is_refused_and_nothing_changes(change, message):
    model, inputs = Regression(), batch()
    change(model, inputs)
    before, state = snapshot(model), torch.get_rng_state()
    config = None if "by itself" in message or "made by" in message else RMMConfig(min_rows=1)
    with pytest.raises(ValueError, match=message):
        gradient_noise(model, inputs, config)
    assert snapshot(model) == before
    assert torch.equal(torch.get_rng_state(), state)
