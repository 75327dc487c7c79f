"""rmm-linear fit: a plan for a model of transformers, printed and saved."""

import pytest
import torch
from helpers import tiny_model, token_ids

from rmm_linear.command.main import main
from rmm_linear.planning import load_plan

BATCH = ["--size", "8", "--length", "16"]
RECOMPUTED = ["--allow", "keep", "recompute"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "roberta"
    tiny_model("roberta").save_pretrained(folder)
    return str(folder)


def run(capsys, *words):
    capsys.readouterr()
    status = main(["fit", *words])
    return status, *capsys.readouterr()


def test_the_report_is_printed_and_the_plan_saved(model, tmp_path, capsys):
    path = tmp_path / "plan.json"
    status, out, _ = run(capsys, model, *BATCH, "--memory", "0.8", *RECOMPUTED, "--save", str(path))
    assert status == 0
    assert out.startswith("rmm_linear fit: ")
    assert "of which optimizer " in out
    plan = load_plan(path)
    assert any(block.choice != "keep" for block in plan.blocks)
    trained = tiny_model("roberta")
    plan.apply(trained)
    trained(input_ids=token_ids(4, 20), labels=torch.zeros(4, dtype=torch.long)).loss.backward()


def test_a_batch_of_a_file_and_an_optimizer_without_state(model, tmp_path, capsys):
    ids = token_ids(4, 20)
    torch.save({"input_ids": ids, "labels": ids[:, 0] % 2}, tmp_path / "batch.pt")
    status, out, _ = run(
        capsys,
        model,
        "--batch",
        str(tmp_path / "batch.pt"),
        "--memory",
        "1GB",
        "--optimizer",
        "sgd",
        "--max-noise",
        "2",
    )
    assert status == 0
    assert "The exact model fits" in out
    assert "of which optimizer " not in out


def test_time_bounds_alone(model, capsys):
    status, out, _ = run(capsys, model, *BATCH, "--time", "100", *RECOMPUTED)
    assert status == 0
    assert any(f" {choice}=" in out for choice in ("recompute", "selective", "nested"))
    assert "budget=" not in out


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "Give --memory 8GB, or --time 1.2"),
        (["--memory", "10KB"], "memory=10000 cannot be met"),
        (["--memory", "8 gigs"], "memory must be a size, got '8 gigs'"),
        (["--memory", "-1"], "memory as a share must be in (0, 1], got -1.0"),
        (["--memory", "1GB", "--allow", "recomput"], "Did you mean 'recompute'"),
        (["--memory", "1GB", "--max-noise", "0"], "max_noise must be positive"),
        (["--memory", "1GB", "--length", "900"], "Give a smaller --length."),
        (["--memory", "1GB", "--size", "0"], "size must be"),
        (["--memory", "1GB", "--save", "/no/such/folder/plan.json"], "/no/such/folder"),
    ],
)
def test_bad_input_is_one_line_and_status_2(model, words, text, capsys):
    status, _, err = run(capsys, model, *BATCH, *words)
    assert status == 2
    assert err.startswith("rmm-linear fit: error: ")
    assert err.count("\n") == 1
    assert text in err


def test_a_folder_that_is_not_there(capsys):
    status, _, err = run(capsys, "/no/such/model", "--memory", "1GB")
    assert status == 2
    assert "MODEL must be a folder written by save_pretrained" in err
