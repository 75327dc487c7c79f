"""Plans: what they do step by step, what they say, and that they are data."""

import math

import matplotlib
import pytest

from rmm_linear.planning import BPTTPlan, StepBytes, plan_bptt

matplotlib.use("agg")
PLANS = [
    (1, 0, None),
    (1, 5, 2),
    (2, 0, 1),
    (7, 0, 4),
    (12, 3, None),
    (40, 4, 1),
    (40, 9, 3),
    (40, 10**6, 3),
    (97, 11, 4),
]


@pytest.mark.parametrize(("steps", "slots", "cost"), PLANS)
def test_every_step_is_reversed_once_in_order_and_slots_suffice(steps, slots, cost):
    """Each action is possible with what is kept: the plan is walked through on a stack of states."""
    plan = plan_bptt(steps, slots=slots, internal_cost=cost)
    kept, at, forward, reversed_steps, used, most = [(0, 0, False)], 0, 0, [], 0, 0
    for action in plan.actions():
        if action.kind in ("advance", "record"):
            at = kept[-1][0] if at is None else at
            assert action.step == at
            at = action.end if action.kind == "advance" else action.step + 1
            forward += at - action.step
        if action.kind in ("store", "record"):
            size = 1 if action.kind == "store" else (cost or 0) * action.is_kept
            assert action.kind == "record" or action.step == at
            kept.append((at, size, action.kind == "record"))
            used += size
            at = None
        elif action.kind in ("backward", "drop", "take"):
            position, size, is_recorded = kept.pop()
            assert is_recorded == (action.kind == "backward")
            assert position == action.step + is_recorded
            reversed_steps += [action.step] * is_recorded
            used -= size
            at = position if action.kind == "take" else None
        most = max(most, used)
        assert used <= slots
    assert reversed_steps == list(range(steps))[::-1]
    assert kept == [(0, 0, False)]
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
    assert f"(no plan has less than {plan.least_forward_steps:,})" in str(plan)


def test_a_measured_step_turns_memory_into_slots():
    measured = StepBytes(state=100, graph=450, plain=350)
    assert measured.internal_cost == 5
    plan = measured.plan(50, memory=1500)
    assert (plan.slots, plan.internal_cost, plan.bytes) == (10, 5, 1450)
    assert measured.plan(50, memory=1500, internal=False).internal_cost is None
    only = measured.plan(50, memory=1500, internal="only")
    assert (only.slots, only.internal_cost, only.bytes) == (2, 1, 1350)
    text = str(plan)
    assert "1.42 KiB: 10 × 100 bytes, a graph" in text
    assert f"of which this is {100 * 1450 / 17500:.1f} %" in text


@pytest.mark.parametrize("state", [0, 4])
def test_a_state_that_is_small_beside_the_graph_does_not_make_millions_of_slots(state):
    measured = StepBytes(state, 10**6, 10**6)
    assert measured.internal_cost == 64
    plan = measured.plan(1000, memory="64MB")
    assert plan.slots <= 64 * 1000
    assert plan.bytes <= 64 * 10**6
    # Beside the current step's graph there is room for 63 others: no worse than with graphs alone.
    assert plan.forward_steps <= plan_bptt(1000, slots=63, internal_cost=1).forward_steps
    assert measured.plan(1000, memory=10**10).forward_steps == 1000
    # No graph fits, but all states do.
    alone = measured.plan(1000, memory=10**6 + 4 * 999)
    assert (alone.internal_cost, alone.forward_steps) == (None, 1999)
    # One more graph fits, or all states, which is better.
    assert measured.plan(1000, memory=2 * 10**6 + 10**5).forward_steps <= 1999
    assert measured.plan(1000, slots=1000).forward_steps == 1999
    assert measured.plan(1000, slots=10**9).forward_steps == 1000


def test_a_budget_that_is_too_small_names_the_least_one():
    with pytest.raises(ValueError, match=r"memory must be at least 450 bytes, .* got 449"):
        StepBytes(100, 450, 350).plan(50, memory=449)
    assert StepBytes(100, 450, 350).plan(50, memory=450).slots == 0


def test_a_plan_is_data(tmp_path):
    plan = StepBytes(100, 450, 350).plan(50, memory=1500)
    plan.save(tmp_path / "plan.json")
    assert BPTTPlan.load(tmp_path / "plan.json") == plan
    assert plan_bptt(10, slots=2).bytes is None


def test_the_picture_shows_every_step_that_is_recorded_and_every_state_that_is_stored():
    plan = plan_bptt(40, slots=9, internal_cost=3)
    lines = {line.get_label(): line for line in plan.plot().get_lines()}
    kinds = [action.kind for action in plan.actions()]
    recorded = [x for name, line in lines.items() if name.startswith("step recorded") for x in line.get_xdata()]
    assert sorted(math.floor(x) for x in recorded) == list(range(40))
    assert len(lines["state stored"].get_xdata()) == kinds.count("store") > 0
    assert len(lines["step recorded, its graph saved"].get_xdata()) > 0


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"steps": 0, "slots": 1}, ValueError, "steps must be at least 1, got 0"),
        ({"steps": 3, "slots": -1}, ValueError, "slots must not be negative, got -1"),
        ({"steps": 3, "slots": 1.5}, TypeError, r"slots must be an integer, got 1\.5"),
        ({"steps": 3, "slots": 1, "internal_cost": 0}, ValueError, "internal_cost must be at least 1, got 0"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments, error, text):
    with pytest.raises(error, match=text):
        plan_bptt(arguments.pop("steps"), **arguments)


def test_a_measured_step_needs_a_budget_and_a_policy():
    with pytest.raises(ValueError, match="needs memory or slots, got neither"):
        StepBytes(1, 1, 1).plan(3)
    with pytest.raises(ValueError, match=r'internal must be True, False or "only", got .both.'):
        StepBytes(1, 1, 1).plan(3, slots=1, internal="both")
