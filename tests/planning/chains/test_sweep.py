"""Sweeps against the plain loop: results, gradients, random numbers and buffers are the same to the bit."""

from __future__ import annotations

import gc
import sys
from typing import Any

import pytest
import torch
from planning_helpers import Reaction, Recording, State, differences, differentiated, plain, start
from torch import Tensor, nn

from rmm_linear.planning import SweepReport, open_store, sweep
from rmm_linear.planning.chains import schedules

SETTINGS: dict[str, dict[str, Any]] = {
    "one slot": {"slots": 1},
    "Revolve": {"slots": 3},
    "all states": {"slots": 100},
    "two levels": {"slots": 3, "store": "cpu", "interval": 7},
    "two levels, one slot": {"slots": 1, "store": "cpu", "interval": 4},
    "every state stored": {"slots": 2, "store": "cpu", "interval": 1},
    "files": {"slots": 2, "store": "folder", "interval": 5},
    "measured": {"slots": 3, "store": "folder"},
    "double checkpointing": {"slots": 4, "store": "folder", "interval": "sqrt"},
    "H-Revolve": {"store": "cpu", "levels": [("ram", 3), ("disk", 4, 1.0, 0.5)]},
    "H-Revolve, measured": {"store": "folder", "levels": [("ram", 2), ("disk", 5)]},
}


def settings(name: str, tmp_path: Any) -> dict[str, Any]:
    chosen = SETTINGS[name]
    return {**chosen, "store": tmp_path / "store"} if chosen.get("store") == "folder" else chosen


@pytest.mark.parametrize("name", SETTINGS)
def test_all_is_as_in_the_plain_loop(name: str, tmp_path: Any) -> None:
    chosen = settings(name, tmp_path)
    for steps in (1, 2, 3, 5, 16, 41):
        report = SweepReport()
        expected = differentiated(lambda step, state, steps=steps: plain(step, state, steps))
        options = {**chosen, "report": report}
        found = differentiated(lambda step, state, steps=steps, how=options: sweep(step, state, steps, **how))
        assert differences(found, expected) == [], steps
        assert report.steps == steps
        assert list(tmp_path.glob("store/*")) == []


@pytest.mark.parametrize("interval", [1, 7, "auto", "sqrt"])
def test_a_condition_ends_the_chain(interval: Any, tmp_path: Any) -> None:
    """A report that was used before changes nothing: it holds no measurement of this sweep."""
    report = SweepReport(steps=9, forward_steps=9, interval=3, stored=3, read=3, waited_forward=1.0)
    length = 30 if interval == "sqrt" else None
    options = {"slots": 3, "store": tmp_path, "interval": interval, "length": length, "report": report}
    for steps in (1, 2, 3, 4, 7, 8, 30):
        asked: list[int] = []

        def goes_on(number: int, state: State, asked: Any = asked, steps: int = steps) -> Tensor:
            asked.append(number)
            assert int(state["count"]) == number
            return state["count"] < steps

        report.step_seconds = report.transfer_seconds = 1.0
        expected = differentiated(lambda step, state, steps=steps: plain(step, state, steps))
        found = differentiated(lambda step, state, goes_on=goes_on: sweep(step, state, goes_on, **options))
        assert differences(found, expected) == []
        assert asked == list(range(steps + 1))  # once before every step, and never again
        assert report.steps == steps
        if interval == "auto" and steps < 4:  # over before a transfer was measured
            assert report == SweepReport(steps=steps, forward_steps=report.forward_steps)


def test_a_report_has_nothing_of_a_sweep_before() -> None:
    report, u = SweepReport(), torch.ones(3, requires_grad=True)
    sweep(lambda i, u: u * 0.5, u, 20, slots=2, store="cpu", interval=3, report=report).sum().backward()
    assert report.stored == 6
    sweep(lambda i, u: u * 0.5, u, 6, slots=2, report=report).sum().backward()
    assert report == SweepReport(steps=6, forward_steps=6 + schedules.recomputed(6, 2))
    sweep(lambda i, u: u * 0.5, u, 0, slots=2, report=report)
    assert report == SweepReport()


def test_no_steps_return_the_state_itself() -> None:
    state = start()
    assert sweep(Reaction(), state, 0, slots=1) is state
    assert sweep(Reaction(), state, lambda number, state: False, slots=1, store="cpu") is state


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_it_is_the_plain_loop(mode: Any) -> None:
    store, report = Recording(), SweepReport()
    step, state = Reaction().eval(), start()
    with mode():
        torch.manual_seed(1)
        expected = plain(step, state, 9)["moving"][0]
        torch.manual_seed(1)
        found = sweep(step, state, 9, slots=2, store=store, interval=2, report=report)["moving"][0]
    assert torch.equal(found, expected)
    assert not found.requires_grad
    assert (report.steps, report.forward_steps, store.done) == (9, 9, [])


def test_no_step_runs_again_where_nothing_needs_a_gradient() -> None:
    report = SweepReport()
    assert not sweep(lambda i, u: u * 0.5, torch.ones(3), 10, slots=2, report=report).requires_grad
    assert report.forward_steps == 10


def captured() -> tuple[Tensor, Tensor, nn.Linear]:
    torch.manual_seed(3)
    return torch.randn(4, requires_grad=True), torch.randn(2, 4), nn.Linear(4, 4)


class Owner(nn.Module):
    """Uses another weight in every step; only a module can say which there are."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.full((4,), 0.9 + 0.01 * number) for number in range(6)])

    def forward(self, number: int, u: Tensor) -> Tensor:
        return torch.sin(u * self.weights[number % 6])

    def advance(self, number: int, u: Tensor) -> Tensor:
        return self(number, u)


@pytest.mark.parametrize("method", ["forward", "advance", None])
def test_parameters_of_a_module_need_not_be_reached_by_the_first_step(method: str | None) -> None:
    owner, (_, u, _) = Owner(), captured()
    step = owner if method is None else getattr(owner, method)
    expected = torch.autograd.grad(plain(step, u, 12).sum(), [*owner.parameters()])
    found = torch.autograd.grad(sweep(step, u, 12, slots=3).sum(), [*owner.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("needs", [True, False])
def test_a_parameter_that_the_first_step_does_not_reach_is_an_error(needs: bool) -> None:
    """Its gradient would be missing, silently."""
    scale, u, _ = captured()

    def step(number: int, u: Tensor) -> Tensor:
        return torch.sin(u * scale) if number > 3 else torch.sin(u)

    with pytest.raises(RuntimeError, match=r"same parameters every time, but step \d reaches .*nn\.Module"):
        sweep(step, u.requires_grad_(needs), 9, slots=3).sum().backward()
    assert scale.grad is None


def test_a_captured_result_of_a_computation_is_an_error() -> None:
    scale, u, _ = captured()
    outside = scale.exp()
    with pytest.raises(RuntimeError, match=r"must be a parameter, got the result .*ExpBackward.*Compute it inside"):
        sweep(lambda i, u: torch.sin(u * outside), u, 5, slots=3)
    carried, _ = sweep(lambda i, state: (torch.sin(state[0] * state[1]), state[1]), (u, outside), 5, slots=3)
    (found,) = torch.autograd.grad(carried.sum(), scale, retain_graph=True)
    (expected,) = torch.autograd.grad(plain(lambda i, u: torch.sin(u * outside), u, 5).sum(), scale)
    assert torch.allclose(found, expected, rtol=1e-5)


def test_sparse_gradients_of_an_embedding() -> None:
    torch.manual_seed(0)
    table = nn.Embedding(10, 4, sparse=True)

    def step(number: int, u: Tensor) -> Tensor:
        return torch.tanh(u + table(torch.tensor([number % 3, number % 10])))

    expected = torch.autograd.grad(plain(step, torch.zeros(2, 4), 9).sum(), table.weight)[0]
    sweep(step, torch.zeros(2, 4), 9, slots=2).sum().backward()
    assert table.weight.grad.is_sparse
    assert torch.equal(table.weight.grad.to_dense(), expected.to_dense())


@pytest.mark.parametrize("name", ["files", "H-Revolve"])
def test_states_of_other_shapes_strides_and_dtypes(name: str, tmp_path: Any) -> None:
    """A slice keeps a larger tensor alive, a transposed matrix may round otherwise, an expanded one has one row."""
    torch.manual_seed(2)
    weight = torch.randn(6, 6, requires_grad=True)
    u = torch.randn(6, 8, requires_grad=True)

    def step(number: int, state: Any) -> Any:
        u, wave, row = state
        wide = torch.cat([u @ u.t() @ weight * 0.01, u], dim=1)
        turned = (weight @ wide[:, :6]).t() * 0.1
        return [
            torch.tanh(torch.cat([turned, wide[:, 6:8]], 1)),
            wave * torch.exp(1j * u.mean()),
            row[:1].tanh().expand(3, 4),
        ]

    initial = [u, torch.ones(3, dtype=torch.complex128), torch.randn(1, 4, requires_grad=True).expand(3, 4)]

    def gradients(final: Any) -> tuple[Tensor, ...]:
        return torch.autograd.grad(final[0].sum() + final[1].real.sum() + final[2].sum(), [u, weight])

    expected = gradients(plain(step, initial, 17))
    found = gradients(sweep(step, initial, 17, **settings(name, tmp_path)))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_caller_breaks_its_graph_there() -> None:
    _, u, linear = captured()

    @torch.compile(backend="eager")
    def loss(u: Tensor) -> Tensor:
        return sweep(lambda i, u: torch.tanh(linear(u)), u, 6, slots=2).sum() * 2

    loss(u).backward()
    expected = torch.autograd.grad(plain(lambda i, u: torch.tanh(linear(u)), u, 6).sum() * 2, linear.weight)[0]
    assert torch.equal(linear.weight.grad, expected)


SIZE = 12347  # of no other tensor


def alive() -> list[Tensor]:
    gc.collect()
    return [one for one in gc.get_objects() if type(one) is Tensor and one.shape == (SIZE,)]


def test_a_loss_that_is_held_holds_no_state() -> None:
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


# Refusals


def halve(number: int, u: Tensor) -> Tensor:
    return u * 0.5 + 0.1 * torch.sin(u)


def initial() -> Tensor:
    return torch.ones(3, requires_grad=True)


def condition(number: int, u: Tensor) -> bool:
    return number < 9


RAM, DISK = ("ram", 1), ("disk", 2)
STORED = {"slots": 1, "store": "cpu"}


@pytest.mark.parametrize(
    ("steps", "options", "error", "message"),
    [
        (2.0, {"slots": 1}, TypeError, r"steps must be a number, or a condition .* got 2\.0"),
        (True, {"slots": 1}, TypeError, "steps must be a number"),
        (-1, {"slots": 1}, ValueError, "at least 0, got -1"),
        (9, {}, TypeError, "slots must be a positive integer, got None"),
        (9, {"slots": 0}, ValueError, "slots must be at least 1, got 0"),
        (9, {"slots": 1, "length": 9}, ValueError, "length is for a condition, got steps=9 and length=9"),
        (condition, {**STORED, "interval": 3, "length": 9}, ValueError, "root of, got interval=3 and .* Leave length"),
        (condition, {**STORED, "length": 9}, ValueError, "got interval='auto' and length=9"),
        (9, {"slots": 1, "interval": 3}, ValueError, "got store=None. Give a store"),
        (9, {**STORED, "interval": "root"}, ValueError, '"auto" or "sqrt", got \'root\''),
        (9, {**STORED, "interval": 0}, ValueError, "interval must be at least 1, got 0"),
        (9, {"slots": 1, "interval": 3, "store": 7}, TypeError, 'a folder, "cpu", or an object .* got 7'),
        (condition, {"slots": 1}, ValueError, "length is not known needs a store and slots, got no store"),
        (condition, {**STORED, "interval": "sqrt"}, ValueError, "Give length="),
        (condition, {"store": "cpu", "levels": [RAM, DISK]}, ValueError, "needs a store and slots, got levels"),
        (9, {"levels": [RAM, DISK]}, ValueError, "levels needs a store"),
        (9, {**STORED, "levels": [RAM, DISK]}, ValueError, "slots=1 and interval='auto'"),
        (9, {"store": "cpu", "levels": [DISK, RAM]}, ValueError, r"levels must be \[\(\"ram\", slots\)"),
        (9, {"store": "cpu", "levels": [RAM, (*DISK, 1.0)]}, ValueError, "levels must be"),
        (9, {"store": "cpu", "levels": [RAM, (*DISK, 1.0, -1)]}, ValueError, "at least 0, got"),
        (9, {"store": "cpu", "levels": [RAM, ("disk", 0)]}, ValueError, "slots of level disk must be at least 1"),
    ],
)
def test_arguments_that_make_no_sense(steps: Any, options: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        sweep(halve, initial(), steps, **options)


@pytest.mark.parametrize("state", [3.0, (), {"u": torch.ones(1), "t": 0.5}, torch.ones(2).to_sparse()], ids=str)
def test_a_state_that_is_no_tensor(state: Any) -> None:
    with pytest.raises(TypeError, match=r"A state must .* in the initial state"):
        sweep(lambda i, state: state, state, 3, slots=1)


def test_a_step_that_returns_another_structure() -> None:
    with pytest.raises(TypeError, match=r"structure that it got, .* but step 2 returned"):
        sweep(lambda i, u: u * 2 if i < 2 else (u * 2,), initial(), 5, slots=1)
    with pytest.raises(TypeError, match="in what step 0 returned"):
        sweep(lambda i, u: None, initial(), 5, slots=1)


@pytest.mark.parametrize("number", [0, 3])
def test_a_step_that_changes_its_state_in_place(number: int) -> None:
    def step(i: int, u: Tensor) -> Tensor:
        return u.mul_(0.5) if i == number else torch.sin(u)

    with pytest.raises(RuntimeError, match=f"step {number} changed the old one in place.* trailing underscore"):
        sweep(step, torch.ones(3), 5, slots=2)
    with pytest.raises(RuntimeError, match=r"in.place"):
        sweep(step, initial(), 5, slots=2)


def test_a_state_that_is_changed_in_place() -> None:
    seen: list[Tensor] = []

    def step(number: int, u: Tensor) -> Tensor:
        seen.append(u)
        return torch.sin(u)

    final = sweep(step, initial(), 9, slots=4)
    for state in seen[1:-1]:
        state.detach().add_(1)
    with pytest.raises(RuntimeError, match=r"The state before step \d must stay as it was .* Clone"):
        final.sum().backward()


def test_a_second_derivative() -> None:
    """``create_graph`` alone is no reason to fail: others' second derivatives may be wanted."""
    u = initial()
    (expected,) = torch.autograd.grad(sweep(halve, u, 5, slots=2).sum(), u)
    (gradient,) = torch.autograd.grad(sweep(halve, u, 5, slots=2).sum(), u, create_graph=True)
    assert torch.equal(gradient, expected)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        (gradient.sum() + u.sum()).backward()


def test_the_package_of_schedules_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "checkpoint_schedules", None)
    with pytest.raises(ImportError, match=r"checkpoint-schedules, which is not installed\. Run pip install .*planning"):
        sweep(halve, initial(), 5, slots=2)
    with torch.no_grad():
        assert sweep(halve, initial(), 5, slots=2).shape == (3,)


def test_open_store_takes_what_a_user_calls_a_store(tmp_path: Any) -> None:
    store = Recording()
    assert open_store(store) is store
    for one in (None, "cpu", tmp_path, str(tmp_path)):
        opened: Any = open_store(one)
        opened.put("a-1", [torch.arange(3)])
        assert torch.equal(opened.get("a-1")[0], torch.arange(3))
        opened.drop("a-1")
        opened.close()
    assert list(tmp_path.iterdir()) == []
