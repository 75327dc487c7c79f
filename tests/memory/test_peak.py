"""Peak memory: what lives at once, the backward pass included."""

import gc

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from rmm_linear.memory import peak


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
