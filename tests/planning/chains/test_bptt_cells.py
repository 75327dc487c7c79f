"""Cells of users: trees of inputs, state and outputs, functions that capture, random numbers, masks, stores."""

import functools
import weakref

import pytest
import torch
from bptt_helpers import B, Dropping, H, T, counted, inputs, loop, outcome, planned, zeros
from torch import nn

from rmm_linear.planning import bptt


def check(cell, given, state, parameters, **options):
    """Compare with a plain loop, to the bit; return the number of parameters that got a gradient."""
    expected = outcome(loop, cell, given, state, parameters)
    for slots in (0, 5, 10**4):
        found = outcome(planned(slots=slots, **options), cell, given, state, parameters)
        assert len(expected[0]) == len(found[0])
        assert all(torch.equal(old, new) for old, new in zip(expected[0], found[0], strict=True))
        assert torch.equal(expected[2], found[2])
        for old, new in zip(expected[1], found[1], strict=True):
            assert (old is None) == (new is None)
            assert old is None or torch.equal(old, new)
    return sum(grad is not None for grad in found[1][-len(parameters) :])


@pytest.mark.parametrize("internal", [True, False])
def test_dropout_repeats_and_trees_keep_their_form(internal):
    cell = Dropping()
    state = {**zeros("h", "c"), "count": torch.tensor(0)}
    assert check(cell, inputs(), state, list(cell.parameters()), internal=internal) == 6
    outputs, last = bptt(cell, inputs(), state, slots=4)
    assert outputs[1]["count"].tolist() == list(range(1, T + 1))
    assert last["count"] == T
    assert not last["count"].requires_grad


def test_numbers_and_nothing_in_the_state_and_nothing_put_out():
    cell = nn.LSTMCell(H, H)

    def run(x, state):
        (h, c), number, nothing = state
        assert nothing is None
        return None, (cell(x, (h, c)), number + 1, nothing)

    state = (torch.zeros(B, H), torch.zeros(B, H)), 0, None
    outputs, ((h, _), number, nothing) = bptt(run, inputs(), state, slots=4)
    assert (outputs, number, nothing) == (None, T, None)
    h.sum().backward()
    found = cell.weight_hh.grad.clone()
    cell.zero_grad()
    for x in inputs().unbind(0):
        _, state = run(x, state)
    state[0][0].sum().backward()
    assert torch.equal(found, cell.weight_hh.grad)


def test_sequences_of_several_lengths_by_a_mask():
    """A sequence that has ended keeps its state, as pack_padded_sequence has it."""
    cell, lengths = nn.LSTMCell(H, H), torch.tensor([T, T // 2, 1])
    x = inputs()
    mask = (torch.arange(T)[:, None] < lengths).unsqueeze(-1)

    def masked(step, state):
        x_t, valid = step
        new = cell(x_t, state)
        state = tuple(torch.where(valid, after, before) for after, before in zip(new, state, strict=True))
        return state[0] * valid, state

    state = (torch.zeros(B, H), torch.zeros(B, H))
    outputs, (h, c) = bptt(masked, (x, mask), state, slots=5)
    torch.manual_seed(0)
    layer = nn.LSTM(H, H)
    with torch.no_grad():
        for name, parameter in cell.named_parameters():
            getattr(layer, f"{name}_l0").copy_(parameter)
    packed, (last_h, last_c) = layer(nn.utils.rnn.pack_padded_sequence(x, lengths))
    expected, _ = nn.utils.rnn.pad_packed_sequence(packed)
    for found, wanted in ((outputs, expected), (h, last_h[0]), (c, last_c[0])):
        assert torch.allclose(found, wanted, atol=1e-5)
    found = torch.autograd.grad(outputs.square().sum() + c.sum(), [x, *cell.parameters()])
    wanted = torch.autograd.grad(expected.square().sum() + last_c.sum(), [x, *layer.parameters()])
    for a, b in zip(found, wanted, strict=True):
        assert (a - b).norm() <= 1e-4 * b.norm()
    assert not found[0][1:, 2].any()  # beyond the end


def test_methods_and_partial_calls_of_modules():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.cell, self.unused = nn.RNNCell(H, H), nn.Linear(2, 2)

        def step(self, x, state, factor=1.0):
            state = self.cell(x * factor, state)
            return state, state

    model = Two()
    assert check(model.step, inputs(), torch.zeros(B, H), list(model.parameters())) == 4
    given = functools.partial(model.step, factor=0.5)
    assert check(given, inputs(), torch.zeros(B, H), list(model.parameters())) == 4
    calls = counted(model.cell)
    bptt(model.step, inputs(), torch.zeros(B, H), slots=2, internal=False)
    assert len(calls) == T  # no trial steps


def test_what_every_step_reads_goes_with_the_state_and_its_gradient_adds_up():
    """An encoder's result, as attention reads it: its storage is shared by all stored states."""
    torch.manual_seed(0)
    encoder, cell = nn.Linear(H, H), nn.LSTMCell(2 * H, H)

    def attend(x, state):
        (h, c), memory = state
        weights = torch.einsum("nbh,bh->nb", memory, h).softmax(0)
        h, c = cell(torch.cat([x, torch.einsum("nb,nbh->bh", weights, memory)], -1), (h, c))
        return h, ((h, c), memory)

    source, grads = torch.randn(11, B, H), []
    parameters = [*encoder.parameters(), *cell.parameters()]
    for run in (loop, planned(slots=4)):
        state = (torch.zeros(B, H), torch.zeros(B, H)), encoder(source)
        grads.append(torch.autograd.grad(run(attend, inputs(), state)[0].square().sum(), parameters))
    for old, new in zip(*grads, strict=True):
        assert (old - new).norm() <= 1e-4 * old.norm()
    memory = encoder(source)
    with pytest.raises(ValueError, match=r"must not capture the result of another computation .* Give it to the cell"):
        bptt(
            lambda x, s: (None, attend(x, (s, memory))[1][0]), inputs(), (torch.zeros(B, H), torch.zeros(B, H)), slots=4
        )


@pytest.mark.parametrize("options", [{"slots": 9, "internal": False}, {"slots": 9}])
def test_nothing_stays_in_memory_when_the_graph_is_gone(options):
    cell = nn.LSTMCell(H, H)
    outputs, last = bptt(cell, inputs(), None, **options)
    run = outputs.grad_fn.run
    assert len(run.frames) > 2
    outputs.sum().backward()
    assert run.frames == []
    outputs, last = bptt(cell, inputs(), None, **options)
    run = weakref.ref(outputs.grad_fn.run)
    assert run() is not None
    del outputs, last  # no cycle that a collector would have to find
    assert run() is None


def test_a_view_of_a_large_tensor_is_not_kept_whole():
    def run(x, state):
        wide = torch.cat([x, state.repeat(1, 50)], -1)
        state = wide[:, H : 2 * H].sin()[:, :]
        return None, (state.repeat(1, 50) + 0)[:, :H]

    _, last = bptt(run, inputs(), torch.zeros(B, H), slots=30, internal=False)
    kept = [leaf.untyped_storage().nbytes() for frame in last.grad_fn.run.frames[1:-1] for leaf in frame.state.leaves]
    assert len(kept) == 30
    assert set(kept) == {B * H * 4}
