"""What the compilers say of a compiled kernel: registers, spills, shared memory, and instructions per element.

Instructions of a kernel are those of its machine code: of a thread, times the threads of a program, by the elements of
a tile. Those in loops, which run once for every tile, and those outside of them, which run once for several tiles.
"""

from __future__ import annotations

import collections
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.nvidia.compiler import get_ptxas

# What kernels of the default path, in bfloat16, may issue per element on sm_90; 9.9 are one byte of an H100's memory.
LIMITS = {
    "pack 3 *bf16": 30, "pack 4 *bf16": 30, "unpack 3 *bf16": 36, "unpack 4 *bf16": 36, "row_statistics 3 *bf16": 14,
    "pack_norm 3 *bf16": 36, "norm_sums 3 *bf16": 50, "norm_totals 3 *bf16": 0.5, "norm_backward 3 *bf16": 45,
    "pack_gated 2 4 *bf16": 85,
    "apply_gated 2 4 *bf16": 75, "pack_derivative gelu 4 *bf16": 60, "apply_derivative gelu 4 *bf16": 18,
    "channel_statistics 3 *bf16 first": 20, "channel_statistics 3 *bf16": 25, "pack_channels 3 *bf16 first": 42,
    "pack_channels 3 *bf16": 36, "channel_sums 3 *bf16 first": 44, "channel_sums 3 *bf16": 50,
    "channel_backward 3 *bf16 first": 50, "channel_backward 3 *bf16": 38,
    "pack_mask *u8": 12, "apply_mask *bf16": 14,
}  # fmt: skip
PER_BYTE = 9.9  # 29.7e12 instructions of lanes per second, 3e12 bytes
_NVDISASM = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"


def instructions(compiled: Any, kernel: str, constants: dict[str, Any], warps: int) -> dict[str, Any]:
    """Count instructions of lanes per element of a tile.

    Args:
        compiled: Result of triton.compile.
        kernel: The name's first word.
        constants: The variant's constants.
        warps: Of a program.

    Returns:
        ``instructions_per_element``: in loops, or of a kernel without loops, all; ``outside_per_tile``: outside of
        loops, by the elements of one tile; ``loads`` and ``stores`` of global memory, such as "4 x 128 bit". On AMD and
        without a disassembler, nothing.
    """
    if "cubin" not in compiled.asm or not _NVDISASM.is_file():
        return {}
    lines, loops = _code(compiled.asm["cubin"])
    sizes = tile_sizes(kernel, constants)
    factor, of_loops = 32 * warps, [end - begin + 1 for begin, end in loops]
    if not of_loops:
        inside, outside = len(lines) * factor / sizes[-1], 0.0
    else:  # of a loop over blocks of another size, the first one
        by = [sizes[min(place, len(sizes) - 1)] for place in range(len(of_loops))]
        inside = sum(count * factor / size for count, size in zip(of_loops, by, strict=True))
        outside = (len(lines) - sum(of_loops)) * factor / sizes[-1]
    accesses = {name: _widths(lines, pattern) for name, pattern in (("loads", r"LDG(?:STS)?"), ("stores", r"STG"))}
    return {"instructions_per_element": round(inside, 1), "outside_per_tile": round(outside, 1), **accesses}


def tile_sizes(kernel: str, constants: dict[str, Any]) -> list[int]:
    """Return the elements of the tiles that the loops of a kernel go over, or of its only one."""
    number = constants.get
    shapes = {
        "sparse_sketch": ("B_K", "B_D"), "dense_sketch": ("B_T", "B_D"), "row_norms": ("B_N", "B_D"),
        "row_statistics": ("B_K", "B_D"), "hash": ("B_N",), "random_keys": ("B_N",), "apply_mask": ("B_N", "B_C"),
        "channel_statistics": ("B_C", "B_L"), "max_pool": ("B_E",), "max_pool_backward": ("B_E",),
    }  # fmt: skip
    if kernel in shapes:
        size = 1
        for name in shapes[kernel]:
            size *= number(name, 1)
        return [size]
    if kernel == "norm_totals":  # of the matrix, 64 of a row have one sum each
        return [number("B_R", 1) * number("B_C", 1) * 64 // (1 + number("CENTERED", 0))]
    if kernel in ("channel_moments", "channel_totals"):  # of a set's sums, one for some thousand elements
        return [number("B_E", 1) * (64 if number("FIRST") else 4096)]
    if kernel == "pack_mask":
        return [number("B_N", 1) * 8 * number("B_B", 1)]
    if kernel.endswith("_normal"):
        return [128 * number("B_K", 1)]
    return [4 * number("B_E", 1)] if kernel == "dropout" else [64 * number("B_K", 1)]


def _code(cubin: bytes) -> tuple[list[str], list[tuple[int, int]]]:
    """Return the instructions of a kernel, and the first and last of every loop that is in no other."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        said = subprocess.run([_NVDISASM, "-c", str(path)], capture_output=True, text=True, check=True).stdout
    lines: list[str] = []
    labels: dict[str, int] = {}
    loops = []
    for line in said.splitlines():
        found = re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*)", line)
        if found and not found[1].startswith("NOP"):
            lines.append(re.sub(r"^@!?U?P\w+\s+", "", found[1]))
        elif label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(lines)
    for place, line in enumerate(lines):
        target = re.search(r"^BRA.*`\((\.L_x_\d+)\)", line)
        if target and labels.get(target[1], place) < place:  # the last instruction jumps to itself
            loops.append((labels[target[1]], place))
    outer = [one for one in loops if not any(o[0] <= one[0] and one[1] <= o[1] for o in loops if o != one)]
    return lines, sorted(set(outer))


def _widths(lines: list[str], name: str) -> str:
    """Return how many accesses there are of every width."""
    found: collections.Counter[int] = collections.Counter()
    for line in lines:
        if re.match(rf"{name}\b", line):
            words = line.split()[0].rstrip(";").split(".")
            narrow = {"U8": 8, "S8": 8, "U16": 16, "S16": 16}
            found[next((narrow.get(w) or int(w) for w in words if w in narrow or w in ("64", "128")), 32)] += 1
    return "; ".join(f"{found[width]} x {width} bit" for width in sorted(found, reverse=True))


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

    spilled = count("vgpr_spill_count")  # scalars that do not fit go to registers of vectors
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
