"""A state that version 0.1.0 stored is read: never write the file again."""

import shutil
from pathlib import Path

import pytest
import torch

from rmm_linear.planning import StoreError, open_store

FIXTURES = Path(__file__).parents[1] / "data"
STATE = [
    torch.tensor([[0.0, 0.25, 0.5], [0.75, 1.0, 1.25]]),
    torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    torch.tensor(7),
    torch.tensor([True, False]),
    torch.tensor([1 + 2j]),
    torch.empty(0, 3),
]


def test_a_stored_state(tmp_path):
    store = open_store(tmp_path)
    shutil.copy(FIXTURES / "state.safetensors", store.path("state-3"))
    found = store.get("state-3")
    assert [tensor.dtype for tensor in found] == [tensor.dtype for tensor in STATE]
    assert all(map(torch.equal, found, STATE))
    store.put("state-4", STATE)
    assert store.path("state-4").stat().st_size == store.path("state-3").stat().st_size
    shutil.copy(FIXTURES / "state.safetensors", store.path("state-4"))  # its digest knows its key
    with pytest.raises(StoreError, match="digest"):
        store.get("state-4")
    store.close()
