"""One call keeps one mask and one draw: checkpoints of all kinds, and compiled code."""

import functools

import pytest
import torch
from attention_helpers import relative
from cases import checkpoints
from compile_helpers import Graphs
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from rmm_linear.activations.attention import scaled_dot_product_attention

TOKENS, P = 16, 0.5
# At 8 bits an element's error is 1/177² of its size, in each of three factors.
NOISE_8 = 3 / 177**2


def attention(q, k, v):
    return scaled_dot_product_attention(q * 1.0, k * 1.0, v * 1.0, dropout_p=P, bits=8)


def given():
    generator = torch.Generator().manual_seed(4)
    q, k = (torch.randn(2, 4, TOKENS, 8, generator=generator).requires_grad_() for _ in range(2))
    return q, k, torch.eye(TOKENS).expand(2, 4, TOKENS, TOKENS).clone().requires_grad_()


def check_mask(function):
    """With the identity as values, the output is P ∘ D, so it says what the gradient of the values must be."""
    q, k, v = given()
    torch.manual_seed(6)
    output = function(q, k, v)
    dropped = float((output == 0).float().mean())
    assert abs(dropped - P) < 4 * (P * (1 - P) / output.numel()) ** 0.5
    y = torch.randn(output.shape, generator=torch.Generator().manual_seed(7))
    output.backward(y)
    dq, dk, dv = (tensor.grad for tensor in (q, k, v))
    assert relative([dv], [output.detach().transpose(2, 3) @ y]) < NOISE_8
    assert min(float(dq.abs().max()), float(dk.abs().max())) > 0
    return [output.detach(), dq, dk, dv]


def saving(choose):
    def policy(context, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if choose(op) else CheckpointPolicy.PREFER_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, policy)


def ours(op):
    return op.namespace == "rmm_linear"


def test_a_gradient_has_the_mask_of_its_output():
    check_mask(attention)


@checkpoints
def test_a_checkpoint_has_the_mask_of_its_first_pass(reentrant):
    check_mask(lambda *tensors: checkpoint(attention, *tensors, use_reentrant=reentrant))


@checkpoints
def test_what_follows_it_in_a_checkpoint_has_its_random_numbers(reentrant):
    """The first pass of a reentrant checkpoint saves nothing, but must draw what the second does."""

    states = []

    def dropped(q, k, v):
        output = attention(q, k, v)
        states.append(torch.get_rng_state())
        return torch.nn.functional.dropout(output, P)

    checkpoint(dropped, *given(), use_reentrant=reentrant).sum().backward()
    assert len(states) == 2
    assert torch.equal(*states)


@pytest.mark.parametrize(
    "choose", [ours, lambda op: not ours(op), lambda op: False], ids=["ours", "all but ours", "nothing"]
)
def test_whatever_a_policy_saves(choose):
    """To the bit: seed and mask are drawn from a state of the generator that checkpoints restore."""
    selective = functools.partial(checkpoint, attention, use_reentrant=False, context_fn=saving(choose))
    found, plain = check_mask(selective), check_mask(attention)
    assert all(torch.equal(*pair) for pair in zip(found, plain, strict=True))


def test_compiled_code_has_one_mask_and_a_new_one_in_every_step():
    torch._dynamo.reset()
    graphs = Graphs()
    compiled = graphs.compile(attention)
    first = check_mask(compiled)
    torch.manual_seed(8)
    assert not torch.equal(compiled(*given()) == 0, first[0] == 0)
    makers = {f"rmm_linear.{name}.default": 1 for name in ("dropped_attention", "pack_mask", "pack_attention")}
    assert graphs.counts == [makers, {"rmm_linear.attention_backward.default": 1}]
    torch._dynamo.reset()
