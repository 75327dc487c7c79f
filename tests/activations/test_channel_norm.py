"""Packed BatchNorm, GroupNorm and InstanceNorm: running statistics, shapes, layouts, and what stays as it is."""

import copy

import pytest
import torch
from helpers import bytes_kept
from module_cases import aligned
from statistical import Z, z_scores
from torch import nn
from torch.utils.checkpoint import checkpoint

from rmm_linear import RMMConfig, convert, revert
from rmm_linear.activations.channel_norm import PackedChannelNorm, _arranged, _as_before
from rmm_linear.planning import simulate

C = 16
NORMS = {
    "batch": lambda: nn.BatchNorm2d(C),
    "batch without weight": lambda: nn.BatchNorm2d(C, affine=False),
    "batch without statistics": lambda: nn.BatchNorm2d(C, track_running_stats=False),
    "batch of all steps": lambda: nn.BatchNorm2d(C, momentum=None),
    "group": lambda: nn.GroupNorm(4, C),
    "group without weight": lambda: nn.GroupNorm(4, C, affine=False),
    "instance": lambda: nn.InstanceNorm2d(C),
    "instance with statistics": lambda: nn.InstanceNorm2d(C, affine=True, track_running_stats=True, momentum=None),
}
every_norm = pytest.mark.parametrize("name", NORMS)


def pair(norm, **fields):
    """A network with the norm, and its converted copy."""
    torch.manual_seed(0)
    exact = nn.Sequential(nn.Conv2d(3, C, 3, padding=1), norm, nn.ReLU(inplace=True)).train()
    model = copy.deepcopy(exact)
    convert(model, RMMConfig(operations=["norm", "activation"], **fields))
    assert isinstance(model[1], PackedChannelNorm)
    return model, exact


def images(sequences=4, size=12):
    return torch.randn(sequences, 3, size, size, generator=torch.Generator().manual_seed(sequences))


def buffers(model):
    return {name: one.clone() for name, one in model.named_buffers()}


def assert_alike(model, exact):
    found, expected = buffers(model), buffers(exact)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def steps(model, run=None, count=3):
    outputs = []
    for number in range(1, count + 1):
        output = (run or model)(images(number + 2))
        output.square().sum().backward()
        outputs.append(output.detach())
    return outputs


@every_norm
def test_outputs_and_running_statistics_are_exact_in_both_modes(name):
    """From the first step on, in which modules are tried; and after the conversion is undone."""
    model, exact = pair(NORMS[name]())
    assert all(map(torch.equal, steps(model), steps(exact)))
    assert_alike(model, exact)
    for one in (model, exact):
        one.eval()
    assert torch.equal(model(images()), exact(images()))
    assert_alike(model, exact)
    assert bytes_kept(model, images().requires_grad_()) == bytes_kept(exact, images().requires_grad_())
    revert(model)
    assert type(model[1]) is type(exact[1])
    for one in (model, exact):
        one.train()
    assert all(map(torch.equal, steps(model), steps(exact)))
    assert_alike(model, exact)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("checkpointed", ["exact", "packed"])
def test_a_checkpoint_updates_running_statistics_as_often_as_it_does_of_the_exact_model(checkpointed, reentrant):
    model, exact = pair(NORMS["batch"](), checkpointed=checkpointed)

    def run(one):
        return steps(one, lambda x: checkpoint(one, x.requires_grad_(), use_reentrant=reentrant))

    assert all(map(torch.equal, run(model), run(exact)))
    assert_alike(model, exact)
    assert model[1].num_batches_tracked == 6


def test_an_example_changes_no_statistics():
    model = nn.Sequential(nn.Conv2d(3, C, 3), NORMS["batch"](), nn.ReLU(), nn.Flatten(), nn.LazyLinear(2)).train()
    model(images())
    before = buffers(model)
    report = convert(model, example=images())
    assert report.packed["1"].operation == "norm"
    assert all(torch.equal(one, before[name]) for name, one in buffers(model).items())


def test_what_pytorch_refuses_is_refused_alike():
    model, _ = pair(nn.BatchNorm2d(C))
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        model[1](torch.randn(1, C, 1, 1, requires_grad=True))
    with pytest.raises(ValueError, match="expected 4D input"):
        model[1](torch.randn(3, C, 5, requires_grad=True))
    model, _ = pair(nn.InstanceNorm2d(C))
    with pytest.raises(ValueError, match="Expected more than 1 spatial element"):
        model[1](torch.randn(2, C, 1, 1, requires_grad=True))


def test_one_image_without_a_batch_is_that_in_one():
    model, exact = pair(nn.InstanceNorm2d(C, affine=True))
    x = torch.randn(C, 9, 9, requires_grad=True)
    assert torch.equal(model[1](x), exact[1](x))
    model[1](x).square().sum().backward()
    assert x.grad.shape == x.shape


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_have_the_layout_and_dtype_of_the_input(layout, dtype):
    model, exact = pair(nn.BatchNorm2d(C))
    x = torch.randn(4, C, 8, 8).to(dtype, memory_format=layout).requires_grad_()
    y, gradients = torch.randn(4, C, 8, 8).to(dtype, memory_format=layout), []
    for one in (model[1], exact[1]):
        output = one(x)
        assert output.is_contiguous(memory_format=layout)
        gradients.append(torch.autograd.grad(output, [x, *one.parameters()], y))
    found, expected = gradients
    for one, other in zip(found, expected, strict=True):
        assert (one.dtype, one.stride()) == (other.dtype, other.stride())
        assert (one - other).norm() < 0.3 * other.norm()


@pytest.mark.parametrize(
    ("name", "compiled"),
    [
        *((name, False) for name in NORMS),
        *(pytest.param(name, True, marks=pytest.mark.stack) for name in ("batch", "group", "instance")),
    ],
)
def test_one_image_stays_channels_last_for_what_comes_behind(name, compiled):
    """Its batch has one element, whose stride is free, but where it is another, the next convolution is of rows."""
    norm, behind = NORMS[name](), [nn.MaxPool2d(2), nn.Conv2d(C, 4, 3)]
    exact = nn.Sequential(nn.Conv2d(3, C, 3), norm, *behind).train()
    model, x = copy.deepcopy(exact), images(1).to(memory_format=torch.channels_last)
    convert(model, RMMConfig(operations=["norm", "pooling"]))
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    found, expected = run(x), exact(x)
    assert torch.equal(found, expected)
    assert found.stride() == expected.stride()
    found.sum().backward()
    if not compiled:
        found = expected = exact[0](x)
        for one, other in list(zip(model, exact, strict=True))[1:]:
            found, expected = one(found), other(expected)
            assert found.stride() == expected.stride()


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_operators_get_contiguous_numbers_whatever_the_gradient_is(layout, is_last):
    """Compiled code refuses results with other strides than it was told: those of a gradient of another format."""
    x = torch.randn(2, 3, 4, 5).contiguous(memory_format=layout)
    found = _arranged(x, is_last)
    assert found.is_contiguous()
    assert torch.equal(_as_before(found, x.shape, is_last), x)


def test_tokens_of_padding_count_in_the_statistics():
    """A mask of the model says nothing to a norm whose statistics have all positions."""

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear = nn.BatchNorm1d(8), nn.Linear(8, 8)

        def forward(self, x, attention_mask=None):
            return self.norm(self.linear(x).transpose(1, 2))

    model, x = Masked(), torch.randn(3, 30, 8)
    exact = copy.deepcopy(model)
    convert(model, RMMConfig(operations=["norm"], norm_bits=8))
    mask = (torch.arange(30) < torch.tensor([[30], [9], [20]])).long()
    for one in (model, exact):
        output = one(x, attention_mask=mask)
        (output.square() * torch.linspace(0, 1, 30) * mask[:, None]).sum().backward()
    found, expected = model.norm.weight.grad, exact.norm.weight.grad
    assert (found - expected).norm() < 0.01 * expected.norm()


def test_synchronized_statistics_stay_exact_and_the_report_says_so():
    model = nn.Sequential(nn.Conv2d(3, C, 3), nn.SyncBatchNorm(C), nn.ReLU())
    report = convert(model)
    assert report.skipped["1"] == "its statistics are those of several processes"


def test_a_step_is_simulated_with_what_it_saves():
    blocks = [(nn.Conv2d(C if i else 3, C, 3), nn.BatchNorm2d(C), nn.ReLU(inplace=True)) for i in range(6)]
    model = nn.Sequential(*(one for block in blocks for one in block))
    before, x = buffers(model), images(4, 64)
    expected = simulate(model, x).bytes
    convert(model, RMMConfig(operations=["norm", "activation"]))
    saved = [C * 4 * (62 - 2 * i) ** 2 * 4 for i in range(6)]
    assert expected - simulate(model, x).bytes > 0.8 * sum(saved[:-1])
    assert all(torch.equal(one, before[name]) for name, one in buffers(model).items())


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("is_trained", [True, False])
def test_a_frozen_norm_of_a_model_that_trains_saves_no_input(is_trained, layout):
    """dX is that of an affine map, to rounding; dγ is made of codes of the input, and unbiased."""
    model, exact = pair(nn.BatchNorm2d(C), norm_bits=4)
    steps(model), steps(exact)
    for one in (model, exact):
        one[1].eval()
        for parameter in one[1].parameters():
            parameter.requires_grad_(is_trained)
    x, before = images().to(memory_format=layout), buffers(model)
    saved = [bytes_kept(one, x) for one in (model, exact)]
    elements = 4 * C * 12 * 12
    of_others = 4 * x.numel(), 4 * elements  # the convolution's input, and ReLU's output, or its mask
    assert saved[1] == of_others[0] + of_others[1] + 4 * elements
    coded = aligned(8, elements // 2, elements // 64) if is_trained else 0
    assert saved[0] == of_others[0] + of_others[1] // 32 + coded + 4 * C
    found, expected = [], None
    for one in [exact] + [model] * 40:
        one.zero_grad()
        output = one(x)
        (output * output.detach()).sum().backward()
        gradients = {name: each.grad.clone() for name, each in one.named_parameters() if each.grad is not None}
        expected = gradients if expected is None else expected
        found.append(gradients)
    found = found[1:]
    assert found[0].keys() == expected.keys()
    for name, one in expected.items():
        errors = torch.stack([each[name] - one for each in found]).double()
        if name == "1.weight":
            assert abs(float(z_scores((errors * one).sum(1)))) < Z
            assert 0 < float(errors[0].norm()) < 0.05 * float(one.norm())
        else:
            assert float(errors.abs().max()) < 1e-5 * float(one.abs().max())
    assert_alike(model, exact)
    assert all(torch.equal(one, before[name]) for name, one in buffers(model).items())


@pytest.mark.parametrize(
    ("norm", "shape", "count"),
    [
        (nn.BatchNorm1d(C), (4, C), 4),
        (nn.BatchNorm2d(C), (1, C, 2, 2), 4),
        (nn.GroupNorm(8, C), (5, C, 2), 4),
        (nn.InstanceNorm1d(C), (5, C, 3), 3),
        (nn.InstanceNorm1d(C), (C, 3), 3),
    ],
)
def test_a_call_of_few_elements_is_exact_and_named(norm, shape, count):
    model = nn.Sequential(norm).train()
    exact = copy.deepcopy(model)
    report = convert(model, operations=["norm"])
    x, more = torch.randn(shape, requires_grad=True), torch.randn(shape[0], C, 40, requires_grad=True)
    y = torch.randn(shape)
    assert torch.equal(*(torch.autograd.grad(one(x), x, y)[0] for one in (model, exact)))
    reason = f"it normalizes {count} elements, where noise of 3 bits would be more than a quarter of the gradient"
    assert report.exact_calls == {"0": reason}
    assert f"{reason}: stays exact" in " ".join(report.table().split())
    if isinstance(norm, nn.BatchNorm2d):
        more = more.unsqueeze(-1)
    model(more)
    assert report.exact_calls == {}


@pytest.mark.parametrize("channels", [3, 16])
def test_a_few_channels_side_by_side_are_no_group_of_a_code(channels):
    """Which would have a scale of its own; gradients lie in memory as before."""
    model = nn.Sequential(nn.InstanceNorm2d(channels)).train()
    convert(model, operations=["norm"], norm_bits=4)
    x = torch.randn(2, channels, 16, 16).to(memory_format=torch.channels_last).requires_grad_()
    output = model(x)
    (gradient,) = torch.autograd.grad(output, x, torch.randn_like(x))
    assert gradient.is_contiguous(memory_format=torch.channels_last)
    elements, group = x.numel(), 64 if channels < 16 else 16
    assert bytes_kept(model, x) == aligned(8, 4 * 2 * channels, elements // 2, elements // group)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("name", ["batch", "group", "instance"])
def test_gradients_of_what_is_the_same_for_a_set_have_no_noise(name, layout):
    """The sum of dX over the elements with the same statistics is zero, as of the exact norm."""
    model, _ = pair(NORMS[name](), norm_bits=2)
    norm, x = model[1], torch.randn(4, C, 6, 6).to(memory_format=layout).requires_grad_()
    (gradient,) = torch.autograd.grad(norm(x), x, torch.randn(4, C, 6, 6))
    sets = gradient.transpose(0, 1).reshape(1, C, -1) if name == "batch" else gradient.reshape(4, norm._groups(C), -1)
    assert float(sets.sum(-1).abs().max()) < 1e-5 * float(sets.abs().sum(-1).max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gradients_of_one_channel_are_summed_over_all_rows(dtype):
    """Of single numbers, as a layer with one output makes them: rows of one column, several added up at once."""
    model = nn.Sequential(nn.BatchNorm1d(1)).to(dtype)
    convert(model, RMMConfig(operations=("norm",)))
    x = torch.randn(256, 1, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    model(x).sum().backward()
    assert float(model[0].bias.grad) == 256
    rounding = torch.finfo(dtype).eps * float(x.grad.abs().double().sum())
    assert abs(float(x.grad.double().sum())) <= rounding + 256 * 2**-20
