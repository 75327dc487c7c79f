"""torchao, torchtitan, axolotl and Liger, which `make test-hosts` installs next to the other packages."""

import functools
import json
import logging

import pytest
import torch
from helpers import converted_names, step, tiny_model
from torch import nn

from rmm_linear import RMMConfig, convert, revert
from rmm_linear.memory import track_saved

pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore")]


# torchao


@pytest.fixture
def quantize_():
    pytest.importorskip("torchao")
    from torchao.quantization import quantize_

    import rmm_linear.integrations.torchao

    assert rmm_linear.integrations.torchao
    return quantize_


@pytest.mark.parametrize(
    ("filter_fn", "count"),
    [
        (None, 15),  # linear layers, the head too
        (lambda module, name: isinstance(module, nn.Linear) and "mlp" in name, 6),
        (lambda module, name: name.endswith("layers.0"), 11),  # all operations inside of it
        (lambda module, name: True, 24),
    ],
    ids=["default", "linear layers", "a block", "the model"],
)
def test_quantize_converts_what_its_filter_accepts(quantize_, filter_fn, count):
    model, exact = tiny_model("llama", dropout=0.0).train(), tiny_model("llama", dropout=0.0).train()
    quantize_(model, RMMConfig(min_rows=4), **({} if filter_fn is None else {"filter_fn": filter_fn}))
    assert len(converted_names(model)) == count
    expected, gradients = step(exact, "llama")
    loss, found = step(model, "llama")
    assert torch.equal(loss, expected)
    assert any(not torch.equal(found[name], gradients[name]) for name in found)
    assert all(map(torch.equal, model.state_dict().values(), exact.state_dict().values()))
    revert(model)
    assert not converted_names(model)


def test_quantize_says_what_it_cannot_do(quantize_):
    from torchao.quantization import Int8WeightOnlyConfig

    with pytest.raises(ValueError, match=r"by filter_fn, got an RMMConfig with exclude_modules=\('q_proj',\)"):
        quantize_(tiny_model("llama"), RMMConfig(exclude_modules=["q_proj"]))
    model = tiny_model("llama")
    quantize_(model, Int8WeightOnlyConfig())
    with pytest.raises(ValueError, match=r"is quantized: convert the model before quantization"):
        quantize_(model, RMMConfig())


# torchtitan


@pytest.fixture
def titan():
    """The debug model of torchtitan, two layers, on the meta device as its Trainer makes it."""
    pytest.importorskip("torchtitan")
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry

    config = model_registry("debugmodel").model
    config.layers = config.layers[:2]
    for layer in config.layers:  # its FlexAttention is compiled for minutes here
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    with torch.device("meta"):
        return config.build()


def titan_step(model):
    ids = torch.randint(0, 2048, (2, 128), generator=torch.Generator().manual_seed(0))
    with track_saved(model) as saved:
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    loss.backward()
    return loss, saved.total


def test_the_policy_converts_before_there_are_weights(titan):
    from rmm_linear.integrations.torchtitan import CompressedActivations

    policy = CompressedActivations.Config(rmm={"min_rows": 16}).build(dump_folder="")
    policy.apply(titan)
    assert len(policy.report.converted) == 10
    assert {"attention", "activation", "norm"} == {one.operation for one in policy.report.packed.values()}
    assert "lm_head" not in converted_names(titan)
    titan.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        titan.init_weights(buffer_device=None)
    loss, saved = titan_step(titan.train())
    assert all(one.grad is not None for one in titan.parameters())
    revert(titan)
    expected, exact = titan_step(titan)
    assert torch.equal(loss, expected)
    head = 2 * 128 * (2048 + 256) * 4  # logits' softmax and the output layer's input, which stay
    assert saved - head < 0.15 * (exact - head)


def test_torchtitan_takes_the_policy_from_its_configuration(tmp_path, monkeypatch):
    pytest.importorskip("torchtitan")
    from torchtitan.config.manager import ConfigManager

    from rmm_linear.integrations.torchtitan import CompressedActivations

    (tmp_path / "own_titan.py").write_text(
        "from torchtitan.models.llama3.config_registry import llama3_debugmodel\n"
        "from rmm_linear.integrations.torchtitan import CompressedActivations\n\n"
        "def small():\n    config = llama3_debugmodel()\n"
        "    config.activation_checkpoint = CompressedActivations.Config(quality='careful')\n    return config\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = ConfigManager().parse_args(["--module", "own_titan", "--config", "small", "--training.steps", "3"])
    assert config.activation_checkpoint == CompressedActivations.Config(quality="careful")
    with pytest.raises(TypeError, match=r"Did you mean 'bits'"):
        CompressedActivations.Config(rmm={"bitz": 4})


# axolotl


@pytest.fixture(scope="module")
def axolotl(tmp_path_factory):
    """A function that reads a YAML file as axolotl's commands do, and one that trains by it."""
    pytest.importorskip("axolotl.train")
    import yaml
    from axolotl.cli.config import load_cfg
    from axolotl.common.datasets import TrainDatasetMeta
    from axolotl.train import train
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("axolotl")
    words = {word: place for place, word in enumerate(["<pad>", "<s>", "</s>", "<unk>"])}
    tokens = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokens, **special).save_pretrained(folder / "base")
    tiny_model("llama").save_pretrained(folder / "base")

    def read(**given):
        settings = {
            "base_model": str(folder / "base"),
            "plugins": ["rmm_linear.integrations.axolotl.RMMPlugin"],
            "datasets": [{"path": str(folder), "type": "completion"}],
            "output_dir": str(folder / "out"),
            "sequence_len": 32,
            "micro_batch_size": 4,
            "gradient_accumulation_steps": 1,
            "max_steps": 2,
            "learning_rate": 0.001,
            "optimizer": "adamw_torch",
            "save_strategy": "no",
            "bf16": False,
            "attn_implementation": "sdpa",
            "adapter": "lora",
            "lora_r": 2,
            "lora_alpha": 4,
            "lora_target_modules": ["q_proj", "v_proj"],
            **given,
        }
        path = folder / "settings.yml"
        path.write_text(yaml.dump(settings))
        return load_cfg(str(path))

    def run(config):
        ids = [[3 + (7 * row + place) % 50 for place in range(32)] for row in range(16)]
        rows = [{"input_ids": one, "attention_mask": [1] * 32, "labels": one} for one in ids]
        return train(config, TrainDatasetMeta(train_dataset=Dataset.from_list(rows), total_num_steps=2))[2]

    return read, run


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_a_section_of_the_yaml_trains_a_converted_model(axolotl, checkpointing):
    from rmm_linear.integrations.transformers import RMMCallback

    read, run = axolotl
    config = read(rmm={"bits": 4, "min_rows": 4}, gradient_checkpointing=checkpointing)
    assert not config.lora_mlp_kernel  # which axolotl switches on by itself
    trainer = run(config)
    (callback,) = [one for one in trainer.callback_handler.callbacks if isinstance(one, RMMCallback)]
    assert sum("lora_A" in name for name in callback.report.converted) == 4
    assert callback.report.converted["base_model.model.model.layers.0.self_attn.q_proj.lora_A.default"].config.bits == 4
    assert trainer.state.global_step == 2


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"bitz": 4}, "Did you mean 'bits'"),
        ({"quality": "carefull"}, "Did you mean 'careful'"),
        ({"fit": "8GB", "bits": 4}, "rmm takes fit alone"),
        ({"fit": {"memry": "8GB"}}, "Did you mean 'memory'"),
        ({"bits": 5}, "bits must be 8, 4"),
        ({"bits": 4, "checkpointing": "kept"}, "Did you mean 'keep'"),
        ([1], "should be a valid dictionary"),
    ],
)
def test_a_wrong_section_is_an_error_of_axolotls(axolotl, section, message):
    from pydantic import ValidationError

    with pytest.raises(ValidationError, match=message):
        axolotl[0](rmm=section)


def test_the_section_may_be_left_out_or_be_a_budget(axolotl, caplog):
    from rmm_linear.integrations.axolotl import RMMPlugin

    read = axolotl[0]
    add = functools.partial(RMMPlugin().add_callbacks_post_trainer, trainer=None)
    assert add(read())[0].convert == RMMConfig()
    assert add(read(rmm={"fit": {"memory": "8GB", "length": 64}}))[0]._fitting.settings["length"] == 64
    for section in ({"fit": "8GB"}, {"bits": 4}):
        assert add(read(rmm={**section, "checkpointing": "keep"}))[0].checkpointing == "keep"
    assert add(read(rmm={"bits": None, "quality": "careful"}))[0].convert.norm_bits == 4
    with caplog.at_level(logging.WARNING):
        read(lora_o_kernel=True)
    assert any("lora_o_kernel is on: what axolotl's kernels save stays" in one for one in caplog.messages)
    assert json.dumps(read(rmm={"bits": 4}).rmm) == '{"bits": 4}'


# Liger, whose kernels run on accelerators alone: what is converted next to its layers


def test_a_model_with_ligers_layers_is_converted_and_the_report_says_what_stays():
    pytest.importorskip("liger_kernel")
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    model, plain = tiny_model("llama"), convert(tiny_model("llama"), dry_run=True)
    apply_liger_kernel_to_llama(model=model)
    report = convert(model)
    assert report.converted.keys() == plain.converted.keys()
    assert {one.operation for one in report.packed.values()} == {"attention", "activation"}
    products = [f"model.layers.{layer}.mlp" for layer in (0, 1)]
    assert report.skipped.keys() == {"lm_head", *products}
    assert report.skipped["lm_head"] == "Liger's fused loss is on, which computes no logits"
    assert all(report.skipped[name].startswith("its forward method was replaced on the object") for name in products)
    revert(model)
    assert not converted_names(model)
