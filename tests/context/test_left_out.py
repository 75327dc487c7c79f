"""Gradients in padding, which is not saved: an error whenever one comes, not in the first pass alone."""

import pytest
import torch
from helpers import tiny_model, token_ids
from torch import nn

from rmm_linear import convert
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
    with pytest.raises(RuntimeError, match=rf"{ON_THE_LEFT}.*No batch before"):
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


def test_every_layer_looks_in_turn():
    """The gradient comes to layers that are not next to the loss."""
    model, mask = Stack(), torch.ones(6, 12)
    mask[:, 7:] = 0
    convert(model, min_rows=4)

    def step(is_pooled):
        model(torch.randn(6, 12, 16), attention_mask=mask, is_pooled=is_pooled).backward()

    for _ in range(STEPS):
        step(False)
    found = []
    for _ in range(len(model.layers)):
        try:
            step(True)
        except RuntimeError as error:
            found.append(str(error).partition(" carry")[0])
    assert sorted(found) == [f"Padding must not reach the loss, but masked tokens of layers.{n}" for n in range(3)]


@pytest.mark.parametrize("length", [4, None])
def test_rows_before_a_text_are_told_from_others(length):
    """The last row of a sequence, before the first of the next one, is none of them."""
    valid = torch.tensor([[0, 1, 1, 0], [1, 1, 0, 0]]).bool().view(-1)
    for row, expected in [(0, 2), (3, 1), (6, 1), (7, 1), (1, 0)]:
        y = torch.zeros(8, 3)
        y[row, 1] = 0.5
        assert gradient_in_padding(y, TokenMask.of(valid, length)) == (min(expected, 1) if length is None else expected)
    assert gradient_in_padding(torch.full((8, 3), torch.inf), TokenMask.of(valid, length)) == 0
