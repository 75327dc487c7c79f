"""All operations in half types: outputs and losses of the exact model, gradients unbiased, fewer bytes."""

import functools

import pytest
import torch
from cases import WHOLE_BODY
from helpers import ALL_ARCHITECTURES, batch_of, gradients, tiny_model
from statistical import assert_unbiased

from rmm_linear import convert
from rmm_linear.activations.lazy_logits import LazyLogits
from rmm_linear.memory import track_saved

TYPES = [(torch.float32, None), (torch.float32, torch.float16), (torch.float32, torch.bfloat16), (torch.bfloat16, None)]
IDS = ["float32", "autocast float16", "autocast bfloat16", "all bfloat16"]
long = functools.partial(pytest.param, marks=pytest.mark.stack)
types = pytest.mark.parametrize(("dtype", "autocast"), TYPES, ids=IDS)


def made(architecture, dtype, *, whole, dropout=0.1):
    model = tiny_model(architecture, dropout=dropout, layers=1).to(dtype).train()
    model.config.use_cache = False
    if whole:
        convert(model, **WHOLE_BODY)
        if model.get_output_embeddings() is not None:
            model.get_output_embeddings().rmm_chunk = 7
    return model


def inputs_of(architecture, dtype):
    batch = {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch_of(architecture).items()}
    labels = batch["input_ids"] if architecture in ("gpt2", "llama", "t5") else torch.tensor([0, 1, 1, 0])
    if architecture in ("llama", "t5"):
        labels = labels.masked_fill(batch["attention_mask"] == 0, -100)
    return {**batch, "labels": labels}


def step(model, batch, autocast):
    model.zero_grad()
    torch.manual_seed(4)
    with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
        output = model(**batch)
    output.loss.backward()
    return output, gradients(model)


@types
@pytest.mark.parametrize(
    "architecture", [name if name in ("roberta", "llama") else long(name) for name in ALL_ARCHITECTURES]
)
def test_outputs_are_the_exact_models(architecture, dtype, autocast):
    """To the bit, hidden dropout included; attention has none, whose rounding would be seen. Logits are read late."""
    batch, outputs = inputs_of(architecture, dtype), []
    for whole in (False, True):
        model = made(architecture, dtype, whole=whole)
        for name in ("attention_probs_dropout_prob", "attn_pdrop", "attention_dropout"):
            if hasattr(model.config, name):
                setattr(model.config, name, 0.0)
        for module in model.modules():
            for name in ("attention_dropout", "dropout_prob", "dropout"):  # T5's attention has a number
                if isinstance(getattr(module, name, None), float):
                    setattr(module, name, 0.0)
        outputs.append((step(model, batch, autocast), model))
    ((exact, want), _), ((output, found), model) = outputs
    assert found.keys() == want.keys()
    assert all(one.isfinite().all() and one.dtype == dtype for one in found.values())
    assert output.loss.dtype == exact.loss.dtype
    is_chunked = model.get_output_embeddings() is not None
    half = torch.finfo(autocast or dtype).eps
    assert abs(output.loss - exact.loss) <= is_chunked * 4 * half * exact.loss
    assert isinstance(output.logits, LazyLogits) == is_chunked
    logits = output.logits * 1
    assert logits.dtype == (exact.logits * 1).dtype
    assert torch.equal(torch.stack(tuple(logits)), exact.logits)


@types
@pytest.mark.parametrize("architecture", ["llama", *map(long, ("roberta", "gpt2", "t5"))])
def test_gradients_are_unbiased_and_bytes_fewer(architecture, dtype, autocast):
    """The projection's band has room for the half type's own rounding."""
    batch = inputs_of(architecture, dtype)
    exact, model = (made(architecture, dtype, whole=whole, dropout=0.0) for whole in (False, True))
    want = step(exact, batch, autocast)[1]
    room = 2 * torch.finfo(autocast or dtype).eps
    assert_unbiased(lambda _: draw(model, batch, autocast), want, draws=16, widest=0.05, room=room)
    saved = []
    for network in (exact, model):
        with (
            track_saved(network) as kept,
            torch.autocast("cpu", dtype=autocast, enabled=autocast is not None),
        ):
            loss = network(**batch).loss
        saved.append(kept.total)
        del loss
    assert saved[1] < 0.6 * saved[0], saved


def draw(model, batch, autocast):
    """Without a seed of its own, so that every draw is another."""
    model.zero_grad()
    with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
        loss = model(**batch).loss
    loss.backward()
    return gradients(model)
