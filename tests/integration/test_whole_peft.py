"""All operations under PEFT: losses of the exact model, unbiased adapters, merged weights, heads that train."""

import pytest
import torch
from cases import WHOLE_BODY
from helpers import batch_of, gradients, tiny_model, token_ids
from peft import LoraConfig, get_peft_model
from peft_helpers import TARGETS, lora, step
from statistical import assert_unbiased

from rmm_linear import convert, revert
from rmm_linear.layers.converted import ConvertedModule
from rmm_linear.memory import track_saved

SHORT = ("roberta", "llama")
architectures = pytest.mark.parametrize(
    "architecture", [name if name in SHORT else pytest.param(name, marks=pytest.mark.stack) for name in TARGETS]
)
converted_first = pytest.mark.parametrize("first", [True, False], ids=["converted before", "converted after"])


def whole(architecture, first):
    base = tiny_model(architecture, dropout=0.0)
    if first:
        convert(base, **WHOLE_BODY)
    model = lora(architecture, base)
    model.base_model.model.config.use_cache = False
    if not first:
        convert(model, **WHOLE_BODY)
    return model


@converted_first
@architectures
def test_losses_are_the_exact_models_and_adapters_unbiased(architecture, first):
    plain = lora(architecture)
    plain.base_model.model.config.use_cache = False
    exact_loss, exact = step(plain, architecture)
    model, losses = whole(architecture, first), []

    def draw(_):
        loss, found = step(model, architecture)
        losses.append(loss)
        assert found.keys() == exact.keys()
        return found

    torch.manual_seed(1)
    assert_unbiased(draw, exact, draws=12, widest=0.1)
    assert all(torch.equal(loss, exact_loss) for loss in losses)


@architectures
def test_a_frozen_base_saves_fewer_bytes(architecture):
    """Sketches of a frozen base save nothing; its norms, activations and attention are what there is to win."""
    saved = []
    for model in (lora(architecture), whole(architecture, first=False)):
        model.base_model.model.config.use_cache = False
        with track_saved(model) as kept:
            output = model(**batch_of(architecture))
        saved.append(kept.total)
        del output
    assert saved[1] < (0.8 if architecture == "t5" else 0.6) * saved[0], saved


@converted_first
@pytest.mark.parametrize("architecture", ["llama", pytest.param("gpt2", marks=pytest.mark.stack)])
def test_merged_weights_are_those_of_the_exact_model(architecture, first):
    plain, model = lora(architecture).merge_and_unload(), whole(architecture, first)
    merged = model.merge_and_unload()
    assert merged.state_dict().keys() == plain.state_dict().keys()
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in merged.state_dict().items())
    merged.requires_grad_(True)
    plain.config.use_cache = False
    loss, found = step(merged, architecture)
    exact_loss, exact = step(plain.requires_grad_(True), architecture)
    assert torch.equal(loss, exact_loss)
    assert found.keys() == exact.keys()
    revert(model if not first else merged)
    assert not any(isinstance(module, ConvertedModule) for module in merged.modules())
    again = step(merged, architecture)[1]
    assert all(torch.equal(again[name], value) for name, value in exact.items())


HEADS = {
    "modules_to_save": ({"modules_to_save": ["lm_head"], "target_modules": ["q_proj"]}, "modules_to_save.default"),
    "lora": ({"target_modules": ["q_proj", "lm_head"]}, "lora_A.default"),
}


@pytest.mark.parametrize("how", HEADS)
def test_a_head_that_peft_wraps_keeps_its_logits_and_the_report_says_so(how):
    settings, inside = HEADS[how]
    models = []
    for _ in range(2):
        base = tiny_model("llama", dropout=0.0)
        base.config.use_cache = False
        with torch.random.fork_rng():
            torch.manual_seed(1)
            models.append(get_peft_model(base, LoraConfig(r=4, task_type="CAUSAL_LM", **settings)).train())
    exact, model = models
    report = convert(model, **WHOLE_BODY)
    (reason,) = {text for name, text in report.skipped.items() if name == "base_model.model.lm_head"}
    assert reason.startswith("its logits stay as they are: it is a "), reason
    assert not any(entry.operation == "logits" for entry in report.packed.values())
    found = []
    for network in models:
        output = network(input_ids=token_ids(), labels=token_ids())
        output.loss.backward()
        assert type(output.logits) is torch.Tensor
        found.append((output.loss, gradients(network)))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1].keys() == found[1][1].keys()
    assert any(inside in name and "lm_head" in name for name in found[0][1])
    assert exact is not model
