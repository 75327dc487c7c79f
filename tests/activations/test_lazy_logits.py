"""Unread logits that are looked at: by hooks, without gradients, under another autocast, by a copy."""

import pytest
import torch
from helpers import gradients, tiny_model, token_ids
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from rmm_linear import convert, revert
from rmm_linear.activations.lazy_logits import LazyLogits


def made(whole):
    model = tiny_model("llama", dropout=0.0).train()
    model.config.use_cache = False
    if whole:
        convert(model, operations="logits")
        model.lm_head.rmm_chunk = 7
    return model


def both(run):
    """What ``run`` returns for the exact model and for the converted one, and their gradients."""
    models = made(False), made(True)
    results = [run(model) for model in models]
    return results, [gradients(model) for model in models]


def assert_same(found, room=0.0):
    first, second = found
    assert first.keys() == second.keys()
    for name, gradient in first.items():
        assert (second[name] - gradient).norm() <= room * gradient.norm(), name


WRITES = {
    "after a view": lambda z: (z.view(-1, z.shape[-1]), z[..., 5:].fill_(-1e4))[0],
    "after a cut": lambda z: (z[:, :-1, :].flatten(0, 1), z.div_(2.0))[0],
    "into a view": lambda z: (z[:, :-1, :].mul_(0.5), z.view(-1, z.shape[-1]))[1],
    "into a copy": lambda z: (z[:, :-1, :].contiguous().mul_(0.5), z.view(-1, z.shape[-1]))[1],
    "after a product": lambda z: ((2 * z).view(-1, z.shape[-1]), z.zero_())[0],
}


@pytest.mark.parametrize("way", WRITES)
def test_what_is_written_is_seen_by_views_alone(way):
    def run(model):
        found = WRITES[way](model(input_ids=token_ids()).logits)
        loss = F.cross_entropy(found, token_ids().flatten().repeat(2)[: len(found)] % 5)
        loss.backward()
        return loss.detach()

    (first, second), found = both(run)
    assert torch.allclose(first, second, rtol=1e-5)
    assert_same(found, 1e-5)


def looked_at(logits):
    """What FSDP2 and DDP ask of outputs."""
    return logits.requires_grad, logits._base is None, logits.grad_fn, logits.clone()


def test_a_look_reads_nothing_and_the_loss_neither(reads):
    model = made(True)
    output = model(input_ids=token_ids(), labels=token_ids())
    requires_grad, is_no_view, graph, copy = looked_at(output.logits)
    output.logits.register_hook(lambda gradient: pytest.fail("the loss does not go through the logits"))
    assert requires_grad
    assert is_no_view
    assert graph is None
    assert isinstance(copy, LazyLogits)
    output.loss.backward()
    assert not reads
    assert torch.equal(copy * 1, made(False)(input_ids=token_ids()).logits)


def test_logits_and_losses_after_a_revert_are_those_of_before():
    def run(model):
        logits = model(input_ids=token_ids()).logits
        if isinstance(logits, LazyLogits):
            revert(model)
        loss = own_loss(logits)
        loss.backward()
        return loss.detach(), logits * 1

    (exact, plain), gradients_of = both(run)
    torch.testing.assert_close(plain[0], exact[0])
    assert torch.equal(plain[1], exact[1])
    assert_same(gradients_of, 1e-5)  # sums of the loss's gradients in another order


def own_loss(logits):
    return F.cross_entropy(logits[..., :-1, :].reshape(-1, 64), token_ids()[:, 1:].reshape(-1))


def test_hooks_wait_until_the_logits_are_read_and_make_a_loss_read_them():
    """Their gradient, changed by one of them; one was removed before, one after the logits were read."""

    def run(model):
        logits, seen = model(input_ids=token_ids()).logits, []
        early = logits.register_hook(lambda gradient: seen.append("early"))
        logits.register_hook(lambda gradient: seen.append(gradient.norm().item()))
        late = logits.register_hook(lambda gradient: seen.append("late"))
        logits.register_hook(lambda gradient: 2 * gradient)
        early.remove()
        loss = own_loss(logits)
        late.remove()
        loss.backward()
        return seen

    (expected, found), both_gradients = both(run)
    assert found == expected
    assert len(found) == 1
    assert_same(both_gradients)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_read_without_gradients_leaves_them_to_others(mode):
    """As accuracy is computed before a loss of one's own."""

    def run(model):
        logits = model(input_ids=token_ids()).logits
        with mode():
            right = (logits.argmax(-1) == token_ids()).sum().item()
        own_loss(logits).backward()
        return right

    results, both_gradients = both(run)
    assert results[0] == results[1]
    assert_same(both_gradients)


def test_a_step_without_gradients_has_none():
    logits = made(True)(input_ids=token_ids()).logits
    with torch.no_grad():
        half = logits * 0.5
    assert isinstance(half, LazyLogits)
    assert not half.requires_grad
    assert not F.cross_entropy(half.view(-1, 64), token_ids().view(-1)).requires_grad
    assert not (half + 1).requires_grad
    assert (logits + 1).requires_grad


@pytest.mark.parametrize("inside", [True, False], ids=["model under autocast", "read under autocast"])
def test_logits_are_computed_under_the_autocast_of_their_forward_pass(inside):
    def run(model):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
            logits = model(input_ids=token_ids()).logits
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not inside):
            return torch.stack(tuple(logits)).detach()

    (expected, found), _ = both(run)
    assert found.dtype == expected.dtype == (torch.bfloat16 if inside else torch.float32)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("inside", [True, False], ids=["loss under autocast", "loss after it"])
def test_a_loss_has_the_dtype_that_autocast_gives_it(inside):
    def run(model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(input_ids=token_ids()).logits
            loss = own_loss(logits) if inside else None
        loss = own_loss(logits) if loss is None else loss
        loss.backward()
        return loss.detach()

    (expected, found), both_gradients = both(run)
    half = torch.finfo(torch.bfloat16).eps
    assert found.dtype == expected.dtype == (torch.float32 if inside else torch.bfloat16)
    assert abs(found - expected) <= 2 * half * expected
    assert_same(both_gradients, room=8 * half)


def test_backward_hooks_of_the_layer_have_its_exact_gradient():
    def run(model):
        seen = []
        model.lm_head.register_full_backward_hook(lambda module, inputs, outputs: seen.append(outputs[0].clone()))
        model(input_ids=token_ids(), labels=token_ids()).loss.backward()
        return seen[0]

    results, both_gradients = both(run)
    assert torch.equal(*results)
    assert_same(both_gradients)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("part", ["logits", "loss"])
def test_a_checkpoint_around_the_whole_model(part, reentrant):
    def run(model):
        def inner(embedded):
            output = model(inputs_embeds=embedded, labels=token_ids())
            return getattr(output, part)

        found = checkpoint(inner, model.model.embed_tokens(token_ids()), use_reentrant=reentrant)
        loss = found if part == "loss" else own_loss(found)
        loss.backward()
        return loss.item()

    results, both_gradients = both(run)
    assert results[1] == pytest.approx(results[0], rel=1e-6)
    assert_same(both_gradients, room=1e-5)
