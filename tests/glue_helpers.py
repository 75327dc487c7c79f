"""What the tests of the GLUE script share: a tiny model, tiny data in the official layout, and runs in this process."""

import contextlib
import json
import os
import signal

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


def write_rows(path, rows, header=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ["\t".join(row) for row in ([header] if header else []) + rows]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="\n")
    return path


def write_cola(root, train=48, dev=24):
    parts = zip(("train", "dev"), make_corpus(train, dev), strict=True)
    for name, examples in parts:
        write_rows(root / "CoLA" / f"{name}.tsv", [[e.source, str(e.label), "", e.text] for e in examples])
    return root


def write_pairs(root, folder, labels, stems, count=24):
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


def save_tiny(folder, width=32):
    """Save a RoBERTa of 2 layers, with dropout, and a tokenizer for the corpus."""
    corpus = folder.parent / "corpus.txt"
    corpus.parent.mkdir(parents=True, exist_ok=True)
    corpus.write_text("\n".join(example.text for example in make_corpus(400, 2)[0]), encoding="utf-8")
    return save_scratch(folder, corpus, layers=2, width=width, heads=2, max_length=64)


def flags(model, data, output, task="cola", **options):
    """A command line for a short run; an option that is True is a bare flag, one that is None is left out."""
    values = {
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
    words = []
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

    def on_step_begin(self, *args, **kwargs):
        super().on_step_begin(*args, **kwargs)
        if args[1].global_step == self.step - 1:
            os.kill(os.getpid(), self.signum)

    def on_prediction_step(self, *args, **kwargs):
        if args[1].global_step == self.evaluation:
            self.evaluation = None
            os.kill(os.getpid(), self.signum)


def results_of(folder):
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))


def same_weights(first, second):
    """Whether two saved models are equal in every bit."""
    one, two = load_file(first / "model.safetensors"), load_file(second / "model.safetensors")
    return one.keys() == two.keys() and all(one[name].equal(two[name]) for name in one)


def fails(capsys, argv):
    """Run a command that must be refused; return its one line."""
    capsys.readouterr()
    with contextlib.suppress(SystemExit):
        status = main(argv)
        assert status == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("glue_finetune: error: ")
    return lines[0]
