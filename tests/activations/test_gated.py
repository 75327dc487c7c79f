"""A packed gated MLP: output and random numbers of the exact one, unbiased gradients, bytes of the formula."""

import copy
import pickle

import pytest
import torch
from cases import checkpoints
from gated_helpers import HIDDEN, MAKERS, WIDTH, made, packed, randn
from helpers import bytes_kept
from statistical import assert_unbiased
from torch import nn
from torch.utils.checkpoint import checkpoint

from rmm_linear import RMMConfig
from rmm_linear.activations.base import SavingCall
from rmm_linear.activations.gated import GatedFunction, activation_bits

every_model = pytest.mark.parametrize("name", MAKERS)


def run(model, x, seed=2, **inputs):
    """Output, gradients by name, and the state of the generator after a step."""
    x = x.detach().requires_grad_()
    model.zero_grad()
    torch.manual_seed(seed)
    output = model(x, **inputs)
    state = torch.get_rng_state()
    (output * randn(*output.shape, seed=5)).float().sum().backward()
    return (
        output.detach(),
        {"x": x.grad, **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}},
        state,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@every_model
def test_the_output_is_that_of_the_exact_module_to_the_bit(name, dtype):
    x = randn(2, 5, WIDTH, dtype=dtype)
    exact, found = made(name, dtype), packed(made(name, dtype))
    for train in (True, False):
        expected, gradients, _ = run(exact.train(train), x)
        output, others, _ = run(found.train(train), x)
        assert torch.equal(output, expected)
        assert {key: value.dtype for key, value in others.items()} == {k: v.dtype for k, v in gradients.items()}
        down = ("mlp.down_proj.weight", "mlp.wo.weight", "mlp.w2.weight")
        for key in others if not train else [key for key in down if key in others]:
            assert torch.equal(others[key], gradients[key])  # in training, that of the layer after the product
    with torch.no_grad():
        torch.manual_seed(2)
        output = found.train()(x)
        torch.manual_seed(2)
        assert torch.equal(output, exact.train()(x))


@every_model
def test_gradients_are_unbiased(name):
    x, model = randn(2, 5, WIDTH, dtype=torch.float64), packed(made(name, torch.float64).eval())
    exact = run(model, x)[1]
    for module in (model, *(m for m in model.modules() if not isinstance(m, nn.Dropout))):
        module.training = True  # dropout stays off
    assert_unbiased(lambda seed: run(model, x, seed)[1], exact, draws=60, widest=0.02)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_bytes_are_the_formula(bits, monkeypatch):
    monkeypatch.setattr("rmm_linear.activations.gated.activation_bits", lambda config: bits)
    model, x = packed(made("llama").requires_grad_(False)), randn(2, 32, WIDTH).requires_grad_()
    # Two seeds; and 64 rows are multiples of 16 bytes. The linears' weights are frozen, so they save no input.
    expected = 16 + 2 * 64 * (-(-HIDDEN * bits // 8) + 4 * 2)
    assert bytes_kept(model, x) == expected
    assert bytes_kept(made("llama").requires_grad_(False), x) == 3 * 64 * HIDDEN * 4


def test_only_what_is_needed_is_kept():
    model, x = packed(made("llama").requires_grad_(False)), randn(2, 32, WIDTH)
    assert bytes_kept(model, x) == 0
    half = 64 * (HIDDEN // 2 + 4 * 2)
    for name, other in (("gate_proj", "up_proj"), ("up_proj", "gate_proj")):
        model.requires_grad_(False)
        model.mlp.get_submodule(name).requires_grad_()
        assert bytes_kept(model, x) == 16 + half + x.nbytes
        gradients = run(model, x)[1]
        assert f"mlp.{name}.weight" in gradients
        assert f"mlp.{other}.weight" not in gradients
    assert bytes_kept(model.eval(), x.requires_grad_()) > 16 + half + x.nbytes


def test_padding_is_not_stored_and_has_no_gradient():
    mask = torch.ones(2, 32, dtype=torch.int64)
    mask[1, 10:] = 0
    model, x = packed(made("llama")), randn(2, 32, WIDTH).requires_grad_()
    weights = mask.unsqueeze(-1)
    torch.manual_seed(2)
    (gradient,) = torch.autograd.grad((model(x, attention_mask=mask) * weights).square().sum(), x)
    assert not gradient[1, 10:].any()
    exact = torch.autograd.grad((made("llama")(x) * weights).square().sum(), x)[0]
    assert (gradient - exact).norm() < 0.3 * exact.norm()  # 4 bits
    with pytest.raises(RuntimeError, match="Padding must not reach the loss, but masked tokens of mlp"):
        packed(made("llama"))(x, attention_mask=mask).square().sum().backward()


@checkpoints
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_checkpoints_keep_output_and_random_numbers(name, reentrant):
    model, x = packed(made(name)), randn(2, 5, WIDTH)
    exact = run(made(name), x)

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = model.mlp

        def forward(self, x):
            return checkpoint(model, x, use_reentrant=reentrant)

    output, gradients, _ = run(Checkpointed(), x)
    assert torch.equal(output, exact[0])
    for key, expected in exact[1].items():
        # With other dropout masks or another seed's codes, the gradient would be far off.
        assert (gradients[key] - expected).norm() < 0.3 * expected.norm()


def test_it_compiles_without_a_break_for_any_length():
    model = packed(made("llama"), context=False)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (5, 9):
        x = randn(2, length, WIDTH)
        expected, exact, _ = run(made("llama"), x)
        (output, first, _), (_, second, _) = run(compiled, x, 1), run(compiled, x, 2)
        assert torch.equal(output, expected)
        assert not torch.equal(first["x"], second["x"])
        assert (first["x"] - exact["x"]).norm() < 0.3 * exact["x"].norm()


@pytest.mark.parametrize("name", ["llama", "gemma", "t5"])
def test_autocast_casts_as_in_the_exact_module(name):
    x, results = randn(2, 5, WIDTH), []
    for model in (made(name), packed(made(name))):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            results.append(run(model, x))
    assert torch.equal(results[0][0], results[1][0])
    for key, exact in results[0][1].items():
        assert results[1][1][key].dtype == exact.dtype
        assert (results[1][1][key] - exact).norm() < 0.3 * exact.norm()


def test_an_activation_in_place_is_packed_before_it_is_overwritten():
    a, b, y = (randn(3, 64, seed=seed).requires_grad_() for seed in range(3))
    gradients = []
    for act in (nn.ReLU(inplace=True), nn.ReLU()):
        gated = GatedFunction.apply(a * 1, b, act, "relu", 8, SavingCall(3))
        gradients.append(torch.autograd.grad(gated, (a, b), y))
    assert all(map(torch.equal, *gradients))
    exact = torch.autograd.grad(torch.relu(a) * b, (a, b), y)
    assert all((one - other).norm() < 0.02 * other.norm() for one, other in zip(gradients[0], exact, strict=True))


def test_no_rows_and_one_row():
    for shape in ((0, WIDTH), (WIDTH,), (2, 0, WIDTH)):
        x = randn(*shape)
        found, expected = run(packed(made("llama")), x), run(made("llama"), x)
        assert torch.equal(found[0], expected[0])
        assert found[1]["x"].shape == shape


def test_copies_and_pickles_are_packed():
    model, x = packed(made("t5")), randn(2, 5, WIDTH)
    expected = run(model, x)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(copied.mlp) is type(model.mlp)
        found = run(copied, x)
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1]["x"], expected[1]["x"])


def test_double_backward_is_refused():
    x = randn(2, 5, WIDTH).requires_grad_()
    with pytest.raises(RuntimeError, match="a packed gated MLP does not support double backward"):
        torch.autograd.grad(packed(made("llama"))(x).sum(), x, create_graph=True)


def test_another_module_is_refused():
    model = made("experts")
    model.mlp.act = nn.Mish()
    with pytest.raises(ValueError, match="is no gated MLP"):
        packed(model)


@pytest.mark.parametrize(("given", "taken"), [(2, 2), (4, 4), (8, 8), (1, 2), ("auto", 4)])
def test_the_width_is_that_of_the_configuration(given, taken):
    assert activation_bits(RMMConfig(activation_bits=given)) == taken


class Scaled(MAKERS["llama"]().__class__):
    def forward(self, x, scale=1.0):
        return super().forward(x if scale == 1 else scale * x)


@pytest.mark.parametrize("what", ["forward", "backward", "argument"])
def test_a_hook_that_changes_the_activation_or_another_argument_leaves_the_module_exact(what):
    found = []
    for is_packed in (True, False):
        model = made("llama").train()
        if what == "argument":
            model.mlp.__class__ = Scaled
        if is_packed:
            packed(model)
        if what == "forward":
            model.mlp.act_fn.register_forward_hook(lambda module, args, output: 2 * output)
        elif what == "backward":
            model.mlp.act_fn.register_full_backward_hook(lambda module, given, out: (2 * given[0],))
        x = randn(2, 9, WIDTH).requires_grad_()
        model.mlp(x, *(3.0,) if what == "argument" else ()).square().sum().backward()
        found.append([x.grad, *(p.grad for p in model.parameters())])
    assert all(map(torch.equal, *found))


def test_a_hook_that_looks_on_leaves_the_module_packed():
    kept, seen = [], []
    for is_packed in (True, False):
        model = made("llama").train()
        if is_packed:
            packed(model)
        model.mlp.act_fn.register_forward_hook(lambda module, args, output: seen.append(output))
        kept.append(bytes_kept(model, randn(2, 9, WIDTH).requires_grad_()))
    assert seen
    assert kept[0] < kept[1]
