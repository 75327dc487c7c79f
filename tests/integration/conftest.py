"""Fixtures of the tests of torch.compile."""

import pytest
import torch
from compile_helpers import SEED


@pytest.fixture
def no_graphs_left():
    """Nothing that other tests have compiled is found, and nothing is left to them."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def one_seed(monkeypatch):
    """All layers draw one seed, in eager and in compiled code, which take them from other places of the generator."""
    monkeypatch.setattr("rmm_linear.ops.save.draw_seed", lambda: SEED)
    monkeypatch.setattr("rmm_linear.layers.linear.draw_seed", lambda: SEED)
    monkeypatch.setattr("rmm_linear.context.recomputation.StepSeeds.take", lambda self, index, salt: SEED)
