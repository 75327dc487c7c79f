"""What sketched_linear saves for the backward pass: K rows, or nothing; and the backward passes that are refused."""

import pytest
import torch
from functional_helpers import config, dtypes, leaves
from helpers import SEED_BYTES
from torch.nn import functional as F

from rmm_linear import sketched_linear
from rmm_linear.memory import track_saved
from rmm_linear.sketches import KINDS, SAMPLERS, has_blocks, kept_rows

# What is saved


def kept_bytes(*args, **fields):
    with track_saved(torch.nn.Identity()) as kept:
        output = sketched_linear(*args, config=config(**fields), seed=1)
    assert output is not None
    return kept.total


@pytest.mark.parametrize(
    ("kind", "block"), [(kind, None) for kind in KINDS] + [(kind, 7) for kind in KINDS if has_blocks(kind)]
)
@dtypes
def test_bytes_kept_are_the_rows_and_the_seed(kind, block, dtype):
    x, w, b = leaves((5, 8, 6), dtype)
    rows = kept_rows(40, 8, block)
    weight_bytes = w.numel() * dtype.itemsize  # kept for dX; not the layer's to save
    origin = rows * 8 if kind in SAMPLERS else SEED_BYTES  # which rows, and their scales
    assert kept_bytes(x, w, b, kind=kind, block=block) == rows * 6 * dtype.itemsize + origin + weight_bytes


def test_input_without_gradient_does_not_keep_the_weight():
    x, w, b = leaves((40, 6))
    assert kept_bytes(x.detach(), w, b) == 8 * 6 * 4 + SEED_BYTES


def test_bytes_kept_in_autocast_are_half():
    x, w, b = leaves((40, 6))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert kept_bytes(x.detach(), w, b) == 8 * 6 * 2 + SEED_BYTES


def test_frozen_weight_keeps_no_input():
    x, w, b = leaves((40, 6))
    assert kept_bytes(x, w.detach(), b) == w.numel() * 4
    assert kept_bytes(x.detach(), w.detach(), b) == 0
    sketched_linear(x, w.detach(), b, config=config()).sum().backward()
    assert torch.allclose(x.grad, w.detach().sum(0).expand(40, 6))
    assert torch.equal(b.grad, torch.full((3,), 40.0))


def test_frozen_bias_and_frozen_input():
    """The weight's gradient is the one that it has beside those that are not frozen."""
    x, w, b = leaves((40, 6))
    sketched_linear(x, w, b, config=config(), seed=1).sum().backward()
    expected = w.grad
    x, w, b = leaves((40, 6))
    sketched_linear(x.detach(), w, b.detach(), config=config(), seed=1).sum().backward()
    assert (x.grad, b.grad) == (None, None)
    assert expected.all()
    assert torch.equal(w.grad, expected)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_grad_mode_nothing_is_kept(mode):
    x, w, b = leaves((40, 6))
    with mode():
        assert kept_bytes(x, w, b) == 0
        output = sketched_linear(x, w, b, config=config())
    assert not output.requires_grad
    assert torch.equal(output, F.linear(x, w, b))


def test_exact_layer_keeps_the_input_once():
    x, w, b = leaves((40, 6))
    assert kept_bytes(x.detach(), w, b, ratio=1.0) == 40 * 6 * 4


# What is refused


@pytest.mark.parametrize("wanted", ["input", "weight"])
def test_double_backward_is_refused(wanted):
    x, w, b = leaves((40, 6))
    loss = sketched_linear(x, w, b, config=config()).square().sum()
    with pytest.raises(RuntimeError, match="does not support double backward") as error:
        torch.autograd.grad(loss, x if wanted == "input" else w, create_graph=True)
    assert "revert" in str(error.value)


def test_second_backward_has_torchs_own_error():
    x, w, b = leaves((40, 6))
    loss = sketched_linear(x, w, b, config=config()).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_retained_graph_gives_the_same_gradient_again():
    x, w, b = leaves((40, 6))
    loss = sketched_linear(x, w, b, config=config()).sum()
    first = torch.autograd.grad(loss, w, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(loss, w)[0], first)


def test_weight_changed_in_place_after_the_forward_pass_is_noticed():
    """dX would be wrong without a word."""
    x, w, b = leaves((40, 6))
    loss = sketched_linear(x, w, b, config=config()).sum()
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_input_changed_in_place_after_the_forward_pass_does_no_harm():
    """Only its sketch is needed, and that was made."""
    x, w, b = leaves((40, 6))
    grads = []
    for change in (False, True):
        x = x.detach().clone()
        output = sketched_linear(x, w, b, config=config(), seed=1)
        if change:
            x.zero_()
        grads.append(torch.autograd.grad(output.sum(), w)[0])
    assert torch.equal(*grads)
