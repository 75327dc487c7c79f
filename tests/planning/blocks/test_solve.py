"""An option for every block: each solver against every choice, on chains of all kinds."""

import itertools
import random
import sys
from dataclasses import replace

import pytest

from rmm_linear.planning.blocks import solve as solvers
from rmm_linear.planning.blocks.solve import Option, choose, least, peak_of

SOLVERS = ["milp", "rounded"]
KEEP, AGAIN = Option("keep", 5, 6, 0.0), Option("recompute", 1, 6, 1.0)


def weighted(option):
    return option.seconds + 0.5 * option.noise


def chains(count, seed=0):
    """Chains of few blocks with small whole numbers, so that ties are many and sums exact, each with a budget.

    In every other chain, some neighbours are alike.
    """
    draw = random.Random(seed)
    for number in range(count):
        options = []
        for _ in range(draw.randint(2, 5)):
            if options and number % 2 and draw.random() < 0.6:
                options.append(options[-1])
                continue
            kept = [draw.randint(0, 30) for _ in range(draw.randint(3, 6))]
            options.append(
                [Option("", k, k + draw.randint(0, 20), draw.randint(-5, 20), draw.randint(0, 9)) for k in kept]
            )
        yield options, int(draw.uniform(0.3, 1.1) * sum(block[0].kept for block in options)) + draw.randint(0, 30)


def large(count, seed=0):
    """Blocks of about ten million bytes and seven options: the less is saved, the more time it takes, more or less."""
    draw = random.Random(seed)
    options = []
    for _ in range(count):
        whole = int(draw.uniform(0.6e7, 1.2e7))
        shares = [1.0, *(draw.uniform(0.1, 0.9) for _ in range(5)), 0.0]
        options.append(
            [Option("", int(s * whole), int(1.2 * s * whole), (1 - s) ** 1.5 * draw.uniform(0.7, 1.3)) for s in shares]
        )
    return options, int(0.4 * sum(block[0].kept for block in options))


def cost_of(options, chosen, cost=weighted):
    return sum(cost(block[index]) for block, index in zip(options, chosen, strict=True))


def peak_in_steps(options, chosen):
    kept, peak = 0, 0
    for block, index in zip(options, chosen, strict=True):
        peak = max(peak, kept + block[index].worst)
        kept += block[index].kept
    return peak


def best_of_all(options, budget, cost=weighted):
    every = itertools.product(*(range(len(block)) for block in options))
    fitting = (cost_of(options, chosen, cost) for chosen in every if peak_in_steps(options, chosen) <= budget)
    return min(fitting, default=None)


@pytest.mark.parametrize("solver", SOLVERS)
def test_small_chains_against_every_choice(solver):
    fitting = infeasible = 0
    for options, budget in chains(60):
        best, chosen = best_of_all(options, budget), choose(options, budget, weighted, solver=solver)
        if best is None:
            infeasible += 1
            assert chosen is None
            continue
        fitting += 1
        assert chosen is not None
        assert peak_in_steps(options, chosen) == peak_of(options, chosen) <= budget
        found = cost_of(options, chosen)
        assert found == best
    assert fitting > 30
    assert infeasible > 3


@pytest.mark.parametrize("solver", SOLVERS)
def test_the_least_budget_is_the_least_that_any_solver_can_meet(solver):
    """What saves least is not rounded, so that rounding makes nothing impossible, in large blocks either."""
    for options in (*(options for options, _ in chains(30, seed=1)), large(20)[0]):
        budget = least(options)
        assert len(options) == 20 or best_of_all(options, budget - 1) is None
        assert choose(options, budget - 1, solver=solver) is None
        chosen = choose(options, budget, solver=solver)
        assert chosen is not None
        assert peak_in_steps(options, chosen) == budget


def test_rounding_costs_at_most_its_share_of_the_budget():
    options, budget = large(96)
    exact, rounded = choose(options, budget, solver="milp"), choose(options, budget, solver="rounded")
    less = choose(options, int(budget * (1 - 96 / 20_000)), solver="milp")
    assert exact is not None and rounded is not None and less is not None  # noqa: PT018
    assert max(peak_of(options, exact), peak_of(options, rounded)) <= budget
    by = [cost_of(options, chosen, lambda option: option.seconds) for chosen in (exact, rounded, less)]
    assert by[0] * (1 - 1e-5) <= by[1] <= by[2] * (1 + 1e-5)
    assert by[0] < by[2]


@pytest.mark.parametrize("solver", SOLVERS)
def test_where_all_fits_the_cheapest_is_taken_and_costs_may_be_negative(solver):
    faster = Option("sketch", 2, 3, -1.0, noise=1.0)
    options = [[KEEP, faster, AGAIN]] * 4
    assert choose(options, 100, solver=solver) == [1, 1, 1, 1]
    assert choose(options, 100, lambda option: option.seconds + 2 * option.noise, solver=solver) == [0, 0, 0, 0]
    assert choose(options, 11, solver=solver) == [1, 1, 1, 1]
    last = [Option("keep", 10**9, 6, 0.0), Option("recompute", 0, 6, 1.0)]  # what it saves is in no peak
    assert choose([[KEEP, AGAIN], last], 11, solver=solver) == [0, 0]


@pytest.mark.parametrize("solver", [*SOLVERS, "auto"])
def test_nothing_to_choose_and_nothing_that_fits(solver):
    assert choose([], 10, solver=solver) == []
    assert choose([[KEEP, AGAIN], [KEEP, AGAIN]], 6, solver=solver) is None
    assert choose([[KEEP, AGAIN], [KEEP, AGAIN]], 7, solver=solver) == [1, 0]
    assert choose([[KEEP], []], 10**6, solver=solver) is None
    assert choose([[Option("view", 0, 0, 0.0)]] * 2, 0, solver=solver) == [0, 0]
    assert peak_of([], []) == 0


def test_scales_of_costs_and_bytes_change_no_choice():
    """Tolerances of HiGHS are absolute, costs are microseconds and bytes may be many."""
    for options, budget in chains(10, seed=2):
        small = [
            [replace(one, kept=one.kept << 32, worst=one.worst << 32, seconds=one.seconds * 2.0**-30) for one in block]
            for block in options
        ]
        best = best_of_all(small, budget << 32, lambda option: option.seconds)
        chosen = choose(small, budget << 32, solver="milp")
        assert (chosen is None) == (best is None)
        if chosen is not None:
            assert peak_of(small, chosen) <= budget << 32
            assert cost_of(small, chosen, lambda option: option.seconds) == best


def test_what_exceeds_the_budget_by_a_tolerance_is_solved_again(monkeypatch):
    options, budgets = [[KEEP, AGAIN], [KEEP, AGAIN]], []

    def exceeding(blocks, prices, budget):
        budgets.append(budget)
        return [0, 0]

    monkeypatch.setattr(solvers, "_milp", exceeding)
    assert choose(options, 8, solver="milp") == [1, 0]
    assert budgets == [8, 7]
    monkeypatch.setattr(solvers, "_milp", lambda blocks, prices, budget: None)  # out of time
    assert choose(options, 8, solver="milp") == [1, 0]


def test_without_scipy_the_dynamic_program_is_taken(monkeypatch):
    options, budget = large(8)
    monkeypatch.setattr(solvers, "_milp", lambda blocks, prices, budget: pytest.fail("scipy was used"))
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    assert choose(options, budget) == choose(options, budget, solver="rounded")


def test_the_integer_program_names_the_package_that_it_needs(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(ImportError, match=r"scipy, which is not installed\. Run pip install .*solver='rounded'"):
        choose([[KEEP, AGAIN]], 8, solver="milp")


def test_solvers_and_costs_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match=r"milp, rounded, got 'round'\. Did you mean 'rounded'\?"):
        choose([[KEEP]], 8, solver="round")
    with pytest.raises(ValueError, match=r"cost must be finite, got inf for 'keep'"):
        choose([[KEEP]], 8, lambda option: float("inf"), solver="rounded")


@pytest.mark.parametrize("solver", SOLVERS)
def test_bytes_that_wait_elsewhere_are_limited(solver):
    """What is chosen keeps the limit and costs no more than the best of a limit a little below: the price has gaps."""
    draw = random.Random(3)
    bound = infeasible = 0
    for options, budget in chains(60, seed=3):
        options = [[replace(one, host=draw.choice([0, 0, 10, 20])) for one in block] for block in options]
        limit = draw.choice([0, 20, 40])

        def within(chosen, options=options, limit=limit):
            return sum(block[index].host for block, index in zip(options, chosen, strict=True)) <= limit

        every = itertools.product(*(range(len(block)) for block in options))
        fitting = [one for one in every if peak_in_steps(options, one) <= budget and within(one)]
        chosen = choose(options, budget, weighted, solver=solver, host=limit)
        if not fitting:
            infeasible += 1
            assert chosen is None
            continue
        assert chosen is not None
        assert within(chosen)
        assert peak_in_steps(options, chosen) <= budget
        free = choose(options, budget, weighted, solver=solver)
        bound += not within(free)
        best, worst = (pick(cost_of(options, one) for one in fitting) for pick in (min, max))
        assert cost_of(options, chosen) == best if within(free) else best <= cost_of(options, chosen) <= worst
    assert bound > 10
    assert infeasible > 3


def test_a_price_for_what_waits_is_near_the_best_of_many_blocks():
    options, budget = large(60)
    options = [[replace(one, host=block[0].kept - one.kept) for one in block] for block in options]
    free = choose(options, budget, solver="rounded")
    limit = int(0.9 * sum(block[index].host for block, index in zip(options, free, strict=True)))
    # What is saved or waits is the whole in each block: 0.9 of what waits is all that may be.
    assert choose(options, budget, solver="rounded", host=limit) is None
    more = [[*block, Option("dropped", 0, block[0].worst, 5.0)] for block in options]
    chosen = choose(more, budget, solver="rounded", host=limit)
    assert chosen is not None
    waits = sum(block[index].host for block, index in zip(more, chosen, strict=True))
    assert 0.9 * limit <= waits <= limit
    assert budget >= peak_of(more, chosen)
    assert least(more, host=limit) <= budget


def test_the_least_budget_with_a_limit_can_be_met():
    for options, _ in chains(20, seed=4):
        options = [[replace(one, host=index) for index, one in enumerate(block)] for block in options]
        budget = least(options, host=0)
        assert choose(options, budget, host=0) == [0] * len(options)
        assert budget <= 1.002 * peak_of(options, [0] * len(options)) + 1
