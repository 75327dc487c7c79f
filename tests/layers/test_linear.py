"""RMMLinear: nn.Linear to everybody but autograd."""

import pytest
import torch
from cases import CONFIG
from module_cases import converted_model
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from rmm_linear import RMMLinear, convert
from rmm_linear.memory import track_saved


def layer(config=CONFIG, **kwargs):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return RMMLinear(6, 4, config=config, **kwargs)


def tokens(count=40, **kwargs):
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(1), **kwargs)


# Modes


def test_eval_gives_gradients_by_input_and_bias():
    """Saliency maps ask for these two in eval mode, with weights that could train."""
    module, x = layer().eval(), tokens().requires_grad_()
    by_input, by_bias = torch.autograd.grad(module(x).square().sum(), (x, module.bias))
    exact = torch.autograd.grad(module.to_linear()(x).square().sum(), (x, module.bias))
    assert torch.allclose(by_input, exact[0], rtol=1e-5, atol=1e-6)
    assert torch.allclose(by_bias, exact[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "ask",
    [
        lambda module, x: module(x).sum().backward(),
        lambda module, x: torch.autograd.grad(module(x).sum(), module.weight),
        lambda module, x: module(x).sum().backward(inputs=[module.weight]),
    ],
)
def test_eval_refuses_the_gradient_by_the_weight(ask):
    with pytest.raises(RuntimeError, match=r"eval mode saves nothing. Call model.train\(\)"):
        ask(layer().eval(), tokens().requires_grad_())


# Conversion of one layer


def test_from_linear_shares_everything():
    linear = nn.Linear(6, 4).eval()
    calls = []
    linear.register_forward_hook(lambda *_: calls.append(1))
    linear.weight.requires_grad_(False)
    module = RMMLinear.from_linear(linear, CONFIG)
    assert type(module) is RMMLinear
    assert module.weight is linear.weight
    assert module.bias is linear.bias
    assert not module.training
    assert not module.weight.requires_grad
    assert torch.equal(module(tokens()), linear(tokens()))
    assert len(calls) == 2


def test_to_linear_is_the_way_back():
    linear = nn.Linear(6, 4, bias=False)
    back = RMMLinear.from_linear(linear, CONFIG).to_linear()
    assert type(back) is nn.Linear
    assert vars(back).keys() == vars(linear).keys()
    assert back.weight is linear.weight
    assert back.bias is None
    assert repr(back) == repr(linear)


def test_from_linear_leaves_the_original_as_it_was():
    linear = nn.Linear(6, 4)
    before = (type(linear), set(vars(linear)), repr(linear))
    module = RMMLinear.from_linear(linear, CONFIG)
    module.register_forward_hook(lambda *_: None)
    module.register_parameter("extra", nn.Parameter(torch.ones(1)))
    assert (type(linear), set(vars(linear)), repr(linear)) == before
    assert not linear._forward_hooks
    assert list(dict(linear.named_parameters())) == ["weight", "bias"]


@pytest.mark.parametrize("module", [nn.Conv1d(2, 2, 1), NonDynamicallyQuantizableLinear(2, 2), RMMLinear(2, 2)])
def test_from_linear_takes_exactly_nn_linear(module):
    with pytest.raises(TypeError, match=f"got {type(module).__name__}"):
        RMMLinear.from_linear(module)


# The rest of being a module


def test_device_dtype_and_bias_reach_nn_linear():
    module = RMMLinear(6, 4, bias=False, device="meta", dtype=torch.bfloat16, config=CONFIG)
    assert (module.weight.device.type, module.weight.dtype, module.bias) == ("meta", torch.bfloat16, None)


def test_repr_shows_the_sizes_and_the_sketch():
    for module, sizes in (
        (layer(), "in_features=6, out_features=4"),
        (converted_model("Conv1D").module, "nf=9, nx=96"),
    ):
        assert sizes in repr(module)
        assert "kind=countsketch, ratio=0.25" in repr(module)


def test_tied_weights_collect_the_gradients_of_both_uses():
    first, second = layer(), layer()
    second.weight = first.weight
    torch.manual_seed(2)
    first(tokens()).sum().backward()
    alone = first.weight.grad.clone()
    first.weight.grad = None
    torch.manual_seed(2)
    (first(tokens()).sum() + second(tokens()).sum()).backward()
    rest = first.weight.grad - alone
    exact = tokens().sum(0).expand(4, 6)
    assert rest.abs().sum() > 0
    assert not torch.allclose(rest, alone)  # another S
    assert (rest * exact).sum() != 0


@pytest.mark.parametrize("autocast", [False, True])
def test_an_exact_layer_that_reads_part_of_a_tensor_keeps_that_part_alone(autocast):
    """As a classifier reads the first token of each sequence."""
    torch.manual_seed(0)
    hidden, exact = torch.randn(8, 100, 32), nn.Linear(32, 4)
    layer = RMMLinear.from_linear(exact)
    with torch.autocast("cpu", enabled=autocast):
        with track_saved(layer) as ledger:
            output = layer(hidden[:, 0])
        expected = exact(hidden[:, 0])
    assert torch.equal(output, expected)
    assert ledger.total == 8 * 32 * (2 if autocast else 4)
    found, stated = (torch.autograd.grad(y.float().square().sum(), exact.weight)[0] for y in (output, expected))
    near = 8 * 2**-8 if autocast else 8 * 2**-23  # sums of 8 terms
    torch.testing.assert_close(found, stated, rtol=0, atol=near * float(stated.abs().max()))


@pytest.mark.parametrize("amount", [{"ratio": 0.25}, {"memory": 0.1}], ids=str)
def test_compilers_may_trace_numbers_as_variables(amount):
    """As dynamic=True does with every number that they find, a configuration's too."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(64, 4)).train()
    convert(model, min_rows=1, operations="linear", target_modules=["0"], **amount)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    for count in (40, 30):
        x = torch.randn(3, count, 64)
        compiled(x).sum().backward()
        assert model[0].weight.grad.isfinite().all()
    torch._dynamo.reset()
