"""Every kernel compiles for NVIDIA and AMD accelerators, fits their shared memory and spills no register."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

if sys.platform != "linux":  # where the test extra has Triton, and a failing import of it is a failure
    pytest.skip("Triton has no build for this platform", allow_module_level=True)

from rmm_kernels_resources import LIMITS

STATISTICS = ("row_statistics", "norm_sums", "channel_statistics", "channel_sums")  # write few numbers
LIMIT = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "gfx942": 64 * 1024}  # shared memory of one block, bytes


@pytest.fixture(scope="module", params=["few", pytest.param("all", marks=pytest.mark.thorough)])
def compiled(request):
    program = Path(__file__).with_name("compile_kernels.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", str(program), request.param]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_kernel_compiles_for_every_target(compiled, request):
    targets = LIMIT if request.node.callspec.params["compiled"] == "all" else ("sm_90", "gfx942")
    found = {(row["name"].split()[0], row["target"]) for row in compiled}
    names = {"sparse_sketch", "dense_sketch", "pack", "unpack", "row_norms", "random_keys", "hash"}
    names |= {
        "encode_normal",
        "decode_normal",
        "row_statistics",
        "pack_norm",
        "norm_sums",
        "norm_totals",
        "norm_backward",
    }
    names |= {"pack_derivative", "apply_derivative"}
    names |= {"pack_mask", "apply_mask", "dropout", "pack_gated", "apply_gated"}
    names |= {"channel_statistics", "channel_moments", "pack_channels", "channel_sums", "channel_totals"}
    names |= {"channel_backward", "max_pool", "max_pool_backward"}
    names |= {"activate", "square", "normalize", "gate"}
    assert found == {(name, target) for name in names for target in targets} - {("encode_normal", "gfx942")}


def test_no_register_is_spilled_and_shared_memory_suffices(compiled):
    for row in compiled:
        spilled = row.get("spilled_bytes", row.get("spilled_registers"))
        assert spilled <= (0 if row["name"] in LIMITS else 24), row  # three registers, of A100's rarest variants
        assert row["shared"] <= LIMIT[row["target"]], row


def test_the_default_path_issues_no_more_than_its_limits(compiled):
    """Every kernel that the default conversion launches in bfloat16, on sm_90; and no limit is far above."""
    found = {
        row["name"]: row["instructions_per_element"]
        for row in compiled
        if row["target"] == "sm_90" and row["name"] in LIMITS
    }
    assert set(found) == set(LIMITS)
    for name, count in found.items():
        assert 0.4 * LIMITS[name] <= count <= LIMITS[name], (name, count)


def test_the_default_path_reads_and_writes_sixteen_bytes_at_a_time(compiled):
    """Matrices are; the codes of 4 bits too, and those of 3 bits, whose planes are 16 and 8 bytes, in 8 and 4 bytes."""
    for row in compiled:
        if row["target"] == "sm_90" and row["name"] in LIMITS:
            kernel = row["name"].split()[0]
            assert ("64 bit" if row["name"].startswith("unpack 3") else "128 bit") in row["loads"], row
            if kernel not in (*STATISTICS, "norm_totals", "pack_mask"):
                assert (
                    "64 bit" if kernel in ("pack", "pack_norm", "pack_channels") and "3" in row["name"] else "128 bit"
                ) in row["stores"]


def test_the_sparse_sketch_loads_sixteen_bytes_at_a_time(compiled):
    rows = [row for row in compiled if row["name"].startswith("sparse_sketch") and row["target"] != "gfx942"]
    rows = [row for row in rows if not row["name"].endswith("of ones")]
    assert rows
    for row in rows:
        assert row["wide_loads"] > 0, row
