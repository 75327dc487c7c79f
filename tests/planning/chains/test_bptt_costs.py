"""Forward steps of plans, against every plan, closed forms, and the bound."""

import functools
import heapq
import math

import pytest
import torch

from rmm_linear.planning.chains import bptt_costs
from rmm_linear.planning.chains.bptt_costs import AllGraphs, Envelope, Table


def fewest(slots, steps, cost):
    """The fewest forward steps by a search over all that can be done, in any order (Dijkstra).

    A situation is what is stored (states, and states with the graph of the step before), the state at hand, and how
    many steps are not reversed yet. One can go back to what is stored, store what is at hand, forget, run a step, and
    run a step for its backward pass, which comes at once or later, when it is the step's turn.
    """
    start = (frozenset(), 0, steps)
    queue, done, number = [(0, 0, start)], set(), 0
    while queue:
        spent, _, situation = heapq.heappop(queue)
        if situation in done:
            continue
        done.add(situation)
        stored, here, left = situation
        if not left:
            return spent
        used = sum(cost if is_graph else 1 for _, is_graph in stored)
        found = [(0, (stored, at, left)) for at in {0, *(at for at, _ in stored)}]
        found += [(0, (stored - {one}, here, left)) for one in stored]
        if (left, True) in stored:
            found.append((0, (stored - {(left, True)}, 0, left - 1)))
        if used < slots:
            found.append((0, (stored | {(here, False)}, here, left)))
        if here < left:
            found.append((1, (stored, here + 1, left)))
            if used + cost <= slots:
                found.append((1, (stored | {(here + 1, True)}, here + 1, left)))
            if here + 1 == left:
                found.append((1, (stored, 0, left - 1)))
        for more, after in found:
            number += 1
            heapq.heappush(queue, (spent + more, number, after))
    raise AssertionError("there is always a way")


@pytest.mark.parametrize("cost", [1, 2, 3])
def test_no_order_of_actions_takes_fewer_steps_than_the_table(cost):
    table = Table(7, 4, cost)
    for slots in range(5):
        assert table.cost[slots].tolist() == [fewest(slots, steps, cost) for steps in range(8)]


@functools.cache
def followed(splits, slots, steps, cost, is_stored=False):
    """Forward steps if the splits are followed."""
    total = 0
    while steps:
        y = splits.split(slots, steps, is_stored=is_stored)
        if y > 0:
            total, slots, rest = total + y + followed(splits, slots, y, cost, is_stored), slots - 1, steps - y
        elif y < 0:
            rest, is_taken = steps + y, is_stored and y == -1
            total = total - y + followed(splits, slots, -y - 1, cost, is_stored)
            slots += is_taken - cost
        elif slots == 0:
            return total + steps * (steps + 1) // 2
        else:
            total, rest = total + steps, steps - 1
        assert slots >= 0 or rest == 0
        assert 0 <= rest < steps
        steps, is_stored = rest, y > 0 or (y == 0 and is_stored)
    return total


@pytest.mark.parametrize("cost", [2, 3, 7])
def test_following_the_tables_splits_takes_the_steps_it_says(cost):
    table = Table(60, 40, cost)
    for slots in range(0, 41, 4):
        for steps in (1, 2, 3, 17, 60):
            assert followed(table, slots, steps, cost) == table.cost[slots, steps]
            assert followed(table, slots, steps, cost, is_stored=True) == table.stored_cost[slots, steps]


@pytest.mark.parametrize("slots", [0, 1, 2, 5, 9, 40])
@pytest.mark.parametrize("steps", [1, 2, 3, 10, 47, 150])
def test_one_kind_of_slots_has_the_closed_forms(slots, steps):
    """Revolve: with s states, the initial one among them, r the least with C(s+r, s) ≥ t, it advances rt - C(s+r, s+1)
    times, and t steps are recorded. Graphs alone: C(m+r+1, r) - 1 steps run at most r times."""
    s = slots + 1
    r = next(r for r in range(steps + 1) if math.comb(s + r, s) >= steps)
    hidden = Envelope(steps, slots, None)
    revolve = steps + r * steps - math.comb(s + r, s + 1)
    assert hidden.least(slots, steps) == revolve == followed(hidden, slots, steps, 0) == fewest_states(slots, steps)
    most = [math.comb(slots + r + 1, r) - 1 for r in range(steps + 2)]
    internal = sum(r * (min(steps, most[r]) - min(steps, most[r - 1])) for r in range(1, steps + 2))
    graphs = Envelope(steps, slots, 1)
    assert graphs.least(slots, steps) == internal == followed(graphs, slots, steps, 1)


@functools.cache
def states_table():
    return Table(150, 40, 1000)  # a graph that no slots can hold


def fewest_states(slots, steps):
    return int(states_table().cost[slots, steps])


@pytest.mark.parametrize(
    ("l", "s", "advances"), [(10, 3, 15), (20, 3, 45), (50, 5, 122), (100, 5, 316), (100, 10, 222)]
)
def test_published_counts_of_revolve(l, s, advances):  # noqa: E741
    assert Envelope(l, s - 1, None).least(s - 1, l) == l + advances


def test_figures_of_the_literature():
    """A third more time for 5 % of the memory: t = 1000, 50 graphs, or 200 states of which a graph takes 4."""
    assert Envelope.of(1000, 50, 1).least(50, 1000) == Table.of(1000, 200, 4).cost[200, 1000] == 1949
    assert Envelope.of(1000, 49, None).least(49, 1000) == 2948


@pytest.mark.parametrize("cost", [2, 4, 7, 12])
def test_the_bound_holds_and_its_splits_are_close_to_the_best(cost):
    """Between two and 2 % more than the table's steps: what larger plans may lose. The bound is 5 % below at most."""
    steps, most = 400, 150
    table, envelope = Table(steps, most, cost), Envelope(steps, most, cost)
    for slots in (1, 5, 10, 20, 40, 60, 100, 150):
        best = int(table.cost[slots, steps])
        assert 0.95 * best <= envelope.least(slots, steps) <= best
        assert best <= followed(envelope, slots, steps, cost) <= 1.03 * best


def test_small_plans_are_searched_and_large_ones_are_bounded():
    assert isinstance(bptt_costs.splits(100, 30, 4), Table)
    assert isinstance(bptt_costs.splits(100, 30, None), Envelope)
    assert isinstance(bptt_costs.splits(100, 4 * 99, 4), AllGraphs)
    assert isinstance(bptt_costs.splits(100, 10**5, 2000), Envelope)  # a table would have 10⁷ numbers
    assert isinstance(bptt_costs.splits(10_000, 2000, 4), Envelope)
    assert not bptt_costs.is_exact(10_000, 2000, 4)
    assert bptt_costs.is_exact(10_000, 40_000, 4)


def test_a_table_serves_smaller_plans(monkeypatch):
    monkeypatch.setattr(Table, "_last", [])
    large = Table.of(60, 40, 3)
    assert Table.of(59, 40, 3) is Table.of(60, 7, 3) is Table.of(60, 40, 3) is large
    small = Table.of(30, 8, 2)
    assert Table.of(50, 20, 3) is large
    assert Table.of(61, 2, 3) not in (large, small)
    assert Table._last[1] is large  # and not the one that was used before it
    exact = Table(30, 8, 3)
    assert [[large.split(m, t) for t in range(1, 31)] for m in range(9)] == [
        [exact.split(m, t) for t in range(1, 31)] for m in range(9)
    ]


def test_the_table_is_the_same_whatever_the_default_dtype_and_device():
    torch.set_default_dtype(torch.float64)
    try:
        assert Table(30, 8, 2).cost.dtype == torch.int32
    finally:
        torch.set_default_dtype(torch.float32)
