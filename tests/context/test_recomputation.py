"""Activation checkpointing where forward and backward passes come in any order: masks and widths are a pass's own.

Two to five of 20 tokens are real and a quarter of the rows is kept: gradients are exact if the mask is the pass's own.
"""

import gc
import threading
import weakref

import pytest
import torch
from cases import PACKED, ROUGH, checkpoints
from helpers import enable_checkpointing, tiny_model
from torch import nn
from torch.utils.checkpoint import CheckpointError, checkpoint

from rmm_linear import RMMConfig, convert


def batch(number, length=20):
    """As many rows in every batch; of each sequence 2 to 5 tokens are real, and another place of them each time."""
    ids = torch.randint(3, 64, (6, length), generator=torch.Generator().manual_seed(number))
    mask = torch.zeros_like(ids)
    mask[:, : 2 + number % 4] = 1
    return {"input_ids": ids, "attention_mask": mask.roll(number, 0)}


def loss_of(model, number):
    inputs = batch(number)
    logits = model(**inputs).logits
    return ((logits * inputs["attention_mask"].unsqueeze(-1)) if logits.dim() == 3 else logits).square().sum()


def play(model, order):
    """Run forward passes (small letters) and backward passes (capitals); weight gradients by letter."""
    losses, found = {}, {}
    for letter in order:
        if letter.islower():
            losses[letter] = loss_of(model, ord(letter))
            continue
        model.zero_grad()
        losses.pop(letter.lower()).backward()
        found[letter] = {n: p.grad.clone() for n, p in model.named_parameters() if p.dim() == 2 and p.grad is not None}
    return found


def assert_same(found, exact):
    """Rounding is near 1e-6; another pass's mask leaves out tokens, a third of the gradient and more."""
    assert found.keys() == exact.keys()
    for letter, gradients in found.items():
        for name, gradient in gradients.items():
            error = (gradient - exact[letter][name]).norm() / exact[letter][name].norm().clamp_min(1e-12)
            assert error < 1e-3, (letter, name, error)


def both(run, architecture="llama", reentrant=None, layers=2):
    """Check that the converted model has the gradients of the exact one."""
    results = []
    for converted in (False, True):
        model = tiny_model(architecture, dropout=0.0, layers=layers).train()
        if converted:
            convert(model, exclude_modules=["lm_head", "classifier.dense", "classifier.out_proj"], **ROUGH)
        if reentrant is not None:
            enable_checkpointing(model, reentrant)
        found = run(model)
        results.append(found or {"it": {n: p.grad.clone() for n, p in model.named_parameters() if p.dim() == 2}})
    assert_same(results[1], results[0])


@pytest.mark.diagonal
@pytest.mark.parametrize("order", ["abBA", "aAbcBdC", "aAbcCdB", "aAabcdACDB"])
@checkpoints
@pytest.mark.parametrize("architecture", ["llama", "roberta"])
def test_every_backward_pass_has_the_mask_of_its_own_forward_pass(architecture, reentrant, order):
    both(lambda model: play(model, order), architecture, reentrant)


@checkpoints
def test_one_backward_pass_of_two_forward_passes(reentrant):
    both(lambda model: (loss_of(model, 1) + loss_of(model, 2)).backward(), reentrant=reentrant)


@checkpoints
def test_many_forward_passes_without_gradients_come_between(reentrant):
    """As sampling from the model does, in train mode, more often than passes are remembered."""

    def run(model):
        loss = loss_of(model, 0)
        with torch.no_grad():
            for number in range(70):
                loss_of(model, number)
        loss.backward()

    both(run, reentrant=reentrant, layers=1)


@checkpoints
def test_two_whole_models_in_one_checkpoint(reentrant):
    def run(model):
        scale = torch.ones((), requires_grad=True)
        losses = lambda scale: scale * (loss_of(model, 1) + loss_of(model, 2))  # noqa: E731
        checkpoint(losses, scale, use_reentrant=reentrant).backward()

    both(run)


class Tagger(nn.Module):
    """One layer in as many checkpoints, one in the other, as ``forms`` has; it takes a mask."""

    def __init__(self, *forms):
        super().__init__()
        self.layer, self.forms = nn.Linear(12, 6), forms

    def forward(self, x, attention_mask):
        run = self.layer
        for form in self.forms:
            run = lambda x, run=run, form=form: checkpoint(run, x, use_reentrant=form)  # noqa: E731
        return (run(x).sin() * attention_mask.unsqueeze(2)).square().sum()


def tagged(number):
    x = torch.randn(6, 20, 12, generator=torch.Generator().manual_seed(number)).requires_grad_()
    return x, batch(number)["attention_mask"]


@pytest.mark.parametrize("forms", [(True, True), (False, False), (True, False), (False, True)])
def test_checkpoints_inside_of_checkpoints(forms):
    """What the inner one of two reentrant ones recomputes was made in the backward pass itself."""
    results = []
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Tagger(*forms)
    for converted in (False, True):
        if converted:
            convert(model, **ROUGH)
        found, losses = [], [model(*tagged(number)) for number in (1, 2, 3)]
        for loss in (losses[1], losses[0], losses[2]):
            model.zero_grad()
            loss.backward()
            found.append(model.layer.weight.grad.clone())
        results.append(dict(enumerate({"weight": each} for each in found)))
    assert_same(results[1], results[0])


class Twins(nn.Module):
    """Calls one module twice in a forward pass."""

    def __init__(self, reentrant):
        super().__init__()
        self.tagger = Tagger(reentrant)

    def forward(self, x, first, second):
        return self.tagger(x, attention_mask=first) + self.tagger(x, attention_mask=second)


@checkpoints
def test_two_masks_for_a_layer_in_one_forward_pass_are_refused(reentrant):
    model = Twins(reentrant)
    convert(model, **ROUGH)
    (x, first), (_, second) = tagged(1), tagged(2)
    with pytest.raises(RuntimeError, match=r"recomputes tagger.layer, which was called several times.*different"):
        model(x, first, second).backward()
    model(x, first, first.clone()).backward()  # equal masks cannot be mistaken


@checkpoints
def test_a_second_backward_pass_after_another_forward_pass_is_refused(reentrant):
    model = Tagger(reentrant)
    convert(model, **ROUGH)
    loss = model(*tagged(1))
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    model(*tagged(2))
    with pytest.raises(RuntimeError, match=r"recomputes layer a second time.*mask_padding=False"):
        loss.backward()


def test_few_forward_passes_are_remembered():
    """None after its backward pass, and no more than 64 of those that have none."""
    model = Tagger(False)
    convert(model, **ROUGH)
    pending = model.layer.rmm_context._pending
    for number in range(3):
        model(*tagged(number)).backward()
        assert pending.passes() == []
    losses = [model(*tagged(number)) for number in range(70)]
    assert len(losses) == 70
    assert len(pending.passes()) == 64


class Side(Tagger):
    """Returns what is no tensor, nor in any container that PyTorch knows."""

    def forward(self, *args, **kwargs):
        return {super().forward(*args, **kwargs)}


@pytest.mark.parametrize("reentrant", [True, False])
def test_masks_are_freed_with_the_graph(reentrant):
    """By reference counts alone, whatever came of the passes: no backward pass, one, an error, an output let go."""
    model = Tagger(reentrant)
    convert(model, **ROUGH)
    seen = []
    context = model.layer.rmm_context

    def note(*_):
        if context._running.inputs:  # not in a recomputation
            seen.append(weakref.ref(context._running.inputs[-1].mask))

    handle = model.layer.register_forward_hook(note)
    gc.disable()
    try:
        losses = [model(*tagged(number)) for number in range(3)]
        assert all(mask() is not None for mask in seen)
        del losses[0]
        assert [mask() is not None for mask in seen] == [False, True, True]
        losses[0].backward()
        detached = losses[0].detach()
        losses.pop(0)
        assert [mask() is not None for mask in seen] == [False, False, True]
        losses.clear()
        assert not any(mask() for mask in seen)
        assert detached.isfinite()
        seen.clear()
        with pytest.raises(ZeroDivisionError), model.layer.register_forward_hook(lambda *_: 1 / 0):
            model(*tagged(3))
        with torch.no_grad():
            model(*tagged(4))
        assert not any(mask() for mask in seen[:1])
    finally:
        gc.enable()
        handle.remove()


def test_masks_stay_for_outputs_in_which_no_tensor_is_found():
    model = Side(True)
    convert(model, **ROUGH)
    (loss,) = model(*tagged(1))
    (known,) = model.layer.rmm_context._pending.passes()
    assert known.calls
    loss.backward()


def test_a_recomputation_has_the_width_of_its_own_forward_pass():
    """With fewer real tokens there is room for wider codes; other widths have other shapes, which PyTorch refuses."""
    config = RMMConfig(memory=0.1, min_rows=1, operations="linear", **PACKED)
    assert len({config.width(64, 4, 20 / real) for real in (2, 3, 4, 5)}) > 1
    model = tiny_model("llama", dropout=0.0, width=64).train()
    convert(model, config)
    enable_checkpointing(model, False)
    found = play(model, "abcdBADC")
    assert all(gradient.isfinite().all() for gradients in found.values() for gradient in gradients.values())


class Masked(nn.Module):
    """A linear in a checkpoint, whose padding reaches no loss."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x, attention_mask=None):
        return checkpoint(lambda t: self.layer(t).tanh(), x, use_reentrant=False) * attention_mask.unsqueeze(-1)


def half_real(first):
    mask = torch.zeros(4, 16, dtype=torch.int64)
    mask[:, :8] = int(first)
    mask[:, 8:] = int(not first)
    return mask


def test_a_backward_pass_that_failed_leaves_nothing_to_the_next_one():
    """Half of the tokens are real and half of the rows are kept: the gradient is exact by the pass's own mask."""
    model, x = Masked(), torch.randn(4, 16, 8)
    model(x, attention_mask=half_real(False)).square().sum().backward()
    exact = model.layer.weight.grad.clone()
    convert(model, target_modules=["layer"], ratio=0.5, min_rows=1, **PACKED)
    model(x, attention_mask=half_real(True)).square().sum().backward()
    failing = torch.randn(4, 16, 8, requires_grad=True)

    def fail(gradient):
        raise ValueError("as meant")

    failing.register_hook(fail)
    first = model(failing, attention_mask=half_real(True)).square().sum()
    second = model(x, attention_mask=half_real(False)).square().sum()
    with pytest.raises(ValueError, match="as meant"):
        first.backward()
    model.zero_grad()
    second.backward()
    torch.testing.assert_close(model.layer.weight.grad, exact, rtol=1e-4, atol=1e-5)


def test_forward_passes_of_several_threads_never_take_each_others_masks():
    """Threads number their nodes by themselves. PyTorch refuses a recomputation that keeps other tensors, as one does
    that finds no mask."""
    model, x, losses = Masked(), torch.randn(4, 16, 8), {}
    convert(model, target_modules=["layer"], ratio=0.5, min_rows=1, **PACKED)
    model(x, attention_mask=half_real(True)).square().sum().backward()

    def run(first):
        losses[first] = model(x, attention_mask=half_real(first)).square().sum()

    for first in (True, False):
        thread = threading.Thread(target=run, args=(first,))
        thread.start()
        thread.join()
    for loss in losses.values():
        with pytest.raises(CheckpointError, match="different number of tensors"):
            loss.backward()
