"""QLoRA, with bitsandbytes itself: quantized layers are left alone, their adapters are sketched and train."""

import warnings

import pytest
import torch
from cases import ROUGH_BODY
from helpers import batch_of, loss_of, step, tiny_model
from peft_helpers import lora
from statistical import assert_unbiased

from rmm_linear import RMMLinear, convert
from rmm_linear.memory import track_saved

bitsandbytes = pytest.importorskip(
    "bitsandbytes", reason="bitsandbytes is not installed: the test extra asks for it on Linux"
)
LORA_A = "base_model.model.model.layers.1.mlp.down_proj.lora_A.default"
BITS = {4: {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32}, 8: {"load_in_8bit": True}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    tiny_model("llama", dropout=0.0).save_pretrained(folder)
    return folder


def quantized(folder, bits, checkpointing=False):
    """As QLoRA's users make it: loaded with fewer bits, prepared, and given adapters."""
    from peft import prepare_model_for_kbit_training
    from transformers import BitsAndBytesConfig, LlamaForCausalLM

    base = LlamaForCausalLM.from_pretrained(folder, quantization_config=BitsAndBytesConfig(**BITS[bits]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT calls it by transformers' older name
        base = prepare_model_for_kbit_training(base, checkpointing, {"use_reentrant": False} if checkpointing else None)
    return lora("llama", base)


@pytest.mark.parametrize("bits", BITS)
def test_quantized_layers_are_skipped_with_the_reason_and_their_adapters_sketched(folder, bits):
    model = quantized(folder, bits)
    report = convert(model, **ROUGH_BODY)
    kind = {4: bitsandbytes.nn.Linear4bit, 8: bitsandbytes.nn.Linear8bitLt}[bits]
    layers = [name for name, module in model.named_modules() if isinstance(module, kind) and "lora" not in name]
    reason = f"{kind.__name__} is quantized: convert the model before quantization, or after get_peft_model has put "
    assert {name for name, why in report.skipped.items() if why.startswith(reason)} == set(layers)
    assert len(layers) == 2 * 7
    assert report.skipped.keys() - layers == {"base_model.model.lm_head"}
    assert all("lora_" in name for name in report.converted)
    assert len(report.converted) == 2 * 3 * 2
    assert not report.frozen
    assert isinstance(model.get_submodule(LORA_A), RMMLinear)


@pytest.mark.parametrize("bits", BITS)
def test_what_adapters_keep_is_their_sketches(folder, bits):
    """20 rows for 80 tokens of 32 features, in float32, and a seed."""
    model = quantized(folder, bits)
    convert(model, **ROUGH_BODY)
    with track_saved(model) as kept:
        loss_of(model, "llama", {"input_ids": batch_of("llama")["input_ids"]}).backward()
    assert kept.by_module[LORA_A] == 20 * 32 * 4 + 8


@pytest.mark.parametrize(("bits", "checkpointing"), [(4, False), (4, True), (8, False)])
def test_adapters_train_and_the_gradient_of_lora_a_is_unbiased(folder, bits, checkpointing):
    """Only adapters have gradients."""
    exact_loss, exact = step(quantized(folder, bits), "llama")
    model = quantized(folder, bits, checkpointing)
    convert(model, **ROUGH_BODY)
    torch.manual_seed(1)
    found = [step(model, "llama") for _ in range(40)]
    assert torch.equal(found[0][0], exact_loss)
    assert found[0][1].keys() == exact.keys()
    assert all("lora_" in name for name in exact)
    name = f"{LORA_A}.weight"
    assert_unbiased(lambda draw: found[draw][1][name], exact[name], draws=40, widest=0.2)
    before = model.get_submodule(LORA_A).weight.detach().clone()
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1).step()
    assert not torch.equal(model.get_submodule(LORA_A).weight, before)
