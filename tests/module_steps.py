"""A step of a model of module_cases.py, what is compared of two, and what autograd saves."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from module_cases import MEMBERS, SEQUENCES, TOKENS, WIDTH
from statistical import Z
from torch import Tensor

ROWS = SEQUENCES * TOKENS
DRAWS = 40


class Step(NamedTuple):
    """What a user sees of a step."""

    output: Tensor
    gradients: dict[str, Tensor]
    state: Tensor  # of the generator, after the module
    after: Tensor  # and after the forward pass


def inputs(dtype=torch.float32, width=WIDTH, tokens=TOKENS, sequences=SEQUENCES):
    x = torch.randn(sequences, tokens, width, generator=torch.Generator().manual_seed(tokens))
    return x.to(dtype).requires_grad_()


def weights_of(output):
    """The gradient of the output."""
    generator = torch.Generator().manual_seed(5)
    return torch.randn(output.shape, generator=generator, dtype=torch.float32, device="cpu").to(output.dtype)


def step(model, x, seed=0, mask=None, run=None):
    """A step of the model, or of what ``run`` makes of it."""
    named = {"x": x, **dict(model.named_parameters())}
    for one in named.values():
        one.grad = None
    torch.manual_seed(seed)
    output = (model if run is None else run)(x, **({} if mask is None else {"attention_mask": mask}))
    after, y = torch.get_rng_state(), weights_of(output)
    output.backward(y if mask is None else y * mask.unsqueeze(-1))
    gradients = {name: one.grad for name, one in named.items() if one.grad is not None}
    return Step(output.detach(), gradients, model.state, after)


def assert_same(found, expected):
    assert torch.equal(found.output, expected.output)
    assert found.gradients.keys() == expected.gradients.keys()
    for name, gradient in found.gradients.items():
        assert gradient.dtype == expected.gradients[name].dtype
        assert torch.equal(gradient, expected.gradients[name]), name


def assert_near(found, expected, room):
    """Relative to the largest element."""
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    if found.numel():
        difference, largest = (found.double() - expected.double()).abs().max(), expected.double().abs().max()
        assert difference <= room * largest + 1e-30


def assert_exact_parts(name, found, expected, dtype=torch.float32):
    """The output to the bit, unless the table says otherwise, and exact gradients up to the order of their sums."""
    member = MEMBERS[name]
    assert_near(found.output, expected.output, member.near * torch.finfo(dtype).eps / torch.finfo(torch.float32).eps)
    for one, gradient in expected.gradients.items():
        assert found.gradients[one].dtype == gradient.dtype
        if one in member.exact:
            assert_near(found.gradients[one], gradient, 8 * max(torch.finfo(of).eps for of in (dtype, gradient.dtype)))


def assert_unbiased(name, found, expected, draws=DRAWS, room=1e-5, z=Z, exact_too=()):
    """Every gradient has the mean of the exact one: along it, and in all coordinates together.

    Both steps of a draw have the same random numbers for dropout; an exact one that draws none is made once. A bias
    of the size of the gradient, as a wrong scale or a lost row makes, is found where z · √(noise / draws) is less than
    it: of these modules with 20 draws and more. M · ‖mean error‖² is the trace of the covariance on
    average, and above z² times that with a chance below that of one normal number beyond z, see ``statistical``.
    """
    errors, exact, fixed = {}, {}, expected(0)
    torch.manual_seed(0)
    draws_none = torch.equal(torch.get_rng_state(), fixed.after)
    for seed in range(draws):
        one, other = found(seed).gradients, (fixed if draws_none else expected(seed)).gradients
        for key, gradient in other.items():
            errors.setdefault(key, []).append(one[key].double() - gradient.double())
            exact.setdefault(key, []).append(gradient.double())
    sizes = {key: torch.stack(gradients).square().flatten(1).sum(1) for key, gradients in exact.items()}
    least = room**2 * max(float(size.mean()) for size in sizes.values())  # what is 0 but for rounding: a key's bias
    for key, values in errors.items():
        error, size = torch.stack(values), sizes[key].clamp_min(least)
        if float(sizes[key].mean()) < least and float(error.square().flatten(1).sum(1).mean()) < least:
            continue
        along = (error * torch.stack(exact[key])).flatten(1).sum(1) / size
        mean, noise = error.mean(0), float((error - error.mean(0)).square().sum() / (draws - 1) / size.mean())
        bias = MEMBERS[name].bias * noise
        assert float(along.mean()) ** 2 <= (z * float(along.std()) / math.sqrt(draws) + room) ** 2 + bias, key
        assert float(mean.square().sum() / size.mean()) <= z**2 * noise / draws + bias + room**2, key
        assert noise < 100, key
        if room < 1e-3:
            assert (noise > room**2) == (key not in {*MEMBERS[name].exact, *exact_too}), key


def saved_bytes(model, x, mask=None):
    """Bytes of the tensors that autograd saves, but for parameters."""
    own = {one.untyped_storage().data_ptr() for one in model.parameters()}
    found = {}

    def note(tensor):
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()  # held, so that addresses stay apart
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = model(x, **({} if mask is None else {"attention_mask": mask}))
    del output
    return sum(storage.nbytes() for place, storage in found.items() if place not in own)
