"""Packed attention in models of transformers: losses to the bit, gradients, what comes back, files, checkpoints."""

import copy
import pickle
import re
import subprocess
import sys

import pytest
import torch
import transformers
from attention_helpers import relative
from compile_helpers import Graphs
from helpers import ALL_ARCHITECTURES, batch_of, enable_checkpointing, loss_of, tiny_model

from rmm_linear import RMMConfig, revert
from rmm_linear.activations.attention_interface import (
    NAME,
    PackedAttention,
    is_attention,
    packed_sdpa,
    stays_exact,
)
from rmm_linear.activations.base import packed_class
from rmm_linear.context.model_context import ModelContext
from rmm_linear.memory import track_saved
from rmm_linear.packing import packed_bytes

PACKED = ["roberta", "bert", "gpt2", "llama", "vit", "grouped", "t5"]
# Relative squared error of gradients at 4 bits: an element's is 1/10.4² of its size, in each of up to five factors.
NOISE = 5 / 10.4**2


PROJECTIONS = re.compile(r"(query|key|value|q_proj|k_proj|v_proj|c_attn|\.[qkv])\.weight")


def model_of(architecture, dropout=0.0, layers=2):
    """A tiny model in train mode; in "grouped", queries share keys, and the second layer has a window."""
    if architecture != "grouped":
        return tiny_model(architecture, dropout, layers).train()
    config = transformers.Qwen2Config(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=32, max_position_embeddings=40, attention_dropout=dropout, use_sliding_window=True,
        sliding_window=6, max_window_layers=1, pad_token_id=1,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return transformers.Qwen2ForCausalLM(config).train()


def converted(model):
    modules = {name: module for name, module in model.named_modules() if is_attention(module)}
    assert modules
    chosen = [module for module in modules.values() if stays_exact(module) is None]
    config = RMMConfig(checkpointed="packed")
    context = ModelContext(list(modules), config)
    for i, module in enumerate(chosen):
        module.__class__ = packed_class(PackedAttention, type(module))
        module._set_up(config, context, i)
    context.attach(model)
    return chosen, context


def reverted(model, context):
    context.detach()
    for module in model.modules():
        if isinstance(module, PackedAttention):
            module._tear_down()
            module.__class__ = type(module).__bases__[1]


def step(model, architecture, batch=None):
    """The loss, and the gradients of what makes queries, keys and values."""
    torch.manual_seed(5)
    model.zero_grad()
    loss = loss_of(model, architecture, batch)
    loss.backward()
    found = [p.grad.clone() for name, p in model.named_parameters() if PROJECTIONS.search(name)]
    assert len(found) > 1
    return loss.detach(), found


@pytest.mark.parametrize("architecture", PACKED)
def test_the_loss_is_that_of_the_model_to_the_bit(architecture):
    model = model_of(architecture)
    exact = copy.deepcopy(model)
    modules, context = converted(model)
    loss, gradients = step(model, architecture)
    wanted, exact_gradients = step(exact, architecture)
    assert torch.equal(loss, wanted)
    assert [module.rmm_exact for module in modules] == [None] * len(modules)
    assert 0 < relative(gradients, exact_gradients) < NOISE
    if architecture == "t5":
        name = "relative_attention_bias"
        biases = [[p.grad for key, p in one.named_parameters() if name in key] for one in (model, exact)]
        assert len(biases[0]) == 2
        assert 0 < relative(*biases) < NOISE
    reverted(model, context)
    assert [type(module) for module in model.modules()] == [type(module) for module in exact.modules()]
    assert {getattr(m, "config", model.config)._attn_implementation for m in model.modules()} == {"sdpa"}
    assert vars(model).keys() == vars(exact).keys()
    assert all(torch.equal(*pair) for pair in zip(step(model, architecture)[1], exact_gradients, strict=True))


@pytest.mark.parametrize("architecture", PACKED)
def test_dropout_has_the_random_numbers_of_the_model(architecture):
    """Sums of 20 products are made in another order, in two layers; another mask would change the loss by a tenth."""
    model = model_of(architecture, 0.1)
    exact = copy.deepcopy(model)
    converted(model)
    loss, gradients = step(model, architecture)
    wanted, exact_gradients = step(exact, architecture)
    assert abs(float(loss - wanted)) < 100 * torch.finfo(torch.float32).eps * float(wanted)
    assert 0 < relative(gradients, exact_gradients) < NOISE


def test_a_position_bias_of_another_shape_stays_exact_with_the_reason():
    model = model_of("t5")
    modules, _ = converted(model)
    q = torch.randn(2, 2, 5, 8, requires_grad=True)
    packed_sdpa(modules[0], q, q, q, None, position_bias=torch.zeros(5, 5))
    assert modules[0].rmm_exact.startswith("its position_bias does not have the shape of its scores")
    packed_sdpa(modules[0], q, q, q, None, position_bias=torch.zeros(1, 2, 5, 5))
    assert modules[0].rmm_exact is None


@pytest.mark.parametrize("given", ["softcap", "s_aux", "cache", "output_attentions"])
def test_arguments_that_are_not_supported_have_a_reason(given, monkeypatch):
    model = model_of("llama")
    modules, _ = converted(model)
    exact = lambda module, query, *args, **kwargs: (query.transpose(1, 2) * 1.0, None)  # noqa: E731
    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "sdpa", exact)
    q = torch.randn(1, 2, 5, 8, requires_grad=True)
    output, _ = packed_sdpa(modules[0], q, q, q, None, **{given: torch.ones(2)[0] * 1 or 1})
    assert torch.equal(output, q.transpose(1, 2))
    assert modules[0].rmm_exact == f"it is called with {given}"


@pytest.mark.parametrize("architecture", PACKED)
def test_eval_and_no_grad_are_those_of_the_model(architecture):
    model = model_of(architecture, 0.1)
    exact = copy.deepcopy(model)
    converted(model)
    batch = batch_of(architecture)

    def outputs(of):
        torch.manual_seed(1)
        with torch.no_grad():
            in_train_mode = of.train()(**batch).logits
        return in_train_mode, of.eval()(**batch).logits

    assert all(torch.equal(*pair) for pair in zip(outputs(model), outputs(exact), strict=True))
    if "labels" not in batch and hasattr(exact, "generate") and "input_ids" in batch and architecture == "llama":
        sizes = {"max_new_tokens": 5, "do_sample": False}
        assert torch.equal(model.generate(batch["input_ids"], **sizes), exact.generate(batch["input_ids"], **sizes))


def test_saved_bytes_of_a_layer_are_those_of_the_formula():
    """Where nothing is padded: of q, k, v and the output, three packed matrices and their seeds are left."""
    model = model_of("roberta")
    ids = {"input_ids": batch_of("roberta")["input_ids"]}
    with track_saved(model) as exact:
        model(**ids)
    modules, _ = converted(model)
    with track_saved(model) as packed:
        model(**ids)
    each, unit = 3 * packed_bytes(80, 16, 4) + 32, 80 * 16 * 4
    sums = 4 * 2 * 20 * 4  # logarithms of the sums of exponentials: (batch, heads, tokens)
    # The output is saved by attention.output.dense too, unless that is sketched.
    assert exact.total - packed.total == len(modules) * (3 * unit + sums - each)


def test_other_functions_stay_with_the_reason():
    model = model_of("roberta")
    model.set_attn_implementation("eager")
    modules = [module for module in model.modules() if is_attention(module)]
    assert len(modules) == 2
    assert all(stays_exact(module).startswith("its attn_implementation is 'eager'") for module in modules)


def test_models_that_ask_for_the_name_stay_exact():
    from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaAttention

    module = object.__new__(GlmMoeDsaAttention)
    torch.nn.Module.__init__(module)
    module.config = transformers.LlamaConfig(attn_implementation="sdpa")
    assert stays_exact(module) == "its model's code treats attn_implementation='sdpa' specially"


def test_a_name_that_the_user_sets_later_stays():
    model = model_of("bert")
    _, context = converted(model)
    model.set_attn_implementation("eager")
    reverted(model, context)
    assert model.config._attn_implementation == "eager"


def test_configurations_inside_keep_their_own_name():
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 8, "patch_size": 4, "projection_dim": 8}
    text = {**vision, "vocab_size": 32, "eos_token_id": 2}
    del text["image_size"], text["patch_size"]
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
    config._attn_implementation = {"": "sdpa", "text_config": "sdpa", "vision_config": "eager"}
    model = transformers.CLIPModel(config)
    assert model.vision_model.config._attn_implementation == "eager"
    modules, context = converted(model)
    assert {type(module).__module__ for module in modules} == {PackedAttention.__module__}
    names = [model.text_model.config._attn_implementation, model.vision_model.config._attn_implementation]
    assert names == [NAME, "eager"]
    reverted(model, context)
    assert model.text_model.config._attn_implementation == "sdpa"


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
    assert NAME not in (tmp_path / "saved" / "config.json").read_text()
    (tmp_path / "pickled").write_bytes(pickle.dumps(model))
    subprocess.run([sys.executable, "-c", LOAD], check=True, cwd=tmp_path)
    assert torch.equal(torch.load(tmp_path / "logits"), model.eval()(input_ids=torch.arange(3, 13)[None]).logits)


def test_a_converted_model_can_be_copied():
    model = model_of("roberta")
    converted(model)
    other = copy.deepcopy(model)
    revert(other)
    assert other.config._attn_implementation == "sdpa"
    assert model.config._attn_implementation == NAME


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("architecture", ["roberta", "grouped"])
def test_a_checkpoint_has_the_gradients_of_a_step_without(architecture, reentrant):
    """Seeds differ from those of a plain step, so the noise does; with a wrong seed the error would be above 1."""
    model = model_of(architecture, 0.1)
    exact = copy.deepcopy(model)
    converted(model)
    enable_checkpointing(model, reentrant)
    loss, gradients = step(model, architecture)
    wanted, exact_gradients = step(exact, architecture)
    assert abs(float(loss - wanted)) < 100 * torch.finfo(torch.float32).eps * float(wanted)
    assert 0 < relative(gradients, exact_gradients) < NOISE


@pytest.mark.parametrize(
    "architecture", ["roberta", *(pytest.param(name, marks=pytest.mark.stack) for name in ("grouped", "t5"))]
)
def test_compiled_models_have_whole_graphs(architecture):
    torch._dynamo.reset()
    model = model_of(architecture, layers=1)
    exact = copy.deepcopy(model)
    modules, _ = converted(model)
    graphs = Graphs()
    compiled = graphs.compile(model)
    for length in (20, 24):
        batch = batch_of(architecture, length)
        loss, gradients = step(compiled, architecture, batch)
        wanted, exact_gradients = step(exact, architecture, batch)
        assert torch.equal(loss, wanted)
        assert 0 < relative(gradients, exact_gradients) < NOISE
    names = ("rmm_linear.pack_attention.default", "rmm_linear.attention_backward.default")
    both = [{name: len(modules)} for name in names]
    assert graphs.counts == [*both, *both]  # for the first length, then for all
    torch._dynamo.reset()


def test_every_architecture_has_been_tried():
    assert {*ALL_ARCHITECTURES, "grouped"} == {*PACKED}
