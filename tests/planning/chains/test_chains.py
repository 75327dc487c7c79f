"""The subset of a chain's outputs with the least peak."""

import random
import time

import pytest
from chain_references import best_of_all, peak_of, quadratic

from rmm_linear.planning import ChainPlan, minimum_peak


def chains(count, longest, seed=0):
    """Chains with few and many ties, zeros and outliers among their sizes."""
    draw = random.Random(seed)
    for _ in range(count):
        length, top = draw.randint(1, longest), draw.choice([1, 3, 10, 1000, 10**12])
        few = draw.random() < 0.3
        yield [draw.choice([0, 1, 100]) if few else draw.randint(0, top) for _ in range(length)]


def check_short(count):
    for sizes in chains(count, 12):
        plan = minimum_peak(sizes)
        assert plan.peak == best_of_all(sizes) == peak_of(sizes, plan.kept), sizes


def check_long(count):
    for sizes in chains(count, 400, seed=1):
        plan = minimum_peak(sizes)
        assert plan.peak == quadratic(sizes) == peak_of(sizes, plan.kept), sizes


def test_no_subset_has_a_lower_peak_and_the_one_returned_has_it():
    check_short(400)


def test_long_chains_agree_with_the_recurrence():
    check_long(20)


@pytest.mark.montecarlo
def test_all_4000_short_and_200_long_chains():
    check_short(4000)
    check_long(200)
    print("4,000 chains of at most 12 outputs against every subset, 200 of at most 400 against the recurrence")


def test_a_million_outputs_take_seconds():
    draw = random.Random(0)
    sizes = [draw.randint(1, 10**6) for _ in range(10**6)]
    begin = time.process_time()
    plan = minimum_peak(sizes)
    assert time.process_time() - begin < 10
    assert plan.peak == peak_of(sizes, plan.kept)


@pytest.mark.parametrize("length", [100, 1000, 10_000])
def test_equal_outputs_need_about_the_root_of_twice_their_number(length):
    """With s segments of falling length s, s - 1, …, the kept ones and the inside of a segment always sum up to s."""
    peak = minimum_peak([1] * length).peak
    segments = next(s for s in range(length) if s * (s + 1) // 2 >= length)
    assert segments <= peak <= segments + 3


@pytest.mark.parametrize(("sizes", "peak", "kept"), [([7], 7, (0,)), ([7, 2], 16, (0, 1)), ([0, 0, 0], 0, (0, 2))])
def test_the_shortest_chains(sizes, peak, kept):
    plan = minimum_peak(sizes)
    assert plan.peak == peak
    assert plan.kept[0] == 0
    assert plan.kept[-1] == kept[-1]


def test_a_plan_is_data(tmp_path):
    plan = minimum_peak(range(50))
    plan.save(tmp_path / "plan.json")
    assert ChainPlan.load(tmp_path / "plan.json") == plan
    assert str(plan).startswith(f"peak of {plan.peak:,} bytes, saves {len(plan.kept)} of 50 outputs: 0, ")


@pytest.mark.parametrize(
    ("sizes", "error", "text"),
    [
        ([], ValueError, "at least one output, got none"),
        ([3, -1], ValueError, "must not be negative, got -1 at 1"),
        ([3, 1.5], TypeError, r"must be integers, got 1\.5 at 1"),
    ],
)
def test_sizes_that_are_none_are_refused(sizes, error, text):
    with pytest.raises(error, match=text):
        minimum_peak(sizes)


@pytest.mark.parametrize("kept", [(), (1, 2), (0, 2, 2)])
def test_a_plan_that_is_none_is_refused(kept):
    with pytest.raises(ValueError, match="kept must begin with 0 and rise"):
        ChainPlan(3, kept)
