"""Packed attention as a function, and in modules that call PyTorch's: outputs, what is saved, gradients, exceptions."""

import copy
import pickle

import pytest
import torch
from attention_helpers import relative, tensors
from helpers import bytes_kept
from torch import nn
from torch.nn import functional as F

from rmm_linear import RMMConfig
from rmm_linear.activations.attention import PackedAttentionCaller, calls_attention, scaled_dot_product_attention
from rmm_linear.activations.base import packed_class
from rmm_linear.context.model_context import ModelContext
from rmm_linear.packing import packed_bytes
from rmm_linear.sketches import TokenMask

# Relative squared error of gradients at 4 bits: an element's is 1/10.4² of its size, in each of up to five factors.
NOISE = 5 / 10.4**2
BOOL = torch.rand(2, 1, 12, 12, generator=torch.Generator().manual_seed(1)) > 0.3
CALLS = {
    "plain": {},
    "causal": {"is_causal": True},
    "bool": {"attn_mask": BOOL},
    "bool of all sequences": {"attn_mask": BOOL[0, 0]},
    "additive": {"attn_mask": torch.randn(1, 4, 12, 12, generator=torch.Generator().manual_seed(2))},
    "scale": {"scale": 0.4},
    "grouped": {"enable_gqa": True},
}


def inputs(dtype=torch.float32, kv_heads=4, tokens=12, width=16):
    made = tensors(2, 4, kv_heads, tokens, tokens, width, width, dtype)[:3]
    return [tensor.requires_grad_() for tensor in made]


def run(attention, given, **named):
    """Output, gradients and the next random number."""
    torch.manual_seed(3)
    output = attention(*given, **named)
    state = torch.get_rng_state()
    gradients = torch.autograd.grad(output.float().square().sum(), given)
    return output.detach(), gradients, state


def fitting(name, dtype):
    """The arguments of a call, an additive mask in the dtype of the queries."""
    named = dict(CALLS[name])
    mask = named.get("attn_mask")
    if mask is not None and mask.is_floating_point():
        named["attn_mask"] = mask.to(dtype)
    return named


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", CALLS)
def test_the_output_is_that_of_pytorch_to_the_bit(name, dtype):
    given, named = inputs(dtype, 2 if name == "grouped" else 4), fitting(name, dtype)
    output, gradients, _ = run(scaled_dot_product_attention, given, **named)
    exact, exact_gradients, _ = run(F.scaled_dot_product_attention, given, **named)
    assert torch.equal(output, exact)
    assert [one.dtype for one in gradients] == [dtype] * 3
    assert 0 < relative(gradients, exact_gradients) < NOISE


@pytest.mark.parametrize("name", ["plain", "causal", "bool"])
def test_dropout_is_that_of_pytorch_but_for_the_order_of_sums(name):
    """Sums of 16 products. The function draws one number more, its seed, afterwards."""
    given = inputs()

    def before_a_seed(*args, **named):
        output = F.scaled_dot_product_attention(*args, **named)
        torch.randint(2**63 - 1, ())
        return output

    output, gradients, state = run(scaled_dot_product_attention, given, dropout_p=0.3, **CALLS[name])
    exact, exact_gradients, exact_state = run(before_a_seed, given, dropout_p=0.3, **CALLS[name])
    assert (output - exact).abs().max() < 16 * torch.finfo(torch.float32).eps * exact.abs().max()
    assert torch.equal(state, exact_state)
    assert 0 < relative(gradients, exact_gradients) < NOISE


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("bits", [8, 4])
def test_saved_bytes_are_those_of_the_formula(bits, dropout):
    """Three packed matrices, three seeds at a multiple of 16, and one bit per score."""
    module = Function(bits, dropout)
    given = [nn.Parameter(tensor.detach()) for tensor in inputs(tokens=16)]
    expected = 3 * packed_bytes(2 * 16, 4 * 16, bits) + 32 + (2 * 4 * 16 * 16 // 8 if dropout else 0)
    assert bytes_kept(module, *given) == expected


class Function(nn.Module):
    def __init__(self, bits=4, dropout=0.0):
        super().__init__()
        self.named = {"bits": bits, "dropout_p": dropout}

    def forward(self, q, k, v):
        return scaled_dot_product_attention(q * 1.0, k * 1.0, v * 1.0, **self.named)


def test_nothing_of_queries_keys_values_and_output_is_saved():
    """PyTorch's own function saves all four."""
    for function, count in ((scaled_dot_product_attention, 0), (F.scaled_dot_product_attention, 4)):
        given, saved = [tensor * 1.0 for tensor in inputs()], set()

        def note(tensor, saved=saved):
            saved.add(tensor.data_ptr())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            output = function(*given)
        assert len(saved & {tensor.data_ptr() for tensor in (*given, output)}) == count


def test_no_grad_and_inputs_without_gradient_save_nothing():
    given = inputs()
    with torch.no_grad():
        assert torch.equal(scaled_dot_product_attention(*given), F.scaled_dot_product_attention(*given))
    plain = [tensor.detach() for tensor in given]
    assert scaled_dot_product_attention(*plain).grad_fn is None


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
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_without_sequences_or_tokens_it_is_exact(dropout, batch, queries, keys):
    given = [tensor.requires_grad_() for tensor in tensors(batch, 4, 4, queries, keys, 16, 16, torch.float32)[:3]]
    functions = scaled_dot_product_attention, F.scaled_dot_product_attention
    found, exact = (run(function, given, dropout_p=dropout) for function in functions)
    assert all(torch.equal(*pair) for pair in zip((found[0], *found[1]), (exact[0], *exact[1]), strict=True))


def test_autocast_computes_and_saves_in_its_dtype():
    given = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        output, gradients, _ = run(scaled_dot_product_attention, given)
        exact, exact_gradients, _ = run(F.scaled_dot_product_attention, given)
    assert output.dtype == torch.bfloat16
    assert torch.equal(output, exact)
    assert [one.dtype for one in gradients] == [torch.float32] * 3
    assert 0 < relative(gradients, exact_gradients) < NOISE


def test_double_backward_is_refused():
    given = inputs()
    with pytest.raises(RuntimeError, match="a packed attention does not support double backward"):
        torch.autograd.grad(scaled_dot_product_attention(*given).sum(), given, create_graph=True)


def test_two_bits_are_refused_with_the_reason():
    with pytest.raises(ValueError, match=r"attention_bits must be 8 or 4, got 2\. Fewer bits bias the gradient"):
        scaled_dot_product_attention(*inputs(), bits=2)


# Modules


class Own(nn.Module):
    """A module with attention of its own, as many have."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(32, 96)

    def forward(self, x):
        q, k, v = self.project(x).view(*x.shape[:2], 3, 4, 8).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def converted(model):
    modules = [module for module in model.modules() if calls_attention(module)]
    context = ModelContext([f"m{i}" for i in range(len(modules))], RMMConfig())
    for i, module in enumerate(modules):
        module.__class__ = packed_class(PackedAttentionCaller, type(module))
        module._set_up(RMMConfig(), context, i)
    context.attach(model)
    return modules


MODELS = {
    "own": Own,
    "encoder": lambda: nn.TransformerEncoderLayer(32, 4, 64, 0.1, batch_first=True),
    "sequence first": lambda: nn.TransformerEncoderLayer(32, 4, 64, 0.0),
    "decoder": lambda: nn.Sequential(Decoder()),
}


class Decoder(nn.TransformerDecoderLayer):
    def __init__(self):
        super().__init__(32, 4, 64, 0.0, batch_first=True)

    def forward(self, x):
        return super().forward(x, x[:, :5].exp(), tgt_is_causal=True, tgt_mask=torch.ones(6, 6).triu(1).bool())


@pytest.mark.parametrize("name", MODELS)
def test_modules_of_pytorch_and_of_users(name):
    model = MODELS[name]().train()
    exact = copy.deepcopy(model)
    modules = converted(model)
    assert len(modules) == (2 if name == "decoder" else 1)
    x = torch.randn(4, 6, 32, requires_grad=True)

    def gradients(of):
        torch.manual_seed(2)
        output = of(x)
        return output, torch.autograd.grad(output.square().sum(), [x, *of.parameters()])

    (output, found), (wanted, exact_gradients) = gradients(model), gradients(exact)
    assert torch.equal(output, wanted)
    assert 0 < relative(found, exact_gradients) < NOISE
    assert [module.rmm_exact for module in modules] == [None] * len(modules)
    model.eval()
    exact.eval()
    assert torch.equal(model(x), exact(x))
    for module in modules:
        module._tear_down()
        module.__class__ = type(module).__bases__[1]
    model.train()
    exact.train()
    assert all(torch.equal(*pair) for pair in zip(gradients(model)[1], gradients(exact)[1], strict=True))


def test_probabilities_that_are_asked_for_are_exact():
    """nn.MultiheadAttention makes them itself, so it does not call the function."""
    model = nn.MultiheadAttention(32, 4)
    exact = copy.deepcopy(model)
    converted(model)
    x = torch.randn(5, 2, 32, requires_grad=True)
    found, wanted = (
        torch.autograd.grad(one(x, x, x, need_weights=True)[0].square().sum(), x) for one in (model, exact)
    )
    assert torch.equal(*found, *wanted)


def test_a_converted_module_can_be_copied_and_pickled():
    model = nn.MultiheadAttention(32, 4)
    converted(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other) is type(model)
        assert other.rmm_exact is None
        x = torch.randn(2, 6, 32, requires_grad=True)
        assert torch.equal(other(x, x, x, need_weights=False)[0], model(x, x, x, need_weights=False)[0])


@pytest.mark.parametrize("seen", [True, False])
def test_padding_leaves_what_is_saved(seen, monkeypatch):
    """Queries of padding leave always, keys and values only where a mask hides them."""
    valid = torch.arange(12) < torch.tensor([[12], [5]])
    mask = None if seen else valid.view(2, 1, 1, 12).expand(2, 1, 12, 12)

    class Masked(nn.Module):
        def forward(self, x):
            heads = (x * 1.0).view(2, 12, 4, 16).transpose(1, 2)
            return F.scaled_dot_product_attention(heads, heads, heads, mask).transpose(1, 2).flatten(2)

    model = Masked()
    (module,) = converted(model)
    call = module._packed_call
    tokens = TokenMask.of(valid.flatten())
    packed = type(call((2, 12), torch.device("cpu")))
    monkeypatch.setattr(
        type(module), "_packed_call", lambda self, shape, device: packed(5, tokens, self._note_backward)
    )
    x = nn.Parameter(torch.randn(2, 12, 64))
    count = (17, 24, 24) if seen else (17, 17, 17)
    sizes = [(rows * 32 + 15) // 16 * 16 + (rows * 4 + 15) // 16 * 16 for rows in count]
    index = 24 * 8  # saved once, as a part of the order of all tokens
    assert bytes_kept(model, x) == 32 + sum(sizes) + index + (0 if seen else 24)
    output = model(x)
    grad = torch.autograd.grad(output, x, torch.ones_like(output) * valid.unsqueeze(2))[0]
    exact = torch.autograd.grad(Masked()(x), x, torch.ones_like(output) * valid.unsqueeze(2))[0]
    assert (grad[~valid] == 0).all() == (not seen)
    assert 0 < relative([grad], [exact]) < NOISE
    module.rmm_mask_checked = False
    loss = model(x).sum()
    with pytest.raises(RuntimeError, match="masked tokens of m0 carry a gradient"):
        loss.backward()
