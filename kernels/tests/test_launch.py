"""Kernels that were launched before are launched without asking Triton for them, with the same arguments."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

if sys.platform != "linux":  # where the test extra has Triton, and a failing import of it is a failure
    pytest.skip("Triton has no build for this platform", allow_module_level=True)


def test_a_known_kernel_gets_the_arguments_that_triton_would_give_it():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("launch_kernels.py"))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    equal, launches, first, second, other_tokens, seeds, variants = done.stdout.split()
    assert equal == "True"
    # Both matrices are unpacked alike, and packed by two kernels: the pointer of the second is not aligned.
    assert (launches, first, second) == ("4", "3", "0")
    assert other_tokens == "0"  # another number of tokens needs no other kernel
    assert (seeds, variants) == ("0", "0")  # nor does another seed, of any size, or one that is written
