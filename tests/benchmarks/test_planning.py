"""What plans are compared with, the counts of sweeps, and sizes on paper, which are those of real steps."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.planning import fit_paper, sweep
from benchmarks.planning.compiled import SAME_SHARE, THEIR_PEAK, TORCH, Compiled
from benchmarks.planning.fit_frontier import Fitted
from benchmarks.planning.fit_paper import METHODS, MODELS, by_method, largest, llama, plans, texts
from benchmarks.planning.fit_steps import FIT, live_peak, recompute_segments, step_of
from benchmarks.planning.fit_steps import MODELS as FITTED_MODELS
from benchmarks.planning.networks import PUBLISHED, large
from benchmarks.records import RESULTS, read_rows
from benchmarks.suites.models import twin
from rmm_linear import Shards
from rmm_linear.fitting.fitting import Fitting
from rmm_linear.memory import peak
from rmm_linear.planning import simulate
from rmm_linear.planning.blocks.plan import BlockPlan
from rmm_linear.planning.chains import schedules
from rmm_linear.planning.step.step import run_step

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:transformers", "ignore::FutureWarning")
MEMORY, TINY = 40_000_000, MODELS["tiny"]


def test_a_wrong_gradient_of_a_sweep_is_not_timed(tmp_path: Path) -> None:
    u = torch.linspace(0, 1, 8)
    sweep.compare(lambda number, u: torch.sin(u), u, tmp_path)
    runs = itertools.count()
    with pytest.raises(RuntimeError, match="must be the plain loop's to the bit"):
        sweep.compare(lambda number, u: torch.sin(u) * (1.0 + next(runs)), u, tmp_path)


@pytest.mark.parametrize(("interval", "slots"), [(1, 1), (3, 6), (20, 2)])
def test_from_the_least_length_on_two_levels_never_take_more_steps(interval: int, slots: int) -> None:
    least = sweep.fewest_steps(interval, slots)

    def loses(steps: int) -> bool:
        two = schedules.count(schedules.two_level(interval, slots), steps).forward_steps
        return two > schedules.count(schedules.in_memory(steps, slots), steps).forward_steps

    assert loses(least - 1)
    assert not any(loses(steps) for steps in range(least, least + 60))


def test_segments_recompute_the_same_gradients_in_less_memory() -> None:
    model, batch = FITTED_MODELS["t5"][1](True)
    other = twin(model)
    recompute_segments(other)
    found, peaks = [], []
    for each in (model, other):
        torch.manual_seed(0)
        step_of(each, batch)()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        peaks.append(live_peak(model, step_of(each, batch)))
    assert len(found[0]) == len(found[1]) > 0
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert peaks[1] < 0.9 * peaks[0]


def test_budgets_for_compiled_code_that_are_published_hold_and_fall() -> None:
    rows = read_rows(RESULTS / "graphs-compiled.csv", Compiled)
    assert all(row.is_equal == "equal" for row in rows)
    for _, group in itertools.groupby(rows, key=lambda row: row.network):
        found = {(row.solver, row.budget): row for row in group}
        budgets = sorted({budget for _, budget in found}, reverse=True)
        shares = [found[SAME_SHARE, budget].peak for budget in budgets]
        assert shares == sorted(shares, reverse=True)
        for budget in budgets:
            theirs, ours = found[TORCH, budget], found[THEIR_PEAK, budget]
            assert found[SAME_SHARE, budget].peak <= theirs.peak
            assert ours.peak <= theirs.peak
            assert ours.work <= theirs.work


def test_plans_that_are_published_fit_and_were_predicted() -> None:
    found = [row for row in read_rows(RESULTS / "fit-frontier.csv", Fitted) if row.method == FIT and row.measured]
    assert found
    for row in found:
        assert row.status == "fits"
        assert (row.measured or 0) <= (row.memory or 0)
        assert max(abs(row.predicted_error or 0), abs(row.simulated_error or 0)) <= 3
    assert large(False).keys() == PUBLISHED.keys()


@pytest.fixture(scope="module")
def work() -> Fitting:
    """The tiny LLaMA's exact step."""
    return Fitting(llama(TINY), texts(1, fit_paper.MEASURED), MEMORY, optimizer=fit_paper.ADAMW)


@pytest.mark.thorough
@pytest.mark.parametrize("shards", [None, Shards(8, context=8)])
def test_methods_reach_as_far_as_the_memory(shards: Shards | None) -> None:
    found = by_method(llama(TINY), MEMORY, shards)
    assert found.keys() == {*METHODS}
    assert 0 < found["exact"]["sequence"] < found["checkpointed"]["sequence"] < found["chunked"]["sequence"]
    assert found["chunked"]["sequence"] < found["fitted"]["sequence"]
    for method in ("chunked", "packed", "fitted"):
        assert 0.9 * MEMORY < found[method]["peak"] <= MEMORY


@pytest.mark.parametrize("method", ["chunked", "packed"])
def test_simulations_take_the_bytes_of_real_steps(work: Fitting, method: str) -> None:
    plan = plans(work)[method]
    simulated = simulate(plan, texts(2, 512)).bytes
    torch.manual_seed(0)
    real: nn.Module = AutoModelForCausalLM.from_config(LlamaConfig(**TINY, use_cache=False), dtype=torch.bfloat16)
    BlockPlan(plan.blocks, config=plan.config).apply(real.train())
    batch = texts(2, 512, "cpu")
    gc.collect()
    with peak("cpu") as measured:
        run_step(real, batch)
    assert simulated == measured.bytes


@pytest.mark.parametrize(
    ("bytes_of", "memory", "guess", "expected"),
    [
        (lambda size: 10 * size + 5, 1000, 1, 99),
        (lambda size: max(500 + size, 10 * size), 1000, 3, 100),
        (lambda size: max(500 + size, 10 * size), 499, 16, 0),
    ],
)
def test_a_secant_finds_the_largest_size(
    bytes_of: Callable[[int], int], memory: int, guess: int, expected: int
) -> None:
    tried: list[int] = []

    def counted(size: int) -> int:
        tried.append(size)
        return bytes_of(size)

    assert largest(counted, memory, guess) == expected
