"""The noise benchmark on real weights: MiniLM on the generated acceptability sentences."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.noise import main, noise_table, record_batch
from glue_finetune.acceptability import write_corpus
from rmm_linear.variance import sketch_variance


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder)
    return folder


def test_the_default_is_quieter_than_the_minibatch_at_a_tenth_of_the_memory(corpus: Path) -> None:
    """The default stays below half of the noise of SGD, where the published sketch has many times as much as that."""
    shape = {"batch": 64, "steps": 5, "max_length": 48, "seed": 0, "memories": [0.1], "itemsize": 2}
    records, mask, samples, choices = record_batch("cola", corpus, **shape)
    assert len(records) == 36
    assert samples[0] == 64
    assert len(mask) == samples[0] * samples[1]
    for _, x, y in records:
        assert x.shape[0] == y.shape[0] == len(mask)
        assert not y[mask == 0].any()
    found = noise_table(records[::5], mask, samples, choices, memories=[0.1], itemsize=2)
    auto = found['bits="auto", no padding'][0.1]
    assert auto <= 0.5
    assert found["gaussian (the paper)"][0.1] > 10 * auto
    # The rule that picks the width sees other batches and no gradient, and costs a fifth at most against hindsight.
    assert auto <= 1.2 * found["best width in hindsight"][0.1]


def test_the_command_prints_a_table(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--data_dir", str(corpus), "--tasks", "cola", "--batch", "16", "--steps", "4", "--max_seq_length", "16"]
    assert main([*argv, "--memory", "0.2"]) == 0
    out = capsys.readouterr().out
    assert "cola: 16 x " in out
    assert "36 layers, 16-bit input" in out
    assert "gaussian (the paper)" in out


def test_padding_carries_no_gradient_noise(corpus: Path) -> None:
    """Leaving padding out is exact, so the dense sketch of the real tokens alone has the noise of all of them."""
    shape = {"batch": 16, "steps": 4, "max_length": 32, "seed": 1, "memories": [], "itemsize": 2}
    records, mask, _, _ = record_batch("cola", corpus, **shape)
    _, x, y = records[3]
    real = mask.bool()
    masked = sketch_variance(x, y, kind="rademacher", rows=8, mask=mask)
    torch.testing.assert_close(masked, sketch_variance(x[real], y[real], kind="rademacher", rows=8))
