"""Functions and modules of the library with the samples of PyTorch's own database of operators."""

import copy
import functools
import inspect
import itertools

import pytest
import torch
from database_helpers import DTYPES, NEAR, converted, databases, differences, run, spread
from helpers import packed
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from rmm_linear.activations.attention import scaled_dot_product_attention
from rmm_linear.activations.lazy_logits import LazyLogits
from rmm_linear.activations.logits import ChunkedHead
from rmm_linear.losses import chunked_cross_entropy

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
# Converted modules round what float16 and float64 save as they do float32's: tests/contracts/test_modules.py has both.
every_dtype = pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(dtype, marks=pytest.mark.thorough if dtype in (torch.float16, torch.float64) else [])
        for dtype in DTYPES
    ],
    ids=str,
)
NEAR_OF_MANY = 2.0**-3  # of attention: products of three matrices with errors


class Function(nn.Module):
    """A function as a module, with the arguments that are no tensors of their own."""

    def __init__(self, function, *args, **kwargs):
        super().__init__()
        self.function, self.args, self.kwargs = function, args, kwargs

    def forward(self, *tensors):
        return self.function(*tensors, *self.args, **self.kwargs)


def sample_inputs(entry, dtype):
    """The samples of an entry, made without the stack that PyTorch notes for each of them."""
    torch.default_generator.manual_seed(0)
    return entry.sample_inputs_func(entry, torch.device("cpu"), dtype, True)


def samples(name, dtype, most=60):
    """The samples of the operators of a name, spread over all."""
    entries = [one for one in databases()[1] if one.name == name and dtype in one.supported_backward_dtypes("cpu")]
    for entry in entries:
        yield from spread(list(sample_inputs(entry, dtype)), most)


def described(sample):
    return [
        tuple(one.shape) if isinstance(one, Tensor) else one for one in tree_leaves((sample.input, sample.args))
    ] + [sample.kwargs]


# Elementwise functions


@every_dtype
def test_elementwise_functions(dtype):
    """All that are found to be elementwise are; a module of any other stays as it is."""
    found, names = [], set()
    for entry in databases()[1]:
        if dtype not in entry.supported_backward_dtypes("cpu") or not entry.supports_autograd:
            continue
        for sample in itertools.islice(sample_inputs(entry, dtype), 4):
            if not isinstance(sample.input, Tensor) or any(
                isinstance(one, Tensor) for one in tree_leaves((sample.args, sample.kwargs))
            ):
                break
            exact = Function(entry.op, *sample.args, **sample.kwargs)
            module = converted(copy.copy(exact))
            if module is None:
                continue
            names.add(entry.name)
            expected = run(exact, [sample.input])
            largest = max([float(one.abs().max()) for one in expected.gradients.values() if one.numel()], default=0.0)
            if largest > 2.0**18:
                continue  # where scales are four octaves apart
            got = run(module, [sample.input])  # the gradient of the output may be small where the derivative is large
            found += [f"{entry.name} {described(sample)}: {one}" for one in differences(got, expected, 4 * NEAR)]
    assert not found, "\n".join(found)
    assert len(names) > 40


# Modules that compute a function


def with_parameters(module, **tensors):
    """Give a module tensors as its parameters."""
    for name, tensor in tensors.items():
        module.register_parameter(name, None if tensor is None else nn.Parameter(tensor.detach().clone()))
    return module


def linear(weight, bias=None):
    return with_parameters(nn.Linear(weight.shape[-1], weight.shape[0], bias is not None), weight=weight, bias=bias)


def layer_norm(normalized_shape, weight=None, bias=None, eps=1e-5):
    return with_parameters(nn.LayerNorm(normalized_shape, eps), weight=weight, bias=bias)


def rms_norm(normalized_shape, weight=None, eps=None):
    return with_parameters(nn.RMSNorm(normalized_shape, eps), weight=weight)


def maker_of(entry):
    """Return what makes a module that computes an operator, of its other arguments: a class, by its name."""
    name = entry.name.rpartition(".")[2]
    if entry.name != name and not entry.name.startswith("nn.functional."):
        return None
    classes = {name.casefold(): kind for name, kind in vars(nn).items() if inspect.isclass(kind)}
    return {"linear": linear, "layer_norm": layer_norm, "rms_norm": rms_norm}.get(
        name, classes.get(name.replace("_", "") if not name.endswith("loss") else None)
    )


def modules_of(entry, dtype):
    """Return samples of an operator, and modules that compute them."""
    make = maker_of(entry)
    if make is None or dtype not in entry.supported_backward_dtypes("cpu"):
        return
    for sample in spread(list(sample_inputs(entry, dtype)), 20):
        kwargs = dict(sample.kwargs)
        is_training = kwargs.pop("training", True)
        try:
            module = make(*sample.args, **kwargs)
        except (AssertionError, TypeError, ValueError):
            continue  # a class that has other arguments
        yield sample, module.train(is_training)


@every_dtype
def test_modules_of_functions(dtype):
    found, names = [], set()
    for entry in databases()[1]:
        for sample, exact in modules_of(entry, dtype):
            module = converted(copy.deepcopy(exact))
            if module is None:
                break
            names.add(entry.name)
            both = [run(one, [sample.input], view=torch.clone) for one in (module, exact)]
            found += [f"{entry.name} {described(sample)}: {one}" for one in differences(*both, NEAR)]
    assert not found, "\n".join(found)
    assert len(names) > 20


def test_errors_of_modules_of_functions():
    found, count = [], 0
    for entry in databases()[1]:
        make = maker_of(entry)
        for error in entry.error_inputs_func(entry, "cpu") if make and entry.error_inputs_func else ():
            sample = error.sample_input
            try:
                exact = make(*sample.args, **sample.kwargs)
            except Exception:
                continue  # as it does without us
            module = converted(copy.deepcopy(exact))
            if module is not None:
                both = [run(one, [sample.input]) for one in (module, exact)]
                found += [f"{entry.name} {described(sample)}: {one}" for one in differences(*both, NEAR)]
                count += both[1].error is not None
    assert not found, "\n".join(found)
    assert count


# Attention


def smaller(tensor):
    """Scores that do not spread so far that a softmax is a maximum."""
    return tensor / 8 if tensor.is_floating_point() else tensor


@every_dtype
def test_attention(dtype):
    """To the bit; with dropout up to rounding, as its documentation says."""
    found, count = [], 0
    ours = functools.partial(scaled_dot_product_attention, bits=8)
    for sample in samples("nn.functional.scaled_dot_product_attention", dtype):
        tensors, count = [sample.input, *sample.args], count + 1
        functions = (Function(one, **sample.kwargs) for one in (ours, F.scaled_dot_product_attention))
        got, expected = (run(one, tensors, view=smaller) for one in functions)
        if sample.kwargs.get("dropout_p") and not got.error:
            room = 16 * torch.finfo(dtype).eps
            assert torch.allclose(got.outputs[0], expected.outputs[0], room, room)
            got = got._replace(outputs=expected.outputs)
        found += [f"{described(sample)}: {one}" for one in differences(got, expected, NEAR_OF_MANY)]
    assert not found, "\n".join(found)
    assert count > 20


# Losses


def last(tensor):
    """Classes at the end, as a head makes them."""
    return tensor.movedim(1, -1) if tensor.dim() > 2 else tensor


def first(logits):
    return logits.movedim(-1, 1) if logits.dim() > 2 else logits


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_losses_of_logits_that_are_not_computed(dtype):
    """Of a head whose weight is 1: in chunks, or by the logits where only they will do."""
    found, kinds = [], set()
    for sample in samples("nn.functional.cross_entropy", dtype):
        hidden, classes = last(sample.input), sample.input.shape[min(1, sample.input.dim() - 1)]
        head = linear(torch.eye(classes, dtype=dtype))
        chunked = packed(copy.deepcopy(head), ChunkedHead)
        chunked.rmm_chunk = 1

        def loss(head, hidden, sample=sample):
            logits = head(hidden)
            kinds.add(type(logits))
            return F.cross_entropy(first(logits), *sample.args, **sample.kwargs)

        got, expected = (run(Function(functools.partial(loss, one)), [hidden]) for one in (chunked, head))
        if not got.error:
            assert torch.allclose(got.outputs[0], expected.outputs[0], 1e-5, 1e-6, equal_nan=True)
            got = got._replace(outputs=expected.outputs)
        found += [f"{described(sample)}: {one}" for one in differences(got, expected, 1e-5)]
    assert not found, "\n".join(found)
    assert kinds == {Tensor, LazyLogits}


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_the_loss_in_chunks_is_that_of_pytorch_or_says_what_it_takes(dtype):
    found, counts = [], {True: 0, False: 0}
    for sample in samples("nn.functional.linear_cross_entropy", dtype, 120):
        weight, target = sample.args
        named = {name: one for name, one in sample.kwargs.items() if name in ("reduction", "ignore_index")}
        if set(sample.kwargs) - {"reduction", "ignore_index", "linear_bias"}:
            continue  # arguments that it does not have
        ours = Function(lambda x, w, b, t, named=named: chunked_cross_entropy(x, w, t, bias=b, chunk=3, **named))
        exact = Function(lambda x, w, b, t, named=named: F.linear_cross_entropy(x, w, t, linear_bias=b, **named))
        tensors = [sample.input, weight, sample.kwargs.get("linear_bias"), target]
        got, expected = run(ours, tensors), run(exact, tensors)
        counts[got.error is None] += 1
        if got.error:
            if got.error[0] is not ValueError or "must" not in got.error[1]:
                found.append(f"{described(sample)}: {got.error}")
            continue
        assert torch.allclose(got.outputs[0], expected.outputs[0], 1e-5, 1e-6, equal_nan=True)
        got = got._replace(outputs=expected.outputs)
        found += [f"{described(sample)}: {one}" for one in differences(got, expected, 1e-5)]
    assert not found, "\n".join(found)
    assert all(counts.values())
