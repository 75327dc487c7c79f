"""Selective checkpointing: whatever a policy saves and runs again, Z and its S are of one draw."""

import functools

import pytest
import torch
from cases import LINEAR, PACKED
from helpers import ALL_ARCHITECTURES, batch_of, checkpointed, gradients, loss_of, six_features, tiny_model
from statistical import assert_unbiased
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from rmm_linear import convert
from rmm_linear.sketches import KINDS


def saving(choose):
    """A policy that saves what the operators chosen return, and runs the others again."""

    def policy(context, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if choose(op) else CheckpointPolicy.PREFER_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, policy)


def ours(op):
    return op.namespace == "rmm_linear"


def run(model, context_fn=None):
    """Gradients of a step, the block in a checkpoint if there is a policy."""
    x, options = six_features(), {"use_reentrant": False, "context_fn": context_fn}
    block = functools.partial(checkpoint, model.block, **options) if context_fn else model.block
    model.forward = lambda x: model.head(model.dropout(block(x)))
    model.zero_grad()
    model(x).square().sum().backward()
    return {**gradients(model), "x": x.grad}


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_who_saves_the_sketch_has_the_gradients_of_a_step_without_checkpointing(kind, bits):
    """To the bit, with dropout: Z, codes, qparams, seeds and sampled rows are those of the forward pass."""
    model = checkpointed()
    convert(model, kind=kind, ratio=0.25, min_rows=1, bits=bits, **PACKED)
    found = []
    for context_fn in (None, saving(ours)):
        torch.manual_seed(3)
        found.append(run(model, context_fn))
    assert all(torch.equal(found[1][name], gradient) for name, gradient in found[0].items())


@pytest.mark.parametrize("choose", [lambda op: not ours(op), lambda op: False], ids=["all but the sketches", "nothing"])
@pytest.mark.parametrize("fields", [{"kind": "countsketch", "bits": 4}, {"kind": "wta", "bits": None}])
def test_who_makes_the_sketch_again_has_an_unbiased_gradient(fields, choose):
    """Z of one S with the rows of another would be noise, ten errors away."""
    model = checkpointed(dropout=0.0)
    exact = run(model)["block.0.weight"]
    convert(model, ratio=0.25, min_rows=1, **PACKED, **fields)
    torch.manual_seed(4)
    assert_unbiased(lambda _: run(model, saving(choose))["block.0.weight"], exact, draws=100, widest=0.1)


@pytest.mark.parametrize("architecture", ALL_ARCHITECTURES)
def test_architectures_that_save_their_sketches(architecture):
    """As transformers hands a policy on; with padding, and with siblings that share a sketch."""
    found = []
    for enabled in (False, True):
        model = tiny_model(architecture, dropout=0.1).train()
        # As checkpointing has it: a cache lays keys out otherwise, sums are made in another order, and where an element
        # lies on the edge of a step it has another code.
        model.config.use_cache = False
        report = convert(model, kind="countsketch", ratio=0.5, min_rows=8, bits=4, **PACKED)
        assert len(report.converted) > 5
        if enabled:
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": False, "context_fn": saving(ours)})
        torch.manual_seed(3)
        loss_of(model, architecture, batch_of(architecture)).backward()
        found.append(gradients(model))
    for name, gradient in found[0].items():
        if "EncDecAttention" in name:
            continue  # of the encoder's output, every checkpoint has a sketch of its own, and all blocks else one
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-4, atol=1e-6)


POLICIES = {
    "products": lambda op: op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default),
    "all": lambda op: True,
    "all but the sketches": lambda op: not ours(op),
}


@pytest.mark.parametrize("fields", [{}, {"ratio": 0.99}], ids=["default", "every row"])
@pytest.mark.parametrize("choose", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("architecture", ["roberta", "llama"])
def test_whatever_is_saved_what_is_exact_stays_so(architecture, choose, fields):
    """With padding, and while bits="auto" looks: a recomputation runs the operators that the forward pass ran.

    With a row for every token that counts, all gradients are exact.
    """
    plain = tiny_model(architecture, dropout=0.0, width=64).train()
    loss_of(plain, architecture, batch_of(architecture)).backward()
    exact = gradients(plain)
    model = tiny_model(architecture, dropout=0.0, width=64).train()
    sketched = {f"{name}.weight" for name in convert(model, min_rows=8, **LINEAR, **fields).converted}
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False, "context_fn": saving(choose)})
    for _ in range(6):
        model.zero_grad()
        loss_of(model, architecture, batch_of(architecture)).backward()
        found = gradients(model)
        for name in found.keys() - (sketched if not fields else set()):
            torch.testing.assert_close(found[name], exact[name], rtol=1e-4, atol=1e-6)
