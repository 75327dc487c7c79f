"""The C library computes the same on aarch64, with NEON, as on x86-64: compiled across, and run by an emulator."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from rmm_linear.backends import native
from rmm_linear.backends.native.library import SIGNATURES

PROGRAM = Path(__file__).with_name("aarch64.c")
FLAGS = ["-O3", "-std=gnu11", "-ffp-contract=off", "-fopenmp", "-Wno-psabi", f"-I{Path(native.__file__).parent}"]
NEEDED = ("gcc", "aarch64-linux-gnu-gcc", "qemu-aarch64")


def output(compiler: str, program: Path, emulator: list[str], *flags: str) -> list[str]:
    subprocess.run([compiler, *FLAGS, *flags, str(PROGRAM), "-o", str(program), "-lm"], check=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*emulator, str(program)], check=True, capture_output=True, text=True, env=environment
    ).stdout.splitlines()


@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is missing")
def test_the_program_runs_every_function_here(tmp_path):
    assert not [name for name in SIGNATURES if f"{name}_0(" not in PROGRAM.read_text()]
    assert len(output("gcc", tmp_path / "here", [], "-O1")) > 1000


@pytest.mark.stack
@pytest.mark.skipif(platform.machine() != "x86_64", reason="compares with x86-64")
def test_every_function_writes_the_same_to_the_bit(tmp_path):
    """Level 0 has the same order of summation everywhere: vectors of four numbers."""
    missing = [name for name in NEEDED if shutil.which(name) is None]
    assert not missing, f"{', '.join(missing)} missing: apt-get install gcc-aarch64-linux-gnu qemu-user"
    expected = output("gcc", tmp_path / "here", [])
    found = output("aarch64-linux-gnu-gcc", tmp_path / "there", ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu"])
    assert found == expected
    code = subprocess.run(
        ["aarch64-linux-gnu-objdump", "-d", str(tmp_path / "there")], check=True, capture_output=True, text=True
    ).stdout
    assert code.count(".4s") > 1000  # NEON's vectors of four float32 numbers
