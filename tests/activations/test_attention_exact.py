"""What packed attention says where it stays exact, and the name in the configurations that models share."""

import copy
import pickle

import pytest
import torch
from helpers import enable_checkpointing, tiny_model, token_ids
from torch import nn
from torch.nn import functional as F

from rmm_linear import convert, revert
from rmm_linear.activations.attention_interface import NAME

SAID = "The attention of {} stays exact and saves what it saved before: {}"


def said(caplog):
    return [message for message in caplog.messages if "stays exact" in message]


class Weighing(nn.Module):
    """Two attentions that are asked for their probabilities, by default."""

    def __init__(self, **named):
        super().__init__()
        self.layers = nn.ModuleList(nn.MultiheadAttention(32, 4) for _ in range(2))
        self.named = named

    def forward(self, x):
        for layer in self.layers:
            x = layer(x, x, x, **self.named)[0]
        return x


class Sometimes(nn.Module):
    def forward(self, x, fused):
        heads = x.unflatten(2, (4, 8)).transpose(1, 2)
        if fused:
            return F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)
        return ((heads @ heads.transpose(2, 3)).softmax(3) @ heads).transpose(1, 2).flatten(2)


def test_probabilities_that_are_asked_for_are_said_once(caplog):
    model = Weighing().train()
    convert(model, operations="attention")
    x = torch.randn(5, 2, 32, requires_grad=True)
    with torch.no_grad():
        model(x)
    model.eval()(x)
    assert not said(caplog)
    for _ in range(2):
        model.train()(x).sum().backward()
    (message,) = said(caplog)
    assert message.startswith(SAID.format("layers.0", "it makes the probabilities itself with need_weights=True"))
    assert "Pass need_weights=False" in message
    assert all("need_weights" in layer.rmm_exact for layer in model.layers)
    model.named["need_weights"] = False
    model(x)
    assert [layer.rmm_exact for layer in model.layers] == [None] * 2
    assert len(said(caplog)) == 1


def test_a_module_that_calls_the_function_sometimes(caplog):
    model = nn.ModuleList([Sometimes()]).train()
    convert(model, operations="attention")
    x = torch.randn(2, 6, 32, requires_grad=True)
    model[0](x.detach(), False)
    model[0](x, True)
    model[0](x[:, :0], True)  # nothing to pack, and nothing to say
    assert not said(caplog)
    model[0](x, False)
    (message,) = said(caplog)
    assert message.startswith(SAID.format("0", "its forward did not call F.scaled_dot_product_attention."))


@pytest.mark.parametrize("reentrant", [True, False])
def test_packed_attention_in_checkpoints_says_nothing(reentrant, caplog):
    model = tiny_model("roberta").train()
    convert(model, min_rows=4)
    enable_checkpointing(model, reentrant)
    model(input_ids=token_ids()).logits.sum().backward()
    assert not said(caplog)


def test_every_model_says_its_own_reasons(caplog):
    x = torch.randn(5, 2, 32, requires_grad=True)
    model = Weighing().train()
    convert(model, operations="attention")
    for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        one(x)
        one(x)
    assert len(said(caplog)) == 3


def test_hooks_of_a_reverted_module_are_gone():
    model = Weighing()
    convert(model, operations="attention")
    for one in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model):
        assert all(layer._forward_hooks for layer in one.layers)
        revert(one)
        assert not any(layer._forward_hooks for layer in one.layers)


def twins():
    """Two models with the same configuration object."""
    first = tiny_model("roberta").train()
    second = type(first)(first.config).train()
    assert second.roberta.config is first.roberta.config
    return first, second


def attentions(model):
    return [layer.attention.self for layer in model.roberta.encoder.layer]


def is_packed(model):
    """Whether the attention function of its modules is ours, and packs."""
    for module in attentions(model):
        module.rmm_exact = "not called"
    model(input_ids=token_ids()).logits.sum().backward()
    return [module.rmm_exact for module in attentions(model)] == [None, None]


def test_models_that_share_a_configuration_are_reverted_by_themselves():
    first, second = twins()
    convert(first, operations="attention")
    convert(second, operations="attention")
    revert(first)
    assert second.config._attn_implementation == NAME
    assert is_packed(second)
    revert(second)
    assert second.config._attn_implementation == "sdpa"


def test_a_dry_or_measured_conversion_of_one_leaves_the_other_packed():
    first, second = twins()
    convert(first, operations="attention")
    convert(second, min_rows=4, example={"input_ids": token_ids()})
    revert(second)
    assert is_packed(first)


def test_a_model_that_is_reverted_part_by_part_has_its_name_again():
    model = tiny_model("roberta").train()
    convert(model, operations="attention")
    first, second = model.roberta.encoder.layer
    revert(first)
    assert model.config._attn_implementation == NAME
    revert(second)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_has_a_name_of_its_own(copied):
    model = tiny_model("roberta").train()
    convert(model, operations="attention")
    other = copied(model)
    revert(other.roberta.encoder.layer[0])
    assert other.config._attn_implementation == NAME
    revert(other)
    assert [other.config._attn_implementation, model.config._attn_implementation] == ["sdpa", NAME]
    assert is_packed(model)


def test_a_name_that_is_set_after_the_conversion_is_said_once(caplog):
    model = tiny_model("roberta").train()
    convert(model, operations="attention")
    model.set_attn_implementation("sdpa")
    for _ in range(2):
        model(input_ids=token_ids()).logits.sum().backward()
    (message,) = said(caplog)
    name = "roberta.encoder.layer.0.attention.self"
    assert message.startswith(SAID.format(name, "its attn_implementation was set to 'sdpa' after it was converted."))
    assert "Call rmm_linear.revert, model.set_attn_implementation('sdpa') and rmm_linear.convert" in message
