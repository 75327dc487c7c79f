"""bptt gives what a plain loop gives, in the steps and the memory that its plan says."""

import functools

import pytest
import torch
from bptt_helpers import counted, loop, outcome, planned
from torch import nn
from torch.func import functional_call

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


@pytest.mark.parametrize("options", [{"slots": 7}, {"slots": 2, "internal": "only"}, {"memory": 10**9}], ids=str)
def test_frozen_parameters_and_inputs_without_gradient(options):
    cell, state = start(nn.LSTMCell)
    cell.weight_hh.requires_grad_(False)
    given = cell, inputs(grad=False), tuple(leaf.detach() for leaf in state), list(cell.parameters())
    expected, found = outcome(loop, *given), outcome(planned(**options), *given)
    assert [grad is None for grad in found[1]] == [True, True, True, False, True, False, False]
    same(expected, found)
    cell.requires_grad_(False)
    given = cell, inputs(), given[2], []
    same(outcome(loop, *given), outcome(planned(**options), *given))


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


def test_autograd_grad_and_hooks_see_the_sum_over_the_steps():
    cell, state = start(nn.LSTMCell)
    seen = []
    handle = cell.weight_hh.register_hook(lambda grad: seen.append(grad) or grad.clamp(-1e-3, 1e-3))
    found = torch.autograd.grad(bptt(cell, inputs(), state, slots=6)[0].sum(), [cell.weight_hh, cell.bias_ih])
    assert len(seen) == 1
    expected = torch.autograd.grad(loop(cell, inputs(), state)[0].sum(), [cell.weight_hh, cell.bias_ih])
    handle.remove()
    assert all(torch.equal(old, new) for old, new in zip(expected, found, strict=True))


def test_a_second_backward_pass_needs_retain_graph_and_then_gives_the_same():
    cell, state = start(nn.LSTMCell)
    outputs, _ = bptt(cell, inputs(), state, slots=6)
    first = torch.autograd.grad(outputs.sum(), cell.weight_hh, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(outputs.sum(), cell.weight_hh)[0])
    with pytest.raises(RuntimeError, match="second time"):
        outputs.sum().backward()


def test_a_double_backward_pass_is_refused():
    cell, state = start(nn.LSTMCell)
    outputs, _ = bptt(cell, inputs(), state, slots=6)
    with pytest.raises(RuntimeError, match="bptt does not support double backward"):
        torch.autograd.grad(outputs.sum(), cell.weight_hh, create_graph=True)


@pytest.mark.parametrize("which", ["parameter", "inputs", "state"])
def test_what_was_changed_in_place_before_the_backward_pass_is_noticed(which):
    cell, state = start(nn.LSTMCell)
    x = inputs()
    x, state = x * 1, tuple(leaf * 1 for leaf in state)
    outputs, _ = bptt(cell, x, state, slots=6)
    with torch.no_grad():
        {"parameter": cell.weight_hh, "inputs": x, "state": state[0]}[which].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs.sum().backward()


def test_a_recording_inside_of_saved_tensor_hooks_and_checkpointing():
    cell, state = start(nn.LSTMCell)
    given = cell, inputs(), state, list(cell.parameters())
    expected = outcome(loop, *given)
    with torch.autograd.graph.save_on_cpu():
        same(expected, outcome(planned(slots=6), *given))

    def checkpointed(*arguments):
        return torch.utils.checkpoint.checkpoint(planned(slots=6), *arguments, use_reentrant=False)

    same(expected, outcome(checkpointed, *given))


def test_a_cell_of_plain_pytorch_under_autocast():
    """The plain loop adds up a weight's gradient in bfloat16; here each step's is rounded to it once, and the sum is in
    float32. The difference: a rounding of 2⁻⁸ of every partial sum, of which later ones see that of earlier ones."""
    cell, state = start(nn.LSTMCell)
    given = cell, inputs(), state, list(cell.parameters())

    def cast(run):
        def inner(*arguments):
            with torch.autocast("cpu", torch.bfloat16):
                return run(*arguments)

        return inner

    expected = outcome(cast(loop), *given)
    assert not torch.equal(expected[0][0], outcome(loop, *given)[0][0])
    roundings = [0.0] * len(expected[1])
    copies = [{name: p.detach().clone().requires_grad_() for name, p in cell.named_parameters()} for _ in range(T)]

    def apart(_, x, state):
        """A loop with a copy of the parameters for each step."""
        outputs = []
        for step, own in zip(x.unbind(0), copies, strict=True):
            state = functional_call(cell, own, (step, state))
            outputs.append(state[0])
        return torch.stack(outputs), state

    steps = outcome(cast(apart), *given[:3], [p for own in copies for p in own.values()])[1]
    first = len(steps) - T * len(copies[0])
    for place in range(len(copies[0])):
        sums = torch.stack(steps[first + place :: len(copies[0])]).flip(0).cumsum(0)
        roundings[first + place] = sum(2**-8 * one.norm().item() for one in sums) * (1 + 2**-8) ** T
    for options in OPTIONS[1:6]:
        found = outcome(cast(planned(**options)), *given)
        assert all(torch.equal(old, new) for old, new in zip(expected[0], found[0], strict=True))
        for old, new, bound in zip(expected[1], found[1], roundings, strict=True):
            assert (old - new).norm() <= bound  # 0 for inputs and state, each of which one step reads


def test_buffers_are_updated_once_per_step():
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.norm = nn.RNNCell(H, H), nn.BatchNorm1d(H)

        def forward(self, x, state):
            state = self.norm(self.cell(x, state))
            return state, state

    state, buffers = torch.zeros(B, H), []
    for run in (loop, planned(slots=4)):
        torch.manual_seed(0)
        cell = Normed()
        run(cell, inputs(), state)[0].sum().backward()
        buffers.append(list(cell.buffers()))
    assert buffers[0][2] == T
    assert all(torch.equal(old, new) for old, new in zip(*buffers, strict=True))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_results_that_depend_on_buffers_which_steps_change(options):  # a spectral norm's vectors, and others
    class Remembering(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(2 * H, H))
            self.register_buffer("count", torch.zeros(()))
            self.register_buffer("mean", torch.zeros(H))

        def forward(self, x, state):
            state = torch.tanh(self.linear(torch.cat([x, state], -1)) / (1 + self.count.clone()) + self.mean.clone())
            self.count += 0.1
            self.mean = 0.9 * self.mean + state.detach().mean(0)
            return state, state

    expected, found = Remembering(), Remembering()
    given = inputs(), torch.zeros(B, H, requires_grad=True)
    results = [
        outcome(run, cell, *given, list(cell.parameters()))
        for run, cell in ((loop, expected), (planned(**options), found))
    ]
    scale = max(grad.abs().max() for grad in results[0][1])
    same(*results, lambda old, new: torch.allclose(old, new, rtol=0, atol=2**-24 * T * T * scale))
    assert all(torch.equal(old, new) for old, new in zip(expected.buffers(), found.buffers(), strict=True))
