"""Sizes on paper: the largest that fit, by simulations that are those of real steps."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks import fit_paper
from benchmarks.fit_paper import METHODS, SEQUENCE, Paper, by_method, largest, paper, plans, rows
from benchmarks.fit_paper_models import MODELS, llama, texts, with_adapters
from rmm_linear.fitting.fitting import Fitting
from rmm_linear.fitting.shards import Shards
from rmm_linear.memory import peak
from rmm_linear.planning import simulate
from rmm_linear.planning.blocks.plan import BlockPlan
from rmm_linear.planning.step.step import run_step

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
GRAIN = fit_paper.GRAIN
MEMORY = 40_000_000
BUFFERS = 2 * 4 * 8  # two tables of rotary frequencies, of half a head each
TINY = MODELS["tiny"]


Made = tuple[Fitting, dict[str, BlockPlan]]
Rows = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def made() -> Made:
    """The tiny LLaMA with the options of its blocks, and the plans of all methods."""
    work = Fitting(llama(TINY), texts(1, fit_paper.MEASURED), MEMORY, optimizer=fit_paper.ADAMW)
    work.add_options(1.0)
    return work, plans(work)


@pytest.fixture(scope="module")
def found(made: Made) -> Rows:
    """Rows by method."""
    return {row["method"]: row for row in by_method(made[0])}


@pytest.mark.thorough
def test_no_method_reaches_further_than_the_fitted_plan(found: Rows) -> None:
    assert tuple(found) == METHODS
    for row in found.values():
        assert row["sequence"] % GRAIN == 0
        assert row["sequence"] <= found["fitted"]["sequence"]
        assert row["batch"] <= found["fitted"]["batch"]
        assert (row["batch"] > 0) == (row["sequence"] >= SEQUENCE)
    assert 0 < found["exact"]["sequence"] < found["checkpointed"]["sequence"] < found["chunked"]["sequence"]


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["exact", "checkpointed", "chunked", "packed"])
def test_the_next_size_is_over_the_memory(made: Made, found: Rows, method: str) -> None:
    work, plan, row = made[0], made[1][method], found[method]

    def total(batch: int, sequence: int) -> int:
        return work.before + simulate(plan, texts(batch, sequence)).bytes

    assert total(1, row["sequence"]) == row["sequence_peak"] <= MEMORY
    assert total(1, row["sequence"] + GRAIN) > MEMORY
    assert (row["batch_peak"] or 0) <= MEMORY < total(row["batch"] + 1, SEQUENCE)


def test_methods_are_what_they_say(made: Made) -> None:
    choices = {method: {row.name: row.option for row in plan.blocks} for method, plan in made[1].items()}
    assert {*choices["exact"].values()} == {"keep"}
    assert {*choices["checkpointed"].values()} == {"recompute"}
    assert choices["chunked"] == choices["checkpointed"] | {"lm_head": "convert others"}
    packed = {name for name, option in choices["packed"].items() if option == "convert tenth"}
    assert packed == {"model.layers.0", "model.layers.1", "model.layers.2", "model.norm", "lm_head"}


@pytest.mark.parametrize("method", ["exact", "checkpointed", "chunked", "packed"])
def test_simulations_take_the_bytes_of_real_steps(made: Made, method: str) -> None:
    batch, sequence = 2, 512
    plan = made[1][method]
    simulated = simulate(plan, texts(batch, sequence)).bytes
    torch.manual_seed(0)
    real = AutoModelForCausalLM.from_config(LlamaConfig(**TINY, use_cache=False), dtype=torch.bfloat16).train()
    assert simulated == real_peak(real, BlockPlan(plan.blocks, config=plan.config), texts(batch, sequence, "cpu"))


def real_peak(model: nn.Module, plan: BlockPlan, batch: dict[str, torch.Tensor]) -> int:
    plan.apply(model)
    gc.collect()
    with peak("cpu") as measured:
        run_step(model, batch)
    return measured.bytes


def test_adapters_alone_are_trained_and_all_weights_are_halves() -> None:
    model = with_adapters(TINY)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert len(trained) == 3 * 7 * 2
    assert all("lora_" in name for name in trained)


@pytest.mark.parametrize("memory", [1_000, 1_700_000])
def test_what_does_not_fit_without_a_batch_is_not_simulated(memory: int) -> None:
    found = list(rows(llama(TINY), memory, None))
    assert [row["status"] for row in found] == ["does not fit"] * len(METHODS)
    assert all(row["needed"] >= memory and "sequence" not in row for row in found)


def test_shards_divide_what_is_needed() -> None:
    whole = next(rows(llama(TINY), 1_000, None))
    part = next(rows(llama(TINY), 1_000, Shards(8)))
    offloaded = next(rows(llama(TINY), 1_000, Shards(8, cpu_offload=True)))
    for name in ("parameters", "gradients"):
        assert part[name] == whole[name] / 8
        assert offloaded[name] == 0
    assert whole["gathered"] == 0 < part["gathered"] == offloaded["gathered"] == offloaded["needed"] - BUFFERS


@pytest.mark.parametrize(
    ("bytes_of", "memory", "guess", "expected"),
    [
        (lambda size: 10 * size + 5, 1000, 1, 99),
        (lambda size: 10 * size + 5, 1000, 5000, 99),
        (lambda size: max(500 + size, 10 * size), 1000, 3, 100),
        (lambda size: max(500 + size, 10 * size), 499, 16, 0),
        (lambda size: 10 * size, 1000, 100, 100),
        (lambda size: 700, 700, 1, None),
    ],
)
def test_a_secant_finds_the_largest_size(
    bytes_of: Callable[[int], int], memory: int, guess: int, expected: int | None
) -> None:
    tried: list[int] = []

    def counted(size: int) -> int:
        tried.append(size)
        assert len(tried) < 12
        return bytes_of(size)

    if expected is None:
        with pytest.raises(AssertionError):
            largest(counted, memory, guess)
    else:
        assert largest(counted, memory, guess) == expected


def test_rows_have_the_columns_of_the_csv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fit_paper.PLACES, "small", ("1KB", None))
    found = paper(["tiny"], ["small"])
    assert len(found) == 2 * len(METHODS)
    assert [Paper(**one).trained for one in found] == ["all"] * len(METHODS) + ["LoRA"] * len(METHODS)
