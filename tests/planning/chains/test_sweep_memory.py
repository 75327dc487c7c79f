"""What a sweep keeps of its initial state: nothing beside autograd, and nothing after the backward pass."""

from __future__ import annotations

import gc

import torch
from torch import Tensor

from rmm_linear.planning import sweep

SIZE = 12347  # of no other tensor


def alive() -> list[Tensor]:
    gc.collect()
    return [one for one in gc.get_objects() if type(one) is Tensor and one.shape == (SIZE,)]


def test_a_loss_that_is_kept_keeps_no_state() -> None:
    scale = torch.ones((), requires_grad=True)
    loss = sweep(lambda i, u: torch.sin(u), scale * torch.ones(SIZE), 9, slots=3).sum()
    assert alive()
    loss.backward()
    assert alive() == []
    assert scale.grad is not None


def test_the_initial_state_is_not_copied_until_the_backward_pass() -> None:
    """A part of a larger tensor would be."""
    u = torch.rand(2, SIZE)[0].requires_grad_()
    loss = sweep(lambda i, u: torch.sin(u), u, 9, slots=3).sum()
    assert [one for one in alive() if torch.equal(one, u) and one.data_ptr() != u.data_ptr()] == []
    loss.backward()
    assert u.grad is not None
