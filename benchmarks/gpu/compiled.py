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
import rmm_kernels_resources

from benchmarks.records import RESULTS, ROOT, Origin, origin, write_rows

TARGETS = ("sm_80", "sm_90", "gfx942")
NOT_RUN = "compiled, not run"
PROGRAM = ROOT / "kernels" / "tests" / "compile_kernels.py"
# Variants whose integers are 1 show that constants can be cast; no call of a layer has them.
_OF_ONES = "of ones"


@dataclass(frozen=True, kw_only=True)
class CompiledRow(Origin):
    """One variant of a kernel for one target; ``device`` says that it was not run."""

    kernel: str  # name of the kernel
    variant: str  # what it was compiled for: kind, width, dtype
    default_path: int  # 1 where the default conversion of a model in bfloat16 launches it, else 0
    instructions_per_element: float | None = None  # of lanes, in the loop over tiles; without a loop, all
    limit: float | None = None  # what the tests hold the default path's to, on sm_90
    bytes_allow: float  # what an H100 issues while its memory moves the bytes
    outside_per_tile: float | None = None  # instructions outside of loops, by the elements of one tile
    target: str  # "sm_80", "sm_90" or "gfx942"
    registers: int  # registers of a thread, those of vectors on AMD
    shared: int  # bytes of shared memory of a block
    moved: str  # formula of the bytes that are read and written, per element of the matrix
    moved_per_element: float  # its value
    loads: str = ""  # instructions that read global memory, by their width
    stores: str = ""  # and that write it
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
    for target in dict.fromkeys(row.target for row in rows):
        write_rows(out / csv_name(target), [row for row in rows if row.target == target])
    return rows


def csv_name(target: str) -> str:
    """Name the file of a target."""
    return f"compiled-{target}.csv"


def _row(said: dict, about: dict) -> CompiledRow:
    name = said.pop("name")
    kernel, variant = split(name)
    del said["wide_loads"]  # what the tests alone look at
    moved, limit = rmm_kernels_moved.value(said["moved"]), rmm_kernels_resources.LIMITS.get(name)
    return CompiledRow(
        kernel=kernel,
        variant=variant,
        **said,
        default_path=int(limit is not None),
        limit=limit if said["target"] == "sm_90" else None,
        bytes_allow=round(rmm_kernels_resources.PER_BYTE * moved, 1),
        moved_per_element=round(moved, 6),
        **about,
    )


def split(name: str) -> tuple[str, str]:
    kernel, _, variant = name.partition(" ")
    return kernel, variant.replace("*", "")
