"""What a module computes is found by its class and attributes, or on a grid; packed ones in place and without rows."""

import copy

import pytest
import torch
from helpers import packed
from pointwise_helpers import gradient_of, is_within_half_a_step, randn
from torch import nn

from rmm_linear.activations import pointwise
from rmm_linear.activations.pointwise import PackedActivation, pointwise_function
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
        (nn.Hardtanh(-2, 3), "hardtanh", (-2.0, 3.0)),
        (nn.ReLU6(inplace=True), "hardtanh", (0.0, 6.0)),
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
        ("relu6", "hardtanh"),
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


# Packed modules


def test_unknown_modules_are_refused():
    with pytest.raises(TypeError, match="no pointwise function"):
        packed(nn.Softplus(), PackedActivation)


def test_modules_in_place_overwrite_a_part_of_a_tensor():
    """Whose gradient passes through both. A leaf is refused, as by PyTorch's own."""
    gradients = []
    for module in (nn.LeakyReLU(0.2, inplace=True), packed(nn.LeakyReLU(0.2, inplace=True), PackedActivation)):
        whole = randn(6, 70).requires_grad_()
        inner = whole * 1
        version, output = inner._version, module(inner[1:4])
        assert output.data_ptr() == inner[1:4].data_ptr()
        assert inner._version > version
        gradients.append(torch.autograd.grad(inner, whole, randn(6, 70, seed=3))[0])
        with pytest.raises(RuntimeError, match="leaf"):
            module(whole)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("shape", [(), (70,), (3, 0), (2, 3, 5, 7)])
def test_any_number_of_dimensions(shape):
    for module, exact in (
        (packed(nn.GELU(), PackedActivation), nn.GELU()),
        (packed(nn.ReLU(), PackedActivation), nn.ReLU()),
    ):
        x = randn(*shape)
        output, gradient = gradient_of(module, x, torch.ones_like(x))
        assert torch.equal(output, exact(x))
        function = module.rmm_function
        assert is_within_half_a_step(gradient, x, torch.ones_like(x), function, function.bits(4))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_images_are_saved_as_they_lie_in_memory(layout):
    """Whose rows are short, and would each begin a byte; what they give is in the same memory."""
    x, found = randn(2, 64, 5, 3).to(memory_format=layout), []
    for name, bits, module, exact in (
        ("gelu", 4, packed(nn.GELU(), PackedActivation), nn.GELU()),
        ("relu", 1, packed(nn.ReLU(inplace=True), PackedActivation), nn.ReLU()),
    ):
        with torch.autograd.graph.saved_tensors_hooks(lambda one: found.append(one) or one, lambda one: one):
            output, gradient = gradient_of(module, x, x)
        assert torch.equal(output, exact(x))
        assert output.stride() == gradient.stride() == x.stride()
        assert is_within_half_a_step(gradient, x, x, Pointwise(name), bits)
        assert found.pop().nbytes == x.numel() * bits // 8 + 16 * (bits > 1)  # and a seed


@pytest.mark.parametrize(
    ("module", "name", "value"),
    [
        (nn.LeakyReLU(0.2), "negative_slope", 0.6),
        (nn.Hardtanh(-1.0, 1.0), "max_val", 2.0),
        (nn.ELU(1.0), "alpha", 0.3),
        (nn.GELU(), "approximate", "tanh"),
        (activations.ACT2FN["gelu_python"], "act", nn.functional.silu),
    ],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_an_attribute_that_changes_later_is_followed(module, name, value, compiled):
    exact = copy.deepcopy(module)
    module = packed(copy.deepcopy(module), PackedActivation)
    run = torch.compile(module, backend="aot_eager") if compiled else module
    x, y = (3 * randn(50, 70)).requires_grad_(), randn(50, 70, seed=2)
    run(x)
    before = module.rmm_function
    setattr(module, name, value)
    setattr(exact, name, value)
    found, expected = (torch.autograd.grad(one(x), x, y)[0] for one in (run, exact))
    function = module.rmm_function
    room = (0.0 if function.is_exact else function.step(4) + 1e-4) * y.abs() + 1e-6
    assert ((found - expected).abs() <= room).all()
    assert function != before


def test_an_attribute_that_makes_it_another_function_is_refused():
    module = packed(copy.deepcopy(activations.ACT2FN["gelu_python"]), PackedActivation)
    act = module.act
    with pytest.raises(ValueError, match=r"must stay one whose derivative is known, got act=.*revert"):
        module.act = nn.Softplus()
    assert module.act == act
    module.note = "an attribute that it does not read"
    assert module.rmm_function == Pointwise("gelu")
