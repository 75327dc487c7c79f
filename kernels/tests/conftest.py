"""Settings of the kernels' tests, which need rmm_linear and nothing of the library's own tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

# Where Hugging Face's package `kernels` is not imported yet, pytest gives its name to the parent of this folder.
if getattr(sys.modules.get("kernels"), "__file__", None) is None:
    sys.modules.pop("kernels", None)

# Read when Triton is first imported: without a GPU, the kernels run in its interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

sys.path.append(str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)
