"""Masks that models hand down to their layers: padding is left out, and never where it would be missed."""

import math
import re

import pytest
import torch
from cases import ROUGH
from helpers import tiny_model, token_ids
from torch import nn

from rmm_linear import convert, revert
from rmm_linear.context.call_inputs import TracedMasks, take_sample_index, valid_tokens
from rmm_linear.norm_estimators.samples import SAMPLE_INDEX


def padded_batch(batch=6, length=20, real=5):
    ids = token_ids(batch, length)
    mask = torch.zeros_like(ids)
    mask[:, :real] = 1
    return {"input_ids": torch.where(mask.bool(), ids, 1), "attention_mask": mask, "labels": torch.arange(batch) % 2}


def weight_gradients(model, batch, call=None):
    model.zero_grad()
    torch.manual_seed(0)
    (call or (lambda: model(**batch)))().loss.backward()
    linears = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and "encoder" in n}
    return {name: module.weight.grad.clone() for name, module in linears.items()}


def relative_error(gradient, exact):
    """By norms: a fresh model's query gradients are smaller than any absolute tolerance. Rounding is near 1e-6."""
    return ((gradient - exact).norm() / exact.norm()).item()


def assert_exact(model, batch, exact, call=None):
    """5 of 20 tokens are real and a quarter of the rows is kept: exact if and only if padding is left out."""
    for name, gradient in weight_gradients(model, batch, call).items():
        assert relative_error(gradient, exact[name]) < 1e-3, name


@pytest.fixture(params=["roberta", "bert"])
def model(request):
    return tiny_model(request.param, dropout=0.0).train()


def test_padding_is_left_out_of_a_model(model):
    batch = padded_batch()
    exact = weight_gradients(model, batch)
    convert(model, **ROUGH)
    assert_exact(model, batch, exact)
    assert_exact(
        model, batch, exact, lambda: model(batch["input_ids"], batch["attention_mask"], labels=batch["labels"])
    )
    revert(model)
    convert(model, mask_padding=False, **ROUGH)
    noisy = weight_gradients(model, batch)
    assert min(relative_error(noisy[name], exact[name]) for name in noisy) > 0.01


def test_two_forward_passes_before_one_backward(model):
    short, long = padded_batch(real=4), padded_batch(real=5)
    both = lambda: type("Sum", (), {"loss": model(**short).loss + model(**long).loss})()  # noqa: E731
    exact = weight_gradients(model, None, both)
    convert(model, **ROUGH)
    assert_exact(model, None, exact, both)


def test_when_the_models_own_hooks_are_passed_by(model):
    """PEFT calls the forward method of the model inside it directly."""
    batch = padded_batch()
    exact = weight_gradients(model, batch)
    convert(model, **ROUGH)
    assert_exact(model, batch, exact, lambda: type(model).forward(model, **batch))


def test_rows_that_do_not_match_the_mask_ignore_it():
    """The head sees one row per sequence: it is sketched as if there were no mask."""
    model, batch, found = tiny_model("roberta", dropout=0.0).train(), padded_batch(), []
    for mask_padding in (True, False):
        convert(model, target_modules=["classifier.dense"], mask_padding=mask_padding, **ROUGH)
        model.zero_grad()
        torch.manual_seed(0)
        model(**batch).loss.backward()
        found.append(model.classifier.dense.weight.grad.clone())
        revert(model)
    model.zero_grad()
    model(**batch).loss.backward()
    assert torch.equal(*found)
    assert relative_error(found[0], model.classifier.dense.weight.grad) > 0.1


def tiny_t5():
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=64,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    torch.manual_seed(0)
    return T5ForConditionalGeneration(config).train()


def test_a_decoders_mask_never_meets_the_encoders_rows():
    """Both sequences have 20 tokens, and the decoder's cross-attention reads the encoder's rows."""
    model, found = tiny_t5(), []
    decoder_mask = torch.ones(6, 20, dtype=torch.long)
    decoder_mask[:, 2:] = 0
    labels = token_ids(6, 20).masked_fill(decoder_mask == 0, -100)
    batch = padded_batch(real=12) | {"labels": labels, "decoder_attention_mask": decoder_mask}
    for mask_padding in (True, False):
        convert(model, mask_padding=mask_padding, target_modules="decoder.*", **ROUGH)
        model.zero_grad()
        torch.manual_seed(0)
        model(**batch).loss.backward()
        found.append({n: p.grad.clone() for n, p in model.named_parameters() if "EncDec" in n})
        revert(model)
    assert len(found[0]) == 8
    for name, gradient in found[0].items():
        assert torch.equal(gradient, found[1][name]), name


def test_an_encoder_decoder_model_masks_its_encoder_only():
    model = tiny_t5()
    batch = padded_batch() | {"labels": token_ids(6, 20)}  # decoder rows as many as encoder rows, none of them padding

    def encoder_gradients():
        model.zero_grad()
        model(**batch).loss.backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if n.startswith("encoder.block")}

    exact = encoder_gradients()
    convert(model, **ROUGH)
    for name, gradient in encoder_gradients().items():
        assert relative_error(gradient, exact[name]) < 1e-3, name


class Pooling(torch.nn.Module):
    """A model that pools over padding: masked tokens carry gradient."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)

    def forward(self, x, attention_mask=None):
        return self.inner(x).mean()


def test_padding_with_a_gradient_is_an_error_that_names_the_layer():
    model, mask = Pooling(), torch.ones(4, 10)
    mask[:, 5:] = 0
    convert(model, **ROUGH)
    with pytest.raises(RuntimeError, match=r"masked tokens of inner carry a gradient.*mask_padding=False"):
        model(torch.randn(4, 10, 8), attention_mask=mask).backward()
    revert(model)
    convert(model, mask_padding=False, **ROUGH)
    model(torch.randn(4, 10, 8), attention_mask=mask).backward()


@pytest.mark.parametrize("factor", [0.0, math.nan])
def test_a_first_step_without_a_gradient_or_with_an_overflow_does_not_pass_for_a_check(factor):
    """As under a layer that starts at zero, LoRA's B among them."""
    model, mask = Pooling(), torch.ones(4, 10)
    mask[:, 5:] = 0
    convert(model, **ROUGH)
    (model(torch.randn(4, 10, 8), attention_mask=mask) * factor).backward()
    with pytest.raises(RuntimeError, match="carry a gradient"):
        model(torch.randn(4, 10, 8), attention_mask=mask).backward()


def test_sample_indices_are_on_the_cpu_whatever_the_default_device_is():
    with torch.device("meta"):
        index, _ = take_sample_index(nn.Linear(2, 2), {SAMPLE_INDEX: [3, 1]})
    assert index.tolist() == [3, 1]


class Additive(torch.nn.Module):
    """Gives the layer inside an additive mask of 0 and a large negative number."""

    def __init__(self, layer, lowest=-1e9):
        super().__init__()
        self.layer, self.lowest = layer, lowest

    def forward(self, x, attention_mask=None):
        return self.layer(x, (1.0 - attention_mask) * self.lowest)


class Valid(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)

    def forward(self, x, attention_mask=None):
        return self.inner(x)[attention_mask == 0].square().mean()


@pytest.mark.parametrize("real", [10, 5])
def test_an_additive_mask_of_an_inner_module_keeps_its_zeros(real):
    model, mask = Additive(Valid()), torch.ones(4, 20)
    mask[:, real:] = 0
    x = torch.randn(4, 20, 8)

    def gradient():
        model.zero_grad()
        model(x, attention_mask=mask).backward()
        return model.layer.inner.weight.grad.clone()

    exact = gradient()
    convert(model, **ROUGH)
    error = relative_error(gradient(), exact)
    assert (error < 1e-5) == (real == 5)  # a quarter of the rows is kept: all that are valid, or half of them


@pytest.mark.parametrize(
    ("values", "valid"),
    [
        ([0.0, 1.0, 1.0], [False, True, True]),
        ([0.0, 0.0, -1e9], [True, True, False]),
        ([0.0, 0.0, 0.0], [True, True, True]),  # additive: as 0 and 1 it would hide all
        ([0.0, 3e38, -3e38], [True, True, False]),  # Longformer's, with a token that all attend to
        ([0.0, -torch.inf, 0.0], [True, False, True]),
    ],
)
def test_floating_masks_are_additive_unless_of_0_and_1(values, valid):
    mask = torch.tensor(values)
    assert valid_tokens(mask).tolist() == valid
    masks = TracedMasks()
    masks.enter(torch.nn.Identity(), ("attention_mask",), (mask.view(1, -1),), {})
    assert masks.token_mask((1, 3)).valid.tolist() == valid


def test_masks_of_integers_are_of_zero_and_others():
    assert valid_tokens(torch.tensor([0, 2, -1])).tolist() == [False, True, True]


def additive_model(architecture):
    import transformers as hf

    sizes = {"vocab_size": 64, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
    encoder = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    encoder |= {"max_position_embeddings": 40, "attention_window": 4}
    layers = {f"{part}_{key}": 2 for part in ("encoder", "decoder") for key in ("layers", "attention_heads")}
    layers |= {"d_model": 16, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "decoder_start_token_id": 0}
    led = {"attention_window": 4, "max_encoder_position_embeddings": 40, "max_decoder_position_embeddings": 40}
    dropouts = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    makers = {
        "longformer": lambda: hf.LongformerForMaskedLM(hf.LongformerConfig(**sizes, **encoder, **off)),
        "led": lambda: hf.LEDForConditionalGeneration(hf.LEDConfig(**sizes, **layers, **led, **dropouts)),
        "pegasus-x": lambda: hf.PegasusXForConditionalGeneration(
            hf.PegasusXConfig(**sizes, **layers, block_size=4, num_global_tokens=2, **dropouts)
        ),
    }
    torch.manual_seed(0)
    return makers[architecture]().train()


@pytest.mark.parametrize("architecture", ["longformer", "led", "pegasus-x"])
@pytest.mark.parametrize("real", [20, 5])
def test_models_whose_layers_get_additive_masks(architecture, real):
    """With 5 real tokens of 20, of which a quarter is kept, the last feed-forward layers are exact.

    The attention of Longformer and LED transposes its rows to (sequence length, batch); that of Pegasus-X adds some.
    """
    model, batch = additive_model(architecture), padded_batch(real=real)
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)

    def gradients():
        model.zero_grad()
        model(**batch).loss.backward()
        found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None and p.dim() == 2}
        return {n: gradient for n, gradient in found.items() if re.search(r"encoder.layers?\.1\.(fc|inter|output)", n)}

    exact = gradients()
    convert(model, **ROUGH)
    errors = {name: relative_error(gradient, exact[name]) for name, gradient in gradients().items()}
    assert len(errors) == 2
    assert (max(errors.values()) < 1e-3) == (real == 5), errors


class Transposing(torch.nn.Module):
    """Processes rows of (sequence length, batch)."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)

    def forward(self, x, attention_mask=None):
        y = self.inner(x.transpose(0, 1)).transpose(0, 1)
        return (y * attention_mask.unsqueeze(-1)).square().mean()


def test_a_mask_does_not_hold_for_rows_in_another_order():
    """All rows are saved: without the padding in its own place, the gradient would be wrong."""
    model, mask = Transposing(), torch.ones(4, 20)
    mask[1:, 5:] = 0
    x = torch.randn(4, 20, 8)
    model(x, mask).backward()
    exact = model.inner.weight.grad.clone()
    model.zero_grad()
    convert(model, **{**ROUGH, "ratio": None, "bits": None})
    model(x, mask).backward()
    assert relative_error(model.inner.weight.grad, exact) < 1e-5
