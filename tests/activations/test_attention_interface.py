"""Packed attention in models of transformers: losses to the bit, what stays exact, and the function that is swapped."""

import copy
import functools
import pickle
import re
import subprocess
import sys
from weakref import WeakSet

import pytest
import torch
import transformers
from attention_helpers import relative
from helpers import ALL_ARCHITECTURES, batch_of, loss_of, tiny_model, token_ids
from torch.nn import functional as F

from rmm_linear import convert, revert
from rmm_linear.activations import attention_interface

# Relative squared error of gradients at 4 bits: an element's is 1/10.4² of its size, in each of up to five factors.
NOISE = 5 / 10.4**2
PROJECTIONS = re.compile(r"(query|key|value|q_proj|k_proj|v_proj|c_attn|\.[qkv])\.weight|relative_attention_bias")


def model_of(architecture, dropout=0.0):
    """A tiny model in train mode; in "grouped", queries share keys, and the second layer has a window."""
    if architecture != "grouped":
        return tiny_model(architecture, dropout).train()
    config = transformers.Qwen2Config(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=32, max_position_embeddings=40, attention_dropout=dropout, use_sliding_window=True,
        sliding_window=6, max_window_layers=1, pad_token_id=1,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return transformers.Qwen2ForCausalLM(config).train()


def functions():
    return transformers.AttentionInterface._global_mapping


@pytest.fixture(autouse=True)
def original(monkeypatch):
    """The function of transformers, before every test and after it, whatever converted models are left."""
    monkeypatch.setattr(attention_interface, "_PACKED", WeakSet())
    function = functions()["sdpa"]
    function = getattr(function, "keywords", {"sdpa": function})["sdpa"]
    monkeypatch.setitem(functions(), "sdpa", function)
    return function


def converted(model):
    report = convert(model, operations="attention", checkpointed="packed")
    return [model.get_submodule(name) for name in report.packed]


def step(model, architecture):
    """The loss, and the gradients of what makes queries, keys, values and a bias."""
    torch.manual_seed(5)
    model.zero_grad()
    loss = loss_of(model, architecture)
    loss.backward()
    found = [p.grad.clone() for name, p in model.named_parameters() if PROJECTIONS.search(name)]
    assert len(found) > 1
    return loss.detach(), found


@pytest.mark.parametrize("architecture", [*ALL_ARCHITECTURES, "grouped"])
def test_the_loss_is_that_of_the_model_to_the_bit(architecture):
    """And with dropout up to sums of 20 products in two layers; another mask would change it by a tenth."""
    for dropout in (0.0, 0.1):
        model = model_of(architecture, dropout)
        exact = copy.deepcopy(model)
        modules = converted(model)
        loss, gradients = step(model, architecture)
        wanted, exact_gradients = step(exact, architecture)
        assert abs(loss - wanted) <= (100 * torch.finfo(torch.float32).eps * wanted if dropout else 0)
        assert [module.rmm_exact for module in modules] == [None] * len(modules)
        for found, expected in zip(gradients, exact_gradients, strict=True):
            assert 0 < relative([found], [expected]) < 3 * NOISE
        assert 0 < relative(gradients, exact_gradients) < NOISE
        batch = batch_of(architecture)
        with torch.no_grad():
            torch.manual_seed(1)
            sampled = model(**batch).logits
            torch.manual_seed(1)
            assert torch.equal(sampled, exact(**batch).logits)
            assert torch.equal(model.eval()(**batch).logits, exact.eval()(**batch).logits)
    if architecture == "llama":
        sizes = {"max_new_tokens": 5, "do_sample": False}
        assert torch.equal(model.generate(batch["input_ids"], **sizes), exact.generate(batch["input_ids"], **sizes))
    revert(model)
    assert [type(module) for module in model.modules()] == [type(module) for module in exact.modules()]
    assert {getattr(m, "config", model.config)._attn_implementation for m in model.modules()} == {"sdpa"}
    assert vars(model).keys() == vars(exact).keys()
    found, expected = (step(one.train(), architecture)[1] for one in (model, exact))
    assert all(map(torch.equal, found, expected))


# What stays exact


def test_a_position_bias_of_another_shape_stays_exact_with_the_reason():
    module = converted(model_of("t5"))[0]
    module.rmm_linears = ()  # else it trains as a region from then on
    q = torch.randn(2, 2, 5, 8, requires_grad=True)
    attend = functions()["sdpa"]
    attend(module, q, q, q, None, position_bias=torch.zeros(5, 5))
    assert module.rmm_exact.startswith("its position_bias does not have the shape of its scores")
    attend(module, q, q, q, None, position_bias=torch.zeros(1, 2, 5, 5))
    assert module.rmm_exact is None


@pytest.mark.parametrize("given", ["softcap", "s_aux", "cache", "output_attentions"])
def test_arguments_that_are_not_supported_have_a_reason(given, monkeypatch):
    exact = lambda module, query, *args, **kwargs: (query.transpose(1, 2) * 1.0, None)  # noqa: E731
    module = converted(model_of("llama"))[0]
    ours = functools.partial(attention_interface.packed_sdpa, sdpa=exact)
    monkeypatch.setitem(functions(), "sdpa", ours)
    module.rmm_linears = ()
    q = torch.randn(1, 2, 5, 8, requires_grad=True)
    output, _ = functions()["sdpa"](module, q, q, q, None, **{given: torch.ones(2)[0] * 1 or 1})
    assert torch.equal(output, q.transpose(1, 2))
    assert module.rmm_exact == f"it is called with {given}"


def test_another_librarys_sdpa_keeps_its_gradient(original, monkeypatch):
    """It may compute something else under that name, as attention to other processes' tokens: its code runs again."""

    def twice(module, query, *args, **kwargs):
        return original(module, 2 * query, *args, **kwargs)

    monkeypatch.setitem(functions(), "sdpa", twice)
    want = step(model_of("llama"), "llama")[1]
    model = model_of("llama")
    assert not any(isinstance(one, attention_interface.PackedAttention) for one in converted(model))
    assert functions()["sdpa"] is twice
    assert relative(step(model, "llama")[1], want) < 3 * NOISE


def test_a_replaced_function_of_pytorch_keeps_its_gradient(monkeypatch, caplog):
    """As by context parallelism, whose attention reaches the tokens of other processes."""
    attend, model = F.scaled_dot_product_attention, model_of("llama")
    converted(model)
    replaced = lambda query, *args, **kwargs: attend(2 * query, *args, **kwargs)  # noqa: E731
    monkeypatch.setattr(F, "scaled_dot_product_attention", replaced)
    assert all(map(torch.equal, step(model, "llama")[1], step(model_of("llama"), "llama")[1]))
    assert "context parallelism, which attends to tokens of other processes" in caplog.text


def test_other_functions_keep_their_own_code():
    model = model_of("roberta")
    model.set_attn_implementation("eager")
    assert {one.saved for one in convert(model, operations="attention").packed.values()} == {
        "outputs of its linear layers, 4 bits"
    }
    assert model.config._attn_implementation == "eager"


def test_models_that_ask_for_the_name_are_packed():
    """It makes another mask where the name is "sdpa"."""
    sizes = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
    sizes |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "index_topk": 4}
    sizes |= {"index_head_dim": 8, "index_n_heads": 2, "num_attention_heads": 2, "num_hidden_layers": 2, "head_dim": 4}
    sizes |= {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16}
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = transformers.GlmMoeDsaForCausalLM(transformers.GlmMoeDsaConfig(**sizes, pad_token_id=1)).train()
    exact = copy.deepcopy(model)
    modules = converted(model)
    loss, wanted = (one(input_ids=token_ids(), labels=token_ids()).loss for one in (model, exact))
    assert torch.equal(loss, wanted)
    assert [module.rmm_exact for module in modules] == [None, None]
    loss.backward()
    wanted.backward()
    found, expected = ([m.model.layers[0].self_attn.kv_b_proj.weight.grad] for m in (model, exact))
    assert 0 < relative(found, expected) < NOISE


# The function that is swapped, which models share


def test_a_name_that_the_user_sets_later_stays():
    model = model_of("bert")
    converted(model)
    model.set_attn_implementation("eager")
    revert(model)
    assert model.config._attn_implementation == "eager"


def attentions(model):
    return [layer.attention.self for layer in model.roberta.encoder.layer]


def is_packed(model):
    """Whether the attention function of its modules is ours, and packs."""
    for module in attentions(model):
        module.rmm_exact = "not called"
    model(input_ids=token_ids()).logits.sum().backward()
    return [module.rmm_exact for module in attentions(model)] == [None, None]


def test_a_model_that_is_not_converted_calls_the_function_of_transformers(original, monkeypatch):
    called = []

    def counted(module, *args, **kwargs):
        called.append((module, kwargs))
        return original(module, *args, **kwargs)

    monkeypatch.setitem(functions(), "sdpa", counted)
    first, second = model_of("roberta"), model_of("roberta")
    exact = step(second, "roberta")
    arguments = [(module, kwargs.keys()) for module, kwargs in called]
    converted(first)
    called.clear()
    found = step(second, "roberta")
    assert [module for module, _ in called] == attentions(second)
    assert all(names <= kwargs.keys() for (_, names), (_, kwargs) in zip(arguments, called, strict=True))
    assert all(map(torch.equal, [exact[0], *exact[1]], [found[0], *found[1]]))


def test_the_function_is_back_when_the_last_model_is_reverted(original):
    first = model_of("roberta")
    second = type(first)(first.config).train()
    assert second.roberta.config is first.roberta.config
    converted(first)
    convert(second, min_rows=4, example={"input_ids": token_ids()})  # which sets it aside to measure
    assert is_packed(first)
    revert(first)
    assert is_packed(second)
    revert(second)
    assert functions()["sdpa"] is original
    assert second.config._attn_implementation == "sdpa"


def test_a_function_that_the_user_registers_later_stays():
    model = model_of("bert")
    converted(model)
    transformers.AttentionInterface.register("sdpa", print)
    revert(model)
    assert functions()["sdpa"] is print


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_is_reverted_by_itself(copied):
    model = model_of("roberta")
    converted(model)
    other = copied(model)
    revert(other.roberta.encoder.layer[0])
    revert(other.roberta.encoder.layer[1])
    assert is_packed(model)


LOAD = """
import pickle, sys, torch, transformers
ids = torch.arange(3, 13)[None]
model = transformers.AutoModelForSequenceClassification.from_pretrained("saved")
assert "rmm_linear" not in sys.modules
assert model.config._attn_implementation == "sdpa", model.config._attn_implementation
torch.save(model(input_ids=ids).logits, "logits")
with open("pickled", "rb") as file:
    model = pickle.load(file)
model(input_ids=ids).logits.sum().backward()
"""


def test_a_saved_model_loads_without_the_library_and_a_pickled_one_with_it(tmp_path):
    """In a process that has registered nothing."""
    model = model_of("roberta")
    converted(model)
    model.save_pretrained(tmp_path / "saved")
    (tmp_path / "pickled").write_bytes(pickle.dumps(model))
    subprocess.run([sys.executable, "-c", LOAD], check=True, cwd=tmp_path)
    assert torch.equal(torch.load(tmp_path / "logits"), model.eval()(input_ids=torch.arange(3, 13)[None]).logits)
