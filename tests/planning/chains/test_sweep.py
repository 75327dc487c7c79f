"""Sweeps against the plain loop: results, gradients, random numbers and buffers are the same to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from planning_helpers import Reaction, Recording, State, differences, differentiated, plain, start
from torch import Tensor, nn

from rmm_linear.planning import SweepReport, sweep

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


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 16, 41])
@pytest.mark.parametrize("name", SETTINGS)
def test_all_is_as_in_the_plain_loop(name: str, steps: int, tmp_path: Any) -> None:
    report, chosen = SweepReport(), settings(name, tmp_path)
    expected = differentiated(lambda step, state: plain(step, state, steps))
    found = differentiated(lambda step, state: sweep(step, state, steps, **chosen, report=report))
    assert differences(found, expected) == []
    assert report.steps == steps
    assert list(tmp_path.glob("store/*")) == []


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 7, 8, 30])
@pytest.mark.parametrize("interval", [1, 7, "auto", "sqrt"])
def test_a_condition_ends_the_chain(steps: int, interval: Any, tmp_path: Any) -> None:
    asked: list[int] = []

    def goes_on(number: int, state: State) -> Tensor:
        asked.append(number)
        assert int(state["count"]) == number
        return state["count"] < steps

    report = SweepReport()
    length = 30 if interval == "sqrt" else None
    options = {"slots": 3, "store": tmp_path, "interval": interval, "length": length, "report": report}
    expected = differentiated(lambda step, state: plain(step, state, steps))
    found = differentiated(lambda step, state: sweep(step, state, goes_on, **options))
    assert differences(found, expected) == []
    assert asked == list(range(steps + 1))  # once before every step, and never again
    assert report.steps == steps


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


def test_nothing_is_kept_where_nothing_needs_a_gradient() -> None:
    report = SweepReport()
    found = sweep(lambda i, u: u * 0.5, torch.ones(3), 10, slots=2, report=report)
    assert torch.equal(found, torch.full((3,), 0.5**10))
    assert not found.requires_grad
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


@pytest.mark.parametrize("name", ["Revolve", "files", "H-Revolve"])
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
