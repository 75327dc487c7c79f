"""What packed attention says where it stays exact: once for a model, with the remedy."""

import copy
import pickle

import torch
from helpers import tiny_model, token_ids
from torch import nn
from torch.nn import functional as F

from rmm_linear import convert, revert
from rmm_linear.activations.attention_interface import PackedAttention

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


def test_every_model_says_its_own_reasons(caplog):
    x = torch.randn(5, 2, 32, requires_grad=True)
    model = Weighing().train()
    convert(model, operations="attention")
    for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        one(x)
        one(x)
    assert len(said(caplog)) == 3


def test_hooks_of_a_reverted_module_are_gone():
    model = tiny_model("roberta")
    convert(model, operations="attention")
    for one in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model):
        layers = [module for module in one.modules() if isinstance(module, PackedAttention)]
        assert all(layer._forward_hooks for layer in layers)
        revert(one)
        assert not any(layer._forward_hooks for layer in layers)


def test_a_name_that_is_set_after_the_conversion_is_said_once(caplog):
    model = tiny_model("roberta").train()
    convert(model, operations="attention")
    for module in model.modules():
        if isinstance(module, PackedAttention):
            module.rmm_linears = ()  # else it trains as a region from the second call on
    model.set_attn_implementation("eager")
    for _ in range(2):
        model(input_ids=token_ids()).logits.sum().backward()
    (message,) = said(caplog)
    name = "roberta.encoder.layer.0.attention.self"
    assert message.startswith(SAID.format(name, "its attn_implementation was set to 'eager' after it was converted."))
    assert "Call rmm_linear.revert, model.set_attn_implementation('sdpa') and rmm_linear.convert" in message
