"""Gradients in padding, which is not saved: an error whenever one comes, not in the first pass alone."""

import re

import pytest
import torch
from helpers import tiny_model, token_ids
from torch import nn

from rmm_linear import convert, revert
from rmm_linear.context import left_out
from rmm_linear.context.left_out import gradient_in_padding
from rmm_linear.sketches import TokenMask

STEPS = 6  # after which no module looks at anything but padding
ON_THE_LEFT = r"padded on the left.*first token of the text.*to -100, pad on the right"


def texts(*, is_labelled):
    """Return sequences padded on the left, whose first tokens are instructions or have a label."""
    ids, mask = token_ids(4, 24), torch.ones(4, 24, dtype=torch.long)
    labels = ids.clone()
    for row in range(4):
        mask[row, : 3 * row] = 0
        labels[row, : 3 * row + (0 if is_labelled else 4)] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def language_model():
    model = tiny_model("llama", dropout=0.0).train()
    convert(model, min_rows=4)
    return model


def train(model, steps=STEPS):
    for _ in range(steps):
        model(**texts(is_labelled=False)).loss.backward()


def test_left_padding_that_predicts_a_text_is_named():
    with pytest.raises(RuntimeError, match=rf"masked tokens of model\.norm.*{ON_THE_LEFT}"):
        language_model()(**texts(is_labelled=True)).loss.backward()


@pytest.mark.parametrize("autocast", [False, True])
def test_a_later_batch_with_a_gradient_in_padding_is_an_error(autocast):
    model = language_model()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        train(model)
        loss = model(**texts(is_labelled=True)).loss
    with pytest.raises(RuntimeError, match=rf"{ON_THE_LEFT}.*of this step are incomplete: drop"):
        loss.backward()
    model.zero_grad()
    train(model, 1)  # nothing of it is left


def test_a_device_that_the_host_waits_for_says_so_after_the_next_forward_pass(monkeypatch):
    model = language_model()
    train(model)
    monkeypatch.setattr(left_out, "waits", lambda device: True)
    model(**texts(is_labelled=True)).loss.backward()
    with pytest.raises(RuntimeError, match=ON_THE_LEFT):
        model(**texts(is_labelled=False))
    train(model, 1)


class Stack(nn.Module):
    """Layers of which one in the middle may have a loss of its own, over padding."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(5))

    def forward(self, x, attention_mask=None, is_pooled=False):
        inner = self.layers[2](self.layers[1](self.layers[0](x)))
        loss = (self.layers[4](self.layers[3](inner)) * attention_mask.unsqueeze(-1)).square().mean()
        return loss + inner.square().mean() if is_pooled else loss


def refused(step):
    """Run a step; say which layer has found a gradient, if one has."""
    try:
        step()
    except RuntimeError as error:
        assert "Padding must not reach the loss" in str(error)  # noqa: PT017
        return str(error).partition("masked tokens of ")[2].partition(" ")[0]


@pytest.fixture
def stack():
    """A converted model whose layers have all looked at padding, and its step."""
    model, mask = Stack(), torch.ones(6, 12)
    mask[:, 7:] = 0
    convert(model, min_rows=4)

    def forward(is_pooled):
        return model(torch.randn(6, 12, 16), attention_mask=mask, is_pooled=is_pooled)

    for _ in range(STEPS):
        forward(False).backward()
    return model, forward


@pytest.mark.parametrize("between", [0, 1])
def test_every_layer_looks_at_random_and_all_do_after_a_find(between, stack):
    """The gradient comes to layers that are not next to the loss; passes without a backward pass take no turns."""
    _, forward = stack
    found = []
    for _ in range(30):
        for _ in range(between):
            with torch.no_grad():
                forward(False)
        found.append(refused(lambda: forward(True).backward()))
    missed = found.count(None)
    assert missed < 20  # three of five layers have one: a probability of 0.4 for each step until the first find
    assert found[missed] in ("layers.0", "layers.1", "layers.2")
    assert found[missed + 1 :] == ["layers.2"] * (29 - missed)  # that runs backward first


def test_every_backward_pass_of_a_forward_pass_is_looked_at(stack):
    model, _ = stack
    x, mask = torch.randn(6, 12, 16), torch.ones(6, 12)
    mask[:, 7:] = 0
    kept = []
    handle = model.layers[4].register_forward_hook(lambda module, args, output: kept.append(output))
    loss = model(x, attention_mask=mask)
    handle.remove()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="next to the loss carry a gradient"):
        kept[0].square().sum().backward()


def test_what_no_forward_pass_comes_to_say_is_logged(monkeypatch, caplog):
    model = language_model()
    train(model)
    monkeypatch.setattr(left_out, "waits", lambda device: True)
    model(**texts(is_labelled=True)).loss.backward()
    revert(model)
    assert len([one for one in caplog.messages if re.search(ON_THE_LEFT, one)]) == 1


@pytest.mark.parametrize("length", [4, None])
def test_rows_before_a_text_are_told_from_others(length):
    """The last row of a sequence, before the first of the next one, is none of them."""
    valid = torch.tensor([[0, 1, 1, 0], [1, 1, 0, 0]]).bool().view(-1)
    for rows, expected in [([0], 2), ([3], 1), ([6], 1), ([7], 1), ([1], 0), ([0, 1], 2), ([0, 3], 1)]:
        y = torch.zeros(8, 3)
        y[rows, 1] = 0.5
        assert gradient_in_padding(y, TokenMask.of(valid, length)) == (min(expected, 1) if length is None else expected)
    assert gradient_in_padding(torch.full((8, 3), torch.inf), TokenMask.of(valid, length)) == 0
