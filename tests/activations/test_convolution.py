"""Convolutions that save their input in few bits: what is exact, the stated variance, which of them are converted."""

import copy
import math
from functools import partial

import pytest
import torch
from compile_helpers import Graphs
from module_cases import aligned, codes, scales
from module_steps import saved_bytes
from statistical import Z
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from rmm_linear import RMMConfig, convert
from rmm_linear.activations.convolution import PackedConvolution, _unpadded
from rmm_linear.variance.standins.convolution import convolution_variance

SIZES = (9, 8, 10)
HOW = [
    {"stride": 2, "padding": 1},
    {"groups": 2, "dilation": 2, "padding": "valid", "bias": False},
    {"kernel_size": 4, "padding": "same"},
    {"padding": 2, "padding_mode": "reflect"},
    {"padding": 1, "padding_mode": "circular", "stride": 2},
    {"kernel_size": 4, "padding": "same", "padding_mode": "replicate"},
]
TRANSPOSED = [{"stride": 2, "padding": 1, "output_padding": 1}, {"groups": 2, "dilation": 2, "bias": False}]
CASES = [
    (axes, how, name)
    for axes in (1, 2, 3)
    for name, all_of_them in (("Conv", HOW), ("ConvTranspose", TRANSPOSED))
    for how in all_of_them
]
WAYS = {
    "rows": lambda x: x,
    "channels last": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1),
    "sliced": lambda x: torch.stack((x, x), -1)[..., 0],
    "no batch": lambda x: x[0],
}


def both(model, **fields):
    """A model that is converted, and the exact one."""
    exact = copy.deepcopy(model).train()
    convert(model.train(), RMMConfig(**{"operations": "convolution", "min_rows": 1, **fields}))
    return model, exact


def gradients(model, x, y=None):
    """The output, and the gradients of input and parameters."""
    leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
    model.zero_grad()
    torch.manual_seed(0)
    output = model(leaf)
    output.backward(torch.ones_like(output).cumsum(-1) if y is None else y)
    return output.detach(), leaf.grad, {name: one.grad for name, one in model.named_parameters()}


def batch(axes, count=3, channels=4):
    return torch.randn(count, channels, *SIZES[:axes], generator=torch.Generator().manual_seed(1))


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")
@pytest.mark.parametrize(("axes", "how", "name"), CASES, ids=str)
def test_everything_but_the_weight_is_exact(axes, how, name):
    """In any memory: to the bit, but for the sums of elements that padding repeats."""
    module = getattr(nn, f"{name}{axes}d")(4, 6, **{"kernel_size": 3, **how})
    found, exact = both(nn.Sequential(module), bits=8)
    for title, way in WAYS.items():
        x = way(batch(axes))
        output, by_input, of_parameters = gradients(found, x)
        expected, expected_by_input, others = gradients(exact, x)
        assert torch.equal(output, expected), title
        assert output.stride() == expected.stride()
        if "padding_mode" in how:
            assert (by_input - expected_by_input).abs().max() <= 1e-6 * expected_by_input.abs().max()
        else:
            assert torch.equal(by_input, expected_by_input), title
        error = (of_parameters.pop("0.weight") - (weight := others.pop("0.weight"))).norm()
        assert 1e-5 * weight.norm() < error < 0.05 * weight.norm()
        assert all(torch.equal(one, others[key]) for key, one in of_parameters.items())


@pytest.mark.parametrize("way", ["rows", "channels last"])
@pytest.mark.parametrize(
    "make",
    [lambda: nn.Conv2d(64, 5, 3, 2, 1), lambda: nn.ConvTranspose2d(64, 4, 3, 2, groups=2)],
    ids=["plain", "transposed"],
)
def test_the_variance_is_the_stated_one(make, way):
    """Of every element; the mean of the squares of M errors, by their variance, has the deviation 1.2/√M at most.

    An element of dW is a sum of many bounded errors, so it is nearly normal, with a kurtosis of at most 3.
    """
    x, draws = WAYS[way](batch(2, 2, 64)) * torch.arange(1, 65).view(-1, 1, 1) ** -0.5, 60
    model, exact = both(nn.Sequential(make()), bits=4)
    output, _, others = gradients(exact, x)
    y, weight = torch.ones_like(output).cumsum(-1) / 10, "0.weight"
    expected, stated = gradients(exact, x, y)[2][weight].double(), 0
    errors = []
    for draw in range(draws):
        model.zero_grad()
        torch.manual_seed(draw)
        model(x.requires_grad_()).backward(y)  # as no batch that is in memory anyway
        errors.append(model[0].weight.grad.double() - expected)
        stated = stated + convolution_variance(exact[0], x, y, bits=4, seed=torch.tensor([draw])) / draws
    errors = torch.stack(errors)
    ratio = errors.square().mean(0) / stated
    assert stated.shape == others[weight].shape
    assert float((ratio - 1).abs().max()) < 8 * 1.5 / math.sqrt(draws)  # the largest of 3000 elements
    assert abs(float(ratio.mean()) - 1) < Z * 1.5 / math.sqrt(draws)  # as if all elements were one
    assert abs(float((errors.mean(0) / (stated / draws).sqrt()).square().mean()) - 1) < 0.5
    with pytest.raises(ValueError, match="padding_mode must be 'zeros', got 'reflect'"):
        convolution_variance(
            nn.Conv2d(1, 1, 3, padding=1, padding_mode="reflect"), x, y, bits=4, seed=torch.tensor([0])
        )


class Block(nn.Module):
    """A ResNet's block, in which two convolutions read the input."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.first, self.second, self.short = (nn.Conv2d(16, 16, 3, padding=1) for _ in range(3))
        self.relus = nn.ModuleList(nn.ReLU() for _ in range(3))

    def forward(self, x):
        x = self.relus[0](self.stem(x))
        return self.relus[2](self.second(self.relus[1](self.first(x))) + self.short(x)).mean()


def test_bytes_of_a_block():
    """The input once for two convolutions, and a bit for each ReLU; not the pixels, which the caller has."""
    model, x = Block(), torch.randn(4, 3, 16, 16)
    report = convert(model, operations=("convolution", "activation"))
    exact = saved_bytes(Block(), x)
    model(x).backward()
    assert report.kept_anyway == ["stem"]
    assert report.groups == [("first", "short")]
    count = 4 * 16 * 16 * 16
    code, bits = aligned(8, codes(count // 1024, 1024, 3), scales(count // 1024, 1024)), count // 8
    assert saved_bytes(model, x) == 2 * code + 3 * bits + x.nbytes
    assert exact == 3 * 4 * count + x.nbytes
    assert "stem" in str(report)
    text = str(report)
    assert "convolution=3" in report.summary()
    assert "its input, 3 bits" in text
    assert "what it would free is in memory anyway, stays exact" in text


def test_frozen_layers_below():
    """Their output needs no gradient, but is no batch."""
    model, x = Block(), torch.randn(4, 3, 16, 16)
    model.stem.requires_grad_(False)
    report, count = convert(model, operations=("convolution", "activation")), 4 * 16 * 16 * 16
    model(x).backward()
    assert report.kept_anyway == []
    code = aligned(8, codes(count // 1024, 1024, 3), scales(count // 1024, 1024))
    assert saved_bytes(model, x) == 2 * code + 2 * count // 8


def test_few_positions_stay_exact():
    """As those of a squeeze, which see one for each image."""
    model, x = nn.Sequential(nn.Conv2d(3, 8, 1), nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 8, 1)), torch.randn(64, 3, 4, 4)
    found, exact = both(model, min_rows=64)
    assert torch.equal(gradients(found, x)[2]["2.weight"], gradients(exact, x)[2]["2.weight"])
    assert not torch.equal(gradients(found, x)[2]["0.weight"], gradients(exact, x)[2]["0.weight"])


class Causal(nn.Conv1d):
    def forward(self, input):
        return super().forward(F.pad(input, (2, 0)))


class Scaled(nn.Conv1d):
    def forward(self, input):
        return self._conv_forward(input, self.weight * 2, self.bias)


class Replaced(nn.Conv1d):
    def _conv_forward(self, input, weight, bias):
        return input


class Cut(nn.ConvTranspose1d):
    def forward(self, input):
        return super().forward(input)[..., :-1]


@pytest.mark.parametrize(
    "kind",
    [Causal, Scaled, *(partial(lambda dim, *sizes: weight_norm(nn.Conv1d(*sizes), dim=dim), dim) for dim in (0, 2))],
)
def test_subclasses_that_call_pytorch(kind):
    found, exact = both(nn.Sequential(kind(4, 4, 3)), bits=8)
    assert isinstance(found[0], PackedConvolution)
    (output, by_input, one), (expected, other_by_input, other) = (
        gradients(model, batch(1)) for model in (found, exact)
    )
    assert torch.equal(output, expected)
    assert torch.equal(by_input, other_by_input)
    near = [(one[name] - other[name]).norm() / other[name].norm() for name in other]
    assert 1e-5 < max(near) < 0.05


def test_a_weight_that_is_made_of_parameters_is_not_saved():
    """But for the norms of v, 4 numbers; where v is frozen, it is."""
    x = torch.randn(2, 64, 67)
    normed, plain = (
        both(nn.Sequential(one))[0] for one in (weight_norm(nn.Conv1d(64, 64, 4), dim=2), nn.Conv1d(64, 64, 4))
    )
    assert saved_bytes(normed, x) == saved_bytes(plain, x) + 4 * 4
    normed[0].parametrizations.weight.original1.requires_grad_(False)
    assert saved_bytes(normed, x) > saved_bytes(plain, x) + 4 * 64 * 64 * 4


@pytest.mark.parametrize("kind", [Replaced, Cut])
def test_subclasses_with_code_of_their_own(kind):
    report = convert(nn.Sequential(kind(4, 4, 3), nn.Conv1d(4, 4, 3)), dry_run=True)
    assert report.skipped == {"0": f"{kind.__name__} computes its output by code of its own"}
    assert [*report.packed] == ["1"]


def test_what_a_user_chooses():
    model = nn.Sequential(*(nn.Conv2d(4, 4, 3) for _ in range(3)), nn.LazyConv2d(4, 3))
    report = convert(model, bits=4, overrides={"1": {"bits": 1.6}}, exclude_modules=["2"], dry_run=True)
    assert {name: entry.saved for name, entry in report.packed.items()} == {
        "0": "its input, 4 bits", "1": "its input, 1.6 bits"
    }  # fmt: skip
    assert report.skipped == {"2": "in exclude_modules"}
    assert report.uncompressed == {"3": "convolutions"}
    with pytest.raises(ValueError, match=r"changes norm_bits, which is a setting of the operation 'norm'"):
        convert(model, overrides={"0": {"norm_bits": 4}}, dry_run=True)


@pytest.mark.stack
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_images_in_compiled_code(layout):
    """One graph for all sizes, in which the pixels, which need no gradient, are kept."""
    torch._dynamo.reset()
    layers = nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect"), nn.GELU()
    (found, exact), graphs = both(nn.Sequential(*layers).to(memory_format=layout)), Graphs()
    run = graphs.compile(found)
    for count, size in ((4, 16), (5, 16), (6, 20), (7, 24)):
        x = torch.randn(count, 4, size, size).to(memory_format=layout)
        outputs = [model(x) for model in (run, exact)]
        assert torch.equal(*outputs)
        gradients = [
            torch.autograd.grad(one.square().sum(), [*of.parameters()])
            for one, of in zip(outputs, (found, exact), strict=True)
        ]
        errors = [float((one - other).norm() / other.norm()) for one, other in zip(*gradients, strict=True)]
        assert max(errors[0], errors[1], errors[3]) < 1e-5 < errors[2] < 0.2
    assert len(graphs.counts) <= 6  # forward and backward, of the first sizes, another batch, other images
    torch._dynamo.reset()


def test_gradients_of_long_padded_sounds_and_of_channels_last_images():
    """Places beyond 2²⁴ are no float32; what is padded keeps its memory format in the backward pass."""
    size = 2**24 + 5
    y = torch.ones(1, 1, size + 4)
    expected = torch.ones(1, 1, size)
    expected[..., 1:3] = expected[..., -3:-1] = 2
    assert torch.equal(_unpadded(y, (1, 1, size), (2, 2), "reflect"), expected)
    found, _ = both(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular")))
    x = batch(2).contiguous(memory_format=torch.channels_last)
    assert gradients(found, x)[1].stride() == x.stride()


@pytest.mark.parametrize("kind", [nn.Conv1d, nn.ConvTranspose1d])
def test_what_is_no_tensor_is_refused_by_pytorch(kind):
    found, _ = both(nn.Sequential(kind(4, 4, 3)))
    with pytest.raises(TypeError, match=r"conv\w*1d\(\)"):
        found(None)


def test_output_sizes_of_transposed_convolutions():
    found, exact = both(nn.Sequential(nn.ConvTranspose1d(4, 4, 3, stride=2)))
    x = batch(1).requires_grad_()
    for size in ([20], (3, 4, 19)):
        assert torch.equal(found[0](x, output_size=size), exact[0](x, size))
    with pytest.raises(ValueError, match="requested an output size"):
        found[0](x, output_size=[50])
