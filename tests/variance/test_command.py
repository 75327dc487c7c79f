"""python -m rmm_linear.variance: the table and the picture of a text file or of saved batches, and what it refuses."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny_model, token_ids
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from glue_finetune.acceptability import make_corpus
from rmm_linear.sketches import KINDS
from rmm_linear.variance.__main__ import main as command
from rmm_linear.variance.survey.batches import load_texts, read_labels
from rmm_linear.variance.survey.survey import AUTO


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "texts.tsv"
    path.write_text("".join(f"{e.text}\t{e.label}\n" for e in make_corpus(40, 2)[0]), encoding="utf-8")
    return path


def test_the_command_measures_a_text_file(
    model: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "noise.png"
    argv = [str(model), str(texts), "--size", "16", "--steps", "5", "--kinds", "rows", "--plot", str(picture)]
    assert command([*argv, "--memory", "0.1", "0.5"]) == 0
    out = capsys.readouterr().out
    assert "16 x " in out
    assert "12 layers, 16-bit input" in out
    assert "rows, 2 bits" in out
    assert AUTO in out
    assert "50 %" in out
    whole = out.split("whole gradient, converted as by default")[1]
    assert re.search(r"roberta\.encoder\.layer\.1 .*\d\.\d{4}", whole)
    assert picture.read_bytes().startswith(b"\x89PNG")
    sys.modules["matplotlib.pyplot"].close("all")


def test_the_command_measures_saved_batches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_model("gpt2").save_pretrained(tmp_path / "model")
    batch = {"input_ids": token_ids(8, 16), "labels": token_ids(8, 16)}
    torch.save([batch, batch], tmp_path / "batches.pt")
    argv = [str(tmp_path / "model"), str(tmp_path / "batches.pt"), "--memory", "0.5"]
    assert command([*argv, "--kinds", *KINDS, "--modules", ".*mlp.c_fc", "--layers"]) == 0
    out, layers = capsys.readouterr().out.split("lowest variance ratio")
    assert re.findall(r"transformer\.h\.(\d)\.mlp\.c_fc .*\w+, \d+ bits: \d+\.\d{3}", layers) == ["0", "1"]
    assert (tmp_path / "noise.png").read_bytes().startswith(b"\x89PNG")
    assert layers.endswith("\npicture of the variance ratio against memory: noise.png\n")
    sys.modules["matplotlib.pyplot"].close("all")
    assert "8 x 16 tokens, 0 % padding, 2 layers" in out
    assert all(f"{kind}, 4 bits" in out for kind in KINDS)
    assert AUTO in out


def test_numbers_of_classes_stay_and_names_are_the_models() -> None:
    twelve = [str(number) for number in range(12)]
    assert read_labels(twelve, {}).tolist() == list(range(12))
    assert read_labels(["1", "2", "2"], {"LABEL_0": 0, "LABEL_1": 1}).tolist() == [1, 2, 2]
    assert read_labels(["yes", "no", "yes"], {"no": 1, "yes": 0, "maybe": 2}).tolist() == [0, 1, 0]
    assert read_labels(["yes", "no", "yes"], {"LABEL_0": 0, "LABEL_1": 1}).tolist() == [1, 0, 1]
    torch.testing.assert_close(read_labels(["1", "2.5"], {}), torch.tensor([1.0, 2.5]))
    with pytest.raises(ValueError, match=r"names that the model knows \(no, yes\), got maybe among them"):
        read_labels(["yes", "maybe"], {"no": 0, "yes": 1})
    with pytest.raises(ValueError, match="must count from 0, got -1"):
        read_labels(["-1", "1"], {})


def test_the_head_has_the_classes_of_the_model_or_the_file_whichever_are_more(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "labels.tsv"
    for labels, classes in ((["0", "1"], 2), (["0", "4"], 5)):
        path.write_text("".join(f"a cat\t{label}\n" for label in labels), encoding="utf-8")
        loaded, _ = load_texts(str(model), path, batch=2, steps=0, max_length=8)
        assert loaded.config.num_labels == classes
    config = AutoConfig.from_pretrained(model, num_labels=3)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "three")
    AutoTokenizer.from_pretrained(model).save_pretrained(tmp_path / "three")
    path.write_text("a cat\t0\na dog\t1\n", encoding="utf-8")
    assert load_texts(str(tmp_path / "three"), path, batch=2, steps=0, max_length=8)[0].config.num_labels == 3


FOUR = torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("one.tsv", b"no tab here\n", "must have lines of text, tab, label"),
        ("empty.tsv", b"", "got 0 lines"),
        ("missing.tsv", None, "No such file"),
        ("torn.pt", b"PK nonsense", "error: "),
        ("empty.pt", b"", "ends before its first batch. Save one with torch.save"),
        ("tensor.pt", [torch.ones(3)], "must hold a mapping of the model's keyword arguments, or a list of them, got"),
        ("token.pt", {"input_ids": torch.full((4, 8), 10**6), "labels": FOUR}, "out of the model's range"),
        (
            "label.pt",
            {"input_ids": token_ids(4, 8), "labels": FOUR + 7},
            "out of the model's range: Target 7 is out of",
        ),
    ],
)
def test_the_command_refuses_bad_files_in_one_line(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: Any, message: str
) -> None:
    if is_labelled := name.startswith(("token", "label")):
        tiny_model("roberta").save_pretrained(tmp_path / "head")
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    assert command([str(tmp_path / "head" if is_labelled else model), str(path)]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("rmm_linear.variance: error: ")
    assert message in line


def test_the_command_refuses_a_picture_without_a_folder_before_it_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["no model", "no batch", "--plot", str(tmp_path / "none" / "noise.png")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert f"--plot must be a file in a folder that is there, got {tmp_path / 'none' / 'noise.png'}" in err


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--size", "0", "must be at least 1, got 0"),
        ("--max_seq_length", "0", "must be at least 1, got 0"),
        ("--steps", "-1", "must be at least 0, got -1"),
        ("--memory", "1.5", "must be in (0, 1], got 1.5"),
    ],
)
def test_the_command_refuses_wrong_numbers(
    capsys: pytest.CaptureFixture[str], flag: str, value: str, message: str
) -> None:
    with pytest.raises(SystemExit):
        command(["model", "texts.tsv", flag, value])
    assert message in capsys.readouterr().err
