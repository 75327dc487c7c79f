"""Attention with code of its own in compiled code, which is divided around it."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
import transformers as hf
from region_helpers import Capped, Sinks, batch, model_of, step
from torch._dynamo.utils import counters

from rmm_linear import convert
from rmm_linear.context.learned import STEPS, ScoreSpread

pytestmark = [
    pytest.mark.usefixtures("no_graphs_left"),
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),  # that a compiler reads, of a divided graph
]


@pytest.mark.parametrize("kind", [Capped, Sinks])
def test_gradients_are_unbiased_and_nothing_is_compiled_again(kind, caplog):
    model, exact, x = model_of(kind), model_of(kind), batch()
    convert(model, operations="attention", attention_bits=8)
    compiled, errors = torch.compile(model, backend="aot_eager"), []
    expected = step(exact, 5, x)
    for seed in range(2):
        with caplog.at_level(logging.WARNING):
            found = step(compiled, seed, x)
    assert torch.equal(found[0], expected[0])
    counters.clear()
    for seed in range(24):
        compiled.zero_grad()
        errors.append(step(compiled, seed, x)[1]["_orig_mod.first.q.weight"] - expected[1]["first.q.weight"])
    assert not counters["stats"]
    assert not counters["graph_break"]
    error = torch.stack(errors).double()
    assert 0 < float(error.mean(0).square().sum()) < 2 * float(error.var(0).sum()) / len(error)
    (message,) = [one for one in caplog.messages if "compiled code" in one]
    assert "which is divided around it: first is the first." in message


def test_the_spread_of_scores_is_learned():
    model, x = model_of(Capped), batch()
    convert(model, operations="attention")
    compiled = torch.compile(model, backend="aot_eager")
    for seed in range(STEPS):
        step(compiled, seed, x)
    learned = [one for one in model.first.rmm_context.learned.values() if isinstance(one, ScoreSpread)]
    assert all(one.is_decided and one.largest > 0 for one in learned)


def test_one_graph_is_refused_in_training_alone():
    model, x = model_of(Capped), batch()
    convert(model, operations="attention")
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    torch._dynamo.reset()
    torch.compile(model.eval(), backend="aot_eager", fullgraph=True)(x)


@pytest.mark.stack
def test_a_model_with_all_operations():
    config = hf.Gemma2Config(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=50, pad_token_id=0, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    model = hf.Gemma2ForCausalLM(config).train()
    exact, ids = copy.deepcopy(model), torch.arange(4 * 32).view(4, 32) % 50
    convert(model)
    compiled = torch.compile(model, backend="aot_eager")
    expected = exact(ids, labels=ids, use_cache=False)
    expected.loss.backward()
    for one in range(4):
        if one == 2:
            counters.clear()
        model.zero_grad()
        output = compiled(ids, labels=ids, use_cache=False)
        output.loss.backward()
    assert not counters["stats"]
    torch.testing.assert_close(output.loss, expected.loss)
    for one, other in zip(model.parameters(), exact.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        assert float((one.grad - other.grad).norm()) < float(other.grad.norm())
