"""python -m benchmarks.attention on generated sentences: a table of layers, and one of the whole model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.attention import AttentionCall, main


def test_the_command_prints_noise_and_bias_by_layer_and_of_the_model(
    cola: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--data_dir", str(cola), "--tasks", "cola", "--model_name_or_path", str(model), "--batch", "8"]
    assert main([*argv, "--steps", "1", "--max_seq_length", "16", "--draws", "20", "--whole", "10"]) == 0
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    layers = [cells for cells in lines if len(cells) == 7 and cells[0].isdigit()]
    assert [cells[0] for cells in layers] == ["0"] * 3 + ["1"] * 3
    assert [cells[2] for cells in layers[:3]] == ["4, 4, 4", "8, 8, 4", "8, 8, 8"]
    noises = [float(cells[3]) for cells in layers[:3]]
    assert noises[0] > noises[1] > noises[2] > 0
    whole = {cells[0]: cells[1:] for cells in lines if len(cells) == 4}
    assert {
        f"roberta.encoder.layer.{i}.attention.self.{name}.weight" for i in (0, 1) for name in ("query", "key")
    } < set(whole)
    assert float(whole["whole gradient"][0]) > 0


def test_scores_are_measured_over_what_a_query_sees() -> None:
    query, key = torch.ones(1, 1, 1, 4), torch.tensor([1.0, 3.0, 100.0]).view(1, 1, 3, 1).expand(1, 1, 3, 4)
    mask = torch.tensor([True, True, False]).view(1, 1, 1, 3)
    for seen in (mask, torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)):
        assert AttentionCall(query, key, key, seen).deviation() == pytest.approx(2.0)  # scores of 2 and 6
