"""What ahead-of-time compilation says of the kernels: nothing runs, nothing is timed.

Every variant of ``kernels/tests/compile_kernels.py``, which needs Triton and no accelerator.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import rmm_kernels_moved

from benchmarks.records import RESULTS, ROOT, Origin, origin, write_rows

NAME = "kernels-compiled.csv"
NOT_RUN = "compiled, not run"
PROGRAM = ROOT / "kernels" / "tests" / "compile_kernels.py"
# Variants whose integers are 1 show that constants can be cast; no call of a layer has them.
_OF_ONES = "of ones"


@dataclass(frozen=True)
class CompiledRow(Origin):
    """One variant of a kernel for one target; ``device`` says that it was not run."""

    kernel: str  # name of the kernel
    variant: str  # what it was compiled for: kind, width, dtype
    target: str  # "sm_80", "sm_90" or "gfx942"
    registers: int  # registers of a thread, those of vectors on AMD
    shared: int  # bytes of shared memory of a block
    moved: str  # formula of the bytes that are read and written, per element of the matrix
    moved_per_element: float  # its value
    accumulators: int | None = None  # on AMD, accumulation registers of a thread
    scalars: int | None = None  # on AMD, scalar registers of a wavefront
    spilled_bytes: int | None = None  # on NVIDIA, bytes of a thread that go to memory and back
    spilled_registers: int | None = None  # on AMD, registers that do


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the csv file")
    parser.add_argument("--commit", default="", help="commit to write into the csv where there is no git")


def run(arguments: argparse.Namespace) -> Iterator[str]:
    rows = compile_all(arguments.out, commit=arguments.commit)
    spilled = [row for row in rows if row.spilled_bytes or row.spilled_registers]
    names = ", ".join(f"{row.kernel} {row.variant} ({row.target})" for row in spilled) or "none"
    yield f"{len(rows)} kernels, {NOT_RUN}; spilled: {names}"


def compile_all(out: Path, *, commit: str = "") -> list[CompiledRow]:
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
    kernel, _, variant = name.partition(" ")
    return kernel, variant.replace("*", "")
