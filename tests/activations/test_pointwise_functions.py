"""What a module computes is found by its class and attributes, or by what it computes."""

import pytest
import torch
from torch import nn

from rmm_linear.activations import pointwise
from rmm_linear.activations.pointwise import pointwise_function
from rmm_linear.packing.pointwise import Pointwise

activations = pytest.importorskip("transformers.activations")


@pytest.mark.parametrize(
    ("module", "name", "parameters"),
    [
        (nn.GELU(), "gelu", ()),
        (nn.GELU("tanh"), "gelu_tanh", ()),
        (nn.SiLU(), "silu", ()),
        (nn.ReLU(inplace=True), "relu", ()),
        (nn.Mish(), "mish", ()),
        (nn.Hardswish(), "hardswish", ()),
        (nn.Sigmoid(), "sigmoid", ()),
        (nn.Tanh(), "tanh", ()),
        (nn.ELU(0.5), "elu", (0.5,)),
        (nn.LeakyReLU(0.3), "leaky_relu", (0.3,)),
    ],
    ids=repr,
)
def test_modules_of_torch(module, name, parameters):
    assert pointwise_function(module) == Pointwise(name, parameters)


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("gelu", "gelu"),
        ("gelu_python", "gelu"),
        ("gelu_new", "gelu_tanh"),
        ("gelu_fast", "gelu_tanh"),
        ("gelu_accurate", "gelu_tanh"),
        ("gelu_pytorch_tanh", "gelu_tanh"),
        ("quick_gelu", "quick_gelu"),
        ("silu", "silu"),
        ("swish", "silu"),
        ("mish", "mish"),
        ("relu", "relu"),
        ("relu2", "relu_squared"),
        ("leaky_relu", "leaky_relu"),
        ("sigmoid", "sigmoid"),
        ("tanh", "tanh"),
        ("gelu_10", None),  # clipped at 10
        ("relu6", None),
        ("laplace", None),
        ("linear", None),
        ("prelu", None),  # learned
    ],
)
def test_modules_of_transformers(key, name):
    found = pointwise_function(activations.ACT2FN[key])
    assert (None if found is None else found.name) == name


@pytest.mark.parametrize(
    "module", [nn.Softplus(), nn.PReLU(), nn.Softmax(-1), nn.Identity(), nn.Linear(3, 3), nn.RReLU(), nn.CELU()]
)
def test_other_modules(module):
    assert pointwise_function(module) is None


def test_a_subclass_is_tried_by_nobody():
    """It may compute something else."""
    assert pointwise_function(type("Mine", (nn.GELU,), {})()) is None


def test_names_do_not_matter_but_what_is_computed_does(monkeypatch):
    renamed = type("Whatever", (nn.Module,), {"forward": lambda self, x: x * torch.sigmoid(x)})
    misnamed = type("SiLUActivation", (nn.Module,), {"forward": lambda self, x: x * torch.sigmoid(1.1 * x)})
    nearly = type("Clipped", (nn.Module,), {"forward": lambda self, x: nn.functional.silu(x).clamp(max=30)})
    broken = type("Broken", (nn.Module,), {"forward": lambda self: None})
    known = dict(dict.items(activations.ACT2FN))
    for kind in (renamed, misnamed, nearly, broken):
        known[kind.__name__] = kind
    monkeypatch.setattr(activations, "ACT2FN", known)
    assert pointwise_function(renamed()) == Pointwise("silu")
    assert [pointwise_function(kind()) for kind in (misnamed, nearly, broken)] == [None] * 3


def test_a_class_is_tried_once_for_each_of_its_settings(monkeypatch):
    monkeypatch.setattr(pointwise, "_found", {})
    tried, on_grid = [], pointwise._try_on_grid
    monkeypatch.setattr(pointwise, "_try_on_grid", lambda *of: tried.append(of) or on_grid(*of))
    for _ in range(3):
        pointwise_function(activations.ACT2FN["gelu_new"])
        pointwise_function(activations.ACT2FN["gelu_10"].eval())
    pointwise_function(activations.ClippedGELUActivation(-1, 1))
    assert len(tried) == 3


def test_found_while_nothing_is_recorded_and_without_running_hooks():
    module = activations.ACT2FN["quick_gelu"]
    module.register_forward_hook(lambda *of: pytest.fail("ran"))
    pointwise._found.clear()
    with torch.inference_mode(), torch.autocast("cpu"):
        assert pointwise_function(module) == Pointwise("quick_gelu")
