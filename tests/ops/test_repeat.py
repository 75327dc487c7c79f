"""Calls that are alike launch the same kernels, with the addresses and seeds of each."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

if sys.platform != "linux":  # where the test extra has Triton, and a failing import of it is a failure
    pytest.skip("Triton has no build for this platform", allow_module_level=True)


def test_repeated_calls_launch_what_the_functions_do():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", str(Path(__file__).parents[1] / "repeated_calls.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "24:"
