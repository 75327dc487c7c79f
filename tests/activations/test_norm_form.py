"""Which modules are norms, and how they round: found by what they compute."""

import copy

import pytest
import torch
import transformers.models as hf
from helpers import packed
from torch import nn
from torch.nn import functional as F
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from rmm_linear.activations.norm import PackedNorm
from rmm_linear.activations.norm_form import NormForm, casts_of, norm_of

assert hf  # the families above are tested, whatever they are called

WIDTH = 48
FOUND = {
    "nn.LayerNorm": (lambda: nn.LayerNorm(WIDTH, eps=1e-12), NormForm(True, 1e-12)),
    "no affine": (lambda: nn.LayerNorm(WIDTH, elementwise_affine=False), NormForm(True, 1e-5)),
    "two dimensions": (lambda: nn.LayerNorm((2, WIDTH)), NormForm(True, 1e-5, dims=2)),
    "nn.RMSNorm": (lambda: nn.RMSNorm(WIDTH), NormForm(False, None)),
    "Llama": (lambda: LlamaRMSNorm(WIDTH, eps=1e-5), NormForm(False, 1e-5)),
    "Qwen3": (lambda: Qwen3RMSNorm(WIDTH), NormForm(False, 1e-6)),
    "T5": (lambda: T5LayerNorm(WIDTH), NormForm(False, 1e-6)),
    "Gemma": (lambda: GemmaRMSNorm(WIDTH), NormForm(False, 1e-6, 1.0)),
    "Nemotron": (lambda: NemotronLayerNorm1P(WIDTH), NormForm(True, 1e-5, 1.0)),
}


class Own(nn.Module):
    """A norm, but for what a subclass changes."""

    def __init__(self, eps=1e-6):
        super().__init__()
        self.weight, self.bias, self.eps = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH)), eps

    def forward(self, x):
        return F.layer_norm(x, (WIDTH,), self.weight, self.bias, self.eps)


class Dropping(Own):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.01, self.training)


class WrongEps(Own):
    def forward(self, x):
        return F.layer_norm(x, (WIDTH,), self.weight, self.bias, 1e-4)


class EpsOutside(Own):
    def forward(self, x):
        x = x - x.mean(-1, keepdim=True)
        return self.weight * x / (x.square().mean(-1, keepdim=True).sqrt() + self.eps) + self.bias


class Unbiased(Own):
    def forward(self, x):
        x = x - x.mean(-1, keepdim=True)
        return self.weight * x / (x.var(-1, keepdim=True) + self.eps).sqrt() + self.bias


class Gated(Own):
    def forward(self, x, gate=None):
        return super().forward(x)


class Residual(Own):
    def forward(self, x):
        return x + super().forward(x)


class OtherDimension(Own):
    def forward(self, x):
        return super().forward(x.transpose(-1, -2)).transpose(-1, -2)


class WithChild(Own):
    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout()


def with_forward_of_its_own():
    module = nn.LayerNorm(WIDTH)
    module.forward = lambda x: F.layer_norm(x, (WIDTH,)) * 2
    return module


OTHERS = {
    "BatchNorm1d": lambda: nn.BatchNorm1d(WIDTH),
    "BatchNorm1d without statistics": lambda: nn.BatchNorm1d(WIDTH, track_running_stats=False),
    "GroupNorm": lambda: nn.GroupNorm(4, WIDTH),
    "GroupNorm without weight": lambda: nn.GroupNorm(1, WIDTH, affine=False),
    "InstanceNorm1d": lambda: nn.InstanceNorm1d(WIDTH),
    "Embedding": lambda: nn.Embedding(4, WIDTH),
    "Linear": lambda: nn.Linear(WIDTH, WIDTH),
    "GELU": nn.GELU,
    "Sequential": lambda: nn.Sequential(nn.LayerNorm(WIDTH)),
    "forward of its own": with_forward_of_its_own,
} | {
    kind.__name__: kind
    for kind in (Dropping, WrongEps, EpsOutside, Unbiased, Gated, Residual, OtherDimension, WithChild)
}


@pytest.mark.parametrize("name", FOUND)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_are_found_with_any_weights(name, dtype):
    make, expected = FOUND[name]
    module = make().to(dtype)
    assert norm_of(module) == expected
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    state, numbers = {key: value.clone() for key, value in module.state_dict().items()}, torch.get_rng_state()
    assert norm_of(module) == expected
    assert torch.equal(torch.get_rng_state(), numbers)
    assert module.training
    assert all(torch.equal(value, state[key]) for key, value in module.state_dict().items())
    standin = packed(module, PackedNorm)
    assert standin.rmm_norm == expected
    assert norm_of(standin) == expected  # again, of the packed class


@pytest.mark.parametrize("name", OTHERS)
def test_everything_else_is_told_apart(name):
    assert norm_of(OTHERS[name]()) is None


def test_an_own_norm_is_one():
    assert norm_of(Own()) == NormForm(True, 1e-6)


def test_norms_on_the_meta_device_are_found():
    assert norm_of(LlamaRMSNorm(WIDTH, 1e-6).to("meta")) == NormForm(False, 1e-6)
    assert norm_of(WrongEps().to("meta")) is None
    assert norm_of(nn.LayerNorm(WIDTH, device="meta")) == NormForm(True, 1e-5)
    assert norm_of(nn.RMSNorm(WIDTH, device="meta")) == NormForm(False, None)


def test_a_tiny_input_uses_the_eps_of_the_module():
    """Where eps is all of the variance, rstd is 1 / √eps: in bfloat16 that of float32, as in nn.RMSNorm."""
    for dtype in (torch.float32, torch.bfloat16):
        module = nn.RMSNorm(WIDTH).to(dtype)
        standin = packed(copy.deepcopy(module), PackedNorm)
        x = (1e-6 * torch.randn(4, WIDTH)).to(dtype).requires_grad_()
        y = torch.randn(4, WIDTH).to(dtype)
        expected, found = (torch.autograd.grad(one(x), x, y)[0].double() for one in (module, standin))
        assert float((found - expected).norm() / expected.norm()) < 0.01


# How they round in half types, as their own code says

FULL, HALF, OTHER = torch.float32, torch.bfloat16, torch.float16


class Twice(nn.LayerNorm):
    """Rounds to eight bits on the way, as no form does."""

    def forward(self, x):
        return super().forward(x).to(torch.float8_e5m2).to(x.dtype)


@pytest.mark.parametrize(
    ("module", "same", "mixed"),
    [
        (nn.LayerNorm(96), (FULL, HALF), (FULL, HALF)),
        (nn.LayerNorm((8, 12), bias=False), (FULL, HALF), (FULL, HALF)),
        (LlamaRMSNorm(96), (HALF, HALF), (HALF, FULL)),
        (T5LayerNorm(96), (HALF, HALF), (FULL, FULL)),
        (GemmaRMSNorm(96), (FULL, HALF), (FULL, HALF)),
    ],
    ids=["layer", "two dimensions", "llama", "t5", "gemma"],
)
def test_casts_are_those_of_the_modules_code(module, same, mixed):
    found = casts_of(module, norm_of(module))
    assert found[HALF, HALF] == same
    assert found[HALF, FULL] == mixed
    assert found[FULL, FULL] == (FULL, FULL)
    swapped = tuple(OTHER if dtype == HALF else dtype for dtype in same)
    assert found[OTHER, OTHER] == swapped


def test_without_parameters_the_dtype_of_the_input_decides():
    found = casts_of(nn.LayerNorm(96, elementwise_affine=False), NormForm(True, 1e-5))
    assert found == {(dtype, None): (FULL, dtype) for dtype in (FULL, OTHER, HALF)}


def test_what_rounds_in_another_way_is_not_known():
    assert casts_of(Twice(96), NormForm(True, 1e-5)) == {}


def test_nothing_is_left_of_the_probe():
    module, state = LlamaRMSNorm(96), torch.get_rng_state()
    before = module.weight
    casts_of(module, norm_of(module))
    assert module.weight is before
    assert module.training
    assert torch.equal(before, torch.ones(96))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("kind", [nn.LayerNorm, LlamaRMSNorm])
def test_the_default_device_does_not_matter(kind):
    module = kind(96)
    form, expected = norm_of(module), casts_of(module, norm_of(module))
    with torch.device("meta"):
        assert norm_of(module) == form
        assert casts_of(module, form) == expected != {}
