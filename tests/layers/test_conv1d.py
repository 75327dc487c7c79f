"""RMMConv1D: GPT-2's layer, whose weight is transposed, and its way back."""

import torch
from cases import ROUGH
from helpers import tiny_model
from statistical import assert_unbiased
from torch import nn

from rmm_linear import convert, revert


def test_gpt2_conv1d_becomes_its_twin_and_back():
    model = tiny_model("gpt2")
    report = convert(model, **ROUGH)
    twin = model.transformer.h[0].attn.c_attn
    assert type(twin).__name__ == "RMMConv1D"
    layer = report.converted["transformer.h.0.attn.c_attn"]
    assert (layer.type, layer.in_features, layer.out_features) == ("Conv1D", 16, 48)
    assert "countsketch" in repr(twin)
    revert(model)
    assert type(twin).__name__ == "Conv1D"


def test_conv1d_gradient_is_unbiased():
    """Its weight is (I, O)."""
    from transformers.pytorch_utils import Conv1D

    model = nn.Sequential(Conv1D(3, 5))
    x = torch.randn(4, 10, 5, generator=torch.Generator().manual_seed(0))
    model(x).square().sum().backward()
    exact = model[0].weight.grad.clone()
    convert(model, **ROUGH)

    def gradient(_):
        model.zero_grad()
        model(x).square().sum().backward()
        return model[0].weight.grad

    torch.manual_seed(0)
    assert_unbiased(gradient, exact, draws=200, widest=0.1)
