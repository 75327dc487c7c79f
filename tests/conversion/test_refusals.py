"""What a converted model does not do, and what is no model: one error each that says what to do instead."""

import re

import pytest
import torch
from helpers import tiny_model, token_ids
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad

from glue_finetune.errors import UserError
from glue_finetune.flags import build_config
from glue_finetune.tasks import get_task
from rmm_linear import RMMConfig, convert, fit, revert
from rmm_linear.memory import explain


def made():
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 4)).train()
    convert(model, min_rows=1)
    return model


def x():
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(0))


def dual(model):
    with forward_ad.dual_level():
        return model(forward_ad.make_dual(x(), x()))


TRANSFORMS = {
    "grad": lambda model: grad(lambda p: functional_call(model, p, (x(),)).sum())(dict(model.named_parameters())),
    "dual": dual,
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_are_refused_and_work_after_revert(name, training):
    model = made().train(training)
    with pytest.raises(RuntimeError, match=r"Converted modules work with .* Call rmm_linear\.revert\(model\) before"):
        TRANSFORMS[name](model)
    revert(model)
    TRANSFORMS[name](model)


@pytest.mark.parametrize("architecture", ["roberta", "llama"])
def test_export_works_in_eval_mode(architecture):
    model = tiny_model(architecture, dropout=0.0).eval()
    model.config.use_cache = False
    inputs = {"input_ids": token_ids(), "attention_mask": torch.ones_like(token_ids())}
    convert(model, min_rows=1)
    exported = torch.export.export(model, (), inputs)
    with torch.no_grad():
        torch.testing.assert_close(exported.module()(**inputs).logits, model(**inputs).logits)


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (nn.Linear, TypeError, r"got the class Linear\. Make an instance first: Linear\(\.\.\.\)"),
        (None, TypeError, "model must be a torch.nn.Module, got NoneType"),
    ],
)
def test_what_is_no_model_to_convert(model, error, message):
    with pytest.raises(error, match=message):
        convert(model)


def test_data_parallel_over_devices_is_refused():
    model = nn.DataParallel(nn.Sequential(nn.Linear(8, 8)))
    model.device_ids = [0, 1]
    with pytest.raises(ValueError, match=r"Use torch\.nn\.parallel\.DistributedDataParallel"):
        convert(model)
    model.device_ids = []
    assert list(convert(model).converted) == ["module.0"]


@pytest.mark.filterwarnings("ignore")
def test_a_quantized_model_says_that_it_is():
    quantized = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(8, 8)), {nn.Linear}, torch.qint8)
    with pytest.raises(ValueError, match=r"layers are quantized \(Linear.*Convert the model before quantization"):
        convert(quantized)


def made_of(package, base=nn.Linear):
    """A class of layers of a package that need not be installed, as far as names tell."""
    return type(f"{package.title()}Linear", (base,), {"__module__": f"{package}.nn"})


class WithoutWeight(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.register_buffer("qweight", torch.zeros(outputs, inputs, dtype=torch.int8))


class OfTorchao(nn.Linear):
    """nn.Linear itself, with a weight of a package's class."""

    def __new__(cls, inputs, outputs):
        layer = nn.Linear(inputs, outputs)
        weight = type("QuantizedTensor", (torch.Tensor,), {"__module__": "torchao.dtypes"})
        layer.weight = nn.Parameter(layer.weight.detach().as_subclass(weight), requires_grad=False)
        return layer


@pytest.mark.parametrize(
    "kind",
    [made_of("bitsandbytes"), made_of("gptqmodel", WithoutWeight), made_of("awq", WithoutWeight), OfTorchao],
    ids=["bitsandbytes", "gptq", "awq", "torchao"],
)
def test_quantized_layers_are_skipped_with_the_remedy(kind):
    model = nn.Sequential(kind(8, 8), nn.GELU(), nn.LayerNorm(8))
    remedy = r"is quantized: convert the model before quantization, or after get_peft_model has put adapters on it"
    assert re.search(remedy, convert(model, dry_run=True).skipped["0"])
    with pytest.raises(ValueError, match=remedy) as refused:
        convert(model, operations="linear")
    assert "Change target_modules" not in str(refused.value)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_model_is_refused():
    layers = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    for model in (
        torch.jit.script(layers), torch.jit.trace(layers, x()), nn.Sequential(torch.jit.script(layers), layers),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"torch\.jit\.script .* Convert the model that they were made from"):
            convert(model)


def test_a_copy_of_data_parallel_is_refused():
    model = made()
    model[0]._is_replica = True
    with pytest.raises(RuntimeError, match="DataParallel has made"):
        model(x())


@pytest.mark.parametrize(
    ("make", "error", "meant"),
    [
        (lambda: RMMConfig(kind="countskech"), ValueError, "countsketch"),
        (lambda: RMMConfig(rato=0.1), TypeError, "ratio"),
        (lambda: RMMConfig(operations=["activations"]), ValueError, "activation"),
        (lambda: RMMConfig(overrides={"query": {"norm_bit": 4}}), ValueError, "norm_bits"),
        (lambda: RMMConfig.from_dict({"memry": 0.1}), ValueError, "memory"),
        (lambda: convert(nn.Sequential(nn.Linear(8, 8)), min_row=1), TypeError, "min_rows"),
        (lambda: RMMConfig(checkpointed="pakced"), ValueError, "packed"),
        (lambda: RMMConfig(kind="wta", norm_estimator="postion"), ValueError, "position"),
        (lambda: RMMConfig(bits="atuo"), ValueError, "auto"),
        (lambda: build_config({"kind": "countsketh"}, ["kind"]), UserError, "countsketch"),
        (lambda: get_task("colaa"), UserError, "cola"),
    ],
)
def test_a_word_that_is_nearly_known(make, error, meant):
    with pytest.raises(error, match=f"Did you mean '{meant}'"):
        make()


@pytest.mark.parametrize(
    ("example", "text"),
    [
        ("text", "got str"),
        ([x()].__iter__(), r"Take one of its batches: next\(iter\(loader\)\)"),
        ({"x": x()}, "must have the arguments of Sequential, and does not: missing .* They are input"),
        ((x(), x()), "too many positional arguments"),
    ],
)
def test_an_example_that_the_model_cannot_take_is_named(example, text):
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    for run in (
        lambda: convert(model, example=example),
        lambda: fit(model, example, 0.5),
        lambda: explain(model, example),
    ):
        with pytest.raises(TypeError, match=text):
            run()
    assert type(model[0]) is nn.Linear
