"""Attention with code of its own: what a region is, what its replay repeats, and when it stays exact."""

from __future__ import annotations

import copy
import gc
import logging
import math

import pytest
import torch
import transformers as hf
from peft_helpers import lora
from region_helpers import (
    KINDS,
    TOKENS,
    WIDTH,
    Biased,
    Capped,
    Dropped,
    Fused,
    Gated,
    Latent,
    Open,
    Scores,
    Sinks,
    Writing,
    assert_unbiased,
    batch,
    forms,
    model_of,
    step,
)
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from rmm_linear import convert, revert
from rmm_linear.activations.region import PackedRegion, reads_softmax
from rmm_linear.context.learned import MOST_SPREAD, ScoreSpread
from rmm_linear.variance import GradientProbe


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_are_the_modules_own_and_gradients_unbiased(kind):
    model, exact, x = model_of(kind), model_of(kind), batch()
    convert(model, operations="attention", attention_bits=8)
    for seed in (5, 6):
        assert torch.equal(step(model, seed, x)[0], step(exact, seed, x)[0])
        assert torch.equal(torch.get_rng_state(), (step(exact, seed, x), torch.get_rng_state())[1])
    assert [one.reason for one in forms(model)] == [None]
    assert_unbiased(model, exact, x)


def test_what_is_found_of_a_region():
    found = {}
    for kind in KINDS:
        model = model_of(kind)
        convert(model, operations="attention")
        step(model, 0, batch())
        (found[kind],) = forms(model)
    assert {kind: one.calls for kind, one in found.items()} == {**dict.fromkeys(KINDS, 3), Fused: 1}
    assert {kind for kind, one in found.items() if one.sink is None} == {Open}
    assert {kind for kind, one in found.items() if one.writes} == {Writing}
    assert {kind for kind, one in found.items() if one.reads} == {Latent}
    assert {kind for kind, one in found.items() if 0 not in one.free} == {Gated}
    assert {kind for kind, one in found.items() if "bias" not in one.free} == {Biased}


def test_nothing_of_the_scores_is_saved():
    saved = []
    model = model_of(Dropped)
    convert(model, operations="attention")
    for _ in range(4):
        step(model, 0, batch())
    with torch.autograd.graph.saved_tensors_hooks(lambda one: saved.append(one.shape) or one, lambda one: one):
        model(batch())
    assert not [shape for shape in saved if len(shape) == 4]


def test_further_outputs_have_their_gradient():
    model, exact, x = model_of(Capped, weights=1e-3), model_of(Capped, weights=1e-3), batch()
    without = step(model_of(Capped), 5, x)[1]["first.q.weight"]
    convert(model, operations="attention", attention_bits=8)
    assert float((step(exact, 5, x)[1]["first.q.weight"] - without).norm()) > 0.1 * float(without.norm())
    assert_unbiased(model, exact, x)


def test_the_check_leaves_no_trace():
    """In random numbers, parameters' gradients, nor in what linear layers learn and draw."""
    model, other, x = model_of(Dropped), model_of(Dropped), batch()
    for one in (model, other):
        convert(one, operations=("linear", "attention"), min_rows=1)
    other.first.rmm_context.regions.update(
        {key: form for key, form in (step(model, 5, x), model.first.rmm_context.regions)[1].items()}
    )
    again = model_of(Dropped)
    convert(again, operations=("linear", "attention"), min_rows=1)
    for one, two in zip(step(again, 5, x)[1].values(), step(other, 5, x)[1].values(), strict=True):
        assert torch.equal(one, two)


class Watched(Scores):
    """It notes its probabilities."""

    def kept(self, p):
        self.refs.append(StorageWeakRef(p.untyped_storage()))
        return p


def test_the_check_keeps_no_memory():
    model = model_of(Watched)
    model.first.refs = model.second.refs = refs = []
    convert(model, operations="attention")
    step(model, 5, batch())
    gc.collect()
    assert len(refs) > 4
    assert all(one.expired() for one in refs)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("kind", [Dropped, Latent, Open])
def test_a_checkpoint_around_it_changes_nothing(use_reentrant, kind):
    x, found = batch().requires_grad_(), []
    for recomputes in (False, True):
        model = model_of(kind)
        convert(model, operations="attention", checkpointed="packed")
        if recomputes:
            run = model.second.forward
            model.second.forward = lambda x, bias, run=run: checkpoint(run, x, bias, use_reentrant=use_reentrant)
        found.append(step(model, 5, x)[1])
    assert all(torch.equal(one, found[1][name]) for name, one in found[0].items())


def test_scores_that_codes_move_far_take_eight_bits():
    model, x = model_of(Scores), batch()
    with torch.no_grad():
        for one in (model.first.q, model.first.k):
            one.weight.mul_(8)
    convert(model, operations="attention")
    for seed in range(5):
        step(model, seed, x)
    learned = [one for one in model.first.rmm_context.learned.values() if isinstance(one, ScoreSpread)]
    assert [one.is_large for one in learned] == [True, False]
    assert learned[0].largest > MOST_SPREAD > learned[1].largest > 0


def test_frozen_and_evaluated_modules_run_as_they_are():
    model, exact, x = model_of(Sinks), model_of(Sinks), batch()
    convert(model, operations="attention")
    for one in (model, exact):
        one.eval()
    assert torch.equal(model(x)[0], exact(x)[0])
    model.train().requires_grad_(False)
    assert not model(x)[0].requires_grad
    model.first.more.requires_grad_(True)
    step(model, 0, x)
    assert model.first.more.grad.abs().sum() > 0
    assert model.first.q.weight.grad is None


def test_a_cache_that_is_filled_keeps_it_exact(caplog):
    config = hf.LlamaConfig(
        hidden_size=WIDTH, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4, vocab_size=50,
        attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    model = hf.LlamaForCausalLM(config).train()
    convert(model, operations="attention")
    ids = torch.arange(10).view(1, 10)
    output = model(ids, use_cache=True)
    assert output.past_key_values.get_seq_length() == 10
    assert model.model.layers[0].self_attn.rmm_exact is None
    with caplog.at_level(logging.WARNING):
        model(ids, past_key_values=output.past_key_values, use_cache=True)
    assert "its KV cache is not empty" in caplog.text


class Read(nn.Module):
    """The second layer reads the keys and values that the first has put into the cache."""

    def __init__(self, model):
        super().__init__()
        self.model, self.layer = model, model.model.layers[0]

    def forward(self, x):
        places = torch.arange(TOKENS).unsqueeze(0)
        rotary, cache = self.model.model.rotary_emb(x, places), hf.DynamicCache(config=self.model.config)
        first = self.layer(x, position_embeddings=rotary, past_key_values=cache)
        output = self.layer(first, position_embeddings=rotary, past_key_values=cache)
        return output.square().sum(), output


def test_what_is_read_from_a_cache_has_its_gradient():
    sizes = {"hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = hf.LlamaConfig(**sizes, vocab_size=50, attn_implementation="eager")
    errors, x = {}, batch()
    torch.manual_seed(0)
    exact = Read(hf.LlamaForCausalLM(config).train())
    model = copy.deepcopy(exact)
    context = convert(model, operations="attention", attention_bits=8).context
    output, expected = step(exact, 5, x)
    for draw in range(20):
        context.salt = draw + 1
        found, gradients = step(model, 5, x)
        assert torch.equal(found, output)
        for name, gradient in gradients.items():
            errors.setdefault(name, []).append((gradient - expected[name]).double())
    for name, values in errors.items():  # half of the gradient of keys and values comes through the cache
        assert float(torch.stack(values).mean(0).norm()) < 0.02 * float(expected[name].norm()), name


def test_a_call_that_the_function_cannot_pack_makes_a_region():
    config = hf.LlamaConfig(
        hidden_size=WIDTH, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4, vocab_size=50
    )
    torch.manual_seed(0)
    model = hf.LlamaForCausalLM(config).train()
    exact = copy.deepcopy(model)
    convert(model, operations="attention")
    attention, ids = model.model.layers[0].self_attn, torch.arange(10).view(1, 10)
    assert not attention.rmm_is_region
    mask = torch.zeros(1, 1, 10, 10, requires_grad=True)
    for _ in range(2):
        output = model(ids, attention_mask=mask, labels=ids)
        output.loss.backward()
        assert attention.rmm_is_region
        assert attention.rmm_exact is None
    expected = exact(ids, attention_mask=mask.detach().requires_grad_(), labels=ids)
    assert torch.equal(output.logits, expected.logits)
    assert mask.grad.abs().sum() > 0
    revert(model)
    assert model.config._attn_implementation == "sdpa"


def test_adapters_on_the_linear_layers_train():
    """Those of a region's sources and sink: the output is the exact one, gradients accumulate, others get none."""
    model = lora("llama")
    model.set_attn_implementation("eager")
    exact = copy.deepcopy(model)
    context = convert(model, operations="attention", attention_bits=8).context
    ids = torch.arange(40).view(2, 20) % 60
    errors, found = {}, {}
    for one in (model, exact):
        torch.manual_seed(0)
        found[one] = one(input_ids=ids).logits
    assert torch.equal(found[model], found[exact])
    for draw in range(12):
        context.salt = draw
        for one in (model, exact):
            one.zero_grad()
            for part in ids:
                one(input_ids=part[None], labels=part[None]).loss.backward()
        pairs = zip(model.named_parameters(), exact.parameters(), strict=True)
        for (name, one), other in pairs:
            assert (one.grad is None) == (other.grad is None), name
            if other.grad is not None:
                errors.setdefault(name, []).append((one.grad - other.grad) / other.grad.norm())
    assert len(errors) == 2 * 3 * 2  # layers, targets, and A and B
    assert all(float(torch.stack(values).mean(0).norm()) < 0.02 for values in errors.values())
    model.eval()
    expected = exact.eval().generate(input_ids=ids, max_new_tokens=4, do_sample=False)
    assert torch.equal(model.generate(input_ids=ids, max_new_tokens=4, do_sample=False), expected)


def test_what_names_a_softmax():
    assert reads_softmax(Scores())
    assert reads_softmax(hf.models.llama.modeling_llama.LlamaAttention(hf.LlamaConfig(hidden_size=32), 0))
    assert not reads_softmax(nn.Linear(2, 2))
    assert not reads_softmax(hf.models.llama.modeling_llama.LlamaMLP(hf.LlamaConfig(hidden_size=32)))


class Compared(Scores):
    """It finds padding by the values of its input, which has no gradient from there."""

    def forward(self, x, bias=None):
        is_padding = (x == 0).all(-1)
        q, k, v = (self.heads(one(x)) for one in (self.q, self.k, self.v))
        scores = (q @ k.transpose(-1, -2)).masked_fill(is_padding[:, None, None], -math.inf)
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)), None


def test_an_input_whose_values_are_read_is_there_again():
    model, exact, x = model_of(Compared), model_of(Compared), batch()
    convert(model, operations="attention", attention_bits=8)
    step(model, 5, x)  # without padding
    x[1, TOKENS // 2 :] = 0
    errors, expected = [], step(exact, 5, x)[1]
    for draw in range(8):
        model.first.rmm_context.salt = draw + 1
        gradients = step(model, 5, x)[1]
        errors.append(gradients["first.v.weight"] - expected["first.v.weight"])
    assert float(torch.stack(errors).mean(0).norm()) < 0.02 * float(expected["first.v.weight"].norm())


def changed_before_backward(model, x, change):
    torch.manual_seed(5)
    loss, _ = model(x)
    change(model)
    loss.backward()
    return {name: one.grad for name, one in model.named_parameters()}


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.eval(),
        lambda model: model.first.more.requires_grad_(False),
        lambda model: revert(model) if isinstance(model.first, PackedRegion) else None,
    ],
)
def test_what_changes_before_the_backward_pass_does_not_matter(change):
    found = []
    for is_changed in (False, True):
        model, x = model_of(Dropped), batch()
        convert(model, operations="attention")
        step(model, 5, x)
        model.zero_grad()
        found.append(changed_before_backward(model, x, change if is_changed else lambda model: None))
    for name, one in found[0].items():
        other = found[1][name]
        assert (one is None and other is None) or other is None or torch.equal(one, other), name


class Twice(Scores):
    """Its sink is called for two streams, as of attention with global tokens; its first parameter is read by both."""

    def forward(self, x, bias=None):
        q, k, v = (self.heads(one(x)) for one in (self.q, self.k, self.v))
        p = (q @ k.transpose(-1, -2) * self.more).softmax(-1)
        first = self.o((p @ v).transpose(1, 2).flatten(2))
        return first + self.o((p.square() @ v * self.more).transpose(1, 2).flatten(2)).tanh(), None


def test_a_sink_that_is_called_twice():
    model, exact, x = model_of(Twice), model_of(Twice), batch()
    convert(model, operations="attention", attention_bits=8)
    assert torch.equal(step(model, 5, x)[0], step(exact, 5, x)[0])
    (form,) = forms(model)
    assert (form.sinks, form.reason) == (2, None)
    assert_unbiased(model, exact, x)


def test_a_probe_measures_sources():
    """Their gradients as in the exact model, and the noise of what they save."""
    found = []
    for is_converted in (False, True):
        model, x = model_of(Scores), batch()
        if is_converted:
            convert(model, min_rows=1)
        with GradientProbe(model, every=1) as probe:
            model(x)[0].square().mean().backward()
        rows = {row.module: row for row in probe.rows}
        assert rows.keys() >= {"first.q", "first.k", "first.v", "first.o"}
        found.append(rows)
    for name, row in found[0].items():
        other = found[1][name]
        assert other.sgd_variance == pytest.approx(row.sgd_variance, rel=0.3)
        assert other.noise > 0


class _Pooled(nn.Module):
    """Attention pooling: one score for each row."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x):
        return (self.b(torch.tanh(self.a(x))).squeeze(-1).softmax(-1).unsqueeze(-1) * x).sum(-2)


class _LateValues(nn.Module):
    """Values are made behind the softmax."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        return (self.q(x) @ self.k(x).transpose(-1, -2) / WIDTH**0.5).softmax(-1) @ self.v(x)


@pytest.mark.parametrize("kind", [_Pooled, _LateValues])
@pytest.mark.parametrize("shape", [(TOKENS, WIDTH), (4, TOKENS, WIDTH)])
@pytest.mark.parametrize("default", ["cpu", "meta"])
def test_scores_of_any_shape_and_values_behind_them(kind, shape, default, caplog):
    """Also where another device than the data's is the default; what follows may write into the output."""
    model, x = nn.Sequential(kind(), nn.ReLU(inplace=True)).train(), torch.randn(shape)
    exact = copy.deepcopy(model)
    convert(model, operations="attention", attention_bits=8)
    with torch.device(default):
        for _ in range(5):
            model.zero_grad()
            model(x).square().sum().backward()
    exact(x).square().sum().backward()
    if len(shape) > 2 or kind is _LateValues:
        assert not [one for one in caplog.messages if "stays exact" in one]
        assert [one.reason for one in forms(model)] == [None]
    for one, other in zip(model.parameters(), exact.parameters(), strict=True):
        assert (one.grad - other.grad).norm() < 0.1 * other.grad.norm() + 1e-3
