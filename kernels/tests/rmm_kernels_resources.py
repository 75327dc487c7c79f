"""What the compilers say of a compiled kernel: registers, spills and shared memory."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from triton.backends.nvidia.compiler import get_ptxas


def resources(compiled: Any) -> dict[str, int]:
    """Return what one compiled kernel takes.

    Args:
        compiled: Result of triton.compile.

    Returns:
        By name: ``shared``, bytes of shared memory of a block; ``registers`` of a thread, those of vectors on AMD,
        where ``accumulators`` and ``scalars`` are counted apart; and what does not fit into them: ``spilled_bytes`` of
        a thread on NVIDIA, stores and loads, or ``spilled_registers`` on AMD.
    """
    found = _of_amd(compiled.asm["amdgcn"]) if "amdgcn" in compiled.asm else _of_nvidia(compiled.asm["ptx"])
    return {"shared": compiled.metadata.shared, **found}


def _of_amd(assembly: str) -> dict[str, int]:
    def count(name: str) -> int:
        numbers = re.findall(rf"^\s*(?:- )?\.{name}:\s*(\d+)", assembly, flags=re.MULTILINE)
        if not numbers:
            raise RuntimeError(f"The metadata of the AMD kernel has no .{name}.")
        return sum(map(int, numbers))

    spilled = count("vgpr_spill_count") + count("sgpr_spill_count")
    names = {"registers": "vgpr_count", "accumulators": "agpr_count", "scalars": "sgpr_count"}
    return {title: count(name) for title, name in names.items()} | {"spilled_registers": spilled}


def _of_nvidia(ptx: str) -> dict[str, int]:
    arch = re.search(r"^\.target (\w+)", ptx, flags=re.MULTILINE)
    if arch is None:
        raise RuntimeError("The PTX names no target.")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [get_ptxas(int(arch[1][3:5])).path, "-v", f"--gpu-name={arch[1]}", str(path), "-o", f"{folder}/out"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spilled, used = re.findall(r"(\d+) bytes spill (?:stores|loads)", said), re.findall(r"Used (\d+) registers", said)
    if not spilled or len(used) != 1:
        raise RuntimeError(f"ptxas did not say how many registers it uses and how much it spills: {said}")
    return {"registers": int(used[0]), "spilled_bytes": sum(map(int, spilled))}
