"""Modules that activation checkpointing recomputes stay exact by default, and it is said."""

import pytest
import torch
from cases import checkpoints
from helpers import batch_of, checkpointed, enable_checkpointing, gradients, loss_of, six_features, tiny_model
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from rmm_linear import RMMConfig, RMMLinear, convert, revert
from rmm_linear.conversion.checkpointed import checkpointed_blocks, without_checkpointing
from rmm_linear.memory import explain, track_saved

MESSAGE = "Activation checkpointing recomputes"
ARCHITECTURES = ["roberta", "gpt2", "llama", "vit", "t5"]


def said(caplog):
    return [record.getMessage() for record in caplog.records if MESSAGE in record.getMessage()]


OUTSIDE = r"(?!.*\.(layer|layers|h|block)\.\d).*"  # names of modules that no block has inside


def step(model, architecture):
    torch.manual_seed(5)
    loss_of(model, architecture).backward()
    return gradients(model)


def made(architecture, reentrant):
    model = tiny_model(architecture, dropout=0.3).train()
    model.config.use_cache = False
    enable_checkpointing(model, reentrant)
    return model


@checkpoints
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_gradients_are_those_of_the_exact_model_to_the_bit(architecture, reentrant):
    """Dropout included, whose masks the recomputation must repeat; nothing outside of blocks is converted."""
    exact = step(made(architecture, reentrant), architecture)
    model = made(architecture, reentrant)
    report = convert(model, min_rows=1, exclude_modules=OUTSIDE)
    assert set(report.checkpointed) == {*report.converted, *report.packed}
    found = step(model, architecture)
    assert found.keys() == exact.keys()
    assert all(torch.equal(found[name], gradient) for name, gradient in exact.items())


@checkpoints
def test_layers_by_themselves_repeat_their_dropout(reentrant):
    """A layer that no model was converted with takes its seeds from the generator that dropout uses."""

    def run(layers):
        torch.manual_seed(3)
        x = six_features()
        checkpoint(nn.Sequential(layers[0], nn.Dropout(0.5), layers[1]), x, use_reentrant=reentrant).sum().backward()
        return x.grad

    layers = [RMMLinear(6, 6, config=RMMConfig(min_rows=1)) for _ in range(2)]
    if reentrant:  # the first pass, which takes a seed before dropout draws
        torch.manual_seed(3)
        with torch.no_grad():
            kept = nn.functional.dropout(layers[0](six_features())) != 0
    else:
        torch.manual_seed(3)
        kept = nn.functional.dropout(torch.ones(40, 6)) != 0
    expected = (torch.ones(40, 6) @ layers[1].weight * kept * 2) @ layers[0].weight
    torch.testing.assert_close(run(layers), expected)


class Nested(nn.Module):
    """A reentrant checkpoint, inside of another one that is not."""

    def __init__(self):
        super().__init__()
        self.first, self.dropout, self.second = nn.Linear(6, 6), nn.Dropout(0.3), nn.Linear(6, 6)

    def inner(self, x):
        return self.second(self.dropout(self.first(x)))

    def forward(self, x):
        return checkpoint(lambda x: checkpoint(self.inner, x, use_reentrant=True), x, use_reentrant=False)


@pytest.mark.parametrize("alone", [True, False], ids=["layers", "model"])
def test_nested_checkpoints_repeat_their_dropout(alone):
    found = []
    for converts in (False, True):
        torch.manual_seed(0)
        model = Nested().train()
        if converts and alone:
            config = RMMConfig(min_rows=1)
            model.first, model.second = (RMMLinear.from_linear(one, config) for one in (model.first, model.second))
        elif converts:
            convert(model, min_rows=1)
        torch.manual_seed(5)
        model(six_features()).square().sum().backward()
        found.append(gradients(model))
    assert all(torch.equal(found[1][name], gradient) for name, gradient in found[0].items())


def test_an_example_leaves_the_layers_of_recomputed_blocks_converted(caplog):
    """Checkpointing hides what they would save, and it may be turned off later; "packed" needs them."""
    model = made("roberta", False)
    batch = {name: value for name, value in batch_of("roberta").items() if name != "labels"}
    report = convert(model, example=batch, min_rows=1, checkpointed="packed")
    assert len(report.converted) == 14
    assert report.skipped == {}
    assert "while activation checkpointing recomputes roberta.encoder.layer.0, inside of it: " in report.memory.line()
    assert report.memory.recomputed.after < 0.4 * report.memory.recomputed.before
    revert(model)
    assert not said(caplog)
    convert(model, example=batch, min_rows=1)
    assert len(said(caplog)) == 1


@checkpoints
def test_it_is_said_once_at_conversion(reentrant, caplog):
    model = made("roberta", reentrant)
    report = convert(model, min_rows=1)
    (message,) = said(caplog)
    assert f"recomputes {len(report.checkpointed)} of the {len(report.converted) + len(report.packed)} " in message
    assert "roberta.encoder.layer.*.attention.self.query" in message
    assert 'convert with checkpointed="packed"' in message
    assert f" checkpointed={len(report.checkpointed)} " in report.summary()
    assert str(report).count("recomputed under activation checkpointing, stays exact") == 13  # rows of the table
    assert report.to_dict()["checkpointed"] == list(report.checkpointed)
    step(model, "roberta")
    assert len(said(caplog)) == 1


@checkpoints
def test_checkpointing_that_is_turned_on_later_is_said_in_the_first_step(reentrant, caplog):
    model = tiny_model("roberta", dropout=0.3).train()
    report = convert(model, min_rows=1)
    assert report.checkpointed == ()
    step(model, "roberta")
    assert not said(caplog)
    enable_checkpointing(model, reentrant)
    for _ in range(2):
        step(model, "roberta")
    (message,) = said(caplog)
    # Dropout of attention, p = 0.3 too, is not called as a module: 24 of the 26 in blocks are.
    assert "recomputes 24 of the " in message
    assert "roberta.encoder.layer.*." in message


@checkpoints
def test_a_checkpoint_in_a_forward_of_ones_own_is_said(reentrant, caplog):
    model = checkpointed(use_reentrant=reentrant)
    convert(model, min_rows=1)
    model(six_features()).sum().backward()
    assert len(said(caplog)) == 1


@checkpoints
def test_packed_makes_the_stand_ins_and_says_nothing(reentrant, caplog):
    exact = step(made("roberta", reentrant), "roberta")
    model = made("roberta", reentrant)
    report = convert(model, min_rows=1, checkpointed="packed")
    assert report.checkpointed
    assert "stays exact" not in str(report)
    name = "roberta.encoder.layer.0.output.dense.weight"
    assert not torch.equal(step(model, "roberta")[name], exact[name])
    assert not said(caplog)


def test_patterns_may_differ(caplog):
    """The first block packs; the message counts the other one's modules."""
    model = made("roberta", False)
    report = convert(model, min_rows=1, overrides={r".*layer\.0\..*": {"checkpointed": "packed"}})
    rest = [name for name in report.checkpointed if "layer.1." in name]
    assert f"recomputes {len(rest)} of the " in said(caplog)[0]


def test_blocks_are_found_by_flags_and_wrappers():
    for architecture in ARCHITECTURES:
        model = tiny_model(architecture)
        assert checkpointed_blocks(model) == {}
        enable_checkpointing(model, False)
        blocks = checkpointed_blocks(model)
        assert len(blocks) == (4 if architecture == "t5" else 2)
        with without_checkpointing(model):
            assert checkpointed_blocks(model) == {}
        assert checkpointed_blocks(model).keys() == blocks.keys()
    wrapped = nn.Sequential(checkpoint_wrapper(nn.Sequential(nn.Linear(4, 4), nn.GELU())), nn.Linear(4, 4))
    assert list(checkpointed_blocks(wrapped)) == ["0"]
    report = convert(wrapped, min_rows=1)
    assert len(report.checkpointed) == 2
    revert(wrapped)
    with without_checkpointing(wrapped), track_saved(wrapped) as saved:
        output = wrapped(torch.randn(8, 4))
    assert len(saved.by_module) == 3
    del output
    assert list(checkpointed_blocks(wrapped)) == ["0"]


def test_explain_says_why_recomputed_layers_save_nothing():
    model = made("roberta", False)
    batch = {name: value for name, value in batch_of("roberta").items() if name != "labels"}
    found = explain(model, batch, min_rows=1)
    layer = found.layers["roberta.encoder.layer.0.output.dense"]
    assert (layer.before, layer.after) == (0, 0)
    assert layer.reason == "recomputed under activation checkpointing, stays exact"


def test_another_word_is_refused():
    with pytest.raises(ValueError, match='checkpointed must be "exact" or "packed", got \'off\''):
        RMMConfig(checkpointed="off")
