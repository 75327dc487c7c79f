"""The benchmark of long sequences: what is published holds what pages say, and small runs measure what they should."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.planning.fit_steps import step_of
from benchmarks.planning.long_longest import COMMANDS, MEMORIES, UNSLOTH, Longest, picture
from benchmarks.planning.long_longest import EXACT as EXACT_ONLY
from benchmarks.planning.long_random import Drawn, Lowest
from benchmarks.planning.long_sequence import LongStep
from benchmarks.planning.long_store import CHUNKED, Stored, errors, gradients_of, plan_of, small
from benchmarks.planning.long_tiles import TILED, WHOLE, Working
from benchmarks.records import RESULTS, read_rows
from benchmarks.suites.models import twin
from rmm_linear.planning import simulate

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:transformers", "ignore::FutureWarning")
FLASH = 91_000  # bytes per token, with flash attention's accumulators
OF_UNSLOTH = ("llama-3.1-8b", "qlora")
EXACT = ("offload", "recompute + offload", "attention + offload", "selective + offload")


def test_published_steps_save_next_to_nothing_with_exact_gradients() -> None:
    rows = {row.method: row for row in read_rows(RESULTS / "long-store.csv", Stored)}
    for choice in EXACT:
        assert rows[choice].share <= 0.02
        assert rows[choice].error == 0
        assert rows[choice].files > 0
    assert rows["convert + offload"].error == 0
    assert rows["recompute + offload + tile"].error < 1e-5


def test_published_tiles_take_the_same_at_every_length() -> None:
    rows = read_rows(RESULTS / "long-tiles.csv", Working)
    for module in ("MLP", "norm"):
        tiled = [row for row in rows if (row.module, row.provider) == (module, TILED)]
        assert len({row.working for row in tiled}) == 1
        assert len(tiled) > 1
        assert all(row.error == 0 for row in tiled)
        assert max(row.weight_error for row in tiled) < 1e-5
    last = {row.provider: row.tensors for row in rows if row.module == "MLP"}
    assert last[TILED] <= 6 < 40 < last[WHOLE]


def test_published_sequences_are_longer_than_what_others_say() -> None:
    rows = {row.command: row for row in read_rows(RESULTS / "long-longest.csv", Longest)}
    assert set(rows) == set(COMMANDS)
    for row in rows.values():
        assert EXACT_ONLY in row.command
        assert row.exact < row.checkpointed <= row.tokens
        assert row.peak <= row.memory
    first, limited, state = map(rows.__getitem__, COMMANDS[:3])  # no limit of the host, one, and all weights trained
    for row in (first, state):
        assert row.tokens >= 800_000
        assert row.bytes_per_token <= FLASH
    assert 800_000 > limited.tokens > UNSLOTH[MEMORIES[-1]]
    assert "host memory" in limited.binds
    assert limited.host_bytes <= 128e9 < first.host_bytes
    by_memory = {row.command.split()[2]: row.tokens for row in rows.values() if (row.model, row.method) == OF_UNSLOTH}
    assert all(by_memory[memory] > 2 * tokens for memory, tokens in UNSLOTH.items() if memory in by_memory)
    assert picture([*rows.values()]).axes[0].get_xlabel() == "memory of the device, GiB"


def test_published_plans_never_exceed_their_budget() -> None:
    rows = read_rows(RESULTS / "long-random.csv", Drawn)
    assert len({row.number for row in rows}) == len(rows) > 2
    assert sum(row.met for row in rows) > 0.5 * sum(row.budgets for row in rows)
    assert sum(row.over for row in rows) == 0
    assert max(row.error for row in rows) <= 1


def test_published_compositions_take_half_of_single_words() -> None:
    exact, single, composed = read_rows(RESULTS / "long-least.csv", Lowest)
    assert composed.measured < single.measured < exact.measured
    assert composed.share <= 0.5
    assert abs(composed.simulated / composed.measured - 1) < 0.01


def test_a_plan_for_all_layers_has_the_gradients_of_the_exact_one(tmp_path: Path) -> None:
    _, (model, batch) = small(True)
    plain = plan_of(model, "keep", 384, "").apply(twin(model))
    planned = plan_of(model, "recompute + offload + tile", 384, str(tmp_path)).apply(twin(model))
    found, expected = (gradients_of(one, step_of(one, batch)) for one in (planned, plain))
    assert 0 <= errors(found, expected) < 1e-5
    assert simulate(planned, batch).bytes < 0.5 * simulate(plain, batch).bytes


@pytest.mark.parametrize(
    "part",
    [
        "tiles",
        *(pytest.param(one, marks=pytest.mark.thorough) for one in ("store", "sequence", "least", "random", "longest")),
    ],
)
def test_small_runs(part: str, tmp_path: Path) -> None:
    assert main(["long", "--parts", part, "--tiny", "--out", str(tmp_path), "--commit", "abc"]) == 0
    kinds = {"tiles": Working, "store": Stored, "sequence": LongStep, "least": Lowest, "random": Drawn}
    kind = {**kinds, "longest": Longest}[part]
    rows = read_rows(tmp_path / f"long-{part}.csv", kind)
    assert {row.commit for row in rows} == {"abc"}
    if part == "store":
        assert {"exact", CHUNKED, *EXACT} <= {row.method for row in rows}
