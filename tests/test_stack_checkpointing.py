"""Activation checkpointing and saved-tensor hooks over real architectures: vision, encoder-decoder and the others."""

import math
import warnings

import pytest
import torch
from helpers import gradients, tiny_model, token_ids

from rmm_linear import convert
from rmm_linear.memory import track_saved

ROUGH = {"kind": "countsketch", "ratio": 0.25, "min_rows": 8}
ARCHITECTURES = ["roberta", "gpt2", "llama", "vit", "t5"]
architectures = pytest.mark.parametrize("architecture", ARCHITECTURES)


def made(architecture, dropout=0.0):
    import transformers as hf

    with torch.random.fork_rng():
        torch.manual_seed(3)
        if architecture == "vit":
            sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
            sizes |= {"image_size": 16, "patch_size": 4, "hidden_dropout_prob": dropout}
            return hf.ViTForImageClassification(hf.ViTConfig(**sizes)).train()
        if architecture == "t5":
            sizes = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
            sizes |= {"dropout_rate": dropout, "decoder_start_token_id": 0}
            return hf.T5ForConditionalGeneration(hf.T5Config(**sizes)).train()
    return tiny_model(architecture, dropout=dropout).train()


def batch(architecture):
    if architecture == "vit":
        return {"pixel_values": torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))}
    ids = token_ids()
    mask = torch.ones_like(ids)
    mask[1, 12:] = 0
    masks = {"attention_mask": mask} if architecture != "gpt2" else {}
    return {"input_ids": ids, **masks, **({"labels": ids} if architecture == "t5" else {})}


def loss_of(model, architecture):
    output = model(**batch(architecture))
    return output.loss if architecture == "t5" else output.logits[:, :5].square().mean()


def step(model, architecture):
    model.zero_grad()
    torch.manual_seed(5)
    loss = loss_of(model, architecture)
    loss.backward()
    return loss.detach(), gradients(model)


def checkpoint(model, reentrant):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of transformers about its older name
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant and hasattr(model, "get_input_embeddings"):
            model.enable_input_require_grads()


@architectures
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_checkpointing_leaves_loss_and_exact_gradients_as_they_are(architecture, reentrant):
    """With dropout, whose masks must repeat; sketched weights are compared statistically below."""
    results = []
    for enabled in (False, True):
        model = made(architecture, dropout=0.1)
        report = convert(model, mask_padding=False, **ROUGH)
        if enabled:
            checkpoint(model, reentrant)
        results.append(step(model, architecture))
    (loss, plain), (again, checkpointed) = results
    assert torch.equal(loss, again)
    sketched = {f"{name}.weight" for name in report.converted}
    assert len(plain.keys() - sketched) >= 5
    for name in plain.keys() - sketched:
        assert torch.allclose(plain[name], checkpointed[name], rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize("architecture", ["vit", "t5"])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_sketched_gradients_are_unbiased_under_checkpointing(architecture, reentrant):
    """z = 4 on the projection of all sketched gradients; noise of another S would be 0."""
    model = made(architecture)
    _, exact = step(model, architecture)
    report = convert(model, **ROUGH)
    checkpoint(model, reentrant)
    names = [f"{name}.weight" for name in report.converted]
    length, values = sum(exact[name].square().sum() for name in names), []
    torch.manual_seed(1)
    for _ in range(40):
        model.zero_grad()
        loss_of(model, architecture).backward()
        found = gradients(model)
        values.append(sum((found[name] * exact[name]).sum() for name in names) / length)
    values = torch.stack(values)
    error = values.std() / math.sqrt(len(values))
    assert abs(values.mean() - 1) < 4 * error
    assert error < 0.2


@architectures
def test_saved_tensors_on_the_cpu_or_through_other_hooks_change_nothing(architecture):
    """Z, the seed and the mask are saved tensors like others, so hooks move all of them."""
    model = made(architecture)
    convert(model, mask_padding=False, bits=4, **ROUGH)
    expected = step(model, architecture)
    copies = []

    def pack(tensor):
        copies.append(tensor.dtype)
        return tensor.detach().clone(), tensor.device

    for hooks in (
        torch.autograd.graph.save_on_cpu(),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed[0].to(packed[1])),
    ):
        with hooks:
            loss, found = step(model, architecture)
        assert torch.equal(loss, expected[0])
        assert all(torch.equal(found[name], expected[1][name]) for name in found)
    assert {torch.uint8, torch.int64} <= set(copies)  # codes and seeds


@pytest.mark.parametrize("reentrant", [None, True], ids=["plain", "reentrant"])
@pytest.mark.parametrize("architecture", ["vit", "roberta"])
def test_the_ledger_counts_what_is_kept(architecture, reentrant):
    """Against a count of one's own: the storages that the saved-tensor hooks see, parameters and buffers excluded.

    (Non-reentrant checkpoints keep their inputs by hooks of their own, which the outer ones do not see.)
    """
    model = made(architecture)
    convert(model, **ROUGH)
    if reentrant:
        checkpoint(model, reentrant)
    torch.manual_seed(5)
    with track_saved(model) as kept:
        loss_of(model, architecture)
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    seen = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = loss_of(model, architecture)
    assert loss.requires_grad
    counted = sum(storage.nbytes() for storage in seen.values())
    assert kept.total == counted > 0
