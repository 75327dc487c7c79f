"""Packed attention as a function; one mask of dropout for a call, whatever runs again; modules that call PyTorch's."""

import copy

import pytest
import torch
from attention_helpers import relative, tensors
from compile_helpers import Graphs
from torch import nn
from torch.nn import functional as F

from rmm_linear import convert
from rmm_linear.activations.attention import scaled_dot_product_attention

# Relative squared error of gradients at 4 bits: an element's is 1/10.4² of its size, in each of up to five factors; at
# 8 bits, 1/177² in each of three.
NOISE, NOISE_8 = 5 / 10.4**2, 3 / 177**2
TOKENS, P = 16, 0.5


def inputs():
    return [tensor.requires_grad_() for tensor in tensors(2, 4, 4, 12, 12, 16, 16, torch.float32)[:3]]


def run(attention, given, **named):
    """Output, gradients and the next random number."""
    torch.manual_seed(3)
    output = attention(*given, **named)
    state = torch.get_rng_state()
    gradients = torch.autograd.grad(output.float().square().sum(), given)
    return output.detach(), gradients, state


def test_dropout_is_that_of_pytorch_but_for_the_order_of_sums():
    """Sums of 16 products. The function draws one number more, its seed, afterwards."""
    given = inputs()

    def before_a_seed(*args, **named):
        output = F.scaled_dot_product_attention(*args, **named)
        torch.randint(2**63 - 1, ())
        return output

    output, gradients, state = run(scaled_dot_product_attention, given, dropout_p=0.3)
    exact, exact_gradients, exact_state = run(before_a_seed, given, dropout_p=0.3)
    assert (output - exact).abs().max() < 16 * torch.finfo(torch.float32).eps * exact.abs().max()
    assert torch.equal(state, exact_state)
    assert 0 < relative(gradients, exact_gradients) < NOISE


@pytest.mark.parametrize("which", [0, 1, 2])
def test_one_input_that_needs_a_gradient(which):
    given = [tensor.detach() for tensor in inputs()]
    given[which].requires_grad_()
    found, exact = (
        torch.autograd.grad(function(*given).square().sum(), given[which])
        for function in (scaled_dot_product_attention, F.scaled_dot_product_attention)
    )
    assert 0 < relative(found, exact) < NOISE


def test_a_mask_that_needs_a_gradient_leaves_the_call_exact():
    given, mask = inputs(), torch.zeros(12, 12, requires_grad=True)
    found, exact = (
        torch.autograd.grad(function(*given, mask).square().sum(), [*given, mask])
        for function in (scaled_dot_product_attention, F.scaled_dot_product_attention)
    )
    assert all(torch.equal(*pair) for pair in zip(found, exact, strict=True))


@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 3, 3), (2, 0, 3), (2, 3, 0)])
def test_without_sequences_or_tokens_it_is_exact(batch, queries, keys):
    given = [tensor.requires_grad_() for tensor in tensors(batch, 4, 4, queries, keys, 16, 16, torch.float32)[:3]]
    functions = scaled_dot_product_attention, F.scaled_dot_product_attention
    found, exact = (run(function, given, dropout_p=0.3) for function in functions)
    assert all(torch.equal(*pair) for pair in zip((found[0], *found[1]), (exact[0], *exact[1]), strict=True))


# One call has one mask and one draw


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


# Modules


class Decoder(nn.TransformerDecoderLayer):
    def __init__(self):
        super().__init__(32, 4, 64, 0.0, batch_first=True)

    def forward(self, x):
        return super().forward(x, x[:, :5].exp(), tgt_is_causal=True, tgt_mask=torch.ones(6, 6).triu(1).bool())


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.TransformerEncoderLayer(32, 4, 64, 0.1, batch_first=True),
        lambda: nn.TransformerEncoderLayer(32, 4, 64, 0.0),
        Decoder,
    ],
    ids=["encoder", "sequence first", "decoder"],
)
def test_layers_of_pytorch(make):
    model = nn.Sequential(make()).train()
    exact = copy.deepcopy(model)
    report = convert(model, operations="attention")
    x = torch.randn(4, 6, 32, requires_grad=True)

    def gradients(of):
        torch.manual_seed(2)
        output = of(x)
        return output, torch.autograd.grad(output.square().sum(), [x, *of.parameters()])

    (output, found), (wanted, exact_gradients) = gradients(model), gradients(exact)
    assert torch.equal(output, wanted)
    assert 0 < relative(found, exact_gradients) < NOISE
    reasons = [model.get_submodule(name).rmm_exact for name in report.packed]
    assert reasons == [None] * (2 if make is Decoder else 1)
    assert torch.equal(model.eval()(x), exact.eval()(x))
