"""Switches in transformers and PEFT: a subscript of a Trainer class, from_pretrained, and a variant of LoRA."""

import importlib
import json
import pickle
import sys
from pathlib import Path

import pytest
import torch
from cases import CONFIG
from helpers import SEED_BYTES, batch_of, converted_names, step, tiny_model
from statistical import assert_unbiased
from torch import nn
from trainer_helpers import Sentences
from transformers import AutoModelForCausalLM, Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments
from transformers.quantizers import auto

import rmm_linear
from rmm_linear import RMMConfig, RMMTrainer, convert
from rmm_linear.integrations.transformers import RMMCallback
from rmm_linear.packing import encoded_bytes

ROOT = Path(__file__).resolve().parents[2]


def arguments(folder, kind=TrainingArguments):
    settings = {"max_steps": 2, "per_device_train_batch_size": 4, "report_to": "none", "use_cpu": True}
    return kind(str(folder), save_strategy="no", disable_tqdm=True, **settings)


# RMMTrainer


def test_a_trainer_with_one_more_argument_converts_and_trains_as_the_callback_does(tmp_path):
    weights = []
    for kind in ("trainer", "callback"):
        torch.manual_seed(0)
        model, common = tiny_model("roberta"), {"train_dataset": Sentences()}
        if kind == "trainer":
            trainer = RMMTrainer[Seq2SeqTrainer](
                model, arguments(tmp_path, Seq2SeqTrainingArguments), rmm=CONFIG, **common
            )
        else:
            trainer = Trainer(model, arguments(tmp_path), callbacks=[RMMCallback(convert=CONFIG)], **common)
        trainer.train()
        weights.append(list(model.parameters()))
        assert converted_names(model)
    assert all(map(torch.equal, *weights))


def test_a_subscript_makes_one_class_with_a_name_that_can_be_pickled():
    made = RMMTrainer[Seq2SeqTrainer]
    assert made is RMMTrainer[Seq2SeqTrainer]
    assert issubclass(made, RMMTrainer)
    assert issubclass(made, Seq2SeqTrainer)
    assert repr(made) == "RMMTrainer[Seq2SeqTrainer]"
    assert RMMTrainer[Trainer] is RMMTrainer
    assert RMMTrainer[made] is made
    assert all(pickle.loads(pickle.dumps(one)) is one for one in (made, RMMTrainer))


@pytest.mark.parametrize(
    ("subscript", "got"),
    [
        (nn.Linear, "the class Linear"),
        ("SFTTrainer", "str 'SFTTrainer'"),
        (None, "NoneType None"),
        ((Trainer, Trainer), "tuple "),
    ],
)
def test_a_wrong_subscript_is_named(subscript, got):
    with pytest.raises(TypeError, match=rf"takes a subclass of transformers.Trainer, got {got}"):
        RMMTrainer[subscript]
    with pytest.raises(TypeError, match=r"has one, got a second"):
        RMMTrainer[Seq2SeqTrainer][Trainer]


@pytest.mark.parametrize(
    ("rmm", "error", "message"),
    [
        (True, TypeError, "rmm must be an RMMConfig, a budget"),
        (None, TypeError, "rmm must be an RMMConfig, a budget"),
        ("careful", TypeError, r"got 'careful'. Use rmm=RMMConfig.preset\('careful'\) to convert"),
        ("8 gigs", ValueError, "memory must be a size"),
        ({"memry": "8GB"}, ValueError, "Did you mean 'memory'"),
    ],
)
def test_what_rmm_cannot_be_is_said_before_the_trainer_is_made(rmm, error, message):
    with pytest.raises(error, match=message):
        RMMTrainer(rmm=rmm)


def test_a_budget_plans_and_a_second_callback_is_refused(tmp_path):
    trainer = RMMTrainer(tiny_model("roberta"), arguments(tmp_path), rmm={"memory": "1GB", "length": 32})
    assert trainer.rmm._fitting.settings == {"memory": "1GB", "length": 32}
    with pytest.raises(ValueError, match=r"got one among the callbacks too"):
        RMMTrainer(tiny_model("roberta"), arguments(tmp_path), callbacks=[RMMCallback(fit="1GB")])


# quantization_config


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """An exact model, and the same one after it was loaded with settings and saved again."""
    exact, saved = tmp_path_factory.mktemp("exact"), tmp_path_factory.mktemp("saved")
    tiny_model("llama", dropout=0.0).save_pretrained(exact)
    config = CONFIG.replace(overrides={"q_proj": {"bits": 8}})
    AutoModelForCausalLM.from_pretrained(exact, quantization_config=config).save_pretrained(saved)
    return exact, saved


def test_settings_travel_in_config_json_and_convert_again(folders):
    exact, model = (AutoModelForCausalLM.from_pretrained(folder) for folder in folders)
    assert not converted_names(exact)
    convert(exact, CONFIG.replace(overrides={"q_proj": {"bits": 8}}))
    assert converted_names(model) == converted_names(exact)
    assert all(map(torch.equal, exact.state_dict().values(), model.state_dict().values()))
    (first, one), (second, other) = (step(one.train(), "llama", seed=3) for one in (exact, model))
    assert torch.equal(first, second)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_model_is_none_that_transformers_takes_for_quantized(folders, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folders[1])
    rows = [{"input_ids": one, "labels": one} for one in torch.randint(3, 60, (8, 12))]
    before = model.lm_head.weight.detach().clone()
    Trainer(model, arguments(tmp_path), train_dataset=rows).train()
    assert not torch.equal(model.lm_head.weight, before)
    assert model.half().dtype is torch.float16  # refused for quantized models


def test_a_quality_in_a_mapping_is_that_of_a_preset(folders):
    given = {"quant_method": "rmm", "quality": "careful", "min_rows": 8}
    model = AutoModelForCausalLM.from_pretrained(folders[0], quantization_config=given)
    fields = {name: value for name, value in model.config.quantization_config.items() if name != "quant_method"}
    assert RMMConfig.from_dict(fields) == RMMConfig.preset("careful", min_rows=8)


def test_adapters_on_a_loaded_model_are_converted_with_it_again(folders):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folders[1]), LoraConfig(target_modules=["q_proj"]))
    assert not any("lora_A" in name for name in converted_names(model))
    rmm_linear.revert(model)
    assert sum("lora_A" in name for name in convert(model, CONFIG).converted) == 2


def test_without_the_module_the_model_stays_exact_and_transformers_says_so(folders, monkeypatch, caplog):
    said = []
    monkeypatch.delitem(auto.AUTO_QUANTIZATION_CONFIG_MAPPING, "rmm")
    monkeypatch.setattr(auto.logger, "warning", said.append)
    assert not converted_names(AutoModelForCausalLM.from_pretrained(folders[1]))
    assert said[0].startswith("Unknown quantization type, got rmm")
    assert "we will skip the quantization" in said[0]


def test_a_config_json_with_an_unknown_key_is_refused(folders, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folders[1])
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    content = json.loads(path.read_text())
    content["quantization_config"]["bitz"] = 4
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"Unknown keys bitz.* Did you mean 'bits'"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


# A variant of LoRA


def adapted(config, **options):
    from peft import get_peft_model

    torch.manual_seed(0)
    model = get_peft_model(tiny_model("llama", dropout=0.0), config(r=4, target_modules=["q_proj"], **options)).train()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(1))
    return model


def sketched(**fields):
    from rmm_linear.integrations.peft import SketchedLoraConfig

    return adapted(SketchedLoraConfig, sketch_config=RMMConfig(min_rows=1, **fields))


def test_the_variant_saves_a_code_and_its_gradients_are_those_of_lora_in_the_mean():
    from peft import LoraConfig

    exact_loss, exact = step(adapted(LoraConfig), "llama")
    model = sketched(bits=4)
    with rmm_linear.memory.track_saved(model) as saved:
        loss, found = step(model, "llama")
    layer = next(size for name, size in saved.by_module.items() if name.endswith("0.self_attn.q_proj"))
    tokens = batch_of("llama")["input_ids"].numel()
    assert layer == encoded_bytes(tokens, 16, 4) + SEED_BYTES
    assert torch.equal(loss, exact_loss)
    last = "base_model.model.model.layers.1.self_attn.q_proj.lora_{}.default.weight"
    assert torch.equal(found[last.format("B")], exact[last.format("B")])
    rough = sketched(ratio=0.25)
    torch.manual_seed(1)
    assert_unbiased(lambda _: step(rough, "llama")[1], exact, draws=40, widest=0.1)


def test_reentrant_checkpointing_draws_what_a_plain_step_draws():
    from rmm_linear.integrations.peft import SketchedLoraConfig

    found = []
    for is_checkpointed in (False, True):
        model = adapted(SketchedLoraConfig, sketch_config=RMMConfig(min_rows=1, bits=4), lora_dropout=0.5)
        if is_checkpointed:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable({"use_reentrant": True})
        found.append((*step(model, "llama", seed=3), torch.get_rng_state()))
    (loss, exact, after), (other_loss, other, other_after) = found
    assert torch.equal(loss, other_loss)
    assert all(torch.equal(exact[name], other[name]) for name in exact)
    assert torch.equal(after, other_after)


def test_adapters_of_the_variant_are_loras(tmp_path):
    from peft import PeftModel

    from rmm_linear.integrations.peft import SketchedLoraConfig

    model = sketched(bits=4)
    model.save_pretrained(tmp_path)
    outputs = model.eval()(**batch_of("llama")).logits
    with pytest.warns(UserWarning, match=r"sketch_config"):
        plain = PeftModel.from_pretrained(tiny_model("llama", dropout=0.0), tmp_path)
    assert torch.equal(plain(**batch_of("llama")).logits, outputs)
    config = SketchedLoraConfig.from_pretrained(tmp_path)
    assert config.sketch_config == RMMConfig(min_rows=1, bits=4)
    again = PeftModel.from_pretrained(tiny_model("llama", dropout=0.0), tmp_path, config=config, is_trainable=True)
    assert type(again.base_model.model.model.layers[0].self_attn.q_proj).__name__ == "SketchedLoraLinear"
    model.merge_adapter()
    assert torch.allclose(model(**batch_of("llama")).logits, outputs, atol=1e-6)
    model.unmerge_adapter()
    assert torch.allclose(model(**batch_of("llama")).logits, outputs, atol=1e-6)


def test_the_prepared_benchmark_is_read():
    from rmm_linear.integrations.peft import SketchedLoraConfig

    folder = ROOT / "benchmarks" / "peft" / "lora" / "llama-3.2-3B-rank32-sketch"
    config = SketchedLoraConfig.from_pretrained(folder)
    assert (config.r, config.lora_alpha, config.sketch_config) == (32, 64, RMMConfig(bits=4))


def test_settings_of_another_type_are_named():
    from peft import get_peft_model

    from rmm_linear.integrations.peft import SketchedLoraConfig

    with pytest.raises(TypeError, match=r"sketch_config must be an RMMConfig or its fields, got 4"):
        SketchedLoraConfig(sketch_config=4)
    with pytest.raises(ValueError, match=r"Did you mean 'bits'"):
        SketchedLoraConfig(sketch_config={"bitz": 4})
    model = nn.Sequential(nn.Linear(4, 4).to(torch.float8_e4m3fn))
    with pytest.raises(ValueError, match=r"sketch_config is for nn.Linear, got Linear, which is quantized"):
        get_peft_model(model, SketchedLoraConfig(target_modules=["0"]))


# Hosts that are not there, or of another version


def test_without_a_usable_transformers_a_config_is_registered_nowhere(monkeypatch):
    name = "rmm_linear.integrations.quantizer"
    monkeypatch.delitem(sys.modules, name, raising=False)
    config = RMMConfig()
    assert not hasattr(config, "quant_methods")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "transformers", None)
        assert config.quant_method == "rmm"
    assert name not in sys.modules
    monkeypatch.setitem(sys.modules, name, None)  # as one that is too old
    assert not hasattr(config, "quant_method")


HOSTS = ["axolotl", "torchao", "torchtitan", "peft", "quantizer", "rmm_trainer", "transformers"]


@pytest.mark.parametrize("switch", HOSTS)
def test_a_switch_says_whether_its_host_is_missing_or_another_version(switch, monkeypatch, tmp_path):
    name = f"rmm_linear.integrations.{switch}"
    host = switch if switch in HOSTS[:4] else "transformers"
    monkeypatch.delitem(sys.modules, name, raising=False)
    for one in [one for one in sys.modules if one.split(".")[0] == host]:
        monkeypatch.delitem(sys.modules, one)
    monkeypatch.setitem(sys.modules, host, None)
    with pytest.raises(ImportError, match=rf"^{name} needs {host}, which is not installed\. Run pip install "):
        importlib.import_module(name)
    monkeypatch.delitem(sys.modules, host)
    (tmp_path / f"{host}.py").write_text("raise ImportError('no name of another version')")
    monkeypatch.syspath_prepend(tmp_path)
    text = rf"^{name} needs {host} .*\d.*, got .*, whose import fails: no name of another version\. Install"
    with pytest.raises(ImportError, match=text):
        importlib.import_module(name)
