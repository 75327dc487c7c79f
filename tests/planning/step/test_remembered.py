"""What operators return for fake tensors is remembered, and the same as by PyTorch's rules."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import LlamaConfig, LlamaForCausalLM

from rmm_linear import convert
from rmm_linear.planning.step import remembered
from rmm_linear.planning.step.fakes import Fakes
from rmm_linear.planning.step.watch import watch


def llama() -> tuple[nn.Module, dict[str, Tensor]]:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    ids = torch.zeros(2, 32, dtype=torch.long)
    config = LlamaConfig(vocab_size=100, num_hidden_layers=2, use_cache=False, **sizes)
    return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}


def images() -> tuple[nn.Module, Tensor]:
    parts = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Dropout(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*parts, nn.Linear(8 * 49, 5)), torch.randn(4, 3, 16, 16)


def events(model, batch):
    """What changed in a step, with what was made."""
    return [
        (*each[:-1], made and (made.pass_, made.module, made.func, made.shape, made.dtype, made.is_gradient))
        for each in watch(model, batch)[1].events
        for made in [each.made]
    ]


@pytest.mark.parametrize("make", [llama, images])
@pytest.mark.parametrize("kind", ["real", "meta", "converted"])
def test_steps_are_those_of_pytorchs_rules(make, kind, monkeypatch):
    with torch.device("cpu" if kind == "real" else "meta"):
        model, batch = make()
    if kind == "converted":
        convert(model)
        watch(model, batch)  # the first step looks at more
    found = [events(model, batch)]
    monkeypatch.setattr(remembered, "_kind_of", lambda func: "")
    found.append(events(model, batch))
    assert found[0] == found[1]
    assert len(found[0]) > 40


CALLS = {
    "view": lambda x: x[1:].t(),
    "new": lambda x: torch.cat([x, x * 2.0]).softmax(0),
    "several": lambda x: x.max(1)[1],
    "written": lambda x: x.clone().add_(1),
    "half": lambda x: x.half() + 1,
    "integers": lambda x: x.long() * 2,
    "complex": lambda x: torch.complex(x, x).conj() * 2,
    "cast by number": lambda x: x.long() * 2.5,
}


@pytest.mark.parametrize("name", CALLS)
def test_a_second_call_is_like_the_first(name):
    fakes, x = Fakes(), torch.randn(4, 6)
    expected = CALLS[name](x)
    with fakes.mode:
        given = fakes(x)
        for _ in range(2):
            found = CALLS[name](given)
            assert type(found) is FakeTensor
            assert (found.shape, found.stride(), found.dtype) == (expected.shape, expected.stride(), expected.dtype)
            assert found.storage_offset() == expected.storage_offset()
            is_shared = found.untyped_storage()._cdata == given.untyped_storage()._cdata
            assert is_shared == (name == "view")
