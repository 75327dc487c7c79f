"""The zoo: some types are converted in the tests, more where they are thorough, and what is written of one is right."""

from __future__ import annotations

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.records import read_rows
from benchmarks.suites import zoo

# Every kind of attention and MLP once, and images.
TYPES = ["bert", "falcon", "gpt2", "llama", "t5", "vit"]
MORE = [
    *("bloom", "gemma2", "mpt", "opt", "phi", "qwen2", "xglm", "deberta-v2", "electra", "gpt_neox", "codegen"),
    *("stablelm", "mobilenet_v1", "segformer", "wav2vec2-bert", "sew"),
]


@pytest.mark.parametrize("name", [*TYPES, *(pytest.param(name, marks=pytest.mark.thorough) for name in MORE)])
def test_models_are_right(name):
    """Logits to the bit, the same parameters with a gradient, unbiased, and as before when reverted."""
    draws = 6
    found = zoo.measured(name, zoo.types()[name], draws)
    assert found["logits"] == "equal"
    assert (found["gradients"], found["reverted"]) == ("same", "same")
    assert found["loss"] < 1e-6  # of chunks, in another order of sums
    # Of scores by distance, one factor of a product is a table in no converted layer: both are kept.
    assert found["share"] < (0.5 if name == "wav2vec2-bert" else 0.3)
    # The mean of draws times the square of the error of the mean, by the variance: 1 on average, with a deviation of
    # (2 / degrees of freedom)**0.5, and there are many more than 32 of these.
    assert 0.5 < found["mean"] < 2


def test_a_type_that_does_not_build_says_why(tmp_path):
    assert main(["zoo", "--types", "mamba", "--draws", "1", "--limit", "0.001", "--out", str(tmp_path)]) == 0
    (row,) = read_rows(tmp_path / zoo.CSV, zoo.ZooRow)
    assert row.status.endswith("measured took longer than 0 s")
    assert main(["zoo", "--types", "no_such_model", "--out", str(tmp_path)]) == 2


def test_bytes_are_counted_once_each_without_parameters_and_batch():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            self.loss = (self.model(x) * x).sum()
            return self

    assert zoo.saved_bytes(Model(), {"x": torch.randn(8, 4)}) == 8 * 4 * 4  # the first output; x is there anyway
