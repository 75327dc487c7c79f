"""Converted modules with the inputs of PyTorch's own database of modules, next to those that are not converted."""

import copy
import functools
import itertools
import pickle

import pytest
import torch
from database_helpers import DTYPES, NEAR, converted, databases, differences, run, spread
from torch import nn

from rmm_linear.layers.converted import ConvertedModule

MOST = {torch.float32: 60, torch.float64: 40, torch.bfloat16: 40, torch.float16: 40}  # inputs of an entry
# Gradients of a layer that is made of many converted ones have the errors of all of them, and norms of rows of four
# columns divide by small differences; half of them are far better.
NEAR_OF_MANY, HALF_OF_MANY = 2.0**-2, 2.0**-5

# float32 and a half type are two paths; the others take the same ones.
every_dtype = pytest.mark.parametrize(
    "dtype",
    [pytest.param(one, marks=[pytest.mark.thorough] * (one is not torch.float32)) for one in DTYPES],
    ids=str,
)
pytestmark = [
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning"),
    pytest.mark.filterwarnings("ignore:Support for mismatched:UserWarning"),
    pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning"),
]


class Sample:
    """An input of the database, and two modules with the same parameters, of which one is converted, or None."""

    def __init__(self, entry, made, dtype, is_training, **named):
        self.title = f"{entry.name} {dtype} {'train' if is_training else 'eval'} {made.desc} {named}"
        self.args, self.kwargs = made.forward_input.args, {**made.forward_input.kwargs, **named}
        torch.default_generator.manual_seed(0)
        args, kwargs = copy.deepcopy((made.constructor_input.args, made.constructor_input.kwargs))
        module = entry.module_cls(*args, **kwargs)  # of which some take no dtype
        self.exact = module.to(dtype).train(is_training)
        self.converted = converted(copy.deepcopy(self.exact))
        self.both = self.converted, self.exact
        count = sum(isinstance(one, ConvertedModule) for one in (self.converted or nn.Module()).modules())
        self.is_many = count > 1 or entry.module_cls is nn.MultiheadAttention
        self.near = (NEAR_OF_MANY if self.is_many else NEAR) if is_training else 0.0

    def differences(self, found, expected):
        return [f"{self.title}: {one}" for one in differences(found, expected, self.near)]


def inputs_of(entry, dtype, is_training):
    """The inputs of an entry; none for a dtype that it does not take."""
    try:
        inputs = {"device": "cpu", "dtype": dtype, "requires_grad": True, "training": is_training}
        return entry.module_inputs_func(entry, **inputs)
    except Exception:
        assert dtype not in entry.dtypes
        return []


@functools.cache
def entries():
    """The entries of which one of the first modules can be converted."""
    found = []
    for entry in databases()[0]:
        made = (Sample(entry, one, torch.float32, True) for one in inputs_of(entry, torch.float32, True)[:5])
        found += [entry] if any(sample.converted is not None for sample in made) else []
    return found


def samples(dtype, is_training, most):
    """At most so many inputs of each entry whose modules can be converted, spread over all."""
    for entry in entries():
        ways = [{}] + [{"need_weights": False}] * (entry.module_cls is nn.MultiheadAttention)
        for one, named in itertools.product(spread(inputs_of(entry, dtype, is_training), most), ways):
            sample = Sample(entry, one, dtype, is_training, **named)
            if sample.converted is not None:
                yield sample


@every_dtype
def test_training(dtype):
    """Outputs are those of the exact module to the bit, gradients are near; parameters keep their names."""
    found, count, kinds, errors = [], 0, set(), []
    for sample in samples(dtype, True, MOST[dtype]):
        expected, got = run(sample.exact, sample.args, sample.kwargs), run(sample.converted, sample.args, sample.kwargs)
        found += sample.differences(got, expected)
        states = sample.exact.state_dict(), sample.converted.state_dict()
        if list(states[0]) != list(states[1]) or not all(map(torch.equal, *(one.values() for one in states))):
            found.append(f"{sample.title}: another state_dict")
        count, kinds = count + (expected.error is None), kinds | {type(sample.exact)}
        for name, exact in expected.gradients.items() if sample.is_many and not got.error else ():
            errors.append(float((got.gradients[name] - exact).norm() / exact.norm().clamp(min=1e-30)))
    assert not found, "\n".join(found)
    assert count > 100
    assert len(kinds) > 25
    assert sum(one > HALF_OF_MANY for one in errors) < len(errors) / 2


@every_dtype
def test_evaluation(dtype):
    """All is that of the exact module, but that a linear layer has no gradient of its weight; in the fast path too."""
    found = []
    for sample in samples(dtype, False, MOST[dtype] // 2):
        both = [run(one, sample.args, sample.kwargs, is_trained=False) for one in sample.both]
        found += sample.differences(*both)
        with torch.no_grad():
            both = [run(one, sample.args, sample.kwargs) for one in sample.both]
        found += sample.differences(*both)
    assert not found, "\n".join(found)


def test_evaluation_takes_the_fast_path_of_encoder_layers(monkeypatch):
    calls, fast = [], torch._transformer_encoder_layer_fwd
    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", lambda *args: calls.append(args) or fast(*args))
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval()
    assert converted(layer) is layer
    with torch.no_grad():
        layer(torch.randn(2, 3, 16))
    assert calls


def gapped(tensor):
    """The same numbers, with others between them."""
    return torch.stack((tensor, tensor), -1)[..., 0]


def mirrored(tensor):
    return tensor.movedim(0, -1).contiguous().movedim(-1, 0) if tensor.dim() > 1 else tensor


CHANGES = {
    "gaps": gapped,
    "other order": mirrored,
    "no rows": lambda tensor: tensor[:0] if tensor.dim() else tensor,
    "other dtype": lambda tensor: tensor.double(),
    "half": lambda tensor: tensor.to(torch.bfloat16),
    "integers": lambda tensor: tensor.long(),
    "booleans": lambda tensor: tensor > 0,
    "narrower": lambda tensor: tensor[..., :-1] if tensor.dim() else tensor,
    "wider": lambda tensor: torch.cat((tensor, tensor), -1) if tensor.dim() else tensor,
    "one dimension more": lambda tensor: tensor.unsqueeze(0),
    "a number": lambda tensor: tensor.sum(),
    "complex": lambda tensor: tensor + 0j,
    "elsewhere": lambda tensor: tensor.to("meta"),
}


@pytest.mark.parametrize("is_training", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_changed_inputs(is_training):
    """What PyTorch's own module makes of them, or the same error."""
    found = []
    for sample in samples(torch.float32, is_training, 3):
        for title, change in CHANGES.items():
            both = [run(one, sample.args, sample.kwargs, is_training, change) for one in sample.both]
            found += [f"{title}: {one}" for one in sample.differences(*both)]
    assert not found, "\n".join(found)


def test_the_errors_of_the_database_are_the_same():
    count, found = 0, []
    for entry in databases()[0]:
        if entry.module_error_inputs_func is None:
            continue
        for is_training in (True, False):
            inputs = {"device": "cpu", "dtype": torch.float32, "requires_grad": True, "training": is_training}
            for error in entry.module_error_inputs_func(entry, **inputs):
                if error.error_on.name != "FORWARD_ERROR":
                    continue
                sample = Sample(entry, error.module_error_input, torch.float32, is_training)
                if sample.converted is not None:
                    both = [run(one, sample.args, sample.kwargs) for one in sample.both]
                    found += sample.differences(*both)
                    count += both[1].error is not None
    assert not found, "\n".join(found)
    assert count


def test_pickles():
    found = []
    for sample in samples(torch.float32, True, 2):
        again = pickle.loads(pickle.dumps(sample.converted))
        assert type(again) is type(sample.converted)
        found += sample.differences(*(run(one, sample.args, sample.kwargs) for one in (again, sample.converted)))
    assert not found, "\n".join(found)
