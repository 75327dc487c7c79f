"""Models on the meta device count as QLoRA trains them, without a package that quantizes."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from quantized_helpers import LAYERS, batch, in_bitsandbytes, llama, with_adapters
from torch import nn
from transformers import RobertaConfig, RobertaForSequenceClassification

from rmm_linear import Shards, convert, fit
from rmm_linear.fitting.quantised import QuantizedLinear, as_quantised
from rmm_linear.fitting.static_memory import static_memory
from rmm_linear.memory.peak import LiveTensors, Peak
from rmm_linear.planning import BlockPlan, PlannedBlock, simulate
from rmm_linear.planning.step.step import loss_of, prepared

WIDTH = 2048


def adapted():
    """A model under LoRA with stand-ins, and the same without them."""
    plain, quantized = with_adapters(llama("meta")), with_adapters(llama("meta"))
    assert len(as_quantised(quantized)) == LAYERS
    return plain, quantized


def sizes(model):
    return sum(p.numel() for name, p in model.named_parameters() if "proj" in name and "lora" not in name)


def saved(model):
    """Bytes that are alive after the forward pass."""
    found = []

    def run(model, example):
        loss = loss_of(model(**example))
        found.append(live.now)
        loss.backward()

    with prepared(model, batch("meta"), run) as step, LiveTensors(Peak()) as live:
        step()
    return found[0]


@pytest.mark.parametrize(("double", "expected"), [(True, 0.5 + 1 / 64 + 4 / (64 * 256)), (False, 0.5 + 4 / 64)])
def test_weights_have_the_bytes_of_qlora(double, expected):
    model, size = nn.Sequential(nn.Linear(1024, 4096, bias=False, device="meta"), nn.ReLU()), 1024 * 4096
    as_quantised(model.requires_grad_(False), double=double)
    found = static_memory(model)
    assert (found.parameters + found.buffers) / size == expected
    assert found.parameters == size / 2


def test_the_head_embeddings_norms_and_adapters_stay():
    plain, quantized = adapted()
    assert sizes(quantized) == sizes(plain) / 2
    assert type(quantized.base_model.model.lm_head) is nn.Linear
    names = {name for name, module in quantized.named_modules() if isinstance(module, QuantizedLinear)}
    assert all(name.endswith("_proj.base_layer") for name in names)
    kept = [p.shape for name, p in quantized.named_parameters() if "base_layer" not in name]
    assert kept == [p.shape for name, p in plain.named_parameters() if "base_layer" not in name]
    assert static_memory(quantized).gradients == static_memory(plain).gradients


def test_classifiers_that_train_in_another_module_stay():
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    with torch.device("meta"):
        model = RobertaForSequenceClassification(RobertaConfig(vocab_size=50, **shape))
        model = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", target_modules="all-linear"))
    assert all("roberta.encoder.layer.0" in name for name in as_quantised(model))
    assert sum(isinstance(module, QuantizedLinear) for module in model.modules()) == 6


def test_models_without_a_head_have_all_layers_replaced():
    stack = nn.Module()
    stack.embedding, stack.encoder = nn.Embedding(4, 4), llama("meta").model.requires_grad_(False)
    assert len(as_quantised(stack)) == LAYERS


def test_a_layer_that_has_two_names_is_replaced_under_both():
    layer = nn.Linear(64, 64, device="meta").requires_grad_(False)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    as_quantised(model)
    assert model[0] is model[2]
    assert type(model[0]) is QuantizedLinear


def test_tied_and_trained_layers_stay():
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(64, 64), nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    model[3].weight = model[0].weight
    model[:2].requires_grad_(False)
    model[3].bias.requires_grad_(False)
    assert as_quantised(model) == ["1"]


def test_errors_name_the_remedy():
    with pytest.raises(ValueError, match=r"got 1 linear layers, of which none is\. Call get_peft_model first"):
        as_quantised(nn.Sequential(nn.Linear(4, 4, device="meta")))
    with pytest.raises(ValueError, match="needs a model on the meta device, got 0 on cpu"):
        as_quantised(nn.Sequential(nn.Linear(4, 4)).requires_grad_(False))
    model = nn.Sequential(nn.Linear(4, 4, device="meta"), nn.ReLU()).requires_grad_(False)
    as_quantised(model)
    with pytest.raises(RuntimeError, match="has shapes and no values, got real tensors"):
        model(torch.ones(1, 4))


@pytest.mark.parametrize("double", [False, True])
def test_the_dequantized_weight_is_there_in_both_passes(double):
    """In the dtype of products; double quantization has absolute maxima in float32 beside it for a moment."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, WIDTH, bias=False), nn.Identity())
    model[1].requires_grad_(False)
    as_quantised(model, double=double, compute_dtype=torch.bfloat16)
    found = simulate(model, torch.ones(1, 64))
    expected = 64 * WIDTH * 2 + double * WIDTH * 4
    for moment in ("forward of 1", "backward of 1"):
        highest = max(now for now, when in found.timeline if when == moment)
        assert expected <= highest < expected + 6 * WIDTH * 4, moment


def test_gradients_have_the_shapes_and_dtypes_of_those_of_a_linear_layer():
    layer = nn.Linear(8, 6, device="meta", dtype=torch.bfloat16)
    layer.weight.requires_grad_(False)
    model = nn.Sequential(layer, nn.Identity())
    as_quantised(model)
    x = torch.ones(2, 3, 8, device="meta", requires_grad=True)
    output = model(x)
    output.sum().backward()
    assert (output.shape, output.dtype) == ((2, 3, 6), torch.float32)
    assert (x.grad.shape, x.grad.dtype) == (x.shape, x.dtype)
    assert (model[0].bias.grad.shape, model[0].bias.grad.dtype) == ((6,), torch.bfloat16)
    assert model[0].weight.grad is None


@pytest.mark.parametrize("how", ["exact", "converted", "recomputed"])
def test_a_step_saves_what_one_with_whole_weights_saves(how):
    """Nothing is saved of a frozen layer, whatever is done with the others."""
    models = adapted()
    reports = [convert(model, min_rows=16) for model in models if how == "converted"]
    plans = [BlockPlan([PlannedBlock("base_model.model.model.layers.0", "recompute")]) for _ in models]
    for model, plan in zip(models, plans, strict=True):
        if how == "recomputed":
            plan.apply(model)
    found = [saved(model) for model in models]
    assert found[0] == found[1]
    if reports:
        assert set(reports[0].converted) - set(reports[1].converted) == set(reports[0].frozen)
        assert reports[0].packed.keys() == reports[1].packed.keys()  # gated MLPs among them


def test_a_model_fits_a_budget():
    plain, quantized = adapted()
    example = {name: value.repeat(4, 1) for name, value in batch("meta").items()}
    report = fit(quantized, example, "least", optimizer=torch.optim.AdamW, allow=("keep", "sketch"))
    assert report.peak < 0.9 * report.exact_peak
    assert any(block.choice.startswith("convert") for block in report.plan.blocks)
    weights = sizes(plain)
    fewer = static_memory(plain).before_step - report.static.before_step + report.static.optimizer
    assert fewer == 2 * weights - weights // 2 - weights // 64 - sum(
        -(-size // (64 * 256)) * 4
        for name, p in plain.named_parameters()
        if "base_layer" in name and (size := p.numel())
    )


def test_shards_divide_packed_weights_and_not_their_scales():
    _, quantized = adapted()
    one, four = static_memory(quantized), static_memory(quantized, shards=Shards(4))
    assert four.buffers == one.buffers
    assert abs(four.parameters - one.parameters / 4) < 0.01 * one.parameters


def test_stand_ins_take_the_bytes_of_bitsandbytes():
    """Besides its table of 16 codes, that of 256, and an offset for every layer."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: the test extra has it on Linux")
    theirs = with_adapters(in_bitsandbytes(llama("meta"), 4, device="meta"))
    found, expected = static_memory(adapted()[1]), static_memory(theirs)
    assert found.parameters == expected.parameters
    assert found.buffers == expected.buffers - LAYERS * (16 + 256 + 1) * 4
    assert simulate(adapted()[1], batch("meta")).bytes == simulate(theirs, batch("meta")).bytes


@pytest.mark.parametrize("weights", ["whole", "stand-ins", "bitsandbytes", "trained"])
def test_narrow_layers_beside_frozen_ones_stay_exact(weights):
    """A code of ``lora_B``'s input would free few bytes; where all layers train, no layer is an adapter."""
    if weights == "bitsandbytes":
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: the test extra has it on Linux")
        model = with_adapters(in_bitsandbytes(llama("meta"), 4, device="meta"))
    else:
        model = adapted()[weights == "stand-ins"]
        if weights == "trained":
            model.requires_grad_()
    report = convert(model, min_rows=16)
    found = {name for name, reason in report.skipped.items() if "its input has 4 features, others up to 512" in reason}
    adapters = {name for name, _ in model.named_modules() if name.endswith("lora_B.default")}
    assert len(adapters) == LAYERS
    assert found == (set() if weights == "trained" else adapters)
