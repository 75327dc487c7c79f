"""Plans of bptt: forward steps against every plan, closed forms and the bound; what plans do and say; they are data."""

import functools
import heapq
import math

import matplotlib
import pytest
import torch

from rmm_linear.planning import BPTTPlan, StepBytes, plan_bptt
from rmm_linear.planning.chains import bptt_costs
from rmm_linear.planning.chains.bptt_costs import AllGraphs, Envelope, Table

matplotlib.use("agg")

# Costs


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


@pytest.mark.parametrize("cost", [pytest.param(1, marks=pytest.mark.thorough), 2, 3])
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


@functools.cache
def states_table():
    return Table(150, 40, 1000)  # a graph that no slots can hold


@pytest.mark.parametrize("slots", [0, 1, 2, 5, 9, 40])
@pytest.mark.parametrize("steps", [1, 2, 3, 10, 47, 150])
def test_one_kind_of_slots_has_the_closed_forms(slots, steps):
    """Revolve: with s states, the initial one among them, r the least with C(s+r, s) ≥ t, it advances rt - C(s+r, s+1)
    times, and t steps are recorded. Graphs alone: C(m+r+1, r) - 1 steps run at most r times."""
    s = slots + 1
    r = next(r for r in range(steps + 1) if math.comb(s + r, s) >= steps)
    hidden, best = Envelope(steps, slots, None), int(states_table().cost[slots, steps])
    revolve = steps + r * steps - math.comb(s + r, s + 1)
    assert hidden.least(slots, steps) == revolve == followed(hidden, slots, steps, 0) == best
    most = [math.comb(slots + r + 1, r) - 1 for r in range(steps + 2)]
    internal = sum(r * (min(steps, most[r]) - min(steps, most[r - 1])) for r in range(1, steps + 2))
    graphs = Envelope(steps, slots, 1)
    assert graphs.least(slots, steps) == internal == followed(graphs, slots, steps, 1)


def test_figures_of_the_literature():
    """Counts of Revolve; and a third more time for 5 % of the memory: 50 graphs, or 200 states, 4 for a graph."""
    for steps, states, advances in ((10, 3, 15), (20, 3, 45), (50, 5, 122), (100, 5, 316), (100, 10, 222)):
        assert Envelope(steps, states - 1, None).least(states - 1, steps) == steps + advances
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
    assert isinstance(bptt_costs.splits(100, 4 * 99, 4), AllGraphs)
    assert isinstance(bptt_costs.splits(100, 10**5, 2000), Envelope)  # a table would have 10⁷ numbers
    assert [bptt_costs.is_exact(10_000, slots, 4) for slots in (2000, 40_000)] == [False, True]


def test_a_table_serves_smaller_plans(monkeypatch):
    monkeypatch.setattr(Table, "_last", [])
    large = Table.of(60, 40, 3)
    assert Table.of(59, 40, 3) is Table.of(60, 7, 3) is large
    assert Table.of(30, 8, 2) is not large
    assert Table.of(61, 2, 3) is not large
    exact, steps = Table(30, 8, 3), range(1, 31)
    for slots in range(9):
        assert [large.split(slots, t) for t in steps] == [exact.split(slots, t) for t in steps]


def test_the_table_is_the_same_whatever_the_default_dtype_is():
    expected = Table(30, 8, 2).cost
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(Table(30, 8, 2).cost, expected)
    finally:
        torch.set_default_dtype(torch.float32)


# Plans


@pytest.mark.parametrize(
    ("steps", "slots", "cost"),
    [(1, 0, None), (1, 5, 2), (2, 0, 1), (7, 0, 4), (12, 3, None), (40, 4, 1), (40, 9, 3), (40, 10**6, 3), (97, 11, 4)],
)
def test_every_step_is_reversed_once_in_order_and_slots_suffice(steps, slots, cost):
    """Each action is possible with what is stored: the plan is walked through on a stack of states."""
    plan = plan_bptt(steps, slots=slots, internal_cost=cost)
    stored, at, forward, reversed_steps, used, most = [(0, 0, False)], 0, 0, [], 0, 0
    for action in plan.actions():
        if action.kind in ("advance", "record"):
            at = stored[-1][0] if at is None else at
            assert action.step == at
            at = action.end if action.kind == "advance" else action.step + 1
            forward += at - action.step
        if action.kind in ("store", "record"):
            size = 1 if action.kind == "store" else (cost or 0) * action.is_kept
            assert action.kind == "record" or action.step == at
            stored.append((at, size, action.kind == "record"))
            used += size
            at = None
        elif action.kind in ("backward", "drop", "take"):
            position, size, is_recorded = stored.pop()
            assert is_recorded == (action.kind == "backward")
            assert position == action.step + is_recorded
            reversed_steps += [action.step] * is_recorded
            used -= size
            at = position if action.kind == "take" else None
        most = max(most, used)
        assert used <= slots
    assert reversed_steps == list(range(steps))[::-1]
    assert stored == [(0, 0, False)]
    assert (plan.forward_steps, plan.slots_used) == (forward, most)
    assert steps <= forward <= steps * (steps + 1) // 2
    assert plan.time_ratio == pytest.approx((forward / steps + 2) / 3)


def test_more_slots_never_cost_more_steps():
    counts = [plan_bptt(60, slots=slots, internal_cost=3).forward_steps for slots in range(0, 190, 3)]
    assert counts == sorted(counts, reverse=True)
    assert (counts[0], counts[-1]) == (60 * 61 // 2, 60)


def test_a_large_plan_comes_soon_and_says_how_far_from_the_best_it_may_be():
    plan = plan_bptt(10_000, slots=300, internal_cost=4)
    assert plan.least_forward_steps < plan.forward_steps <= 1.02 * plan.least_forward_steps
    small = plan_bptt(1000, slots=200, internal_cost=4)
    assert small.least_forward_steps == small.forward_steps == 1949
    assert f"{plan.least_forward_steps:,}" in str(plan)


def test_a_measured_step_turns_memory_into_slots():
    measured = StepBytes(state=100, graph=450, plain=350)
    assert measured.internal_cost == 5
    plan = measured.plan(50, memory=1500)
    assert (plan.slots, plan.internal_cost, plan.bytes) == (10, 5, 1450)
    assert measured.plan(50, memory=1500, internal=False).internal_cost is None
    only = measured.plan(50, memory=1500, internal="only")
    assert (only.slots, only.internal_cost, only.bytes) == (2, 1, 1350)
    assert "1.42 KiB: 10 × 100 bytes" in str(plan)
    assert f"{100 * 1450 / 17500:.1f} %" in str(plan)
    assert measured.plan(50, memory=450).slots == 0
    assert plan_bptt(10, slots=2).bytes is None


@pytest.mark.parametrize("state", [0, 4])
def test_a_state_that_is_small_compared_with_the_graph_does_not_make_millions_of_slots(state):
    measured = StepBytes(state, 10**6, 10**6)
    assert measured.internal_cost == 64
    plan = measured.plan(1000, memory="64MB")
    assert plan.slots <= 64 * 1000
    assert plan.bytes <= 64 * 10**6
    # Next to the current step's graph there is room for 63 others: no worse than with graphs alone.
    assert plan.forward_steps <= plan_bptt(1000, slots=63, internal_cost=1).forward_steps
    assert measured.plan(1000, memory=10**10).forward_steps == 1000
    # No graph fits, but all states do.
    alone = measured.plan(1000, memory=10**6 + 4 * 999)
    assert (alone.internal_cost, alone.forward_steps) == (None, 1999)
    # One more graph fits, or all states, which is better.
    assert measured.plan(1000, memory=2 * 10**6 + 10**5).forward_steps <= 1999
    assert measured.plan(1000, slots=1000).forward_steps == 1999
    assert measured.plan(1000, slots=10**9).forward_steps == 1000


def test_a_plan_is_data(tmp_path):
    plan = StepBytes(100, 450, 350).plan(50, memory=1500)
    plan.save(tmp_path / "plan.json")
    assert BPTTPlan.load(tmp_path / "plan.json") == plan


def test_the_picture_shows_every_step_that_is_recorded_and_every_state_that_is_stored():
    plan = plan_bptt(40, slots=9, internal_cost=3)
    lines = {line.get_label(): line for line in plan.plot().get_lines()}
    kinds = [action.kind for action in plan.actions()]
    recorded = [x for name, line in lines.items() if name.startswith("step recorded") for x in line.get_xdata()]
    assert sorted(math.floor(x) for x in recorded) == list(range(40))
    assert len(lines["state stored"].get_xdata()) == kinds.count("store") > 0


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: plan_bptt(0, slots=1), ValueError, "steps must be at least 1, got 0"),
        (lambda: plan_bptt(3, slots=-1), ValueError, "slots must not be negative, got -1"),
        (lambda: plan_bptt(3, slots=1.5), TypeError, r"slots must be an integer, got 1\.5"),
        (lambda: plan_bptt(3, slots=1, internal_cost=0), ValueError, "internal_cost must be at least 1, got 0"),
        (lambda: StepBytes(1, 1, 1).plan(3), ValueError, "needs memory or slots, got neither"),
        (lambda: StepBytes(1, 1, 1).plan(3, slots=1, internal="both"), ValueError, 'False or "only", got .both.'),
        (lambda: StepBytes(1, 9, 1).plan(3, memory=8), ValueError, r"memory must be at least 9 bytes, .* got 8"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(call, error, text):
    with pytest.raises(error, match=text):
        call()
