"""How norms round in half types, as their own code says."""

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from rmm_linear.activations.norm_form import NormForm, casts_of, norm_of

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
