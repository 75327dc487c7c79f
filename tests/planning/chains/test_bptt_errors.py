"""What bptt refuses, with the remedy, and what it notices."""

import pytest
import torch
from bptt_helpers import B, H, T, inputs
from torch import nn

from rmm_linear.planning import bptt


def refused(cell, given=None, state=None, **options):
    return bptt(cell, inputs() if given is None else given, state, **({"slots": 3} | options))


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: refused(nn.LSTM(H, H)), TypeError, r"got nn\.LSTM, which runs all .* Use nn\.LSTMCell"),
        (lambda: refused(nn.GRU(H, H)), TypeError, r"Use nn\.GRUCell"),
        (lambda: refused(3), TypeError, "cell must be callable as"),
        (lambda: refused(nn.LSTMCell(H, H), slots=None), ValueError, "needs memory or slots"),
        (lambda: refused(nn.LSTMCell(H, H), memory=3), ValueError, "and not both"),
        (
            lambda: refused(nn.LSTMCell(H, H), slots=None, memory="0.8KB"),
            ValueError,
            "memory must be at least 864 bytes",
        ),
        (lambda: refused(nn.LSTMCell(H, H), slots=None, memory="much"), ValueError, "memory must be a size"),
        (lambda: refused(nn.LSTMCell(H, H), slots=None, memory=1e6), TypeError, "memory must be a number of bytes"),
        (lambda: refused(nn.LSTMCell(H, H), slots=None, memory=0), ValueError, "memory must be at least one byte"),
        (lambda: refused(nn.LSTMCell(H, H), slots=-1), ValueError, "slots must not be negative"),
        (lambda: refused(nn.LSTMCell(H, H), internal="all"), ValueError, "internal must be"),
        (lambda: refused(nn.LSTMCell(H, H), internal=1), ValueError, "internal must be True, False or"),
        (lambda: refused(nn.LSTMCell(H, H), store="cpu", internal="only"), ValueError, "stores no states, got store"),
        (lambda: refused(nn.LSTMCell(H, H), store=7), TypeError, "store must be a folder, .* or an object with put"),
        (lambda: refused(nn.LSTMCell(H, H), torch.ones(0, B, H)), ValueError, "at least one step, got none"),
        (lambda: refused(nn.LSTMCell(H, H), (torch.ones(3, H), torch.ones(2, H))), ValueError, "all of one length"),
        (lambda: refused(nn.LSTMCell(H, H), torch.tensor(1.0)), ValueError, "time first"),
        (lambda: refused(lambda x, s: s, state=torch.ones(1)), TypeError, r"must return \(output, state\), got Tensor"),
        (lambda: refused(lambda x, s: (x, [s, s]), state=torch.ones(1)), ValueError, "a state of one structure"),
        (lambda: refused(lambda x, s: ("a", s), state=torch.ones(1)), TypeError, "must put out tensors, or None"),
    ],
)
def test_what_cannot_be_is_refused_with_the_remedy(call, error, text):
    with pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"slots": -1}, "slots must not be negative"),
        ({"internal": "all"}, "internal must be"),
        ({"slots": None, "memory": "much"}, "memory must be a size"),
    ],
)
def test_arguments_are_checked_without_gradients_too(options, text):
    with torch.no_grad(), pytest.raises(ValueError, match=text):
        refused(nn.LSTMCell(H, H), **options)


def test_outputs_of_several_shapes_are_refused():
    lengths = iter(range(1, 100))
    with pytest.raises(ValueError, match="of one shape and dtype"):
        refused(lambda x, s: (x.sum() * torch.ones(next(lengths)), s), state=torch.ones(1))


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("first", [True, False])
def test_outputs_that_are_sometimes_none_are_refused(first, grad):
    with pytest.raises(ValueError, match=r"or None at every step, got .*None"), torch.set_grad_enabled(grad):
        refused(lambda x, n: (None if (n == 0) == first else x, n + 1), state=0)
    with pytest.raises((TypeError, ValueError), match=r"must put out tensors, or None, got 0\.5"):
        refused(lambda x, n: (x if n < 3 else 0.5, n + 1), state=0)


def test_a_cell_that_changes_its_state_in_place_is_noticed():
    def run(x, state):
        with torch.no_grad():
            state.detach().mul_(2)
        return x + state, state + x.mean()

    with pytest.raises(RuntimeError, match="was changed in place"):
        bptt(run, inputs(), torch.ones(B, H), slots=4, internal=False)[0].sum().backward()


def test_a_module_that_reaches_for_parameters_that_are_not_its_own_is_noticed():
    other = nn.Linear(H, H)

    class Reaching(nn.Module):
        def forward(self, x, state):
            return x, torch.tanh(other(x) + state)

    with pytest.raises(ValueError, match=r"got a tensor of shape \(8,?.* none of Reaching's.*lambda x, state"):
        bptt(Reaching(), inputs(), torch.zeros(B, H), slots=4)
    cell = Reaching()
    _, last = bptt(lambda x, s: cell(x, s), inputs(), torch.zeros(B, H), slots=4)
    last.sum().backward()
    assert other.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("options", [{"slots": 0}, {"slots": 3, "internal": False}, {"slots": 10**4}], ids=str)
@pytest.mark.parametrize("is_module", [False, True])
def test_parameters_that_only_some_steps_reach_are_noticed(is_module, options):
    """Steps with an even number use another layer; of a module, one that it does not own."""
    even, odd = nn.Linear(H, H), nn.Linear(H, H)

    class Alternating(nn.Module):
        def __init__(self):
            super().__init__()
            self.even = even

        def forward(self, x, state):
            h, n = state
            return None, (torch.tanh((even if n % 2 == 0 else odd)(x) + h), n + 1)

    cell = Alternating()
    cell = cell if is_module else lambda x, state, run=cell: run(x, state)
    text = "none of Alternating's" if is_module else "same parameters at every step .* nn.Module that has all"
    with pytest.raises(ValueError, match=text):
        bptt(cell, inputs(), (torch.zeros(B, H), 0), **options)[1][0].sum().backward()
    even.requires_grad_(False)  # the first step needs no gradient at all
    with pytest.raises(ValueError, match=text):
        bptt(cell, inputs().detach(), (torch.zeros(B, H), 0), **options)


def test_a_parameter_that_is_put_out_as_it_is_gets_its_gradient():
    weight = torch.ones(B, H, requires_grad=True)
    for slots in (0, 3, 10**4):
        weight.grad = None
        bptt(lambda x, s: (weight, s), inputs().detach(), torch.zeros(1), slots=slots)[0].sum().backward()
        assert torch.equal(weight.grad, torch.full((B, H), float(T)))
