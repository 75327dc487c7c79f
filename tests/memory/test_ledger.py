"""Bytes that models save equal the formula, each storage counts once; the peak is what lives at once."""

import gc
import weakref

import pytest
import torch
from cases import ROUGH
from helpers import SEED_BYTES, Mlp, Shapes, bytes_kept
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from rmm_linear import RMMLinear, convert, revert
from rmm_linear.memory import peak, track_saved


def total(run, model):
    with track_saved(model) as saved:
        output = run()
    assert output is not None
    return saved.total


# The counter


def test_a_storage_counts_once_whoever_keeps_it():
    x = torch.randn(10, 4)
    layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    assert total(lambda: [layer(x) for layer in layers], layers) == 10 * 4 * 4


def test_a_view_counts_as_its_whole_storage():
    base = torch.randn(10, 8)
    layer = nn.Linear(4, 3)
    assert total(lambda: layer(base[:, :4]), layer) == 10 * 8 * 4


def test_parameters_and_buffers_do_not_count():
    layer = nn.Linear(4, 3)
    x = torch.randn(10, 4, requires_grad=True)
    assert total(lambda: layer(x), layer) == 10 * 4 * 4
    assert total(lambda: layer(x), nn.Identity()) == 10 * 4 * 4 + 3 * 4 * 4


class Replaces(nn.Module):
    """Drops a buffer of the size of what it saves, which mostly gets its address."""

    def __init__(self, size):
        super().__init__()
        self.register_buffer("state", torch.randn(size))

    def forward(self, x):
        self.state = None
        return x.exp()


@pytest.mark.parametrize("size", [64, 256, 4096])
def test_what_takes_the_place_of_a_buffer_counts(size):
    model = Replaces(size)
    with track_saved(model) as ledger:
        _ = model(torch.randn(size, requires_grad=True))
    assert ledger.total == 4 * size


def test_tensors_on_the_meta_device_do_not_count():
    layer, shapes = nn.Linear(4, 3), torch.ones(1000, device="meta", requires_grad=True)
    assert total(lambda: (layer(torch.randn(10, 4)), shapes.exp()), layer) == 10 * 4 * 4


def test_nothing_counts_without_gradients():
    layer = nn.Linear(4, 3)
    with torch.no_grad():
        assert total(lambda: layer(torch.randn(10, 4)), layer) == 0


def test_backward_inside_takes_nothing_away():
    layer = nn.Linear(4, 3)
    with track_saved(layer) as saved:
        layer(torch.randn(10, 4)).sum().backward()
    assert saved.total == 10 * 4 * 4


def test_gradients_are_the_same_under_the_counter():
    layer, x = nn.Linear(4, 3), torch.randn(10, 4)
    with track_saved(layer):
        layer(x).square().sum().backward()
    counted = layer.weight.grad.clone()
    layer.weight.grad = None
    layer(x).square().sum().backward()
    assert torch.equal(counted, layer.weight.grad)


def test_the_ledger_names_keepers_and_marks_shared_storages():
    model = Shapes()
    with track_saved(model) as saved:
        output = model(torch.randn(100, 16))
    size = 100 * 16 * 4
    # left and right each give the product an operand, tanh saves its output, which `after` reads.
    assert saved.by_module == {"inner": size, "left": size, "": 3 * size}
    assert saved.shared == {"left": size, "": size}
    assert saved.total == 5 * size
    assert saved.to_dict() == {"total": saved.total, "by_module": saved.by_module, "shared": saved.shared}
    assert "left" in saved.table()
    assert "(model)" in saved.table()
    del output


def test_the_ledger_leaves_no_hooks():
    model = Shapes()
    with pytest.raises(RuntimeError), track_saved(model):
        model(torch.randn(3, 5))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


# Models


def test_a_graph_without_a_backward_pass_is_freed():
    layer, x = nn.Linear(4, 4), torch.ones(10, 4)
    with track_saved(layer):
        loss = layer(x).sigmoid().sum()  # a sigmoid saves its output, which must not hold its node
    freed = weakref.ref(x)
    del x, loss
    gc.collect()
    assert freed() is None


def test_a_saved_tensor_that_is_changed_in_place_is_an_error():
    layer = nn.Linear(4, 4)
    with track_saved(layer):
        hidden = layer(torch.ones(10, 4)).sigmoid()
        hidden.mul_(2)
    with pytest.raises(RuntimeError, match=r"shape \(10, 4\) is at version 1, expected 0"):
        hidden.sum().backward()


def test_mlp_keeps_its_rows_its_seeds_and_what_relu_keeps():
    """120 tokens, K = 30: 30 · (12 + 16) sketched elements and two seeds instead of 120 · 12; ReLU saves 120 · 16."""
    model, x = Mlp(), torch.randn(120, 12)
    model.dropout = nn.Identity()
    relu = 120 * 16 * 4
    assert bytes_kept(model, x) == 120 * 12 * 4 + relu  # the second layer's input is the ReLU's output
    convert(model, **ROUGH)
    assert bytes_kept(model, x) == 30 * (12 + 16) * 4 + 2 * SEED_BYTES + relu
    revert(model)
    assert bytes_kept(model, x) == 120 * 12 * 4 + relu


def test_input_is_freed_after_the_forward_pass():
    """What counts in the end: once the caller lets go of X, it is freed."""
    layer = RMMLinear(6, 4)
    x = torch.randn(4000, 6)
    gone = weakref.ref(x)
    output = layer(x)
    del x
    assert gone() is None
    output.sum().backward()
    assert layer.weight.grad.abs().sum() > 0


# The peak


def test_peak_counts_what_lives_at_once():
    gc.collect()
    with peak("cpu") as measured:
        a = torch.ones(1000)
        b = a + 1
        del a
        c = b.view(10, 100) * 2
        del b, c
        torch.ones(10)
    assert measured.bytes == 2 * 4000
    assert measured.measure == "cpu live tensors"


def test_peak_sees_the_backward_pass():
    layer, x = nn.Linear(64, 64), torch.randn(1000, 64)
    with peak("cpu") as forward:
        output = layer(x)
    with peak("cpu") as both:
        layer(x).square().sum().backward()
    assert forward.bytes == 1000 * 64 * 4
    assert both.bytes >= 2 * 1000 * 64 * 4
    del output


def test_tensors_on_the_meta_device_have_no_bytes():
    with peak("cpu") as measured:
        shapes = torch.empty(1000, device="meta").add(1)
        real = torch.ones(10)
    assert measured.bytes == real.nbytes
    with FakeTensorMode(), peak("cpu") as simulated:  # whose storages are all on the meta device
        shapes, fake = torch.empty(1000, device="meta").add(1), torch.ones(10)
    assert simulated.bytes == fake.nbytes
    del shapes
