"""What the tests of saved states share: a model whose sketches have learned, and all that a save of it holds."""

import torch
from helpers import Mlp

from rmm_linear import convert, sketch_state, sketch_tensors

WTA = {"kind": "wta", "memory": 0.5, "min_rows": 1, "norm_estimator": "position"}


def learned(steps=4, **fields):
    """A small model whose sketches have learned tensors, if its kind has any."""
    torch.manual_seed(0)
    model = Mlp()
    convert(model, **{**WTA, **fields})
    for _ in range(steps):
        model(torch.randn(4, 10, 12)).square().sum().backward()
    return model


def content(model):
    """All that a save is of, so that two of them can be compared."""
    config = next(layer.rmm_context.config for layer in model.modules() if hasattr(layer, "rmm_context"))
    return config, sketch_state(model), {name: tensor.tolist() for name, tensor in sketch_tensors(model).items()}
