"""Packed activations: outputs to the bit, gradients of their codes, bytes, in-place modules, and the training stack."""

import copy
import pickle
import weakref

import pytest
import torch
from compile_helpers import Graphs
from pointwise_helpers import gradient_of, is_within_half_a_step, packed, randn
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from rmm_linear.activations.base import SavingCall
from rmm_linear.activations.pointwise import PackedActivation, pointwise_function
from rmm_linear.sketches import TokenMask

PACK = torch.ops.rmm_linear.pack_derivative.default
MAKERS = {
    "gelu": nn.GELU,
    "gelu tanh": lambda: nn.GELU(approximate="tanh"),
    "silu": nn.SiLU,
    "relu": nn.ReLU,
    "leaky relu": lambda: nn.LeakyReLU(0.2),
    "mish": nn.Mish,
    "hardswish": nn.Hardswish,
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
    "elu": lambda: nn.ELU(1.5),
}
INPLACE = {
    "silu": lambda: nn.SiLU(inplace=True),
    "relu": lambda: nn.ReLU(inplace=True),
    "leaky relu": lambda: nn.LeakyReLU(0.2, inplace=True),
    "mish": lambda: nn.Mish(inplace=True),
    "hardswish": lambda: nn.Hardswish(inplace=True),
    "elu": lambda: nn.ELU(1.5, inplace=True),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def follows(module, x, run=None, bits=4):
    """Whether the gradient of a packed module is made of the codes of its input and of their own seed."""
    y = randn(*x.shape, seed=9, dtype=x.dtype)
    _, found = gradient_of(module if run is None else run, x, y)
    function = module.rmm_function
    return found.dtype == x.dtype and is_within_half_a_step(found, x, y, function, function.bits(bits))


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_training", [True, False], ids=["train", "eval"])
def test_output_is_the_modules_own_to_the_bit(name, dtype, is_training):
    exact, module = MAKERS[name]().train(is_training), packed(MAKERS[name]()).train(is_training)
    x, y = randn(2, 5, 70, dtype=dtype), randn(2, 5, 70, seed=2, dtype=dtype)
    (expected, slope), (found, gradient) = gradient_of(exact, x, y), gradient_of(module, x, y)
    assert torch.equal(found, expected)
    if not is_training or module.rmm_function.is_exact:
        assert torch.equal(gradient, slope)
    else:
        assert not torch.equal(gradient, slope)
        assert follows(module, x)


@pytest.mark.parametrize("name", INPLACE)
def test_modules_in_place_work_in_place(name):
    exact, module = INPLACE[name](), packed(INPLACE[name]())
    x = randn(6, 70)
    z = x.clone().requires_grad_() * 1
    version, output = z._version, module(z)
    assert output.data_ptr() == z.data_ptr()
    assert z._version > version
    assert torch.equal(output, exact(x.clone()))
    assert follows(module, x)
    with pytest.raises(RuntimeError, match="leaf"):
        module(x.clone().requires_grad_())
    if not module.rmm_function.is_exact:
        return
    gradients = []
    for one in (exact, module):  # of a part of a tensor, whose gradient passes through both
        whole = x.clone().requires_grad_()
        inner = whole * 1
        one(inner[1:4])
        gradients.append(torch.autograd.grad(inner, whole, randn(6, 70, seed=3))[0])
    assert torch.equal(*gradients)


@pytest.mark.parametrize("name", ["gelu_new", "gelu_python", "quick_gelu", "relu2"])
def test_outputs_of_transformers_modules_under_autocast(name):
    activations = pytest.importorskip("transformers.activations")
    exact, module = activations.ACT2FN[name], packed(activations.ACT2FN[name])
    x = randn(5, 70, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = exact(x)
        found = module(x.clone().requires_grad_())
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)
    y = torch.ones_like(expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, gradient = gradient_of(module, x, y)
        _, slope = gradient_of(exact, x, y)
    assert gradient.dtype == slope.dtype == x.dtype
    # A deviation of 1.26 / 15 / √12, and of ReLU² at most 2 · 2‖z‖ / 15 / √12 for the ‖z‖ of a group, below 7.
    assert 0.01 < (gradient.float() - slope.float()).square().mean().sqrt() < (0.54 if name == "relu2" else 0.03)


def test_only_codes_and_the_index_are_saved_and_the_input_is_freed():
    saved = []

    def keep(tensor):
        saved.append(tensor)
        return tensor

    def run(module):
        saved.clear()
        x = randn(30, 70).requires_grad_()
        z = x * 1
        freed = weakref.ref(z)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = module(z)
        kept = [tensor.data_ptr() for tensor in saved]
        return output, sum(tensor.nbytes for tensor in saved), z.data_ptr() in kept, freed

    *found, freed = run(nn.GELU())
    assert found[1:] == [30 * 70 * 4, True]
    saved.clear()
    assert freed() is not None
    for name, bits, stated in (("gelu", 4, 16 + 30 * 35), ("gelu", 2, 16 + 30 * 18), ("relu", 4, 30 * 9)):
        output, total, is_kept, _ = run(packed(MAKERS[name](), bits))
        assert output.requires_grad
        assert total == -(-stated // 16) * 16
        assert not is_kept
    module = packed(nn.GELU(), 4)
    index = torch.arange(0, 30, 2)
    module._packed_call = lambda shape, device, **named: SavingCall(7, TokenMask.of(torch.arange(30) % 2 == 0))
    assert run(module)[1] == -(-(16 + 15 * 35) // 16) * 16 + index.nbytes
    saved.clear()
    output, *_, freed = run(packed(nn.GELU()))
    assert freed() is None
    assert output.grad_fn is not None


def test_padding_is_left_out_and_seen():
    seen, mask = [], TokenMask.of(torch.arange(12).view(3, 4).flatten() % 4 < 2)
    module = packed(nn.GELU())
    module._packed_call = lambda shape, device, **named: SavingCall(7, mask, lambda y, m: seen.append((y.clone(), m)))
    x, y = randn(3, 4, 70), randn(3, 4, 70, seed=2)
    y[:, 2:] = 0
    _, gradient = gradient_of(module, x, y)
    assert not gradient[:, 2:].any()
    assert is_within_half_a_step(gradient, x, y, module.rmm_function, 4)
    assert gradient[:, :2].any()
    ((found, found_mask),) = seen
    assert torch.equal(found, y.view(12, 70))
    assert found_mask is mask


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("preserve", [True, False])
def test_checkpoint_repeats_the_codes_or_makes_new_ones_with_their_seed(reentrant, preserve):
    """And the global generator is where it would be without a gradient: every pass draws once."""
    module, x = packed(nn.SiLU(), 2), randn(6, 70)

    def run(z):
        return checkpoint(module, z, use_reentrant=reentrant, preserve_rng_state=preserve)

    assert follows(module, x, run, bits=2)
    states = []
    for grad in (True, False):
        torch.manual_seed(5)
        with torch.set_grad_enabled(grad):
            module(x.clone().requires_grad_())
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE])
def test_selective_checkpointing_saves_or_recomputes_codes_and_seed_together(policy):
    module = packed(nn.SiLU(), 2)

    def contexts():
        return create_selective_checkpoint_contexts(
            lambda ctx, op, *args, **kwargs: policy if op == PACK else CheckpointPolicy.MUST_RECOMPUTE
        )

    def run(z):
        return checkpoint(module, z, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)

    assert follows(module, randn(6, 70), run, bits=2)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ["gelu", "relu", "elu", "gelu_new", "relu2"])
def test_compiled_in_one_graph_for_all_lengths(name):
    if name in MAKERS:
        exact, module = MAKERS[name](), packed(MAKERS[name](), 2)
    else:
        activations = pytest.importorskip("transformers.activations")
        exact, module = activations.ACT2FN[name], packed(activations.ACT2FN[name], 2)
    torch._dynamo.reset()
    graphs = Graphs()
    compiled = graphs.compile(module)
    gradients = []
    for length in (3, 6, 9):
        x = randn(2, length, 70)
        output, _ = gradient_of(compiled, x, x)
        assert torch.allclose(output, exact(x), rtol=1e-6, atol=1e-6)
        if module.rmm_function.is_bounded:
            assert follows(module, x, compiled, bits=2)
        gradients.append(gradient_of(compiled, x, x)[1])
    assert len(graphs.counts) == 4  # forward and backward, of the first length and of all others
    assert {name: count for counts in graphs.counts[:2] for name, count in counts.items()} == {
        "rmm_linear.pack_derivative.default": 1,
        "rmm_linear.apply_derivative.default": 1,
    }
    if not module.rmm_function.is_exact:  # every call has a seed of its own
        assert not torch.equal(gradient_of(compiled, x, x)[1], gradients[-1])


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_compiled_in_place_modules_stay_exact():
    torch._dynamo.reset()
    graphs = Graphs()
    module = packed(nn.ReLU(inplace=True))
    x, y = randn(4, 70), randn(4, 70, seed=2)
    found = gradient_of(graphs.compile(module), x, y)
    assert all(map(torch.equal, found, gradient_of(nn.ReLU(), x, y)))
    assert not any(graphs.counts)


@pytest.mark.parametrize("shape", [(0, 70), (3, 0), (4, 1), (70,), (2, 3, 5, 7), (5, 130), ()])
@pytest.mark.parametrize("name", ["gelu", "relu"])
def test_odd_shapes(shape, name):
    module, x = packed(MAKERS[name]()), randn(*shape)
    output, gradient = gradient_of(module, x, torch.ones_like(x))
    assert torch.equal(output, MAKERS[name]()(x))
    assert gradient.shape == shape
    assert follows(module, x)


def test_nan_and_infinity_in_reach_the_output_and_leave_other_gradients_alone():
    x = randn(4, 70)
    x[1, 3], x[2, 4], x[3, 5] = torch.nan, torch.inf, -torch.inf
    module = packed(nn.SiLU())
    output, gradient = gradient_of(module, x, torch.ones_like(x))
    assert torch.equal(output.nan_to_num(77.0), nn.SiLU()(x).nan_to_num(77.0))
    assert gradient.isfinite().all()
    assert is_within_half_a_step(gradient, x, torch.ones_like(x), module.rmm_function, 4)  # the limits, 1 and 0
    y = torch.ones_like(x)
    y[0, 0] = torch.nan
    _, gradient = gradient_of(module, x, y)
    assert int(gradient.isnan().sum()) == 1


def test_double_backward_is_refused():
    x = randn(4, 70).requires_grad_()
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(packed(nn.GELU())(x).sum(), x, create_graph=True)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_are_packed_modules_of_their_own(copied):
    module = packed(nn.LeakyReLU(0.3))
    other = copied(module)
    assert type(other) is type(module)
    assert isinstance(other, PackedActivation)
    assert (other.negative_slope, other.rmm_function, other.rmm_bits) == (0.3, module.rmm_function, 4)
    assert follows(other, randn(4, 70))


def test_the_module_is_its_own_again_when_undone():
    module = packed(nn.GELU())
    before = set(vars(nn.GELU()))
    module._tear_down()
    module.__class__ = nn.GELU
    assert set(vars(module)) == before
    x, y = randn(4, 70), randn(4, 70, seed=2)
    assert all(map(torch.equal, gradient_of(module, x, y), gradient_of(nn.GELU(), x, y)))


def test_unknown_modules_are_refused():
    assert pointwise_function(nn.Softplus()) is None
    with pytest.raises(TypeError, match="no pointwise function"):
        packed(nn.Softplus())
