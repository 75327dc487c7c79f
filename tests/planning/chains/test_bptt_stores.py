"""Stores of bptt: what goes there, when it leaves, and what is said of a store that fails."""

import gc

import pytest
import torch
from bptt_helpers import B, Dropping, H, T, inputs, loop, outcome, planned, zeros
from torch import nn

from rmm_linear.planning import StoreError, bptt


def same(expected, found):
    """Whether results, gradients and the generator's state are equal to the bit, and the same ones are there."""
    assert len(expected[0]) == len(found[0])
    assert [old is None for old in expected[1]] == [new is None for new in found[1]]
    pairs = zip((*expected[0], *expected[1], expected[2]), (*found[0], *found[1], found[2]), strict=True)
    return all(torch.equal(old, new) for old, new in pairs if old is not None)


class Dictionary:
    """A store that says what it holds."""

    def __init__(self):
        self.held, self.puts, self.gets, self.most = {}, 0, 0, 0

    def put(self, key, tensors):
        assert key not in self.held
        self.held[key] = tensors
        self.puts, self.most = self.puts + 1, max(self.most, len(self.held))

    def get(self, key):
        self.gets += 1
        return self.held[key]

    def drop(self, key):
        del self.held[key]


def test_states_go_to_a_store_and_leave_it():
    cell, state, store = Dropping(), {**zeros("h", "c"), "count": torch.tensor(0)}, Dictionary()
    given = cell, inputs(), state, list(cell.parameters())
    expected = outcome(loop, *given)
    found = outcome(planned(slots=5, internal=False, store=store), *given)
    assert same(expected, found)
    assert (store.most, store.held) == (5, {})
    assert store.puts > 5
    one, two = (bptt(cell, inputs(), state, slots=5, internal=False, store=store)[0][0] for _ in range(2))
    assert len(store.held) == 10  # of two runs, under keys of their own
    del one
    assert len(store.held) == 5  # no backward pass: they go with the graph
    two.sum().backward()
    assert store.held == {}


@pytest.mark.parametrize("kind", ["cpu", "folder"])
def test_a_folder_has_the_states_for_as_long_as_the_graph_lives(kind, tmp_path):
    cell, state = Dropping(), {**zeros("h", "c"), "count": torch.tensor(0)}
    given = cell, inputs(), state, list(cell.parameters())
    store = "cpu" if kind == "cpu" else tmp_path / "states"
    expected = outcome(loop, *given)
    found = outcome(planned(slots=5, internal=False, store=store), *given)
    assert same(expected, found)
    outputs = bptt(cell, inputs(), state, slots=5, internal=False, store=store)[0]
    assert len(list(tmp_path.rglob("*.safetensors"))) == (0 if kind == "cpu" else 5)
    del outputs, found, expected
    gc.collect()
    assert not list(tmp_path.rglob("*.safetensors"))
    with torch.no_grad():
        bptt(cell, inputs(), state, slots=5, internal=False, store=store)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size]


def stored(store, slots=5):
    """One training step of a cell whose states are in a store."""
    torch.manual_seed(0)
    bptt(nn.LSTMCell(H, H), inputs(), None, slots=slots, internal=False, store=store)[0].sum().backward()


def test_a_state_that_was_just_stored_is_not_read_back():
    store = Dictionary()
    outputs, _ = bptt(nn.LSTMCell(H, H), inputs(), None, slots=T, internal=False, store=store)
    assert (store.puts, store.gets) == (T - 2, 0)
    outputs.sum().backward()
    assert store.gets <= store.puts == T - 2


class Faulty(Dictionary):
    """A store of which one method fails at its third call."""

    def __init__(self, method, fault):
        super().__init__()
        self.method, self.fault, self.calls = method, fault, 0

    def check(self, method):
        self.calls += method == self.method
        return method == self.method and self.calls == 3

    def put(self, key, tensors):
        super().put(key, tensors)
        if self.check("put"):
            raise self.fault

    def get(self, key):
        found = super().get(key)
        if self.check("get"):
            if isinstance(self.fault, Exception):
                raise self.fault
            return self.fault(found)
        return found

    def drop(self, key):
        if self.check("drop"):
            raise self.fault
        super().drop(key)


@pytest.mark.parametrize(
    ("method", "fault", "text"),
    [
        ("put", OSError("disk full"), "could not be stored under the key 'bptt-.*disk full"),
        ("get", KeyError("gone"), "could not be read under the key .*gone"),
        ("get", StoreError("/there/state.safetensors is damaged"), "could not be read: /there/state.safetensors"),
        ("get", lambda found: found[:1], r"must come back as it was stored, but store\.get returned \[\(torch.float32"),
        (
            "get",
            lambda found: [one.double() for one in found],
            r"must come back .* returned \[\(torch.float64, \(3, 8\)\)",
        ),
        ("get", lambda found: [one[:1] for one in found], r"must come back .* returned \[\(torch.float32, \(1, 8\)\)"),
        ("get", lambda found: None, "could not be read under the key .*NoneType"),
        ("drop", PermissionError("no"), "could not be dropped under the key .*no"),
    ],
)
def test_a_store_that_fails_is_named_with_the_step(method, fault, text):
    store = Faulty(method, fault)
    with pytest.raises(StoreError, match=f"The state before step [0-9]+ {text}") as caught:
        stored(store)
    assert len(store.held) == (method == "drop")  # the others leave, though the traceback is held
    assert caught.value


def test_two_processes_can_share_a_store():
    """Names come from more than a count in one process."""
    names = []
    for _ in range(2):
        store = Dictionary()
        outputs, _ = bptt(nn.LSTMCell(H, H), inputs(), None, slots=3, internal=False, store=store)
        names += {key.rsplit("-", 1)[0] for key in store.held}
        del outputs
    assert all(len(name) == len("bptt-") + 12 for name in names)
    assert len(set(names)) == 2


@pytest.mark.parametrize("kind", ["cpu", "folder"])
def test_strides_and_lazy_conjugates_come_back(kind, tmp_path):
    seen = []

    def run(x, state):
        turned, lazy = state
        seen.append((turned.stride(), turned.sum().item(), lazy.resolve_conj().sum().item()))
        return None, ((turned.mT + x.mean()).contiguous().mT, (lazy * (1 + 1j)).conj())

    start = torch.ones(H, B).T, torch.full((B, H), 1 - 2j).conj()
    store = "cpu" if kind == "cpu" else tmp_path
    _, (last, lazy) = bptt(run, inputs(), start, slots=5, internal=False, store=store)
    first = set(seen)
    (last.sum() + lazy.real.sum()).backward()
    assert set(seen) == first
    assert {stride for stride, *_ in seen} == {(1, B)}


@pytest.mark.parametrize("failing", ["cell", "store"])
def test_a_forward_pass_that_fails_leaves_no_files(failing, tmp_path, monkeypatch):
    def run(x, state):
        if failing == "cell" and state[1] == 30:
            raise ArithmeticError("step 30")
        return None, (torch.tanh(x + state[0]), state[1] + 1)

    if failing == "store":
        monkeypatch.setattr("rmm_linear.planning.stores.files.FileStore.put", _full)
    with pytest.raises((ArithmeticError, StoreError)) as caught:
        bptt(run, inputs(), (torch.zeros(B, H), 0), slots=5, internal=False, store=tmp_path)
    assert caught.value.__traceback__ is not None
    assert not list(tmp_path.rglob("*"))


def _full(*_):
    raise OSError("disk full")
