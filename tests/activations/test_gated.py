"""Gated MLPs are found by their structure, and nothing else is; what else leaves them exact."""

import copy

import pytest
import torch
from gated_helpers import HIDDEN, MAKERS, WIDTH, Experts, made, randn
from helpers import bytes_kept, packed
from torch import nn
from torch.nn import functional as F
from transformers import T5Config
from transformers.activations import ACT2FN
from transformers.models.t5.modeling_t5 import T5DenseActDense

from rmm_linear import RMMConfig, RMMLinear, convert
from rmm_linear.activations.gated import PackedGatedMLP, gated_bits
from rmm_linear.activations.gated_parts import GatedParts, activation_kind, gated_parts

GATE, UP = (
    ("gate_proj", "up_proj", "act_fn", "down_proj"),
    ("gate_up_proj", "gate_up_proj", "activation_fn", "down_proj"),
)
EXPECTED = {
    "llama": GatedParts(*GATE, None, "silu", True),
    "qwen2": GatedParts(*GATE, None, "silu", True),
    "mistral": GatedParts(*GATE, None, "silu", True),
    "gemma": GatedParts(*GATE, None, "gelu_tanh", True),
    "phi3": GatedParts(*UP, None, "silu", True),
    "t5": GatedParts("wi_0", "wi_1", "act", "wo", "dropout", "gelu_tanh", True),
    "experts": GatedParts("w1", "w3", "act", "w2", None, "relu", False),
    "lfm2": GatedParts("w1", "w3", None, "w2", None, "silu", True),
    "functional": GatedParts("gate_up_proj", "gate_up_proj", None, "down_proj", None, "gelu", False),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MAKERS)
def test_the_parts_are_found_and_nothing_is_left_behind(name, dtype):
    mlp = made(name, dtype).mlp.train()
    before, state = [(m.training, len(m._forward_hooks)) for m in mlp.modules()], torch.get_rng_state()
    assert gated_parts(mlp) == EXPECTED[name]
    assert [(m.training, len(m._forward_hooks)) for m in mlp.modules()] == before
    assert torch.equal(torch.get_rng_state(), state)
    assert gated_parts(packed(made(name, dtype).mlp, PackedGatedMLP)) == EXPECTED[name]


def test_sketched_and_wrapped_linears_are_linears_too():
    from peft.tuners.lora import LoraConfig, LoraModel

    mlp = made("llama").mlp
    mlp.up_proj = RMMLinear.from_linear(mlp.up_proj)
    assert gated_parts(mlp) == EXPECTED["llama"]
    model = made("llama")
    LoraModel(model, LoraConfig(r=2, target_modules=["gate_proj", "down_proj"]), "default")
    assert gated_parts(model.mlp) == EXPECTED["llama"]


def test_a_weight_in_another_type_is_cast_to_as_t5_does():
    mlp = made("t5", torch.bfloat16).mlp
    mlp.wo.float()
    assert gated_parts(mlp) == EXPECTED["t5"]


def variant(change):
    class Variant(Experts):
        def __init__(self):
            super().__init__()
            self.p = 0.5

        def forward(self, x):
            return change(self, x)

    return Variant()


@pytest.mark.parametrize(
    "change",
    [
        lambda m, x: m.w2(m.w3(x) * m.act(m.w1(x)) * 2),
        lambda m, x: m.w2(m.w3(x) + m.act(m.w1(x))),
        lambda m, x: m.w2(m.w3(x) * m.act(m.w1(x))) + x,
        lambda m, x: m.w2(m.w3(x) * m.act(m.w1(2 * x))),
        lambda m, x: m.w2(m.w3(x) * m.act(m.w1(x) + 1)),
        lambda m, x: m.w2(F.dropout(m.w3(x) * m.act(m.w1(x)), m.p, m.training)),
        lambda m, x: m.w2(m.act(m.w1(x))),
        lambda m, x: (m.w2(m.w3(x) * m.act(m.w1(x))), x),
        lambda m, x: m.w2(m.act(m.w3(x)) * m.act(m.w1(x))),
        lambda m, x: m.w2(m.w3(x) * m.act(m.w1(x).clamp(max=10))),
        lambda m, x: m.w2((m.w3(x) * m.act(m.w1(x))).clamp(-100, 100)),
        lambda m, x: m.w2(m.w3(x) * m.act(m.w1(x)) * (2 if x.shape[1] > 3 else 1)),
    ],
)
def test_other_formulas_are_refused(change):
    assert gated_parts(variant(lambda m, x: m.w2(m.w3(x) * m.act(m.w1(x))))) is not None
    assert gated_parts(variant(change)) is None


@pytest.mark.parametrize("scale", [1e-3, 1, 1e3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("silu", F.silu),
        ("gelu", F.gelu),
        ("gelu_tanh", lambda x: F.gelu(x, approximate="tanh")),
        ("relu", torch.relu),
        (None, lambda x: F.relu(x).square()),
        (None, lambda x: F.silu(x).clamp(max=1)),
        (None, lambda x: F.relu(x - 0.1)),
    ],
)
def test_functions_are_known_by_what_they_compute(name, function, dtype, scale):
    """Also where the weights are so small that all functions are linear, or so large that they are all ReLU."""
    mlp = variant(lambda m, x: m.w2(function(m.w1(x)) * m.w3(x)))
    del mlp.act
    mlp.function = F.gelu  # by whose name it is tried
    for parameter in mlp.to(dtype).parameters():
        parameter.data *= scale
    assert gated_parts(mlp) == (None if name is None else GatedParts("w1", "w3", None, "w2", None, name, True))


def test_modules_that_call_no_function_are_not_run():
    mlp = variant(lambda m, x: pytest.fail("ran"))
    del mlp.act
    assert gated_parts(mlp) is None


def test_other_modules_are_refused():
    others = nn.Linear(3, 3), nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)), nn.Identity()
    others = *others, T5DenseActDense(T5Config(d_model=WIDTH, d_ff=HIDDEN)), nn.MultiheadAttention(4, 2)
    assert not any(map(gated_parts, others))
    mlp = made("llama").mlp
    mlp.act_fn = nn.Mish()
    assert gated_parts(mlp) is None


def test_activations_are_known_by_what_they_compute():
    kinds = {name: activation_kind(ACT2FN[name]) for name in ("gelu", "gelu_new", "gelu_fast", "silu", "swish", "relu")}
    assert kinds == {
        "gelu": "gelu",
        "gelu_new": "gelu_tanh",
        "gelu_fast": "gelu_tanh",
        "silu": "silu",
        "swish": "silu",
        "relu": "relu",
    }
    others = (ACT2FN["quick_gelu"], ACT2FN["gelu_10"], ACT2FN["relu2"], nn.PReLU(), nn.Identity(), nn.Dropout(0.0))
    assert [activation_kind(other) for other in (*others, nn.Bilinear(1, 1, 1), nn.Tanh())] == [None] * 8


def test_halves_of_another_width_and_modules_that_draw_numbers_are_refused():
    class Split(nn.Module):
        def __init__(self):
            super().__init__()
            self.both, self.out, self.act = nn.Linear(4, 5), nn.Linear(2, 4), nn.SiLU()

        def forward(self, x):
            a, b = self.both(x).split([3, 2], dim=-1)
            return self.out(self.act(a)[..., :2] * b)

    class Noise(nn.Module):
        def forward(self, x):
            return x + torch.randn_like(x)

    others = Split(), nn.Sequential(nn.Linear(4, 4), Noise(), nn.Linear(4, 4))
    state = torch.get_rng_state()
    assert [gated_parts(other) for other in others] == [None, None]
    assert torch.equal(torch.get_rng_state(), state)


# Modules


def test_another_module_is_refused():
    model = made("experts")
    model.mlp.act = nn.Mish()
    with pytest.raises(ValueError, match="is no gated MLP"):
        packed(model.mlp, PackedGatedMLP)


@pytest.mark.parametrize(("given", "taken"), [(2, 2), (4, 4), (8, 8), (1, 2), ("auto", 4)])
def test_the_width_is_that_of_the_configuration(given, taken):
    assert gated_bits(RMMConfig(activation_bits=given)) == taken


class Scaled(MAKERS["llama"]().__class__):
    def forward(self, x, scale=1.0):
        return super().forward(x if scale == 1 else scale * x)


@pytest.mark.parametrize("what", ["forward", "backward", "argument"])
def test_a_hook_that_changes_the_activation_or_another_argument_leaves_the_module_exact(what):
    found = []
    for is_packed in (True, False):
        model = made("llama").train()
        if what == "argument":
            model.mlp.__class__ = Scaled
        if is_packed:
            packed(model.mlp, PackedGatedMLP)
        if what == "forward":
            model.mlp.act_fn.register_forward_hook(lambda module, args, output: 2 * output)
        elif what == "backward":
            model.mlp.act_fn.register_full_backward_hook(lambda module, given, out: (2 * given[0],))
        x = randn(2, 9, WIDTH).requires_grad_()
        model.mlp(x, *(3.0,) if what == "argument" else ()).square().sum().backward()
        found.append([x.grad, *(p.grad for p in model.parameters())])
    assert all(map(torch.equal, *found))


def test_a_hook_that_looks_on_leaves_the_module_packed():
    kept, seen = [], []
    for is_packed in (True, False):
        model = made("llama").train()
        if is_packed:
            packed(model.mlp, PackedGatedMLP)
        model.mlp.act_fn.register_forward_hook(lambda module, args, output: seen.append(output))
        kept.append(bytes_kept(model, randn(2, 9, WIDTH).requires_grad_()))
    assert seen
    assert kept[0] < kept[1]


@pytest.mark.parametrize(("change", "name"), [("tanh", "gelu_tanh"), (nn.SiLU(), "silu"), (nn.Tanh(), None)])
def test_an_activation_that_changes_later_is_followed_or_refused(change, name):
    mlp = made("llama").mlp.train()
    mlp.act_fn = nn.GELU()
    mlp = packed(mlp, PackedGatedMLP)
    if isinstance(change, str):
        mlp.act_fn.approximate = change
    else:
        mlp.act_fn = change
    x = randn(2, 5, WIDTH).requires_grad_()
    if name is None:
        with pytest.raises(RuntimeError, match=r"must stay one of gelu, .*got Tanh\(\)\. Call rmm_linear.revert"):
            mlp(x)
    else:
        mlp(x)
        assert mlp.rmm_parts.activation == name


def test_a_setting_of_its_own_that_changes_is_followed(caplog):
    class Dropping(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.up, self.down = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 32)
            self.act, self.p = nn.SiLU(), 0.0

        def forward(self, x):
            return self.down(F.dropout(self.act(self.gate(x)) * self.up(x), self.p, self.training))

    model, x = nn.Sequential(Dropping()).train(), torch.randn(256, 32)
    exact = copy.deepcopy(model)
    convert(model)
    assert isinstance(model[0], PackedGatedMLP)
    for p in (0.0, 0.5, 0.0):
        model[0].p = exact[0].p = p
        model[0].name = "a tag that nothing reads"
        found = []
        for one in (model, exact):
            torch.manual_seed(1)
            found.append(one(x))
        assert torch.equal(*found)
        assert model[0].rmm_is_other == (p > 0)
    assert sum("its p is 0.5 now, and was 0.0" in one for one in caplog.messages) == 1
