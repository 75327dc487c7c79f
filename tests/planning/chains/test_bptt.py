"""bptt gives what a plain loop gives, in the steps and the memory that its plan says."""

import functools

import pytest
import torch
from bptt_helpers import counted, loop, outcome, planned
from torch import nn

from rmm_linear.planning import bptt, plan_bptt, step_bytes

T, B, H = 60, 3, 8
OPTIONS = [
    {"slots": 0},
    {"slots": 1},
    {"slots": 7},
    {"slots": 7, "internal": False},
    {"slots": 3, "internal": "only"},
    {"slots": 10**6},
    {"memory": "4KB"},
    {"memory": 10**9},
]


def inputs(steps=T, dtype=torch.float32, grad=True):
    torch.manual_seed(3)
    return torch.randn(steps, B, H, dtype=dtype).requires_grad_(grad)


def start(kind, dtype=torch.float32):
    torch.manual_seed(4)
    cell = kind(H, H, dtype=dtype)
    h, c = torch.randn(2, B, H, dtype=dtype).unbind(0)
    leaves = [leaf.clone().requires_grad_() for leaf in (h, c)]
    return cell, tuple(leaves) if kind is nn.LSTMCell else leaves[0]


def same(expected, found, compare=torch.equal):
    results, grads, generator = expected
    assert all(compare(old, new) for old, new in zip(results, found[0], strict=True))
    assert torch.equal(generator, found[2])
    for old, new in zip(grads, found[1], strict=True):
        assert (old is None) == (new is None)
        assert old is None or compare(old, new)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.RNNCell])
def test_gradients_of_cells_that_read_a_state_once_are_the_same_to_the_bit(kind, options):
    cell, state = start(kind)
    given = cell, inputs(), state, list(cell.parameters())
    same(outcome(loop, *given), outcome(planned(**options), *given))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradients_of_a_gru_are_the_same_but_for_the_order_of_three_terms(options):
    """h is read twice and put out: three parts of its gradient, added in another order. That rounds twice per step, and
    the error of a step, 2⁻⁵³ of numbers of about one, reaches the sums over T · B rows with a factor below T."""
    cell, state = start(nn.GRUCell, torch.float64)
    given = cell, inputs(dtype=torch.float64), state, list(cell.parameters())
    expected = outcome(loop, *given)
    scale = max(grad.abs().max().item() for grad in expected[1])
    close = functools.partial(torch.allclose, rtol=0, atol=2 * 2**-53 * T * T * B * scale)
    same(expected, outcome(planned(**options), *given), close)


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("options", OPTIONS[:6], ids=str)
def test_few_steps(steps, options):
    cell, state = start(nn.LSTMCell)
    given = cell, inputs(steps), state, list(cell.parameters())
    same(outcome(loop, *given), outcome(planned(**options), *given))


@pytest.mark.parametrize(("options", "trials"), [({"slots": 9, "internal": False}, 0), ({"slots": 9}, 2)])
def test_steps_are_those_of_the_plan(options, trials):
    cell, state = start(nn.LSTMCell)
    cost = None if trials == 0 else step_bytes(cell, inputs(), state).internal_cost
    calls = counted(cell)
    outputs, _ = bptt(cell, inputs(), state, **options)
    assert len(calls) == T + trials
    outputs.sum().backward()
    assert len(calls) == plan_bptt(T, slots=9, internal_cost=cost).forward_steps + trials


def test_bytes_of_an_lstm_step():
    """State h, c. Graph: those and what was read (h, c), four gates in one storage, tanh(c): 9 of B × H numbers."""
    cell, state = start(nn.LSTMCell)
    measured = step_bytes(cell, inputs(), state)
    unit = B * H * 4
    assert (measured.state, measured.graph, measured.plain) == (2 * unit, 9 * unit, 7 * unit)


def test_bytes_of_random_numbers_and_of_buffers_that_change_count_with_every_state_and_graph():
    class Normed(nn.Module):
        def __init__(self, rate):
            super().__init__()
            self.cell, self.norm, self.rate = nn.RNNCell(H, H), nn.BatchNorm1d(H), rate

        def forward(self, x, state):
            state = self.norm(nn.functional.dropout(self.cell(x, state), self.rate, self.rate > 0))
            return None, state

    state = torch.zeros(B, H)
    plain, dropping, frozen = (step_bytes(cell, inputs(), state) for cell in (Normed(0), Normed(0.5), Normed(0).eval()))
    drawn, counted_buffers = torch.get_rng_state().nbytes, (2 * H + 2) * 4  # mean, variance, an int64
    assert frozen.state == B * H * 4
    assert plain.state - frozen.state == counted_buffers
    assert dropping.state - plain.state == drawn
    for measured, besides in ((frozen, 0), (plain, counted_buffers), (dropping, counted_buffers + drawn)):
        assert (
            measured.graph - measured.plain == B * H * 4 + besides
        )  # a plain run keeps neither, nor the state it reads


def test_without_gradients_the_steps_run_once_and_nothing_is_kept():
    cell, state = start(nn.LSTMCell)
    cell.requires_grad_(False)
    calls = counted(cell)
    with torch.no_grad():
        without, _ = bptt(cell, inputs(), state, slots=5)
    assert len(calls) == T
    frozen, _ = bptt(cell, inputs(grad=False), [leaf.detach() for leaf in state], slots=5, internal=False)
    assert len(calls) == 2 * T
    assert frozen.grad_fn is None
    assert torch.equal(without, frozen)
    assert torch.equal(without, loop(cell, inputs(), state)[0])
    with torch.inference_mode():
        assert torch.equal(without, bptt(cell, inputs(grad=False), None, slots=5)[0]) is False  # another state: zeros


def test_no_state_is_zeros_for_pytorchs_cells():
    cell, _ = start(nn.GRUCell)
    zeros = torch.zeros(B, H)
    assert torch.equal(bptt(cell, inputs(), None, slots=3)[0], bptt(cell, inputs(), zeros, slots=3)[0])
    unbatched = bptt(start(nn.LSTMCell)[0], inputs()[:, 0], None, slots=3)[0]
    assert unbatched.shape == (T, H)


def test_only_the_last_state_or_only_an_output_may_reach_the_loss():
    cell, state = start(nn.LSTMCell)
    for pick in (lambda o, s: s[1], lambda o, s: o[5], lambda o, s: o[-1]):
        grads = []
        for run in (loop, planned(slots=6)):
            cell.zero_grad()
            pick(*run(cell, inputs(), state)).square().sum().backward()
            grads.append([p.grad for p in cell.parameters()])
        assert all(torch.equal(old, new) for old, new in zip(*grads, strict=True))


def test_a_second_backward_pass_needs_retain_graph():
    cell, state = start(nn.LSTMCell)
    outputs, _ = bptt(cell, inputs(), state, slots=6)
    outputs.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        outputs.sum().backward()


def test_a_double_backward_pass_is_refused():
    cell, state = start(nn.LSTMCell)
    outputs, _ = bptt(cell, inputs(), state, slots=6)
    with pytest.raises(RuntimeError, match="bptt does not support double backward"):
        torch.autograd.grad(outputs.sum(), cell.weight_hh, create_graph=True)


def test_inputs_that_were_changed_in_place_before_the_backward_pass_are_noticed():
    cell, state = start(nn.LSTMCell)
    x = inputs() * 1
    outputs, _ = bptt(cell, x, state, slots=6)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs.sum().backward()
