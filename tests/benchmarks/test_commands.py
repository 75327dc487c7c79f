"""The commands: what they refuse, what they need, and which cases a full run has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import bandwidth, block_steps, linear, models, operators
from benchmarks.__main__ import main

ON_CPU = not torch.cuda.is_available()


def test_arguments_that_make_no_sense_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--threads", "0"])
    assert "--threads must be at least 1, got 0" in capsys.readouterr().err


@pytest.mark.skipif(not ON_CPU, reason="there is a CUDA device")
def test_gpu_without_a_device_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpu", "--out", str(tmp_path)]) == main(["run", "--device", "cuda", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("needs a CUDA device, and there is none. Use --device cpu.") == 2


def test_the_commands_start_without_the_extras() -> None:
    """Nothing of the extras is imported at the start, and their absence is none of an error."""
    code = (
        "import sys\n"
        "for name in ('transformers', 'pandas', 'matplotlib', 'rich', 'scipy', 'datasets'): sys.modules[name] = None\n"
        "import benchmarks.__main__ as m\n"
        "sys.exit(m.main(['run', '--help']))\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", code]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--suite" in done.stdout


def test_cases_of_the_full_run_are_those_that_are_promised() -> None:
    cpu = linear.cases("cpu", tiny=False)
    shapes = {(4096, 768, 3072), (4096, 3072, 768), (4096, 768, 768)}
    every = (0.05, 0.1, 0.2, 0.5)
    wanted = {(s, "float32", r) for s in shapes for r in every} | {(s, "bfloat16", 0.1) for s in shapes}
    wanted |= {((4096, 768, 3072), "bfloat16", r) for r in every}
    assert {(case.sizes, case.dtype, case.ratio) for case in cpu} == wanted
    cuda = linear.cases("cuda", tiny=False)
    assert {c.sizes for c in cuda} == shapes | {(16384, 4096, 4096), (16384, 2048, 5632)}
    assert [case.sizes for case in models.cases("cuda", tiny=False)] == [(64, 128), (8, 2048)]
    assert (16384, 4096) in {c.sizes for c in bandwidth.cases("cuda", tiny=False) if c.dtype == "bfloat16"}
    blocks = {
        (case.name.split()[0], case.sizes, case.dropout, case.dtype) for case in block_steps.cases("cuda", tiny=False)
    }
    roberta = {("roberta", (32, 512, 2), p, dtype) for p in (0.1, 0.0) for dtype in ("bfloat16", "float32")}
    assert blocks == roberta | {("llama", (4, 4096, 2), 0.0, "bfloat16"), ("llama-1b", (8, 2048, 2), 0.0, "bfloat16")}
    named = {case.name.rstrip("0123456789 x") for case in operators.cases("cuda", tiny=False)}
    assert named == {"layer norm", "gelu", "swiglu", "dropout", "attention", "causal attention"}
