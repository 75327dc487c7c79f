"""Modules with ``fused=True``: which of them run a kernel for their output, how near it is, and their gradients."""

import copy

import pytest
import torch
from cases import needs_triton
from compile_helpers import Graphs
from gated_helpers import made
from helpers import packed
from pointwise_helpers import randn
from torch import nn
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from rmm_linear import RMMConfig, convert
from rmm_linear.activations.gated import PackedGatedMLP
from rmm_linear.activations.norm import PackedNorm
from rmm_linear.activations.pointwise import PackedActivation, is_composed
from rmm_linear.backends.triton import kernels

pytestmark = needs_triton

FUSED = RMMConfig(fused=True, checkpointed="packed")
WIDTH = 96
NORMS = {
    "layer": lambda: nn.LayerNorm(WIDTH),
    "no affine": lambda: nn.LayerNorm(WIDTH, elementwise_affine=False),
    "two dimensions": lambda: nn.LayerNorm((8, 12)),
    "rms": lambda: nn.RMSNorm(WIDTH),
    "llama": lambda: LlamaRMSNorm(WIDTH),
    "t5": lambda: T5LayerNorm(WIDTH),
}


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


def activation(module, config=FUSED):
    return packed(module, PackedActivation, config)


def gated(name, dtype=torch.float32, config=FUSED):
    model = made(name, dtype)
    packed(model.mlp, PackedGatedMLP, config)
    return model.train()


def norm(name, fused=True, dtype=torch.float32):
    module = NORMS[name]()
    for seed, parameter in enumerate(module.parameters()):
        parameter.data = 1 + 0.3 * randn(*parameter.shape, seed=seed)
    return packed(module.to(dtype), PackedNorm, FUSED.replace(norm_bits=4, fused=fused))


def rows(name, dtype=torch.float32):
    x = randn(5, *((8, 12) if name == "two dimensions" else (WIDTH,)), scale=2)
    return (x + 1).to(dtype)


def ulps(found, expected, count):
    """Whether two outputs are of one dtype, and differ by at most so many last bits, of numbers below 1 those of 1."""
    size = torch.finfo(found.dtype).eps * expected.double().abs().clamp(min=1)
    return found.dtype == expected.dtype and bool(((found.double() - expected.double()).abs() <= count * size).all())


def test_half_inputs_of_norms_with_float32_weights_have_the_modules_dtype(calls):
    for name, dtype in (("llama", torch.float32), ("t5", torch.float32), ("layer", torch.bfloat16)):
        module = norm(name)
        x = rows(name, torch.bfloat16).requires_grad_()
        output = module(x)
        assert output.dtype == dtype == module.eval()(x).dtype
        assert ulps(output, module(x), 2 if dtype == torch.bfloat16 else 2**16 if name == "llama" else 16)
        output.sum().backward()
        assert x.grad.dtype == torch.bfloat16
    assert len(calls) == 3


def test_autocast_leaves_composed_modules_and_norms_alone(calls):
    x = randn(5, WIDTH, dtype=torch.bfloat16).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for module in (activation(copy.deepcopy(ACT2FN["gelu_new"])), norm("llama")):
            assert torch.equal(module(x), module.eval()(x))
        assert not calls
        for module in (nn.GELU(), copy.deepcopy(ACT2FN["gelu"]), copy.deepcopy(ACT2FN["silu"])):
            assert activation(module)(x).dtype == torch.bfloat16
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
        assert is_composed(ACT2FN[name]) == several
        assert is_composed(activation(copy.deepcopy(ACT2FN[name]))) == several


def test_a_gated_activation_with_hooks_is_called(calls):
    model, seen = gated("llama"), []
    x = randn(3, 7, 16).requires_grad_()
    handle = model.mlp.act_fn.register_forward_hook(lambda *args: seen.append(1))
    model(x)
    assert seen
    assert not calls
    handle.remove()
    model(x)
    assert calls == ["gate_and_pack"]


def test_without_kernels_outputs_stay_the_same_to_the_bit(calls, monkeypatch):
    monkeypatch.setenv("RMM_BACKEND", "auto")
    x = rows("layer").requires_grad_()
    for module in (activation(nn.GELU()), norm("layer")):
        assert torch.equal(module(x), module.eval()(x))
    model = gated("llama")
    tokens = randn(3, 7, 16).requires_grad_()
    assert torch.equal(model(tokens), made("llama").train()(tokens))
    assert not calls


def test_odd_inputs(calls):
    module = activation(nn.GELU())
    for shape in ((0, 70), (3, 0), (70,), (2, 0, 5)):
        x = torch.ones(shape, requires_grad=True)
        output = module(x)
        output.sum().backward()
        assert output.shape == x.grad.shape == shape
    scalar = torch.tensor(1.0, requires_grad=True)
    assert torch.equal(module(scalar), nn.GELU()(scalar))
    view = randn(70, 5).T.requires_grad_()
    assert ulps(module(view), nn.GELU()(view), 4)
    assert norm("layer")(torch.ones(0, WIDTH, requires_grad=True)).shape == (0, WIDTH)


def test_norms_that_read_one_input_share_its_copy(calls):
    pair = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
    pair[1].weight.data.fill_(2.0)
    convert(pair, fused=True, operations="norm")
    context, saved = pair[0].rmm_context, []

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.pair = pair

        def forward(self, x):
            return self.pair[0](x), self.pair[1](x)

    model, x = Both(), rows("layer").requires_grad_() * 1
    context.attach(model)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        first, second = model(x)
    stored = {t.data_ptr() for t in saved if t.dtype == torch.uint8}
    assert len(stored) == 1
    assert calls == ["normalize_and_pack"]
    assert ulps(second, 2 * first, 16)


def test_compiled_code_is_one_graph_with_the_same_outputs(calls):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.act, self.rms = nn.LayerNorm(16), nn.GELU(), LlamaRMSNorm(16)
            self.mlp = made("llama").mlp

        def forward(self, x):
            return self.mlp(self.act(self.rms(self.norm(x))))

    model = Block().train()
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
