"""How suites measure: in turns, in processes of their own, and what counts as activation memory."""

from __future__ import annotations

import dataclasses
import os
import statistics
import time

import pytest
import torch
from helpers import tiny_model, token_ids

from benchmarks.noise import sampling
from benchmarks.processes import ProcessError, call
from benchmarks.suites import blocks, setup
from benchmarks.timing import interleaved, quartiles
from rmm_linear.estimators import norm_estimators
from rmm_linear.memory import track_saved
from rmm_linear.memory.peak import LiveTensors, Peak


def test_a_call_in_a_process_of_its_own_tells_how_it_ended() -> None:
    assert call(os.getpid) != os.getpid()
    with pytest.raises(ProcessError, match="ValueError: could not convert"):
        call(float, "x")
    with pytest.raises(ProcessError, match="_exit ended its process with status 7"):
        call(os._exit, 7)
    with pytest.raises(ProcessError, match="sleep took longer than 1 s"):
        call(time.sleep, 60, timeout=1)


def test_providers_take_turns() -> None:
    turns: list[str] = []

    def run(name: str) -> None:
        turns.append(name)
        time.sleep(0.011)

    times = interleaved({name: lambda name=name: run(name) for name in "abc"}, "cpu", 3)
    assert "".join(name for name, before in zip(turns, ["", *turns], strict=False) if name != before) == "abcbabc"
    assert all(len(values) == 3 and min(values) >= 0.011 for values in times.values())
    assert quartiles([3.0]) == (3.0, 3.0, 3.0)
    assert quartiles([5.0, 1.0, 2.0, 4.0, 3.0]) == (2.0, 3.0, 4.0)


def test_kept_bytes_are_those_alive_between_forward_and_backward() -> None:
    """The ledger of saved tensors against a count of live ones, with the results of the forward pass and scalars."""
    case, kept = dataclasses.replace(blocks.cases("cpu", tiny=True)[0], sizes=(8, 128, 4)), {}
    for provider in blocks.providers(case):
        candidate = setup(case, provider)
        assert candidate.forward is not None
        assert candidate.module is not None
        for _ in range(5):
            candidate.run()  # bits="auto" has chosen
        candidate.module.zero_grad()
        with LiveTensors(Peak()) as alive:
            loss = candidate.forward()
            live = alive.now
        del loss
        with track_saved(candidate.module) as ledger:
            loss = candidate.forward()
        del loss
        given = blocks._input(case).nbytes
        kept[provider] = ledger.total
        assert ledger.total - given - 4096 <= live <= ledger.total + 4096, provider
    assert max(kept[blocks.CHECKPOINT], kept[blocks.ALL]) < kept[blocks.LINEARS] < kept[blocks.REFERENCE]


def test_who_knows_the_norms_has_the_least_noise_and_winners_help() -> None:
    """Σ d/p is least for p ∝ ‖x‖‖y‖ (the mix with uniform apart), and theorem 2 holds for every layer."""
    torch.manual_seed(0)
    model, batches = tiny_model("roberta", dropout=0.0).train(), []
    for step in range(8):
        ids = token_ids(16, 20).roll(step, 0)
        mask = torch.ones_like(ids)
        mask[8:, 11:] = 0
        batches.append({"input_ids": ids, "attention_mask": mask, "labels": ids[:, 0] % 2})
    found = sampling.measure(model, batches, learning_rate=1e-3)
    names = {"none", "oracle", *norm_estimators()}
    assert set(found) == {("rows", ""), ("countsketch", ""), *((k, n) for k in ("wta", "norm_rows") for n in names)}
    middle = {key: statistics.median(layers) for key, layers in found.items()}
    for name in names - {"none"}:
        assert middle["norm_rows", "oracle"] <= middle["norm_rows", name]
        assert all(w <= n * (1 + 1e-9) for w, n in zip(found["wta", name], found["norm_rows", name], strict=True))
    assert middle["wta", "position"] < middle["wta", "none"]
