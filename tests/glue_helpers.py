"""What the tests of the GLUE script share: a tiny model, tiny data in the official layout, and runs in this process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from glue_finetune.__main__ import main
from glue_finetune.acceptability import make_corpus
from glue_finetune.minilm import save_scratch
from glue_finetune.trainer import StepTimer

HEADERS = {
    "SST-2": ["sentence", "label"],
    "RTE": ["index", "sentence1", "sentence2", "label"],
    "WNLI": ["index", "sentence1", "sentence2", "label"],
    "QNLI": ["index", "question", "sentence", "label"],
    "QQP": ["id", "qid1", "qid2", "question1", "question2", "is_duplicate"],
    "MRPC": ["Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"],
    "STS-B": [
        *("index", "genre", "filename", "year", "old_index"),
        *("source1", "source2", "sentence1", "sentence2", "score"),
    ],
    "MNLI": [
        *("index", "promptID", "pairID", "genre", "sentence1_binary_parse", "sentence2_binary_parse"),
        *("sentence1_parse", "sentence2_parse", "sentence1", "sentence2", "label1", "gold_label"),
    ],
}


def write_rows(path: Path, rows: list[list[str]], header: list[str] | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ["\t".join(row) for row in ([header] if header else []) + rows]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="\n")
    return path


def write_cola(root: Path, train: int = 48, dev: int = 24) -> Path:
    parts = zip(("train", "dev"), make_corpus(train, dev), strict=True)
    for name, examples in parts:
        write_rows(root / "CoLA" / f"{name}.tsv", [[e.source, str(e.label), "", e.text] for e in examples])
    return root


def write_pairs(root: Path, folder: str, labels: list[str], stems: tuple[str, ...], count: int = 24) -> Path:
    """Write files of sentence pairs in the task's official columns, labels taking turns."""
    texts = [example.text for part in make_corpus(2 * count, 2) for example in part]
    header = HEADERS[folder]
    places = {"sentence1": 0, "sentence2": 1, "question": 0, "sentence": 1, "question1": 0, "question2": 1}
    for stem in stems:
        rows = []
        for index in range(count):
            pair = texts[2 * index : 2 * index + 2]
            row = [pair[places[name]] if name in places else str(index) for name in header]
            row[-1] = labels[index % len(labels)]
            rows.append(row)
        write_rows(root / folder / f"{stem}.tsv", rows, header)
    return root


def save_tiny(folder: Path, width: int = 32) -> Path:
    """Save a RoBERTa of 2 layers, with dropout, and a tokenizer for the corpus."""
    corpus = folder.parent / "corpus.txt"
    corpus.parent.mkdir(parents=True, exist_ok=True)
    corpus.write_text("\n".join(example.text for example in make_corpus(400, 2)[0]), encoding="utf-8")
    return save_scratch(folder, corpus, layers=2, width=width, heads=2, max_length=64)


def flags(model: Path | str, data: Path, output: Path, task: str = "cola", **options: Any) -> list[str]:
    """A command line for a short run; an option that is True is a bare flag, one that is None is left out."""
    values: dict[str, Any] = {
        "task_name": task,
        "model_name_or_path": model,
        "data_dir": data,
        "output_dir": output,
        "num_train_epochs": 2,
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-3,
        "min_rows": 4,
        **options,
    }
    words: list[str] = []
    for name, value in values.items():
        if value is None:
            continue
        words.append(f"--{name}")
        if value is not True:
            words.extend(str(part) for part in (value if isinstance(value, list | tuple) else [value]))
    return words


class SignalTimer(StepTimer):
    """Sends this process a signal at the begin of a step, or in the middle of an evaluation."""

    step: int
    evaluation: int | None
    signum: signal.Signals

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        super().on_step_begin(*args, **kwargs)
        if args[1].global_step == self.step - 1:
            os.kill(os.getpid(), self.signum)

    def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
        if args[1].global_step == self.evaluation:
            self.evaluation = None
            os.kill(os.getpid(), self.signum)


def results_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))


def same_weights(first: Path, second: Path) -> bool:
    """Whether two saved models are equal in every bit."""
    one, two = load_file(first / "model.safetensors"), load_file(second / "model.safetensors")
    return one.keys() == two.keys() and all(one[name].equal(two[name]) for name in one)


def fails(capsys: pytest.CaptureFixture[str], argv: list[str]) -> str:
    """Run a command that must be refused; return its one line."""
    capsys.readouterr()
    with contextlib.suppress(SystemExit):
        status = main(argv)
        assert status == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("glue_finetune: error: ")
    return lines[0]
