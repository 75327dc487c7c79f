"""PEFT: a frozen base saves no inputs, lora_A is sketched, adapters are unbiased, merged weights the exact model's."""

import pytest
import torch
from cases import ROUGH_BODY, WHOLE_BODY
from helpers import SEED_BYTES, batch_of, enable_checkpointing, gradients, step, tiny_model, token_ids
from peft import LoraConfig, get_peft_model
from peft_helpers import HIDDEN, RANK, ROWS, TARGETS, WTA, lora
from statistical import assert_unbiased
from torch import nn

from rmm_linear import RMMLinear, convert, revert
from rmm_linear.layers.converted import ConvertedModule
from rmm_linear.layers.linear import SketchedLayer
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
        report = convert(model, **WHOLE_BODY)
        inside = [name for name in report.converted if name.endswith("lora_A.default")]
        assert len(inside) == sum("lora_A" in name for name, _ in model.named_parameters())
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
    assert_unbiased(draw, exact, draws=20, widest=0.1)
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


def test_the_frozen_base_keeps_nothing_and_lora_a_keeps_rows():
    """query and value have A matrices that read one tensor, and so keep one sketch; B reads 4 features."""
    model = lora("roberta")
    convert(model, **ROUGH_BODY)
    with track_saved(model) as kept:
        model(input_ids=token_ids()).logits.sum().backward()
    stem = "base_model.model.roberta.encoder.layer.0.attention.self"
    linears = {name: size for name, size in kept.by_module.items() if name.startswith(f"{stem}.")}
    assert linears == {
        f"{stem}.query.lora_A.default": ROWS * HIDDEN * 4 + SEED_BYTES,
        f"{stem}.query.lora_B.default": ROWS * RANK * 4 + SEED_BYTES,
        f"{stem}.value.lora_B.default": ROWS * RANK * 4 + SEED_BYTES,
    }
    frozen = {name for name, module in model.named_modules() if name.endswith("base_layer") or name.endswith(".key")}
    assert frozen
    assert not frozen & kept.by_module.keys()


@pytest.mark.parametrize("name", ["position_token", "sample_cache"])
def test_estimators_of_adapters_learn_once_b_is_not_zero(name):
    """As PEFT makes it, B is zero at first: then A has no gradient to learn from, and B has. A frozen base has none."""
    model = lora("roberta")
    for part, parameter in model.named_parameters():
        if "lora_B" in part:
            nn.init.zeros_(parameter)
    convert(model, norm_estimator=name, **WTA)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    ids, labels, numbers = token_ids(), torch.tensor([0, 1, 1, 0]), torch.tensor([6, 2, 0, 3])
    for _ in range(3):
        optimizer.zero_grad()
        model(input_ids=ids, labels=labels, sample_index=numbers).loss.backward()
        optimizer.step()
    stem = "base_model.model.roberta.encoder.layer.0.attention.self"
    layers = {part: m for part, m in model.named_modules() if isinstance(m, RMMLinear) and part.startswith(stem)}
    assert len([part for part in layers if "lora_" in part]) == 4
    for part, layer in layers.items():
        if "lora_" not in part:
            assert layer.rmm_estimator.bytes == 0, part
            continue
        assert layer.weight.grad.any()
        tensors = layer.rmm_estimator.tensors()
        assert float(tensors["unit"][1]) == pytest.approx(1.9 if "lora_A" in part else 2.71), part
        if name == "sample_cache":
            assert tensors["cache"].isnan().all(1).tolist() == [n not in (6, 2, 0, 3) for n in range(7)]


@pytest.mark.parametrize(
    ("setting", "reentrant"),
    [
        pytest.param(ROUGH_BODY, None, id="plain"),
        pytest.param(ROUGH_BODY, True, id="reentrant"),
        pytest.param(ROUGH_BODY, False, id="non-reentrant"),
        pytest.param({**WTA, "norm_estimator": "position_token"}, None, id="wta"),
        pytest.param(
            {**WTA, "norm_estimator": "position_token"}, False, id="wta, non-reentrant", marks=pytest.mark.thorough
        ),
    ],
)
def test_lora_a_has_an_unbiased_gradient(setting, reentrant):
    """Noise of another S would be many errors away."""
    exact, model = step(lora("roberta", layers=1))[1], lora("roberta", layers=1)
    convert(model, **setting)
    if reentrant is not None:
        enable_checkpointing(model.base_model.model, reentrant)
    name = "base_model.model.roberta.encoder.layer.0.output.dense.lora_A.default.weight"
    torch.manual_seed(1)
    assert_unbiased(lambda _: step(model)[1][name], exact[name], draws=50, widest=0.2)


def test_converted_before_the_base_is_sketched_until_it_is_frozen():
    base = tiny_model("roberta", dropout=0.0)
    convert(base, **ROUGH_BODY)
    model = lora("roberta", base)
    assert isinstance(
        model.get_submodule("base_model.model.roberta.encoder.layer.0.attention.self.query.base_layer"), RMMLinear
    )
    exact_loss, exact = step(lora("roberta"))
    loss, found = step(model)
    assert torch.equal(loss, exact_loss)
    for name in exact:  # adapters came after the conversion, and so are exact
        if "lora_" in name:
            assert torch.allclose(found[name], exact[name], rtol=1e-4, atol=1e-8), name
    with track_saved(model) as kept:
        model(input_ids=token_ids()).logits.sum().backward()
    assert not [name for name in kept.by_module if name.endswith("base_layer")]
    # Converting again, as the error of a second conversion says, sketches them.
    with pytest.raises(ValueError, match=r"Call rmm_linear.revert\(model\) first"):
        convert(model, **ROUGH_BODY)
    revert(model)
    report = convert(model, **ROUGH_BODY)
    assert any(name.endswith("lora_A.default") for name in report.converted)


@converted_first
@architectures
def test_merged_weights_are_those_of_the_exact_model_and_train_on(architecture, first):
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
    sketched = [name for name, module in merged.named_modules() if isinstance(module, SketchedLayer)]
    assert any(name.rpartition(".")[2] in TARGETS[architecture] for name in sketched)  # adapters were merged into some
    assert any(not torch.allclose(found[f"{n}.weight"], exact[f"{n}.weight"], rtol=1e-2, atol=0) for n in sketched)
    revert(merged if first else model)
    assert not any(isinstance(module, ConvertedModule) for module in merged.modules())
    again = step(merged, architecture)[1]
    assert all(torch.equal(again[name], value) for name, value in exact.items())


@pytest.mark.parametrize("converted_first", [True, False], ids=["from converted", "to converted"])
def test_adapters_are_saved_and_loaded_in_both_directions(tmp_path, converted_first):
    from peft import PeftModel  # peft_helpers has imported it without its warnings

    source = lora("llama")
    if converted_first:
        convert(source, **ROUGH_BODY)
    source.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} >= {"adapter_model.safetensors", "adapter_config.json"}
    loaded = PeftModel.from_pretrained(tiny_model("llama", dropout=0.0), tmp_path, is_trainable=True).train()
    if not converted_first:
        convert(loaded, **ROUGH_BODY)
    first, second = source.state_dict(), loaded.state_dict()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert torch.equal(step(source, "llama")[0], step(loaded, "llama")[0])


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
