"""Activation checkpointing and saved-tensor hooks over real architectures: vision, encoder-decoder and the others."""

import contextlib

import pytest
import torch
from cases import PACKED, ROUGH_BODY, WHOLE_BODY, architectures
from helpers import batch_of, checkpointed, enable_checkpointing, gradients, loss_of, six_features, tiny_model
from statistical import assert_unbiased

from rmm_linear import convert
from rmm_linear.memory import track_saved
from rmm_linear.memory.peak import LiveTensors, Peak


def made(architecture, dropout=0.0):
    """Without a cache, as under checkpointing: with one, keys are laid out and sums are made in another order."""
    model = tiny_model(architecture, dropout=dropout).train()
    model.config.use_cache = False
    return model


def step(model, architecture):
    model.zero_grad()
    torch.manual_seed(5)
    loss = loss_of(model, architecture)
    loss.backward()
    return loss.detach(), gradients(model)


@architectures
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_checkpointing_leaves_loss_and_exact_gradients_as_they_are(architecture, reentrant):
    """With dropout, whose masks must repeat; sketched weights are compared statistically below."""
    results = []
    for enabled in (False, True):
        model = made(architecture, dropout=0.1)
        report = convert(model, mask_padding=False, **ROUGH_BODY)
        if enabled:
            enable_checkpointing(model, reentrant)
        results.append(step(model, architecture))
    (loss, plain), (again, checkpointed) = results
    assert torch.equal(loss, again)
    sketched = {f"{name}.weight" for name in report.converted}
    assert len(plain.keys() - sketched) >= 5
    for name in plain.keys() - sketched:
        assert torch.allclose(plain[name], checkpointed[name], rtol=1e-4, atol=1e-6), name


@pytest.mark.pairs
@architectures
@pytest.mark.parametrize(("reentrant", "preserve"), [(True, True), (False, True), (True, False), (False, False)])
def test_sketched_gradients_are_unbiased_under_checkpointing(architecture, reentrant, preserve):
    """All sketched gradients together; noise of another S would be five errors away or more.

    Without a generator's state that is preserved there is no dropout, whose masks would not repeat.
    """
    model = made(architecture)
    _, exact = step(model, architecture)
    report = convert(model, **ROUGH_BODY)
    enable_checkpointing(model, reentrant, preserve)
    sketched = {f"{name}.weight": exact[f"{name}.weight"] for name in report.converted}

    def draw(_):
        model.zero_grad()
        loss_of(model, architecture).backward()
        return gradients(model)

    torch.manual_seed(1)
    assert_unbiased(draw, sketched, draws=20, widest=0.2)


@pytest.mark.parametrize("settings", [ROUGH_BODY, WHOLE_BODY], ids=["linear", "whole"])
@architectures
def test_saved_tensors_on_the_cpu_or_through_other_hooks_change_nothing(architecture, settings):
    """Z, the seed and the mask are saved tensors like others, so hooks move all of them.

    The loss is the same to the bit. What comes back for the backward pass may be laid out otherwise, so that products
    of it add in another order: that is rounding, where another seed would be seen in the first digit.
    """
    model = made(architecture)
    convert(model, mask_padding=False, bits=4, **settings)
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
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[1][name], rtol=1e-4, atol=1e-6)
    assert {torch.uint8, torch.int64} <= set(copies)  # codes and seeds


# Bytes: the tensors that live, as every operator was watched, against what the saved-tensor hooks and the formulas say


@pytest.mark.parametrize("settings", [None, ROUGH_BODY, WHOLE_BODY], ids=["exact", "linear", "whole"])
@architectures
def test_nothing_but_what_the_ledger_counts_lives_after_a_forward_pass(architecture, settings):
    """Nothing is held past the hooks, in nodes, closures or the scope."""
    model = made(architecture, dropout=0.1)
    if settings:
        convert(model, bits=4, **settings)
    batch = batch_of(architecture)
    with LiveTensors(Peak()) as live:
        loss = loss_of(model, architecture, batch)
        alive = live.now
    given = {tensor.untyped_storage().data_ptr() for tensor in batch.values()}
    with track_saved(model) as kept:
        again = loss_of(model, architecture, batch)
    counted = sum(entry.bytes for (_, address), entry in kept.storages.items() if address not in given)
    assert loss.requires_grad
    assert again.requires_grad
    assert alive == counted + loss.nbytes > loss.nbytes


FORMS = {
    "plain": {},
    "reentrant": {"use_reentrant": True},
    "non-reentrant": {"use_reentrant": False},
    "save_on_cpu": {},
}


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("preserve", [True, False], ids=["preserve", "no-preserve"])
@pytest.mark.parametrize("form", FORMS)
def test_recomputed_sketches_take_the_bytes_of_their_recipes(form, preserve, bits, monkeypatch):
    """20 rows instead of 10: what that adds after the forward pass, and when the backward pass comes to the block.

    A checkpoint keeps the sketch of the head alone, and that of the block's two layers while the block is recomputed.
    """
    x = six_features()

    def measured(ratio):
        model = checkpointed(preserve_rng_state=preserve, **FORMS[form])
        convert(model, kind="countsketch", ratio=ratio, bits=bits, min_rows=1, **PACKED)
        in_block = []
        monkeypatch.setattr(
            type(model.block[2]),
            "_on_backward",
            lambda layer, call, y, mask, held=None: in_block.append((layer.rmm_index, live.now)),
        )
        with LiveTensors(Peak()) as live:
            hooks = torch.autograd.graph.save_on_cpu() if form == "save_on_cpu" else contextlib.nullcontext()
            with hooks:
                loss = model(x).sum()
            forward = live.now
            loss.backward()
        assert [index for index, _ in in_block] == [2, 1, 0]
        recipes = [layer.rmm_config.spec(len(x), layer.in_features, 4) for layer in (*model.block[::2], model.head)]
        sizes = [recipe.bytes(len(x), features, 4) for recipe, features in zip(recipes, (6, 8, 6), strict=True)]
        return sizes, forward, in_block[1][1]

    (few, forward, block), (many, more_forward, more_block) = measured(0.25), measured(0.5)
    first, second, head = (more - less for more, less in zip(many, few, strict=True))
    assert (first, second, head) == ((240, 320, 240) if bits is None else (70, 80, 70))
    assert more_forward - forward == (head if form.endswith("reentrant") else first + second + head)
    assert more_block - block == first + second


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_a_checkpointed_block_of_a_transformer_keeps_its_sketches_while_it_is_recomputed(reentrant, bits, monkeypatch):
    """Twice as many rows add nothing after the forward pass, and their recipes' bytes once the block is recomputed."""

    def measured(ratio):
        model = tiny_model("llama", dropout=0.0, layers=1).train()
        sizes = {"ratio": ratio, "bits": bits, "min_rows": 1}
        report = convert(model, kind="countsketch", exclude_modules=["lm_head"], **sizes, **PACKED)
        enable_checkpointing(model, reentrant)
        batch, alive = {"input_ids": batch_of("llama")["input_ids"], "use_cache": False}, []
        layer = model.model.layers[0].mlp.down_proj
        monkeypatch.setattr(type(layer), "_on_backward", lambda layer, call, y, mask, held=None: alive.append(live.now))
        with LiveTensors(Peak()) as live:
            loss = loss_of(model, "llama", batch)
            forward = live.now
            loss.backward()
        assert len(alive) == len(report.converted) == 7
        attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
        readers = [
            attention.q_proj,
            attention.o_proj,
            mlp.gate_proj,
            mlp.down_proj,
        ]  # the others share with one of them
        recipes = [layer.rmm_config.spec(80, layer.in_features, 4) for layer in readers]
        total = sum(r.bytes(80, layer.in_features, 4) for r, layer in zip(recipes, readers, strict=True))
        return total, forward, alive[0]

    (few, forward, block), (many, more_forward, more_block) = measured(0.25), measured(0.5)
    assert many - few == (20 * 4 * (3 * 16 + 32) if bits is None else 20 * (3 * (8 + 4) + 16 + 4))
    assert more_forward == forward
    assert more_block - block == many - few
