"""RMMLinear: nn.Linear to everybody but autograd."""

import copy
import pickle

import pytest
import torch
from cases import CONFIG
from helpers import SEED_BYTES, bytes_kept, seeds_of
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from rmm_linear import RMMLinear
from rmm_linear.memory import track_saved


def layer(config=CONFIG, **kwargs):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return RMMLinear(6, 4, config=config, **kwargs)


def tokens(count=40, **kwargs):
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(1), **kwargs)


# Modes


def test_training_keeps_rows_and_seed():
    assert bytes_kept(layer(), tokens()) == 10 * 6 * 4 + SEED_BYTES


def test_eval_keeps_nothing_of_the_input():
    assert bytes_kept(layer().eval(), tokens()) == 0
    assert bytes_kept(layer().eval(), tokens().requires_grad_()) == 0  # the weight alone, a parameter


@pytest.mark.parametrize("training", [True, False])
def test_frozen_weight_keeps_nothing_of_the_input(training):
    module = layer().train(training)
    module.weight.requires_grad_(False)
    assert bytes_kept(module, tokens()) == 0
    assert bytes_kept(module, tokens().requires_grad_()) == 0


def test_weight_can_be_frozen_and_trained_again():
    module = layer()
    for trains in (True, False, True):
        module.weight.requires_grad_(trains)
        module.weight.grad = None
        module(tokens()).sum().backward()
        assert (module.weight.grad is not None and bool(module.weight.grad.any())) is trains


@pytest.mark.parametrize("training", [True, False])
def test_output_is_that_of_nn_linear_to_the_bit(training):
    module = layer().train(training)
    x = tokens().view(4, 10, 6)
    assert torch.equal(module(x), module.to_linear()(x))


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


def test_eval_with_backward_by_input_alone():
    module, x = layer().eval(), tokens().requires_grad_()
    module(x).sum().backward(inputs=[x])
    assert torch.allclose(x.grad, module.weight.detach().sum(0).expand(40, 6), atol=1e-6)
    assert module.weight.grad is None


# Seeds


def test_same_seed_same_run_without_any_other_randomness():
    """Seeded again in the same process, a layer by itself repeats its sketches."""
    runs = []
    for _ in range(2):
        torch.manual_seed(5)
        module = layer()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(4):
            optimizer.zero_grad()
            module(tokens()).square().mean().backward()
            optimizer.step()
        runs.append(module.weight.detach().clone())
    assert torch.equal(*runs)


def test_every_step_and_every_layer_has_its_own_sketch():
    layers = nn.Sequential(layer(), RMMLinear(4, 6, config=CONFIG), layer())
    seeds = seeds_of(lambda: [layers(tokens()) for _ in range(3)])
    assert len(set(seeds)) == len(seeds) == 9


def test_generator_moves_alike_with_and_without_gradients():
    states = []
    for grad in (True, False):
        torch.manual_seed(1)
        with torch.set_grad_enabled(grad):
            layer()(tokens())
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


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


def test_state_dict_is_that_of_nn_linear():
    module, linear = layer(), nn.Linear(6, 4)
    assert list(module.state_dict()) == list(linear.state_dict())
    linear.load_state_dict(module.state_dict())
    assert torch.equal(linear(tokens()), module(tokens()))


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_work_on_their_own(clone):
    module = layer()
    twin = clone(module)
    twin(tokens()).sum().backward()
    assert type(twin) is RMMLinear
    assert twin.rmm_config == module.rmm_config
    assert module.weight.grad is None
    assert twin.weight.grad is not None
    assert torch.equal(twin.weight, module.weight)


def test_device_dtype_and_bias_reach_nn_linear():
    module = RMMLinear(6, 4, bias=False, device="meta", dtype=torch.bfloat16, config=CONFIG)
    assert (module.weight.device.type, module.weight.dtype, module.bias) == ("meta", torch.bfloat16, None)


def test_repr_shows_the_sizes_and_the_sketch():
    text = repr(layer())
    for part in ("in_features=6", "out_features=4", "bias=True", "countsketch", "0.25"):
        assert part in text


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
