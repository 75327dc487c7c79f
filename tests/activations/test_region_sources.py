"""Regions whose linear layers read what the module has made: norms between them, and a second stream."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
import transformers as hf
from region_helpers import HEADS, WIDTH, Scores, assert_unbiased, batch, forms, model_of, step
from torch import nn
from torch.nn import functional as F

from rmm_linear import convert
from rmm_linear.activations import region_slices
from rmm_linear.activations.norm import PackedNorm
from rmm_linear.memory import track_saved


class Normed(Scores):
    """Queries come from a latent that a norm rescales; keys have a norm behind their linear layer."""

    def __init__(self):
        super().__init__()
        self.down, self.between, self.behind = nn.Linear(WIDTH, 16), nn.LayerNorm(16), nn.LayerNorm(WIDTH // HEADS)
        self.q = nn.Linear(16, WIDTH)

    def forward(self, x, bias=None):
        q, v = self.heads(self.q(self.between(self.down(x)))), self.heads(self.v(x))
        k = self.behind(self.heads(self.k(x)))
        return self.o(((q @ k.transpose(-1, -2)).softmax(-1) @ v).transpose(1, 2).flatten(2)), None


class Streams(Scores):
    """A second softmax behind the sink of the first, with a source of its own that reads a part of the input."""

    def __init__(self):
        super().__init__()
        self.places = nn.Linear(WIDTH, HEADS)
        self.is_dropped = False

    def forward(self, x, bias=None):
        q, k, v = (self.heads(one(x)) for one in (self.q, self.k, self.v))
        outputs, p = [], None
        for q, x in zip(q.chunk(2, 2), x.chunk(2, 1), strict=True):  # noqa: B020
            scores = q @ k.transpose(-1, -2) + self.places(torch.stack([x, x]).mean(0)).transpose(1, 2).unsqueeze(-1)
            p = F.dropout((scores * self.more).softmax(-1), 0.2 * self.is_dropped, self.training)
            outputs.append(self.o((p @ v).transpose(1, 2).flatten(2)))
        return torch.cat(outputs, 1).tanh(), p


@pytest.mark.parametrize("is_divided", [False, True])
@pytest.mark.parametrize("kind", [Normed, Streams])
def test_outputs_are_the_modules_own_and_gradients_unbiased(kind, is_divided, monkeypatch):
    if is_divided:
        monkeypatch.setattr(region_slices, "_LEAST", 0)
        monkeypatch.setattr(region_slices, "_MULTIPLE", 0)
    model, exact, x = model_of(kind), model_of(kind), batch()
    convert(model, operations=("attention", "norm"), attention_bits=8, norm_bits=8)
    for seed in (5, 6):
        assert torch.equal(step(model, seed, x)[0], step(exact, seed, x)[0])
    (form,) = forms(model)
    assert (form.reason, form.slices.reason) == (None, None)
    assert (form.reads, form.derives) == (kind is Normed, kind is Streams)
    assert_unbiased(model, exact, x)


def test_a_second_stream_with_dropout_and_a_loss_on_its_probabilities():
    model, exact, x = model_of(Streams, weights=1e-3), model_of(Streams, weights=1e-3), batch()
    for one in (model, exact):
        one.first.is_dropped = one.second.is_dropped = True
    convert(model, operations="attention", attention_bits=8)
    assert torch.equal(step(model, 5, x)[0], step(exact, 5, x)[0])
    assert_unbiased(model, exact, x, draws=20)


def test_the_scores_of_both_streams_save_nothing():
    model, x = model_of(Streams), batch()
    convert(model, operations="attention")
    for seed in range(4):
        step(model, seed, x)
    saved = []

    def pack(one):
        one = one.detach()
        saved.append(weakref.ref(one))
        return one

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
        output = model(x)
    alive = [one().shape for one in saved if one() is not None]
    assert alive
    assert not [shape for shape in alive if len(shape) == 4 and shape[-1] == x.shape[1]]
    output[0].backward()


def test_norms_behind_the_last_source_take_no_seed():
    """Nothing is saved for them; those between linear layers are packed."""
    model = model_of(Scores)
    model.first.behind = nn.LayerNorm(WIDTH)
    model.first.kept = lambda p: model.first.behind(p.new_ones(WIDTH)).mean() * p
    convert(model, operations=("attention", "norm"))
    assert isinstance(model.first.behind, PackedNorm)
    step(model, 5, batch())
    assert not model.first.behind.rmm_took_seed
    assert "forward" not in vars(model.first.behind)


LATENT = {"q_lora_rank": 48, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}


def latent():
    config = hf.DeepseekV3Config(
        hidden_size=64, vocab_size=50, num_hidden_layers=2, intermediate_size=64, moe_intermediate_size=32,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
        topk_group=1, first_k_dense_replace=2, attn_implementation="eager", pad_token_id=0, **LATENT,
    )  # fmt: skip
    return hf.DeepseekV3ForCausalLM(config)


def two_streams():
    config = hf.ProphetNetConfig(
        hidden_size=64, vocab_size=50, num_decoder_layers=2, num_encoder_layers=1, num_decoder_attention_heads=4,
        num_encoder_attention_heads=4, decoder_ffn_dim=64, encoder_ffn_dim=64, ngram=2, num_buckets=8,
        relative_max_distance=32, max_position_embeddings=128, is_decoder=True, add_cross_attention=False,
    )  # fmt: skip
    return hf.ProphetNetForCausalLM(config)


@pytest.mark.parametrize(("build", "most"), [(latent, 0.55), (two_streams, 0.3)])
def test_models(build, most):
    torch.manual_seed(0)
    model = build().train()
    exact, ids = copy.deepcopy(model), torch.arange(4 * 64).view(4, 64) % 50
    convert(model, operations=("attention", "norm"))
    counts, found = [], []
    for one in (model, exact):
        for seed in range(5):
            torch.manual_seed(seed)
            output = one(ids, labels=ids, use_cache=False)
            output.loss.backward()
        with track_saved(one) as saved:
            last = one(ids, labels=ids, use_cache=False)
        counts.append(saved.total)
        del last
        found.append((output.logits, {name for name, p in one.named_parameters() if p.grad is not None}))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
    assert counts[0] < most * counts[1]
