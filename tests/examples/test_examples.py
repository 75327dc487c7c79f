"""The examples run as they are, with few steps: they print what is saved, train, and leave what they name."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SAVED = r"^(?:rmm_linear: )?saved for backward: .* MiB \((\d+)%\)"
# What is printed, most of what may be saved in percent of the exact bytes, and the files that are left.
EXAMPLES = {
    "vit": ([SAVED, r"^Accuracy on other digits: 0\.\d+$"], 20, []),
    "sft_lora": ([SAVED, "^Adapters: out/examples/sft_lora$"], 35, ["sft_lora/adapter_model.safetensors"]),
    "dpo": ([SAVED, "^Adapters: out/examples/dpo$"], 35, ["dpo/adapter_model.safetensors"]),
    "roberta_glue": (
        [SAVED, r"^Accuracy: 0\.\d+$"],
        15,
        ["roberta_glue/model.safetensors", "roberta_glue/rmm_config.json"],
    ),
    "long_context": ([r"length=\d+ exact=\d+ ", r"^step 1: loss 8\.\d+, \d+ tokens, peak \d+ MB"], None, []),
}
HEAVY = pytest.mark.stack


def run(name: str, folder: Path, *flags: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py"), *flags]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name == "vit" else [HEAVY]) for name in EXAMPLES])
def test_an_example_runs_and_says_what_is_saved(name, tmp_path):
    patterns, most, files = EXAMPLES[name]
    out = run(name, tmp_path, "--max_steps", "2")
    for pattern in patterns:
        assert re.search(pattern, out, flags=re.MULTILINE), f"{pattern} in\n{out}"
    if most is not None:
        assert int(re.findall(SAVED, out, flags=re.MULTILINE)[-1]) < most
    assert [file for file in files if not (tmp_path / "out" / "examples" / file).is_file()] == []


@pytest.mark.stack
def test_a_model_that_an_example_saved_is_what_another_run_starts_from(tmp_path):
    """As a real one is, by its folder."""
    run("roberta_glue", tmp_path, "--max_steps", "2")
    folder = "out/examples/roberta_glue"
    assert "Accuracy: " in run("roberta_glue", tmp_path, "--max_steps", "2", "--model", folder, "--output_dir", "again")


def test_all_examples_are_short_and_tested():
    files = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "examples").glob("*.py")}
    assert files.keys() - {"small"} == set(EXAMPLES)
    assert {name: text.count("\n") for name, text in files.items() if text.count("\n") > 60 and name != "small"} == {}
    assert all(f"python examples/{name}.py" in text for name, text in files.items() if name != "small")


@pytest.mark.parametrize("example", ["sft_lora", "dpo"])
def test_the_page_about_trl_shows_lines_of_the_examples(example):
    shown = re.findall(r"^```py\n(.*?)^```$", (ROOT / "docs/trl.md").read_text(encoding="utf-8"), flags=re.M | re.S)
    text = (ROOT / "examples" / f"{example}.py").read_text(encoding="utf-8")
    assert sum(block in text for block in shown) == 1
