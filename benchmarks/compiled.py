"""``python -m benchmarks compile``: what ahead-of-time compilation says of the kernels. Nothing runs, nothing is timed.

Every variant of ``kernels/tests/compile_kernels.py``, which needs Triton and no accelerator.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import rmm_kernels_moved

from benchmarks.records import ROOT, Origin, origin, write_rows

NAME = "kernels-compiled.csv"
NOT_RUN = "compiled, not run"
PROGRAM = ROOT / "kernels" / "tests" / "compile_kernels.py"
# Variants whose integers are 1 show that constants can be cast; no call of a layer has them.
_OF_ONES = "of ones"


@dataclass(frozen=True)
class CompiledRow(Origin):
    """One variant of a kernel for one target; ``device`` says that it was not run.

    Attributes:
        kernel: Name of the kernel.
        variant: What it was compiled for: kind, width, dtype.
        target: "sm_80", "sm_90" or "gfx942".
        registers: Registers of a thread, those of vectors on AMD.
        accumulators: On AMD, accumulation registers of a thread.
        scalars: On AMD, scalar registers of a wavefront.
        spilled_bytes: On NVIDIA, bytes of a thread that go to memory and back.
        spilled_registers: On AMD, registers that do.
        shared: Bytes of shared memory of a block.
        moved: Formula of the bytes that are read and written, per element of the matrix.
        moved_per_element: Its value.
    """

    kernel: str
    variant: str
    target: str
    registers: int
    shared: int
    moved: str
    moved_per_element: float
    accumulators: int | None = None
    scalars: int | None = None
    spilled_bytes: int | None = None
    spilled_registers: int | None = None


def compile_all(out: Path, *, commit: str = "") -> list[CompiledRow]:
    """Compile all variants for all targets, and write what the compilers say.

    Args:
        out: Folder for the csv file.
        commit: What to write as the commit; "" asks git.

    Returns:
        The rows.

    Raises:
        ValueError: If a kernel does not compile.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", str(PROGRAM)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"Every kernel must compile, got: {done.stderr[-2000:]}")
    about = origin("cpu", commit) | {"device": NOT_RUN, "machine": "", "threads": 0}
    rows = [_row(json.loads(line), about) for line in done.stdout.splitlines()]
    rows = [row for row in rows if not row.variant.endswith(_OF_ONES)]
    write_rows(out / NAME, rows)
    return rows


def _row(said: dict, about: dict) -> CompiledRow:
    kernel, variant = split(said.pop("name"))
    del said["wide_loads"]  # what the tests alone look at
    return CompiledRow(
        kernel, variant, **said, moved_per_element=round(rmm_kernels_moved.value(said["moved"]), 6), **about
    )


def split(name: str) -> tuple[str, str]:
    """Split the name of a compiled case.

    Args:
        name: As "pack_norm 2".

    Returns:
        The kernel and the variant.
    """
    kernel, _, variant = name.partition(" ")
    return kernel, variant.replace("*", "")


def summary(rows: Sequence[CompiledRow]) -> str:
    """Return a line for the terminal."""
    spilled = [row for row in rows if row.spilled_bytes or row.spilled_registers]
    names = ", ".join(f"{row.kernel} {row.variant} ({row.target})" for row in spilled) or "none"
    return f"{len(rows)} kernels, {NOT_RUN}; spilled: {names}"
