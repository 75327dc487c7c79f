"""The doctor's page: what it says of kinds of models, that its figures are simulated ones, and that its code runs."""

import json
import random
import re
from types import SimpleNamespace

import pytest
import torch
from fit_cases import assert_untouched, network, snapshot
from helpers import converted_names, tiny_model, token_ids
from peft_helpers import lora
from torch import nn
from trainer_helpers import make_trainer
from transformers import Gemma2Config, Gemma2ForCausalLM, LlavaConfig, LlavaForConditionalGeneration

import rmm_linear
from rmm_linear import RMMConfig
from rmm_linear._support.sizes import show_bytes
from rmm_linear.command.main import main
from rmm_linear.memory import explain
from rmm_linear.planning import simulate

IDS = token_ids(4, 32)
BATCH = {"input_ids": IDS, "labels": IDS}


def llama(change=lambda model: None):
    model = tiny_model("llama", layers=1).train()
    model.config.use_cache = False
    change(model)
    return model, BATCH


def gemma2():
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 1, "bos_token_id": 0}
    with torch.random.fork_rng():
        return Gemma2ForCausalLM(Gemma2Config(**sizes, eos_token_id=2)).train(), BATCH


def mlp():
    return nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 8)), torch.randn(200, 32)


KINDS = {
    "roberta": (lambda: network("roberta"), ["all trained", "attention: sdpa"], []),
    "llama and LoRA": (
        lambda: (lora("llama", layers=1), BATCH), ["448 trained (8.78%), the others frozen, 3 layers with LoRA"], [],
    ),
    "mixtral": (
        lambda: (tiny_model("mixtral", layers=1).train(), BATCH), [], ["experts: 1 modules of experts save codes"],
    ),
    "checkpointed": (
        lambda: llama(lambda model: model.gradient_checkpointing_enable()),
        ["checkpointing: on"],
        ["convert(model), without activation checkpointing,", "it is on: blocks save their input alone and run twice",
         'checkpointed="packed" takes'],
    ),
    "eager llama": (
        lambda: llama(lambda model: model.set_attn_implementation("eager")),
        ["attention: eager"], ["With sdpa, a converted step takes"],
    ),
    "eager gemma-2": (gemma2, ["attention: eager"], ["The model has no sdpa, so convert runs it again"]),
    "plain": (mlp, ["all trained; checkpointing: off."], []),
}  # fmt: skip


def assert_codes_run(found, **names):
    """Each by itself, after the imports of the page's own code."""
    imports = found.code.partition("\n\n")[0]
    model = names["model"] if "model" in names else names["trainer"].model
    for one in found.findings:
        exec(f"{imports}\n{one.code}", dict(names))
        if converted_names(model):
            rmm_linear.revert(model)


def without_breaks(text):
    return " ".join(text.split())


SLOW = ("eager llama",)


@pytest.mark.parametrize(
    "kind", [pytest.param(one, marks=pytest.mark.thorough) if one in SLOW else one for one in KINDS]
)
def test_a_page_says_what_matters_of_a_model_and_its_code_runs(kind):
    make, weights, texts = KINDS[kind]
    model, batch = make()
    before = snapshot(model)
    torch.manual_seed(7)
    seed = torch.get_rng_state()
    found = rmm_linear.doctor(model, batch, optimizer=torch.optim.AdamW)
    assert torch.equal(torch.get_rng_state(), seed)
    torch.set_rng_state(before[0]["torch"])
    assert_untouched(model, before)

    parts, now = found.now.parts(), found.now
    assert now.peak == sum(parts.values())
    assert parts["parameters"] + parts["optimizer"] <= now.static.before_step
    assert now.gradients + now.activations == simulate(model, batch).bytes
    gains = [one.gain for one in found.findings]
    assert gains == sorted(gains, reverse=True)
    assert gains[0] > 0
    best = found.options["convert(model)"]
    assert ("conversion", now.peak - best.peak) in [(one.topic, one.gain) for one in found.findings]
    if kind == "roberta":
        explained = explain(model, batch)
        assert found.saved == (explained.before, explained.after)

    page = str(found)
    assert max(map(len, found.table().splitlines())) <= 100
    for text in (*weights, *texts):
        assert text in without_breaks(page)
    assert json.loads(json.dumps(found.to_dict()))["peak"] == now.peak
    assert list(found.to_dataframe()["topic"]) == [one.topic for one in found.findings]
    assert "<table>" in found._repr_html_()
    assert_codes_run(found, model=model, batch=batch)
    trained, _, plan = found.code.partition("# or, within a budget:")
    names = {"model": model, "batch": batch}
    exec(trained, names)
    if kind in ("roberta", "checkpointed", "eager llama"):
        step = [simulate(model, batch).bytes for _ in range(2)][1]  # in the first one, conversions are checked
        best = min(found.options.values(), key=lambda one: one.peak)
        assert step <= 1.05 * (best.gradients + best.activations)
    assert "rmm_linear.fit(model, batch, memory=0." in plan


def test_a_composite_models_parts_keep_their_attention():
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**vision, "vocab_size": 64, "model_type": "llama"}
    vision |= {"image_size": 8, "patch_size": 4, "projection_dim": 16, "model_type": "clip_vision_model"}
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=2, image_seq_length=4)
    with torch.random.fork_rng():
        model = LlavaForConditionalGeneration(config).train()
    chosen = {"": "eager", "text_config": "sdpa", "vision_config": "eager"}
    model.set_attn_implementation(chosen)
    found = rmm_linear.doctor(model, BATCH, noise=False)  # no images, of which LLaVA's code reads numbers
    assert [one.topic for one in found.findings if one.topic == "attention"]
    parts = {"": model, "text_config": model.model.language_model, "vision_config": model.model.vision_tower}
    assert {name: part.config._attn_implementation for name, part in parts.items()} == chosen


def test_the_plan_that_is_typed_fits():
    model, batch = mlp()
    found = rmm_linear.doctor(model, batch)
    exec(found.code, {"model": model, "batch": batch})
    assert any("rmm_plan" in vars(module) for module in model.modules())


def test_of_a_model_without_weights_peaks_are_known():
    model, batch = mlp()
    real, there = rmm_linear.doctor(model, batch), rmm_linear.doctor(model.to("meta"), batch.to("meta"))
    assert (there.saved, there.noise) == (None, None)
    assert there.now.peak == real.now.peak
    assert there.options["convert(model)"].peak == pytest.approx(real.options["convert(model)"].peak, rel=0.05)


WIDE = {"few rows": 4, "more rows": 250}


@pytest.mark.parametrize("rows", WIDE.values(), ids=WIDE)
def test_a_peak_in_the_optimizers_step_is_named_with_what_lowers_it(rows):
    def made():
        return nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256))

    weights = sum(p.nbytes for p in made().parameters())
    batch = torch.randn(rows, 256)
    found = rmm_linear.doctor(made().to("meta"), batch.to("meta"), optimizer=torch.optim.AdamW)
    first = found.findings[0]
    assert found.now.peak == pytest.approx(5 * weights, rel=0.01)  # two states and a temporary, of all at once
    fused = max(4 * weights, found.options["convert(model)"].step)
    assert (first.topic, first.gain) == ("optimizer", pytest.approx(found.now.peak - fused, rel=0.01))
    assert "AdamW(fused=True), which makes no temporary results" in first.text
    assert f"leave weights of {show_bytes(weights)}" in first.text
    assert "of forward and backward" in str(found)
    assert "Nothing is won" not in str(found)
    assert ("get_peft_model" in found.code) is (rows == WIDE["few rows"])
    if "get_peft_model" not in found.code:
        exec(found.code, {"model": made(), "batch": batch})


class Own(nn.Module):
    """A product that no operation knows."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8))

    def forward(self, x):
        return x @ self.weight


def test_few_rows_and_nothing_to_convert_are_said():
    few = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    found = rmm_linear.doctor(few, torch.randn(16, 64))
    (rows,) = [one for one in found.findings if one.topic == "rows"]
    assert rows.text.startswith("2 linear layers stay exact, ")
    assert "the layer sees 16 rows and stays exact, as min_rows is 64" in rows.text
    assert_codes_run(found, model=few)
    nothing = rmm_linear.doctor(nn.Sequential(nn.Embedding(8, 8), nn.Flatten()), torch.randint(0, 8, (2, 4)))
    assert nothing.options == {}
    assert nothing.findings[0].topic in ("conversion", "weights")
    assert 'memory="least"' in nothing.code


class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 1))

    def forward(self, x):
        return {"loss": self.layers(x).square().mean()}


def test_noise_above_the_minibatchs_and_noise_that_is_not_measured_are_said(monkeypatch):
    model, batch = Regression(), {"x": torch.randn(4, 32, 32)}
    quiet = rmm_linear.doctor(model, batch)
    assert 0 < quiet.noise < 1
    assert f"compression adds {quiet.noise:.2g} times the minibatch's variance" in without_breaks(str(quiet))
    monkeypatch.setattr("rmm_linear.integrations.doctor._CHEAP", {})
    unknown = rmm_linear.doctor(model, batch)
    assert unknown.noise is None
    assert "rmm_linear.doctor(model, batch, noise=True)" in [one.code for one in unknown.findings]
    monkeypatch.setattr("rmm_linear.variance.whole_model.GradientNoise.whole", lambda self: 1.5)
    noisy = rmm_linear.doctor(model, batch, noise=True)
    (noise,) = [one for one in noisy.findings if one.topic == "noise"]
    assert 'quality="careful" adds half of it, an eighth in linear layers' in noise.text
    assert noise.code == 'rmm_linear.convert(model, quality="careful")'
    assert f"print({noise.code})" in noisy.code
    assert "rmm_linear.convert(model)" not in noisy.code
    exec(noisy.code, {"model": model, "batch": batch})


def state(trainer):
    counts = {
        name: value for name, value in vars(trainer).items() if isinstance(value, int | float | str | dict | list)
    }
    drawn = torch.get_rng_state().tolist(), random.getstate()
    return repr(counts), drawn, [id(one) for one in trainer.accelerator._dataloaders]


def test_a_trainer_is_left_as_it_was_and_trains_by_the_code(tmp_path):
    trainer, _, _ = make_trainer(tmp_path, config=None, max_steps=1)
    trainer.model.config.problem_type = "single_label_classification"  # which a forward pass would set
    before, model = state(trainer), snapshot(trainer.model)
    found = rmm_linear.doctor(trainer)
    assert state(trainer) == before
    assert_untouched(trainer.model, model)
    assert trainer.optimizer is None
    assert found.batch == "Batch 4 × 20; optimizer: AdamW."
    assert found.now.static.optimizer > 2 * found.now.static.parameters * 0.99
    exec(found.code, {"trainer": trainer})
    trainer.train()
    assert rmm_linear.revert(trainer.model)
    assert_codes_run(found, trainer=trainer)


def test_what_a_trainers_user_types_of_noise_is_the_trainers(tmp_path, monkeypatch):
    trainer, _, _ = make_trainer(tmp_path, config=None, max_steps=1)
    unknown = rmm_linear.doctor(trainer, noise=False)
    assert "rmm_linear.doctor(trainer, noise=True)" in [one.code for one in unknown.findings]
    measured = SimpleNamespace(whole=lambda: 1.5)
    monkeypatch.setattr("rmm_linear.integrations.doctor.gradient_noise", lambda *given, **options: measured)
    noisy = rmm_linear.doctor(trainer, noise=True)
    (noise,) = [one.code for one in noisy.findings if one.topic == "noise"]
    assert noise == noisy.code.splitlines()[-1]
    exec(noisy.code, {"trainer": trainer})
    assert trainer.callback_handler.callbacks[-1].convert == RMMConfig.preset("careful")


@pytest.mark.thorough
def test_trls_trainer_with_its_defaults_is_told_of_checkpointing(tmp_path):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    rows = [{"input_ids": token_ids(1, 20)[0].tolist()} for _ in range(8)]
    options = {"max_length": 32, "report_to": "none", "use_cpu": True, "bf16": False, "max_steps": 1}
    settings = trl.SFTConfig(str(tmp_path), **options, save_strategy="no", disable_tqdm=True)
    trainer = trl.SFTTrainer(
        tiny_model("llama", layers=1),
        settings,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer(),
    )
    before = state(trainer)
    found = rmm_linear.doctor(trainer)
    assert state(trainer) == before
    assert found.now.activations > 0
    exec(found.code, {"trainer": trainer})
    trainer.train()


def tokenizer():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(64)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, "w0")), pad_token="w1", eos_token="w2", unk_token="w0"
    )


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ((3,), TypeError, "doctor takes a Trainer, or a model and a batch, got int"),
        ((nn.Linear,), TypeError, "got Linear"),
        ((nn.Linear(4, 4),), TypeError, r"needs a training batch with a model: doctor\(model, batch\)"),
        ((nn.Linear(4, 4), "text"), TypeError, "must be a training batch"),
    ],
)
def test_what_is_refused(given, error, text):
    with pytest.raises(error, match=text):
        rmm_linear.doctor(*given)


def test_a_converted_model_is_refused():
    model, batch = mlp()
    rmm_linear.convert(model)
    with pytest.raises(ValueError, match=r"Call rmm_linear\.revert\(model\) first"):
        rmm_linear.doctor(model, batch)


def test_the_command_prints_the_page_of_a_folder(tmp_path, capsys):
    tiny_model("llama", layers=1).save_pretrained(tmp_path)
    capsys.readouterr()
    assert main(["doctor", str(tmp_path), "--size", "4", "--length", "30", "--no-progress"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("rmm_linear doctor: peak=")
    assert "What to type:" in out
    assert err == ""
    assert main(["doctor", str(tmp_path), "--size", "4", "--method", "qlora", "--rank", "2", "--no-progress"]) == 0
    assert re.search(r"(\d+) layers with LoRA, \1 weights quantized", without_breaks(capsys.readouterr().out))
    assert main(["doctor", "/nowhere"]) == 2
    assert "MODEL must be a folder written by save_pretrained" in capsys.readouterr().err
