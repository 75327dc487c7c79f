"""Replays that are divided into slices of the sequences, and those that are not."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
import transformers as hf
from region_helpers import (
    BATCH,
    HEADS,
    KINDS,
    TOKENS,
    WIDTH,
    Biased,
    Capped,
    Dropped,
    Scores,
    Sinks,
    assert_unbiased,
    batch,
    forms,
    model_of,
    step,
)
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from rmm_linear import convert, planning
from rmm_linear.activations import region_slices
from rmm_linear.activations.region_slices import DRAWS, Slices, Sums
from rmm_linear.memory.peak import LiveTensors, Peak


@pytest.fixture
def small(monkeypatch):
    """Divide every replay, into slices of a sequence."""
    monkeypatch.setattr(region_slices, "_LEAST", 0)
    monkeypatch.setattr(region_slices, "_MULTIPLE", 0)


@pytest.fixture
def counts(monkeypatch):
    """The numbers of slices of the backward passes."""
    found, made = [], Sums.__init__
    monkeypatch.setattr(Sums, "__init__", lambda self, cut: (found.append(cut.count), made(self, cut))[1])
    return found


def gradients(model, x, *, are_whole, monkeypatch):
    """Of a second step, as the first one checks."""
    convert(model, operations="attention")
    step(model, 5, x)
    with monkeypatch.context() as changed:
        if are_whole:
            changed.setattr(region_slices, "_MOST", 1)
        return step(model, 6, x)


def assert_near(found, expected):
    """What is 0 but for rounding, as the gradient of a key's bias, has an error relative to the others."""
    assert found.keys() == expected.keys()
    largest = max(float(one.norm()) for one in expected.values())
    for name, one in found.items():
        assert float((one - expected[name]).norm()) < 1e-5 * max(float(one.norm()), 0.01 * largest), name


@pytest.mark.parametrize("kind", [one for one in KINDS if one is not Dropped])
def test_gradients_are_those_of_a_whole_replay(kind, small, counts, monkeypatch):
    found = []
    for are_whole in (True, False):
        found.append(gradients(model_of(kind), batch(), are_whole=are_whole, monkeypatch=monkeypatch))
        assert counts[-2:] == [1 if are_whole else BATCH] * 2
    assert torch.equal(found[0][0], found[1][0])
    assert_near(found[1][1], found[0][1])


def test_gradients_of_further_outputs(small):
    model, exact = model_of(Capped, weights=1e-3), model_of(Capped, weights=1e-3)
    convert(model, operations="attention", attention_bits=8)
    assert_unbiased(model, exact, batch(), draws=20)


def test_half_types_are_summed_in_single_precision():
    sums = Sums(region_slices.Cut(3, 3, (), {}))
    for one in range(3):
        part = region_slices.Part(one, 1, 3)
        sums.add(part, [torch.tensor([256.0 if one == 0 else 0.6]).bfloat16(), None], [0, 0])
    assert sums.gradients()[0] == torch.tensor([257.2]).bfloat16()
    assert sums.gradients()[1] is None


class Mixed(Scores):
    """Its scores depend on those of the other sequences."""

    def scores(self, scores, bias):
        return scores + scores.mean(0)


class Listed(Scores):
    """It keeps the sizes of its first batch."""

    def forward(self, x, bias=None):
        self.heads = lambda one: one.view(BATCH, TOKENS, HEADS, -1).transpose(1, 2)
        return super().forward(x)


REASONS = {
    Dropped: DRAWS,
    Mixed: "run again, its code has another gradient",
    Listed: "its code does not run for some of its sequences (RuntimeError: shape",
}


@pytest.mark.parametrize("kind", REASONS)
def test_what_is_not_divided_says_why(kind, small, counts, caplog):
    model, exact = model_of(kind), model_of(kind)
    convert(model, operations="attention", attention_bits=8)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert torch.equal(step(model, 5, batch())[0], step(exact, 5, batch())[0])
    assert [one.reason for one in forms(model)] == [None]
    assert forms(model)[0].slices.reason.startswith(REASONS[kind])
    (message,) = [one for one in caplog.messages if "at once" in one]
    assert message.startswith("The attention of first runs again for all sequences at once")
    assert REASONS[kind] in message
    assert counts[-2:] == [1, 1]


def test_where_little_is_saved_there_is_one_slice(counts, caplog):
    model = model_of(Capped)
    convert(model, operations="attention")
    with caplog.at_level(logging.WARNING):
        step(model, 5, batch())
    assert counts[-2:] == [1, 1]
    assert not caplog.messages


def test_the_number_of_slices(monkeypatch):
    def count(mib, shape):
        return Slices(mib * 2**20, 1024, 1024**2, {}).count([shape] * 3, 2, torch.device("cpu"))

    assert count(1024, [8, 1024, 512]) == 4  # more would not lower the peak
    assert count(1024, [8, 256, 512]) == 4
    assert count(64, [8, 1024, 512]) == 4
    assert count(64, [2, 1024, 512]) == 1
    assert count(64, [8, 256, 512]) == 1
    assert count(64, [2, 2048, 512]) == 2
    assert count(64, [8, 1024, 16384]) == 1  # twice the sources' bytes
    monkeypatch.setattr(region_slices, "memory_of", lambda device: 256 * 128 * 2**20)
    assert count(64, [8, 1024, 512]) == 2  # a 128th of a GPU


def test_the_peak_of_blocks_that_were_measured_on_a_gpu(monkeypatch):
    """That of exact blocks is 10,370 MiB there too."""
    config = hf.Gemma2Config(
        hidden_size=2304, intermediate_size=9216, num_attention_heads=8, num_key_value_heads=4, head_dim=256,
        num_hidden_layers=2, vocab_size=100, pad_token_id=0, attn_implementation="eager",
    )  # fmt: skip
    peaks = []
    for most in (0, 1, 3):
        monkeypatch.setattr(region_slices, "_MOST", most)
        with torch.device("meta"):
            model = hf.Gemma2Model(config).to(torch.bfloat16).train()
            x = torch.empty(8, 2048, 2304, dtype=torch.bfloat16, requires_grad=True)
        if most:
            convert(model)
        peaks.append(planning.simulate(model, {"inputs_embeds": x, "use_cache": False}).bytes / 2**20)
    assert int(peaks[0]) == 10370
    assert peaks[1] < 4800
    assert peaks[2] < 3600


class Sized(Scores):
    """Its bias may have a row for every sequence, one for all, none, or one for every head of a sequence."""

    def scores(self, scores, bias):
        if bias is None:
            return scores
        return scores + (bias.unflatten(0, (len(scores), -1)) if bias.dim() == 3 else bias)


def attention_step(model, x, bias):
    model.zero_grad()
    bias = None if bias is None else bias.clone().requires_grad_()
    output = model(x, bias=bias)[0]
    output.square().sum().backward()
    return [model.v.weight.grad, model.q.weight.grad, *([] if bias is None else [bias.grad])]


@pytest.mark.parametrize(
    ("first", "later", "count"),
    [
        ((1, HEADS, TOKENS, TOKENS), (BATCH, HEADS, TOKENS, TOKENS), BATCH),
        ((BATCH, 1, TOKENS, TOKENS), (1, 1, TOKENS, TOKENS), BATCH),
        ((BATCH * HEADS, TOKENS, TOKENS), (BATCH * HEADS, TOKENS, TOKENS), BATCH),
        ((TOKENS, TOKENS), (TOKENS, TOKENS), BATCH),
        (None, (BATCH, 1, TOKENS, TOKENS), 1),
    ],
)
def test_arguments_of_later_calls(first, later, count, small, counts):
    torch.manual_seed(0)
    model = Sized().train()
    exact, x = copy.deepcopy(model), batch().requires_grad_()
    wrapped = nn.ModuleList([model])
    convert(wrapped, operations="attention", attention_bits=8)
    for shape in (first, later):
        bias = None if shape is None else torch.randn(shape)
        found, expected = attention_step(model, x, bias), attention_step(exact, x, bias)
        for one, other in zip(found, expected, strict=True):
            assert float((one - other).norm()) < 0.05 * float(other.norm())
    assert counts[-1] == count


def test_a_batch_of_one_sequence_is_looked_at_apart(small, counts):
    model = model_of(Sinks)
    convert(model, operations="attention")
    step(model, 5, batch()[:1])
    step(model, 5, batch())
    assert [one.slices is None for one in forms(model)] == [True, False]
    assert counts[-1] == BATCH


SMALL = {"hidden_size": 32, "vocab_size": 50, "num_hidden_layers": 2, "pad_token_id": 0}
EAGER = {"num_attention_heads": 4, "attn_implementation": "eager"}
MODELS = {
    "gemma2": lambda: hf.Gemma2ForCausalLM(
        hf.Gemma2Config(**SMALL, **EAGER, intermediate_size=64, num_key_value_heads=2, head_dim=8)
    ),
    "gpt_oss": lambda: hf.GptOssForCausalLM(
        hf.GptOssConfig(
            **SMALL, **EAGER, intermediate_size=32, num_key_value_heads=2, head_dim=8, num_local_experts=2,
            num_experts_per_tok=1,
        )
    ),
    "bloom": lambda: hf.BloomForCausalLM(
        hf.BloomConfig(hidden_size=32, n_head=4, n_layer=2, vocab_size=50, hidden_dropout=0.0, attention_dropout=0.0)
    ),
}  # fmt: skip


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_models_are_divided(kind, use_cache, small, counts, monkeypatch):
    ids = torch.arange(4 * 16).view(4, 16) % 50
    mask = torch.ones_like(ids)
    mask[1, 10:] = 0
    found = []
    for least in (1 << 60, 0):
        torch.manual_seed(0)
        model = MODELS[kind]().train()
        convert(model, operations="attention")
        monkeypatch.setattr(region_slices, "_LEAST", least)
        for one in (None, mask):  # the mask has one row in the first call, and then one for every sequence
            model.zero_grad()
            model(ids, attention_mask=one, labels=ids, use_cache=use_cache).loss.backward()
        found.append({name: one.grad for name, one in model.named_parameters() if one.grad is not None})
        assert counts[-1] == (1 if least else 4)
    assert_near(found[1], found[0])


def peak_of(model, x):
    live = LiveTensors(Peak())
    with live:
        loss = model(x)[0]
        live.result.bytes = 0
        loss.backward()
    return live.result.bytes


@pytest.mark.parametrize("is_fake", [False, True])
def test_the_peak_of_the_backward_pass_is_smaller(is_fake, monkeypatch):
    class Long(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = Capped()

        def forward(self, x):
            return (self.first(x)[0].square().sum(),)

    peaks = []
    for least in (1 << 60, 1 << 21):
        monkeypatch.setattr(region_slices, "_LEAST", least)
        with FakeTensorMode(allow_non_fake_inputs=True) if is_fake else torch.random.fork_rng():
            torch.manual_seed(0)
            model, x = Long().train(), torch.randn(8, 256, WIDTH)
            convert(model, operations="attention")
            model(x)[0].backward()
            peaks.append(peak_of(model, x))
    assert peaks[1] < 0.7 * peaks[0]


def test_gradients_of_a_bias_that_all_sequences_share(small, counts):
    model, exact = model_of(Biased), model_of(Biased)
    convert(model, operations="attention", attention_bits=8)
    assert_unbiased(model, exact, batch(), draws=20)
    assert set(counts[10:]) == {BATCH}
