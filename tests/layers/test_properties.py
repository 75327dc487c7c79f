"""Any input: what is exact equals nn.Linear's, the gradient is finite and unbiased, or the documented error comes.

Every case is made by Hypothesis: shape, dtype, size, strides, kind, ratio or memory, bits, block, mask, and what is
called: the function, a layer, GPT-2's layer. The light form takes a hundred of them, the heavy one (`-m montecarlo`)
10,000.
"""

import json
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from statistical import assert_unbiased
from torch import nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from rmm_linear import RMMConfig, convert, sketched_linear
from rmm_linear.sketches import KINDS, SAMPLERS, has_blocks

pytestmark = pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")  # PyTorch's, of fresh layers

CALLED = ("sketched_linear", "Linear", "Conv1D")
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
LIGHT = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
HEAVY = settings(max_examples=10_000, deadline=None, suppress_health_check=list(HealthCheck))


@st.composite
def configs(draw):
    kind = draw(st.sampled_from(KINDS))
    amount = draw(st.sampled_from(["ratio", "memory"]))
    fields = {
        "kind": kind,
        amount: draw(st.floats(0.01, 1.0)),
        "bits": draw(st.sampled_from([None, 8, 4, 2, "auto"])),
        "min_rows": draw(st.integers(1, 12)),
    }
    if has_blocks(kind) and draw(st.booleans()):
        fields["block"] = draw(st.integers(1, 50))
    if kind in SAMPLERS:
        fields["uniform_mix"] = draw(st.floats(0.01, 1.0))
    return RMMConfig(**fields)


@st.composite
def cases(draw):
    """What is called, configuration, X (any strides), W, b, Y, mask; seeded, so that a failing case repeats."""
    called, dtype = draw(st.sampled_from(CALLED)), draw(st.sampled_from(DTYPES))
    leading = draw(st.lists(st.integers(0, 9), min_size=0, max_size=3))
    least = 1 if called == "Conv1D" else 0  # which cannot tell the shape of what has no columns
    inputs, outputs = draw(st.integers(least, 70)), draw(st.integers(least, 9))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def leaf(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    x = leaf(*leading, inputs)
    layout = draw(st.sampled_from(["plain", "transposed", "sliced", "expanded"]))
    if layout == "transposed":
        x = leaf(inputs, *leading).movedim(0, -1)
    elif layout == "sliced":
        x = leaf(*leading, 2 * inputs)[..., ::2]
    elif layout == "expanded" and leading:
        x = leaf(1, *leading[1:], inputs).expand(*leading, inputs)
    bias = leaf(outputs) if called == "Conv1D" or draw(st.booleans()) else None
    mask = None
    if leading and called == "sketched_linear" and draw(st.booleans()):
        mask = torch.rand(leading, generator=generator) < draw(st.sampled_from([0.0, 0.3, 0.9, 1.0]))
    y = leaf(*leading, outputs)
    if mask is not None:
        y = y * mask.unsqueeze(-1)
    seed = draw(st.integers(-(2**63), 2**63 - 1))
    return called, draw(configs()), x, leaf(outputs, inputs), bias, y, mask, seed


def exact_linear(called):
    """nn.Linear's function, or Conv1D's, which is another one to the bit."""
    if called != "Conv1D":
        return F.linear
    return lambda x, w, b: torch.addmm(b, x.reshape(-1, x.shape[-1]), w.t()).view(*x.shape[:-1], len(w))


def sketched(called, config, seed, mask):
    if called == "sketched_linear":
        return lambda *args: sketched_linear(*args, config=config, seed=seed, token_mask=mask)

    def call(x, weight, bias):
        outputs, inputs = weight.shape
        layer = Conv1D(outputs, inputs) if called == "Conv1D" else nn.Linear(inputs, outputs)
        if bias is None:
            layer.bias = None
        model = nn.Sequential(layer)
        convert(model, config.replace(target_modules=["0"]))
        torch.manual_seed(seed)
        given = {"0.weight": weight.t() if called == "Conv1D" else weight} | ({} if bias is None else {"0.bias": bias})
        return torch.func.functional_call(model, given, (x,))

    return call


def run(function, x, weight, bias, y):
    leaves = [
        None if one is None else one.detach().clone(memory_format=torch.preserve_format) for one in (weight, bias)
    ]
    x = x.detach().requires_grad_()
    for one in leaves:
        if one is not None:
            one.requires_grad_()
    output = function(x, *leaves)
    output.backward(y)
    return output.detach(), x.grad, leaves[0].grad, None if bias is None else leaves[1].grad


def check_exact_parts(case):
    called, config, x, weight, bias, y, mask, seed = case
    ours = run(sketched(called, config, seed, mask), x, weight, bias, y)
    exact = run(exact_linear(called), x, weight, bias, y)
    assert torch.equal(ours[0], exact[0])
    tolerance = TOLERANCE[x.dtype]
    for found, wanted in ((ours[1], exact[1]), (ours[3], exact[3])):
        if wanted is not None:
            assert found.dtype == wanted.dtype
            scale = 1 + wanted.double().abs().max().item() if wanted.numel() else 1
            assert torch.allclose(found.double(), wanted.double(), rtol=tolerance, atol=tolerance * scale)
    assert ours[2].shape == weight.shape
    assert ours[2].dtype == weight.dtype
    assert ours[2].isfinite().all()
    real = x.shape[:-1].numel() if mask is None else int(mask.sum())
    if real == 0:
        assert not ours[2].any()


def check_many(how, made, check, capsys):
    """Check, and print how many cases there were: Hypothesis may stop early when it finds no further ones."""
    checked = 0

    @how
    @given(made)
    def run_all(case):
        nonlocal checked
        check(case)
        checked += 1

    run_all()
    with capsys.disabled():
        print(f" {checked} cases")
    assert checked >= how.max_examples


@LIGHT
@given(cases())
def test_exact_parts_are_those_of_nn_linear(case):
    check_exact_parts(case)


@pytest.mark.montecarlo
def test_exact_parts_are_those_of_nn_linear_in_ten_thousand_cases(capsys):
    check_many(HEAVY, cases(), check_exact_parts, capsys)


def check_unbiased(config, dtype, tokens, mask_part, seed):
    """At z = 6, as many configurations are tried; some of them store every row and have no noise.

    Z, SᵀY and dW are each rounded to nearest in the dtype, by half of its epsilon at most; three of that are the room.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, 3, generator=generator, dtype=torch.float64)
    y = x @ torch.randn(3, 2, generator=generator, dtype=torch.float64) + 0.5
    mask = torch.rand(tokens, generator=generator) < mask_part
    x, y = x.to(dtype), (y * mask.unsqueeze(1)).to(dtype)
    exact = y.double().T @ x.double()
    if not exact.any():
        return

    def gradient(draw):
        weight = torch.zeros(2, 3, dtype=dtype, requires_grad=True)
        sketched_linear(x, weight, config=config, seed=mixed(seed, draw), token_mask=mask).backward(y)
        return weight.grad

    scale = max(1, x.double().norm() * y.double().norm() / exact.norm())  # by what terms that cancel are the larger
    room = 1.5 * torch.finfo(dtype).eps * float(scale) + 1e-9
    assert_unbiased(gradient, exact, draws=60, z=6, room=room, widest=math.inf)


def mixed(seed, draw):
    return (seed * 1_000_003 + draw * 7_919) % 2**62


UNBIASED = {
    "config": configs(),
    "dtype": st.sampled_from(DTYPES),
    "tokens": st.integers(13, 60),
    "mask_part": st.sampled_from([0.5, 1.0]),
    "seed": st.integers(0, 2**30),
}


@settings(LIGHT, max_examples=40)
@given(**UNBIASED)
def test_the_gradient_is_unbiased(config, dtype, tokens, mask_part, seed):
    check_unbiased(config, dtype, tokens, mask_part, seed)


@pytest.mark.montecarlo
def test_the_gradient_is_unbiased_in_two_thousand_cases(capsys):
    made = st.tuples(*UNBIASED.values())
    check_many(settings(HEAVY, max_examples=2_000), made, lambda case: check_unbiased(*case), capsys)


# Errors

WRONG = [
    ({"config": {"ratio": 0.1}}, TypeError, r"config must be an RMMConfig, got dict"),
    ({"config": None}, TypeError, r"config must be an RMMConfig, got NoneType"),
    ({"seed": 1.5}, TypeError, r"seed must be an integer or None, got 1.5"),
    ({"seed": True}, TypeError, r"seed must be an integer"),
    ({"seed": 2**63}, ValueError, r"seed must be a signed 64-bit integer"),
    ({"token_mask": torch.tensor([0.0] * 6 + [-1e9] * 2)}, TypeError, r"booleans or integers, got torch.float32"),
    ({"token_mask": torch.ones(7, dtype=torch.bool)}, ValueError, r"got \(7,\) for an input of \(8, 3\)"),
]


@pytest.mark.parametrize(("arguments", "error", "says"), WRONG, ids=lambda value: None)
def test_wrong_arguments_are_refused(arguments, error, says):
    weight = torch.zeros(2, 3, requires_grad=True)
    with pytest.raises(error, match=says):
        sketched_linear(torch.ones(8, 3), weight, **{"config": RMMConfig(), **arguments})


@given(
    st.sampled_from(["ratio", "memory", "bits", "block", "min_rows", "uniform_mix", "kind", "norm_estimator"]),
    st.one_of(st.floats(), st.integers(), st.text(max_size=3), st.booleans(), st.just([]), st.binary(max_size=2)),
)
def test_a_configuration_is_valid_or_names_the_field_that_is_not(name, value):
    """What is accepted can be written and read."""
    config, said = None, ""
    try:
        config = RMMConfig(**{"kind": "gaussian", name: value})
    except (TypeError, ValueError) as error:
        said = str(error)
    if config is None:
        assert name.replace("_", " ") in said.replace("_", " ")
    else:
        assert RMMConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_numbers_of_other_libraries_are_written_or_refused():
    import numpy as np

    with pytest.raises(ValueError, match=r"bits must be 8, 4, 3, 2, 1.6, 1, None or .auto., got np.int64\(4\)"):
        RMMConfig(bits=np.int64(4))
    assert json.loads(json.dumps(RMMConfig(ratio=np.float64(0.5)).to_dict()))["ratio"] == 0.5


# NaN and inf


def poisoned(kind, bits, bad, where):
    """dW of 20 sketches with one bad element in X or Y."""
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(40, 5, generator=generator), torch.randn(40, 4, generator=generator)
    (x if where == "X" else y)[7, 2] = bad
    config = RMMConfig(kind=kind, ratio=0.5, bits=bits, min_rows=1)
    weight = torch.zeros(4, 5, requires_grad=True)
    found = []
    for seed in range(20):
        weight.grad = None
        sketched_linear(x, weight, config=config, seed=seed).backward(y)
        found.append(weight.grad.clone())
    return torch.stack(found)


@pytest.mark.pairs
@pytest.mark.parametrize("bits", [None, 8, 4, 2])
@pytest.mark.parametrize("where", ["X", "Y"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_arrives(kind, bits, where, bad):
    """As in nn.Linear, where it spoils column 2 or row 2 of dW: a gradient scaler or a guard sees it. Kinds that draw
    rows read nothing of the others: they see it if they draw the token, which wta and norm_rows surely do for one of X.
    """
    found = poisoned(kind, bits, bad, where)
    line = found[:, :, 2] if where == "X" else found[:, 2, :]
    spoiled = (~line.isfinite()).any(1)
    if kind == "rows" or (kind in SAMPLERS and where == "Y"):
        assert spoiled.any()
    else:
        assert spoiled.all()
