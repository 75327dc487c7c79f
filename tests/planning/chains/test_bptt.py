"""bptt gives what a plain loop gives, with cells of users too, in the steps and the memory that its plan says."""

import functools
import weakref

import pytest
import torch
from bptt_helpers import B, Dropping, H, T, counted, inputs, loop, outcome, planned, same
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from rmm_linear.memory import peak
from rmm_linear.planning import bptt, plan_bptt, step_bytes

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


def start(kind, dtype=torch.float32):
    torch.manual_seed(4)
    h, c = (torch.randn(B, H, dtype=dtype, requires_grad=True) for _ in range(2))
    return kind(H, H, dtype=dtype), (h, c) if kind is nn.LSTMCell else h


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.RNNCell, nn.GRUCell])
def test_a_training_step_is_that_of_the_loop(kind, options):
    """To the bit, but for a GRU: h is read twice and put out, so three parts of its gradient add up in another order.
    That rounds twice per step, and the error of a step, 2⁻⁵³ of numbers of about one, reaches the sums over T · B rows
    with a factor below T."""
    dtype = torch.float64 if kind is nn.GRUCell else torch.float32
    cell, state = start(kind, dtype)
    for steps in (1, 2, 3, T):
        given = cell, inputs(steps, dtype=dtype), state
        expected, compare = outcome(loop, *given), torch.equal
        if kind is nn.GRUCell:
            scale = max(grad.abs().max().item() for grad in expected[1])
            compare = functools.partial(torch.allclose, rtol=0, atol=2 * 2**-53 * steps * steps * B * scale)
        assert same(expected, outcome(planned(**options), *given), compare), steps


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
    measured = step_bytes(nn.LSTMCell(H, H), inputs(), start(nn.LSTMCell)[1])
    unit = B * H * 4
    assert (measured.state, measured.graph, measured.plain) == (2 * unit, 9 * unit, 7 * unit)


def test_bytes_of_random_numbers_and_of_buffers_that_change_count_with_every_state_and_graph():
    class Normed(nn.Module):
        def __init__(self, rate):
            super().__init__()
            self.cell, self.norm, self.rate = nn.RNNCell(H, H), nn.BatchNorm1d(H), rate

        def forward(self, x, state):
            return None, self.norm(nn.functional.dropout(self.cell(x, state), self.rate, self.rate > 0))

    state = torch.zeros(B, H)
    plain, dropping, frozen = (step_bytes(cell, inputs(), state) for cell in (Normed(0), Normed(0.5), Normed(0).eval()))
    drawn, buffers = torch.get_rng_state().nbytes, (2 * H + 2) * 4  # mean, variance, an int64
    for measured, more in ((frozen, 0), (plain, buffers), (dropping, buffers + drawn)):
        assert measured.state == B * H * 4 + more
        assert measured.graph - measured.plain == measured.state  # a plain run saves neither


def test_without_gradients_the_steps_run_once_and_nothing_is_saved():
    cell, state = start(nn.LSTMCell)
    cell.requires_grad_(False)
    expected, _ = loop(cell, inputs(), state)
    calls = counted(cell)
    with torch.no_grad():
        assert torch.equal(bptt(cell, inputs(), state, slots=5)[0], expected)
    assert len(calls) == T
    frozen, _ = bptt(cell, inputs().detach(), [leaf.detach() for leaf in state], slots=5, internal=False)
    assert len(calls) == 2 * T
    assert frozen.grad_fn is None
    assert torch.equal(frozen, expected)
    with torch.inference_mode():
        assert torch.equal(bptt(cell, inputs().detach(), state, slots=5)[0], expected)


def test_no_state_is_zeros_for_pytorchs_cells():
    cell, _ = start(nn.GRUCell)
    assert torch.equal(bptt(cell, inputs(), None, slots=3)[0], bptt(cell, inputs(), torch.zeros(B, H), slots=3)[0])
    assert bptt(start(nn.LSTMCell)[0], inputs()[:, 0], None, slots=3)[0].shape == (T, H)  # not batched


def test_only_the_last_state_or_only_an_output_may_reach_the_loss():
    cell, state = start(nn.LSTMCell)
    for pick in (lambda o, s: s[1], lambda o, s: o[5], lambda o, s: o[-1]):
        grads = []
        for run in (loop, planned(slots=6)):
            cell.zero_grad()
            pick(*run(cell, inputs(), state)).square().sum().backward()
            grads.append([p.grad for p in cell.parameters()])
        assert all(torch.equal(old, new) for old, new in zip(*grads, strict=True))


def test_second_backward_passes():
    cell, state = start(nn.LSTMCell)
    outputs, _ = bptt(cell, inputs(), state, slots=6)
    with pytest.raises(RuntimeError, match="bptt does not support double backward"):
        torch.autograd.grad(outputs.sum(), cell.weight_hh, create_graph=True)
    outputs, _ = bptt(cell, inputs(), state, slots=6)
    outputs.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        outputs.sum().backward()


# Cells of users


def assert_as_the_loop(cell, state, **options):
    expected = outcome(loop, cell, inputs(), state)
    assert sum(grad is not None for grad in expected[1]) > 4  # of the parameters too
    for slots in (0, 5, 10**4):
        assert same(expected, outcome(planned(slots=slots, **options), cell, inputs(), state))


@pytest.mark.parametrize("internal", [True, False])
def test_dropout_repeats_and_trees_keep_their_form(internal):
    cell = Dropping()
    assert_as_the_loop(cell, cell.start(), internal=internal)
    outputs, last = bptt(cell, inputs(), cell.start(), slots=4)
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
    (found,) = torch.autograd.grad(h.sum(), cell.weight_hh)
    for x in inputs().unbind(0):
        _, state = run(x, state)
    assert torch.equal(found, torch.autograd.grad(state[0][0].sum(), cell.weight_hh)[0])


def test_sequences_of_several_lengths_by_a_mask():
    """A sequence that has ended keeps its state, as pack_padded_sequence has it."""
    cell, lengths, x = nn.LSTMCell(H, H), torch.tensor([T, T // 2, 1]), inputs()
    mask = (torch.arange(T)[:, None] < lengths).unsqueeze(-1)

    def masked(step, state):
        x_t, valid = step
        state = tuple(torch.where(valid, *both) for both in zip(cell(x_t, state), state, strict=True))
        return state[0] * valid, state

    outputs, (_, c) = bptt(masked, (x, mask), (torch.zeros(B, H), torch.zeros(B, H)), slots=5)
    layer = nn.LSTM(H, H)
    layer.load_state_dict({f"{name}_l0": value for name, value in cell.state_dict().items()})
    packed, (_, last_c) = layer(nn.utils.rnn.pack_padded_sequence(x, lengths))
    expected, _ = nn.utils.rnn.pad_packed_sequence(packed)
    assert torch.allclose(outputs, expected, atol=1e-5)
    found = torch.autograd.grad(outputs.square().sum() + c.sum(), [x, *cell.parameters()])
    wanted = torch.autograd.grad(expected.square().sum() + last_c.sum(), [x, *layer.parameters()])
    for a, b in zip(found, wanted, strict=True):
        assert (a - b).norm() <= 1e-4 * b.norm()
    assert not found[0][1:, 2].any()  # beyond the end


def test_methods_and_partial_calls_of_modules():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.unused = nn.RNNCell(H, H), nn.Linear(2, 2)

        def step(self, x, state, factor=1.0):
            state = self.cell(x * factor, state)
            return state, state

    model = Two()
    assert_as_the_loop(model.step, torch.zeros(B, H))
    assert_as_the_loop(functools.partial(model.step, factor=0.5), torch.zeros(B, H))
    calls = counted(model.cell)
    bptt(model.step, inputs(), torch.zeros(B, H), slots=2, internal=False)
    assert len(calls) == T  # no trial steps


def test_what_every_step_reads_goes_with_the_state_and_its_gradient_adds_up():
    """An encoder's result, as attention reads it: its storage is shared by all stored states."""
    torch.manual_seed(0)
    encoder, cell, source = nn.Linear(H, H), nn.LSTMCell(2 * H, H), torch.randn(11, B, H)

    def attend(x, state):
        (h, c), memory = state
        weights = torch.einsum("nbh,bh->nb", memory, h).softmax(0)
        h, c = cell(torch.cat([x, torch.einsum("nb,nbh->bh", weights, memory)], -1), (h, c))
        return h, ((h, c), memory)

    zeros, grads = (torch.zeros(B, H), torch.zeros(B, H)), []
    for run in (loop, planned(slots=4)):
        outputs = run(attend, inputs(), (zeros, encoder(source)))[0]
        grads.append(torch.autograd.grad(outputs.square().sum(), [*encoder.parameters(), *cell.parameters()]))
    for old, new in zip(*grads, strict=True):
        assert (old - new).norm() <= 1e-4 * old.norm()
    memory = encoder(source)
    with pytest.raises(ValueError, match=r"must not capture the result of another computation .* Give it to the cell"):
        bptt(lambda x, s: (None, attend(x, (s, memory))[1][0]), inputs(), zeros, slots=4)


@pytest.mark.parametrize("options", [{"slots": 9, "internal": False}, {"slots": 9}])
@pytest.mark.parametrize("ends", ["backward", "dropped"])
def test_no_state_outlives_the_backward_pass_or_the_graph(options, ends):
    """And no cycle holds one that a collector would have to find."""
    states = []

    def run(x, state):
        states.append((StorageWeakRef(state.untyped_storage()), weakref.ref(state)))
        return None, torch.tanh(x + state)

    _, last = bptt(run, inputs(), torch.zeros(B, H), **options)
    assert sum(not storage.expired() for storage, _ in states) > 2
    if ends == "backward":
        last.sum().backward()
    del last
    assert all(storage.expired() and state() is None for storage, state in states)


def test_a_view_of_a_large_tensor_is_not_stored_whole():
    def run(x, state):
        wide = torch.cat([x, state.repeat(1, 500)], -1)
        return None, wide[:, H : 2 * H].sin()[:, :].repeat(1, 500)[:, :H]

    with peak("cpu") as measured:
        _, last = bptt(run, inputs(), torch.zeros(B, H), slots=30, internal=False)
    assert measured.bytes < 30 * B * H * 4 + 5 * 501 * B * H * 4  # a step has three wide tensors, and its state's
    del last


def test_a_parameter_that_is_put_out_as_it_is_gets_its_gradient():
    weight = torch.ones(B, H, requires_grad=True)
    for slots in (0, 3, 10**4):
        weight.grad = None
        bptt(lambda x, s: (weight, s), inputs().detach(), torch.zeros(1), slots=slots)[0].sum().backward()
        assert torch.equal(weight.grad, torch.full((B, H), float(T)))
