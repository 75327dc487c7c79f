"""The comparison of methods in training, on little data."""

from __future__ import annotations

from pathlib import Path

from glue_helpers import write_cola

from benchmarks.__main__ import main
from glue_finetune.acceptability import make_corpus
from glue_finetune.scratch import save_scratch


def places_in(root: Path) -> list[str]:
    """Write a task and a model; return the arguments that name them."""
    texts = root / "texts.txt"
    texts.write_text("\n".join(example.text for example in make_corpus(100, 2)[0]), encoding="utf-8")
    save_scratch(root / "model", texts, width=32, heads=2)
    return ["--data_dir", str(write_cola(root, 96, 32)), "--model_dir", str(root / "model"), "--tasks", "cola"]


def run(places: list[str], out: Path, *arguments: str) -> None:
    """Run the command."""
    assert main(["frontier", *places, "--out", str(out), "--tiny", "--commit", "abc", *arguments]) == 0
