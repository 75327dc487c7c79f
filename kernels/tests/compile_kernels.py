"""Compile every kernel for accelerators that need not be there, and print what the compilers say as JSON.

A program of its own, because Triton decides when it is imported whether it compiles or interprets.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from rmm_kernels_channels import variants as channels
from rmm_kernels_derivatives import variants as derivatives
from rmm_kernels_fused import variants as fused
from rmm_kernels_moved import moved
from rmm_kernels_resources import LIMITS, instructions, resources

from rmm_linear.backends.triton import kernels

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
FEW = ("sm_90", "gfx942")
TYPES = {
    "p_seed": "*i64",
    "seed": "i64",
    "seed_s": "i64",
    "p_order": "*i64",
    "p_count": "*i64",
    "p_index": "*i64",
    "p_scale": "*fp32",
    "p_words": "*i32",
    "p_bits": "*u8",
    "scale": "fp32",
}
TYPES |= {"p_s_codes": "*u8", "p_s_scales": "*u8"}
TYPES |= {"p_shifts": "*i64", "p_scales": "*u8", "p_codes": "*u8", "p_norms": "*fp32", "factor": "fp32"}
TYPES |= {"p_total": "*fp32", "p_rstd": "*fp32", "p_sums": "*fp32", "eps": "fp32"}
TYPES |= {"parameter": "fp32", "low": "fp32", "inverse": "fp32", "step": "fp32"}
TYPES |= {"p_means": "*fp32", "p_slope": "*fp32", "p_shift": "*fp32", "share": "fp32"}
TYPES |= {"p_place": "*i64", "p_mean": "*fp32", "p_rows": "*fp32", "p_saved": "*fp32"}


def cases() -> Any:
    """Name, kernel, dtype, constants and absent pointers of every variant worth a look."""
    kernels()
    module = {name: sys.modules[f"rmm_linear.kernels.{name}"] for name in ("sparse_sketch", "dense_sketch", "packing")}
    norms = sys.modules["rmm_linear.kernels.row_norms"]
    sparse, dense = module["sparse_sketch"]._sparse_sketch_kernel, module["dense_sketch"]._dense_sketch_kernel
    hashed, gathered = {"p_index": None, "p_scale": None}, {"p_order": None, "p_count": None}
    unhashed = {"p_words": None, "p_shifts": None}
    for dtype in ("*bf16", "*fp32"):
        tile = {"BITS": 0, "B_K": 16, "B_D": 128, "p_scales": None}
        yield f"sparse_sketch masked {dtype}", sparse, dtype, {"HASHED": True, "MASKED": True, **tile, **hashed}
        yield (
            f"sparse_sketch gathered {dtype}",
            sparse,
            dtype,
            {"HASHED": False, "MASKED": False, **tile, **gathered, **unhashed, "p_seed": None},
        )
        if dtype == "*bf16":  # what float16 is sketched to
            yield "sparse_sketch to fp32", sparse, "*fp16 *fp32", {"HASHED": True, "MASKED": True, **tile, **hashed}
    packed = {"B_K": 32, "B_D": 64}
    plain = {"HASHED": True, "MASKED": False, "BITS": 4, **packed, **hashed, **gathered}
    yield "sparse_sketch packed", sparse, "*bf16", plain
    yield (
        "sparse_sketch packed masked",
        sparse,
        "*fp16",
        {"HASHED": True, "MASKED": True, "BITS": 2, **packed, **hashed},
    )
    taken = {"HASHED": False, "MASKED": False, "BITS": 8, **packed, **gathered, **unhashed}
    yield "sparse_sketch packed gathered", sparse, "*fp32", taken
    keys = sys.modules["rmm_linear.kernels.random_keys"]._random_keys_kernel
    for kind, bits, dtype, is_masked in (
        (0, 0, "*bf16", True), (1, 0, "*bf16", True), (2, 0, "*bf16", True), (1, 3, "*bf16", True),
        (0, 4, "*fp32", True), (2, 4, "*fp32", True), (1, 8, "*fp16", False), (1, 0, "*fp32", False),
        (1, 0, "*fp16 *fp32", True),
    ):  # fmt: skip
        tile = {"UPCAST": False, "B_T": 32, "B_R": 32, "B_D": 64, "MASKED": is_masked}
        absent = ({} if kind == 2 else {"p_index": None}) | ({} if bits else {"p_scales": None})
        absent |= {} if is_masked else gathered
        name = f"dense_sketch {kind} {bits} {dtype}{' masked' if is_masked else ''}"
        yield name, dense, dtype, {"KIND": kind, "BITS": bits, **tile, **absent}
    pack, unpack = module["packing"]._pack_kernel, module["packing"]._unpack_kernel
    for bits, dtype, *tail in (
        (4, "*bf16"), (3, "*bf16"), (8, "*fp32"), (4, "*fp32"), (3, "*fp32"), (2, "*fp16"), (3, "*bf16", "tail")
    ):  # fmt: skip
        name, shape = " ".join((str(bits), dtype, *tail)), {"BITS": bits, "B_K": 64, "TAIL": bool(tail)}
        shape |= {"HAS_INDEX": False, "HAS_MEAN": False, "p_index": None, "p_mean": None}
        yield f"pack {name}", pack, dtype, shape
        yield f"unpack {name}", unpack, dtype, shape
    yield "pack 4 *bf16 less means", pack, "*bf16", {"BITS": 4, "B_K": 64, "HAS_INDEX": True, "HAS_MEAN": True}
    normal = sys.modules["rmm_linear.kernels.normal"]
    for bits, dtype in ((2, "*bf16"), (1.6, "*bf16"), (1, "*fp16"), (2, "*fp32")):
        shape = {"LEVELS": {2: 4, 1.6: 3, 1: 2}[bits], "SIZE": normal.GROUP_BYTES[bits], "WHOLE": True, "B_K": 64}
        yield f"encode_normal {bits} {dtype}", normal._encode_normal_kernel, dtype, shape
        yield f"decode_normal {bits} {dtype}", normal._decode_normal_kernel, dtype, shape
    yield "hash", module["sparse_sketch"]._hash_kernel, "*i64", {"B_N": 256}
    yield "random_keys", keys, "*i64", {"MASKED": True, "B_N": 1024}
    saved = sys.modules["rmm_linear.kernels.norms"]
    for bits, dtype, centered, is_indexed in (
        (3, "*bf16", True, False), (3, "*bf16", False, False), (2, "*bf16", True, True), (4, "*fp32", False, False),
        (8, "*fp16", True, True),
    ):  # fmt: skip
        shape = {"CENTERED": centered, "HAS_INDEX": is_indexed, "B_K": 64, "BITS": bits}
        shape |= ({} if is_indexed else {"p_index": None}) | ({} if centered else {"p_mean": None})
        affine = {"HAS_GAMMA": centered, **({} if centered else {"p_gamma": None})}
        name = f"{bits} {dtype}{'' if centered else ' RMS'}{' index' if is_indexed else ''}"
        statistics = {key: value for key, value in shape.items() if key != "BITS"} | {"B_K": 8, "B_D": 256}
        statistics |= {"HAS_PLACE": False, "p_place": None, "p_saved": None}
        yield f"row_statistics {name}", saved._row_statistics_kernel, dtype, statistics
        yield f"pack_norm {name}", saved._pack_norm_kernel, dtype, shape
        shape.pop("p_mean", None)
        sums = {**shape, **affine, "SUMS": centered, **({} if centered else {"p_sums": None})}
        yield f"norm_sums {name}", saved._norm_sums_kernel, dtype, sums
        yield f"norm_backward {name}", saved._norm_backward_kernel, dtype, {**shape, **affine}
        if not is_indexed:
            absent = {} if centered else {"p_sums": None, "p_weight": None, "p_bias": None}
            totals = {"SUMS": centered, "CENTERED": centered, "B_R": 32, "B_C": 64, **absent}
            yield f"norm_totals {name}", saved._norm_totals_kernel, dtype, totals
    masks = sys.modules["rmm_linear.kernels.masks"]
    for dtype, absent in (("*u8", {"p_index": None}), ("*fp32", {}), ("*bf16", {"p_index": None})):
        index = {"HAS_INDEX": not absent, **absent}
        yield f"pack_mask {dtype}", masks._pack_mask_kernel, dtype, {**index, "B_N": 8, "B_B": 64}
        if dtype != "*u8":
            yield f"apply_mask {dtype}", masks._apply_mask_kernel, dtype, {**index, "B_N": 16, "B_C": 128}
    dropout = sys.modules["rmm_linear.kernels.dropout"]._dropout_kernel
    for dtype in ("*bf16", "*fp32"):
        yield f"dropout {dtype}", dropout, dtype, {"B_E": 1024}
    gated = sys.modules["rmm_linear.kernels.gated"]
    for activation, bits, dtype in (
        (0, 4, "*bf16"),
        (1, 8, "*fp32"),
        (2, 4, "*bf16"),
        (2, 2, "*fp16"),
        (3, 4, "*fp32"),
    ):
        both = {"BITS": bits, "HAS_P": True, "HAS_S": True, "B_K": 64}
        both |= {"HAS_INDEX": True} if bits == 2 else {"HAS_INDEX": False, "p_index": None}
        name = f"{activation} {bits} {dtype}"
        yield f"pack_gated {name}", gated._pack_gated_kernel, dtype, {**both, "ACTIVATION": activation}
        if activation != 1:
            yield f"apply_gated {name}", gated._apply_gated_kernel, dtype, both
    yield "row_norms", norms._row_norms_kernel, "*bf16", {"B_N": 16, "B_D": 256}
    yield from derivatives()
    yield from fused()
    yield from channels()


def ones() -> Any:
    """A variant of every kernel whose integers are 1: Triton makes constants of them, and those cannot be cast."""
    seen = set()
    for name, kernel, dtype, constants in cases():
        if kernel not in seen:
            seen.add(kernel)
            integers = {
                key: 1 for key in kernel.arg_names if key.startswith("n_") or key in ("stride", "stride_b", "block")
            }
            yield f"{name} of ones", kernel, dtype, {**constants, **integers}


def compile_case(kernel: Any, dtype: str, constants: dict[str, Any], target: GPUTarget) -> Any:
    """Compile one variant."""
    source = source_of(kernel, dtype, constants, target)
    return triton.compile(source, target=target, options={"num_warps": warps(kernel, target)})


def check_types(kernel: Any, dtype: str, constants: dict[str, Any], target: GPUTarget) -> None:
    """Translate one variant into Triton's own code, where what cannot be cast is an error, and go no further."""
    backend, context = make_backend(target), ir.context()
    options = backend.parse_options({"num_warps": warps(kernel, target)})
    ir.load_dialects(context)
    backend.load_dialects(context)
    made = backend.get_codegen_implementation(options), backend.get_module_map(), context
    source_of(kernel, dtype, constants, target).make_ir(target, options, *made)


def source_of(kernel: Any, dtype: str, constants: dict[str, Any], target: GPUTarget) -> ASTSource:
    """Specialize one variant, with pointers and row lengths that are multiples of 16 as PyTorch's are."""
    names = kernel.arg_names
    dtype, made = (dtype.split() * 2)[:2]  # of the matrix, and of the sketch
    is_cuda, half = target.backend == "cuda", {"*bf16": tl.bfloat16, "*fp16": tl.float16}.get(dtype, tl.float32)
    if half != tl.float32 and kernel.__name__ not in ("_pack_kernel", "_encode_normal_kernel"):
        # What is packed is multiplied in its own dtype, what is unpacked and small in the more exact one.
        half = tl.bfloat16 if kernel.__name__ in ("_pack_gated_kernel", "_gate_kernel") else tl.float16
    if "normal_kernel" in kernel.__name__ and half == tl.float32:
        half = tl.bfloat16  # in two parts
    defaults = {"PRECISION": "tf32x3" if is_cuda else "ieee", "IEEE": not is_cuda, "TAIL": False, "HALF": half}
    constants = {name: value for name, value in (defaults | constants).items() if name in names}
    if (
        "BITS" in constants and "p_scales" in names and constants.get("B_K") == 64 and "square" not in kernel.__name__
    ):  # as it is launched
        is_heavy = "gate" in kernel.__name__ or constants["TAIL"]
        tile_rows = sys.modules["rmm_linear.kernels.launch"].tile_rows
        constants["B_K"] = tile_rows(dtype == "*fp32", is_heavy, _is_asynchronous(target))
        if "FIRST" in constants:
            halved = sys.modules["rmm_linear.kernels.channels"].tile_rows_for
            constants["B_K"] = halved(constants["FIRST"], constants["TAIL"], constants["B_K"])
    if "normal_kernel" in kernel.__name__:
        shape = sys.modules["rmm_linear.kernels.normal"].normal_shape
        constants["B_K"] = shape(dtype == "*fp32", _is_asynchronous(target))[0]
    is_whole = not constants.get("TAIL")
    signature, aligned = {}, []
    for place, name in enumerate(names):
        if name in constants:
            signature[name] = "constexpr"
        elif name == "p_z" and constants.get("BITS") and "p_codes" not in names:
            signature[name] = "*u8"
        elif name == "p_index" and "HASHED" in constants:
            signature[name] = "*i32"  # sampled rows are stored in as few bytes
        elif name == "p_z":
            signature[name] = made
        elif name == "p_mean" and "HAS_MEAN" in constants:
            signature[name] = dtype
        else:
            signature[name] = TYPES.get(name, dtype if name.startswith("p_") else "i32")
        lengths = (
            ("n_columns", "n_channels", "n_length", "n_elements", "row_bytes", "stride", "stride_b")
            if is_whole
            else ("n_elements", "stride")
        )
        if name not in constants and (name.startswith("p_") or name in lengths):
            aligned.append(place)
    return ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(place,): [["tt.divisibility", 16]] for place in aligned},
    )


def warps(kernel: Any, target: GPUTarget) -> int:
    """Return the warps of a program, as it is launched."""
    return 8 if "normal_kernel" in kernel.__name__ and not _is_asynchronous(target) else 4


def _is_asynchronous(target: GPUTarget) -> bool:
    return target.backend == "cuda" and target.arch >= 90


def targets_of(name: str) -> list[str]:
    """Return the targets on which a variant is launched: on AMD, PyTorch makes normal codes, which spilled there."""
    return [target for target in TARGETS if target != "gfx942" or not name.startswith("encode_normal")]


def wanted(few: bool) -> Any:
    """Variants and targets: every variant for each, or one variant of each kernel."""
    seen = set()
    for case in cases():
        if not few or case[1] not in seen:
            yield from ((case, name) for name in targets_of(case[0]) if not few or name in FEW)
        elif case[0] in LIMITS:
            yield case, "sm_90"
        seen.add(case[1])
    if not few:
        yield from ((case, "sm_90") for case in ones())


def main() -> None:
    """Print one JSON object per variant and target; "few" as an argument leaves most of both out."""
    few = "few" in sys.argv[1:]
    for _, *variant in ones() if few else ():
        check_types(*variant, TARGETS["sm_90"])
    for (name, kernel, dtype, constants), target_name in wanted(few):
        target = TARGETS[target_name]
        compiled = compile_case(kernel, dtype, constants, target)
        row = {"name": name, "target": target_name, "moved": moved(name, dtype, constants), **resources(compiled)}
        row |= instructions(compiled, name.split()[0], constants, warps(kernel, target))
        row["wide_loads"] = len(re.findall(r"ld\.global\.\S*(?:v4\.b32|v2\.b64)", compiled.asm.get("ptx", "")))
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
