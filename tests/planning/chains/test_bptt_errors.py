"""What bptt refuses, with the remedy, and what it notices."""

import pytest
import torch
from bptt_helpers import B, H, inputs
from torch import nn

from rmm_linear.planning import bptt

LSTM = nn.LSTMCell(H, H)
BUDGET = {"slots": None}
ZERO = torch.zeros(1)
# error, text, cell, and what is not as usual: inputs, an LSTM's zero state, three slots.
REFUSED = [
    (TypeError, r"got nn\.LSTM, which runs all .* Use nn\.LSTMCell", nn.LSTM(H, H), {}),
    (TypeError, r"Use nn\.GRUCell", nn.GRU(H, H), {}),
    (TypeError, "cell must be callable as", 3, {}),
    (ValueError, "needs memory or slots", LSTM, BUDGET),
    (ValueError, "and not both", LSTM, {"memory": 3}),
    (ValueError, "memory must be at least 864 bytes", LSTM, {**BUDGET, "memory": "0.8KB"}),
    (ValueError, "memory must be a size", LSTM, {**BUDGET, "memory": "much"}),
    (TypeError, "memory must be a number of bytes", LSTM, {**BUDGET, "memory": 1e6}),
    (ValueError, "memory must be at least one byte", LSTM, {**BUDGET, "memory": 0}),
    (ValueError, "slots must not be negative", LSTM, {"slots": -1}),
    (ValueError, "internal must be True, False or", LSTM, {"internal": "all"}),
    (ValueError, "internal must be True, False or", LSTM, {"internal": 1}),
    (ValueError, "stores no states, got store", LSTM, {"store": "cpu", "internal": "only"}),
    (TypeError, "store must be a folder, .* or an object with put", LSTM, {"store": 7}),
    (ValueError, "at least one step, got none", LSTM, {"inputs": torch.ones(0, B, H)}),
    (ValueError, "all of one length", LSTM, {"inputs": (torch.ones(3, H), torch.ones(2, H))}),
    (ValueError, "time first", LSTM, {"inputs": torch.tensor(1.0)}),
    (TypeError, r"pair of tensors \(h, c\), or None for zeros, got Tensor", LSTM, {"state": ZERO}),
    (TypeError, "state of nn.GRUCell must be a tensor h", nn.GRUCell(H, H), {"state": (ZERO, ZERO)}),
    (TypeError, r"must return \(output, state\), got Tensor", lambda x, s: s, {"state": ZERO}),
    (ValueError, "a state of one structure", lambda x, s: (x, [s, s]), {"state": ZERO}),
    (TypeError, "must put out tensors, or None", lambda x, s: ("a", s), {"state": ZERO}),
    (TypeError, r"must put out tensors, or None, got 0\.5", lambda x, n: (x if n < 3 else 0.5, n + 1), {"state": 0}),
    (ValueError, "or None at every step, got .*None", lambda x, n: (None if n == 0 else x, n + 1), {"state": 0}),
    (ValueError, "or None at every step, got .*None", lambda x, n: (x if n == 0 else None, n + 1), {"state": 0}),
    (ValueError, "of one shape and dtype", lambda x, n: (torch.ones(n), n + 1), {"state": 1}),
]


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(("error", "text", "cell", "options"), REFUSED, ids=[text for _, text, *_ in REFUSED])
def test_what_cannot_be_is_refused_with_the_remedy(error, text, cell, options, grad):
    """Also without gradients, where no budget is measured."""
    options = {"slots": 3, "inputs": inputs(), "state": None, **options}
    if not grad and "at least 864" in text:
        pytest.skip("nothing is saved")
    with torch.set_grad_enabled(grad), pytest.raises(error, match=text):
        bptt(cell, **options)


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

    cell = Reaching()
    with pytest.raises(ValueError, match=r"got a tensor of shape \(8,?.* none of Reaching's.*lambda x, state"):
        bptt(cell, inputs(), torch.zeros(B, H), slots=4)
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
