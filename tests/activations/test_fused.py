"""Modules with ``fused=True`` where the module makes its own output, what it is called with, and what they share."""

import copy

import pytest
import torch
from cases import needs_triton
from compile_helpers import Graphs
from gated_helpers import made
from helpers import packed
from module_cases import converted_model
from pointwise_helpers import randn
from torch import nn
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from rmm_linear import RMMConfig, convert
from rmm_linear.activations.pointwise import PackedActivation, is_composed
from rmm_linear.backends.triton import kernels

pytestmark = needs_triton
WIDTH = 96


@pytest.fixture
def calls(monkeypatch):
    """Names of the kernels that have made outputs."""
    monkeypatch.setenv("RMM_BACKEND", "triton")
    made = []
    for name in ("activate_and_pack", "square_and_pack", "gate_and_pack", "normalize_and_pack"):
        kernel = getattr(kernels(), name)
        monkeypatch.setattr(
            kernels(), name, lambda *args, _name=name, _kernel=kernel: (made.append(_name), _kernel(*args))[1]
        )
    return made


def fused(name):
    return converted_model(name, fused=True)


def activation(module):
    return packed(copy.deepcopy(module), PackedActivation, RMMConfig(fused=True, checkpointed="packed"))


def test_half_inputs_of_norms_with_float32_weights_have_the_modules_dtype(calls):
    """Rounded to bfloat16 before the weight, in float32 after it, or at the end."""
    for name, dtype, room in (
        ("llama", torch.float32, 2**-7),
        ("t5", torch.float32, 2**-19),
        ("layer", torch.bfloat16, 2**-6),
    ):
        module = fused(f"norm {name}").module
        x = randn(5, WIDTH, scale=2, dtype=torch.bfloat16).requires_grad_()
        output = module(x)
        assert output.dtype == dtype == module.eval()(x).dtype
        assert ((output - module(x)).abs() <= room * module(x).abs().clamp(min=1)).all()
        output.sum().backward()
        assert x.grad.dtype == torch.bfloat16
    assert len(calls) == 3


def test_autocast_leaves_composed_modules_and_norms_alone(calls):
    x = randn(5, WIDTH, dtype=torch.bfloat16).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for name in ("activation gelu_new", "norm llama"):
            module = fused(name).module
            assert torch.equal(module(x), module.eval()(x))
        assert not calls
        for exact in (nn.GELU(), ACT2FN["gelu"], ACT2FN["silu"]):
            assert activation(exact)(x).dtype == torch.bfloat16
    assert calls == ["activate_and_pack"] * 3


@pytest.mark.parametrize(
    ("names", "several"),
    [
        (["gelu", "gelu_pytorch_tanh", "silu", "mish", "tanh"], False),
        (["gelu_new", "gelu_python", "gelu_fast", "quick_gelu", "relu2"], True),
    ],
)
def test_modules_are_composed_if_they_call_several_functions(names, several):
    for name in names:
        assert is_composed(ACT2FN[name]) == is_composed(activation(ACT2FN[name])) == several


def test_a_gated_activation_with_hooks_is_called(calls):
    model, seen = fused("gated llama"), []
    x = randn(3, 7, WIDTH).requires_grad_()
    handle = model.module.act_fn.register_forward_hook(lambda *args: seen.append(1))
    model(x)
    assert seen
    assert not calls
    handle.remove()
    model(x)
    assert calls == ["gate_and_pack"]


@pytest.mark.parametrize("name", ["activation gelu", "norm layer", "gated llama"])
def test_without_kernels_outputs_stay_the_same_to_the_bit(name, calls, monkeypatch):
    monkeypatch.setenv("RMM_BACKEND", "auto")
    x, model = randn(5, WIDTH).requires_grad_(), fused(name)
    assert torch.equal(model(x), model.eval()(x))
    assert not calls


def test_odd_inputs(calls):
    module = activation(nn.GELU())
    for shape in ((0, 70), (3, 0), (70,), (2, 0, 5), ()):
        x = torch.ones(shape, requires_grad=True)
        output = module(x)
        output.sum().backward()
        torch.testing.assert_close(output, nn.GELU()(x))
        assert x.grad.shape == shape
    view = randn(70, 5).T.requires_grad_()
    torch.testing.assert_close(module(view), nn.GELU()(view))
    assert fused("norm layer").module(torch.ones(0, WIDTH, requires_grad=True)).shape == (0, WIDTH)


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.second.weight.data.fill_(2.0)

    def forward(self, x):
        x = x * 1
        return self.first(x), self.second(x)


def test_norms_that_read_one_input_share_its_copy(calls):
    model, saved = Both(), []
    convert(model, fused=True, operations="norm")
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        first, second = model(randn(5, WIDTH).requires_grad_())
    assert len({t.data_ptr() for t in saved if t.dtype == torch.uint8}) == 1
    assert calls == ["normalize_and_pack"]
    torch.testing.assert_close(second, 2 * first)


@pytest.mark.stack
def test_compiled_code_is_one_graph_with_the_same_outputs(calls):
    model = nn.Sequential(nn.LayerNorm(16), nn.GELU(), LlamaRMSNorm(16), made("llama").mlp).train()
    convert(model, fused=True, operations=["norm", "activation"])
    graphs = Graphs()
    compiled = graphs.compile(model)
    for length in (7, 5):
        x = randn(3, length, 16).requires_grad_()
        found = compiled(x)
        assert torch.equal(found, model(x))
        found.sum().backward()
    operators = {"normalize_and_pack": 2, "activate_and_pack": 1, "gate_and_pack": 1}
    assert graphs.counts[0] == {f"rmm_linear.{name}.default": count for name, count in operators.items()}
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
