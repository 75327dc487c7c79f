"""Whole models: what is counted as kept is alive, and transformers is asked for by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmark_helpers import LLAMA, ROBERTA

from benchmarks import models
from benchmarks.__main__ import main
from benchmarks.case import Case
from benchmarks.suites import setup
from rmm_linear.memory import track_saved
from rmm_linear.memory.peak import LiveTensors, Peak


@pytest.mark.parametrize("case", [ROBERTA, LLAMA], ids=lambda case: case.name)
def test_kept_bytes_are_those_alive_between_forward_and_backward(case: Case) -> None:
    """The ledger of saved tensors against a count of live ones, which knows nothing of hooks or checkpoints.

    Alive beside it are the results of the forward pass and scalars; checkpoints keep no more than they save.
    """
    kept = {}
    for provider in models.providers(case):
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
        given = sum(t.nbytes for t in models._batch(case, case.sizes[0]).values())
        kept[provider] = ledger.total
        assert ledger.total - given - 4096 <= live <= ledger.total + 4096, provider
    full = f"{models.CHECKPOINT} 4 of 4"
    assert kept[full] < kept[models.SKETCHED] < kept[models.REFERENCE]
    matched = models.matched_layers(case)
    kept[f"{models.CHECKPOINT} 0 of 4"] = kept[models.REFERENCE]
    assert kept[f"{models.CHECKPOINT} {matched} of 4"] >= kept[models.SKETCHED]
    assert models._kept(case, f"{models.CHECKPOINT} {matched + 1} of 4") < kept[models.SKETCHED]


def test_without_transformers_the_suite_says_so_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["run", "--tiny", "--suite", "linear", "model", "--out", str(tmp_path)]) == 2
    assert "The suite model needs transformers: pip install transformers" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
