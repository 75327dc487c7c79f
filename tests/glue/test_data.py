"""Official files are read as they are; what is wrong in them is reported with its line."""

import logging

import datasets
import pytest
from glue_helpers import HEADERS, write_cola, write_pairs, write_rows

from glue_finetune.errors import UserError
from glue_finetune.tasks import TASKS, load_task, read_file


def test_cola_has_no_header(tmp_path):
    data = load_task(TASKS["cola"], str(write_cola(tmp_path, train=20, dev=10)))
    assert (len(data.train), len(data.dev[""])) == (20, 10)
    assert sorted(data.train["label"]) == [0] * 10 + [1] * 10
    assert data.train.column_names == ["text", "label"]


def test_quotes_na_byte_order_mark_and_line_ends_are_text_as_it_stands(tmp_path):
    path = tmp_path / "train.tsv"
    rows = ["sentence\tlabel", '"an open quote\t1', "NA\t0", 'say "no"\t1', "a\u2028b \x0b c\t0", " spaces \t1"]
    path.write_bytes(("\ufeff" + "\r\n".join(rows) + "\r\n").encode())
    read = read_file(TASKS["sst2"], path)
    assert list(read["text"]) == ['"an open quote', "NA", 'say "no"', "a\u2028b \x0b c", " spaces "]
    assert list(read["label"]) == [1, 0, 1, 0, 1]


@pytest.mark.parametrize(
    ("task", "labels", "classes"),
    [
        ("rte", ["entailment", "not_entailment"], [0, 1]),
        ("qnli", ["entailment", "not_entailment"], [0, 1]),
        ("wnli", ["0", "1"], [0, 1]),
        ("qqp", ["1", "0"], [1, 0]),
        ("stsb", ["5.000", "0.25"], [5.0, 0.25]),
        ("mnli", ["neutral", "contradiction", "entailment"], [1, 2, 0]),
    ],
)
def test_pairs_in_the_official_columns(tmp_path, task, labels, classes):
    stems = ("train", "dev_matched", "dev_mismatched") if task == "mnli" else ("train", "dev")
    data = load_task(TASKS[task], str(write_pairs(tmp_path, TASKS[task].folder, labels, stems, count=6)))
    assert list(data.train["label"])[: len(classes)] == classes
    assert data.train[0]["text"] != data.train[0]["text_pair"]
    assert list(data.dev) == (["matched", "mismatched"] if task == "mnli" else [""])


def test_mrpc_takes_the_label_from_the_first_column(tmp_path):
    row = ["1", "12", "34", "The first .", "The second ."]
    for name in ("train", "dev"):
        write_rows(tmp_path / "MRPC" / f"{name}.tsv", [row], HEADERS["MRPC"])
    data = load_task(TASKS["mrpc"], str(tmp_path))
    assert data.train[0] == {"text": "The first .", "text_pair": "The second .", "label": 1}


def test_samples_are_the_first_rows(tmp_path):
    root = str(write_cola(tmp_path, train=20, dev=10))
    everything, few = load_task(TASKS["cola"], root), load_task(TASKS["cola"], root, 3, 2)
    assert few.train["text"][:] == everything.train["text"][:3]
    assert few.dev[""]["text"][:] == everything.dev[""]["text"][:2]
    with pytest.raises(UserError, match="max_train_samples must be at least 1, got 0"):
        load_task(TASKS["cola"], root, 0)


def test_short_rows_of_qqp_are_skipped_and_counted(tmp_path, caplog):
    good = ["0", "1", "2", "Is it ?", "Is it so ?", "1"]
    path = write_rows(tmp_path / "train.tsv", [good, good[:4], good], HEADERS["QQP"])
    with caplog.at_level(logging.WARNING, "glue_finetune"):
        assert len(read_file(TASKS["qqp"], path)) == 2
    assert f"{path}: skipped 1 rows" in caplog.text


@pytest.mark.parametrize(
    ("task", "content", "message"),
    [
        ("sst2", b"sentence\tlabel\ngood\t1\nbad\n", r"train\.tsv:3: a row must have 2 .*\(sentence, label\), got 1"),
        ("sst2", b"sentence\tlabel\ngood\tbad\t1\n", r"train\.tsv:2: a row must have 2 .* got 3"),
        ("sst2", b"sentence\tlabel\ngood\t2\n", r"train\.tsv:2: label must be one of 0, 1, got '2'"),
        ("sst2", b"text\tlabel\ngood\t1\n", r"train\.tsv:1: the header must name the columns .* sentence not found"),
        ("sst2", b"sentence\tlabel\n", r"train\.tsv: the file must hold at least one row, got none"),
        ("sst2", b"", r"train\.tsv: the file must hold at least one row, got none"),
        (
            "sst2",
            b"sentence\tlabel\ngood\t1\ncaf\xe9\t1\n",
            r"train\.tsv:3: the text must be UTF-8, got byte 0xe9 at col",
        ),
        ("cola", b"s\t1\t\tgood\ns\tyes\t\tgood\n", r"train\.tsv:2: label must be one of 0, 1, got 'yes'"),
        ("cola", b"sentence\tlabel\n", r"train\.tsv:1: a row must have 4 tab-separated fields \(source, label"),
        (
            "rte",
            b"index\tsentence1\tsentence2\tlabel\n0\ta\tb\tneutral\n",
            r":2: label must be one of entailment, not_",
        ),
        ("stsb", b"sentence1\tsentence2\tscore\na\tb\t5.1\n", r":2: score must be a number from 0 to 5, got '5.1'"),
        ("stsb", b"sentence1\tsentence2\tscore\na\tb\tnan\n", r":2: score must be a number from 0 to 5, got 'nan'"),
    ],
)
def test_what_is_wrong_is_reported_with_its_line(tmp_path, task, content, message):
    path = tmp_path / "train.tsv"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_file(TASKS[task], path)


def test_missing_folders_and_files(tmp_path):
    with pytest.raises(UserError, match="data_dir must hold a folder 'CoLA'"):
        load_task(TASKS["cola"], str(tmp_path))
    write_cola(tmp_path)
    (tmp_path / "CoLA" / "dev.tsv").unlink()
    with pytest.raises(UserError, match=r"Cannot read .*dev\.tsv: No such file"):
        load_task(TASKS["cola"], str(tmp_path))


def test_the_hubs_columns(monkeypatch):
    rows = datasets.Dataset.from_dict({"premise": ["a"], "hypothesis": ["b"], "label": [2], "idx": [0]})
    asked = []

    def load(*args):
        asked.append(args)
        return dict.fromkeys(("train", "validation_matched", "validation_mismatched"), rows)

    monkeypatch.setattr(datasets, "load_dataset", load)
    data = load_task(TASKS["mnli"], None)
    assert asked == [("nyu-mll/glue", "mnli")]
    assert data.train[0] == data.dev["mismatched"][0] == {"text": "a", "text_pair": "b", "label": 2}


def test_without_the_hub_the_remedy_is_named(monkeypatch):
    def load(*args):
        raise ConnectionError("Couldn't reach the hub")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(UserError, match=r"Couldn't reach the hub.* give --data_dir"):
        load_task(TASKS["cola"], None)
