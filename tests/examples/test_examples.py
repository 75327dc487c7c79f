"""The examples run as they are, with few steps: they print what is saved, train, and leave what they name."""

import re
import runpy
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

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs an example in an empty folder, and returns what it prints."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "examples")

    def run(name: str, *flags: str) -> str:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *flags])
        runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name == "vit" else [HEAVY]) for name in EXAMPLES])
def test_an_example_runs_and_says_what_is_saved(name, run, tmp_path):
    patterns, most, files = EXAMPLES[name]
    out = run(name, "--max_steps", "2")
    for pattern in patterns:
        assert re.search(pattern, out, flags=re.MULTILINE), f"{pattern} in\n{out}"
    if most is not None:
        assert int(re.findall(SAVED, out, flags=re.MULTILINE)[-1]) < most
    assert [file for file in files if not (tmp_path / "out" / "examples" / file).is_file()] == []


@pytest.mark.stack
def test_a_model_that_an_example_saved_is_what_another_run_starts_from(run):
    """As a real one is, by its folder."""
    run("roberta_glue", "--max_steps", "2")
    folder = "out/examples/roberta_glue"
    assert "Accuracy: " in run("roberta_glue", "--max_steps", "2", "--model", folder, "--output_dir", "again")


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
