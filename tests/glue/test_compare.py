"""Comparisons: what is run, what is reused, and the numbers in the table."""

import csv
import os
import signal
import subprocess
import sys
import time

import matplotlib.image
import numpy as np
import pytest
from glue_helpers import fails, flags, results_of

from glue_finetune import compare
from glue_finetune.__main__ import main
from glue_finetune.compare import collect_runs, format_table, parse_setting, plan_runs, summarize
from glue_finetune.errors import UserError


def test_entries():
    assert parse_setting("exact").flags == ("--kind", "exact")
    assert parse_setting("gaussian:0.1").flags == ("--kind", "gaussian", "--ratio", "0.1")
    assert parse_setting("gaussian:0.1").folder == "gaussian-0.1"
    assert parse_setting("rows:0.3:4").flags == ("--kind", "rows", "--ratio", "0.3", "--bits", "4")
    assert parse_setting("wta+token:0.3").flags == ("--kind", "wta", "--ratio", "0.3", "--norm_estimator", "token")
    assert parse_setting("wta+token:0.3").folder == "wta+token-0.3"
    for text in ("", "gaussian:", ":0.1", "a:1:2:3", "wta+:0.3", "+token:0.3"):
        with pytest.raises(UserError, match=r"must be kind:ratio\[:bits\], or kind alone"):
            parse_setting(text)


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_again(model, cola, tmp_path, monkeypatch, capsys):
    argv = flags(model, cola, tmp_path / "out", compare="exact", max_steps=1)
    monkeypatch.setattr(compare, "run_process", lambda argv: 130)
    assert main(argv) == 130
    assert "the same command goes on from here" in capsys.readouterr().err
    partial = tmp_path / "out" / "exact" / "seed-42" / "checkpoint-1"
    partial.mkdir(parents=True)  # SIGKILL came before the checkpoint was complete
    (partial / "model.safetensors").write_text("half")
    monkeypatch.setattr(compare, "run_process", main)
    assert main(argv) == 0
    assert results_of(partial.parent)["epochs"]


def test_every_run_gets_its_own_flags(tmp_path):
    shared = ["--task_name", "cola", "--ratio", "0.3", "--save_strategy", "steps"]
    settings = [parse_setting(text) for text in ("exact", "rows", "rows:0.5")]
    runs = plan_runs(shared, settings, [0, 1], tmp_path)
    assert [(run.setting.label, run.seed) for run in runs] == [
        (label, seed) for label in ("exact", "rows", "rows:0.5") for seed in (0, 1)
    ]
    assert [run.arguments.config and run.arguments.config.ratio for run in runs[::2]] == [None, 0.3, 0.5]
    assert [run.arguments.training.seed for run in runs[:2]] == [0, 1]
    assert runs[5].folder == tmp_path / "rows-0.5" / "seed-1"
    assert runs[5].arguments.training.save_strategy == "steps"
    assert plan_runs(shared[:2], settings, [0], tmp_path)[0].arguments.training.save_strategy == "no"


def test_a_comparison_from_end_to_end(model, cola, tmp_path, capfd, monkeypatch):
    settings = ["exact", "countsketch:0.2@linear"]
    argv = flags(model, cola, tmp_path / "all", compare=settings, seeds=3, num_train_epochs=1)
    monkeypatch.setattr(compare, "run_process", main)  # in this process
    assert main(argv) == 0
    first = capfd.readouterr().out
    exact = results_of(tmp_path / "all" / "exact" / "seed-3")
    sketched = results_of(tmp_path / "all" / "countsketch-0.2-linear" / "seed-3")
    assert (exact["sketch"], sketched["sketch"]["ratio"]) == ("exact", 0.2)
    with (tmp_path / "all" / "comparison.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for row, label, results in zip(rows, ("exact", "countsketch:0.2@linear"), (exact, sketched), strict=True):
        assert (row["setting"], row["seed"], row["metric"]) == (label, "3", "matthews_correlation")
        assert float(row["best"]) == results["score"]["best"]
        assert float(row["bytes_kept"]) == results["memory"]["bytes_kept_for_backward"]
        assert float(row["bytes_kept_by_layers"]) == results["memory"]["bytes_kept_by_layers"]
        assert float(row["peak_bytes"]) == results["memory"]["peak_bytes"]
    share = sketched["memory"]["bytes_kept_for_backward"] / exact["memory"]["bytes_kept_for_backward"]
    assert share < 1
    layers = sketched["memory"]["bytes_kept_by_layers"] / exact["memory"]["bytes_kept_by_layers"]
    assert layers < share
    markdown = (tmp_path / "all" / "comparison.md").read_text(encoding="utf-8")
    for text in (first, markdown):
        assert "| countsketch:0.2@linear |" in text
        assert f"(−{1 - share:.1%}) " in text
        assert f"(−{1 - layers:.1%}) " in text
    image = matplotlib.image.imread(tmp_path / "all" / "comparison.png")
    assert image.shape[:2] == (630, 960)
    assert np.ptp(image[..., :3].mean(axis=-1)) > 0.8
    assert not list((tmp_path / "all").glob("*/*/checkpoint-*"))

    monkeypatch.setattr(compare, "run_process", lambda argv: pytest.fail("a finished run was run again"))
    assert main(argv) == 0
    again = capfd.readouterr().out
    assert again.count("finished before, reused") == 2
    assert again.split("\n\n")[-3:] == first.split("\n\n")[-3:]
    line = fails(capfd, [*argv, "--learning_rate", "0.5"])
    assert "holds a run with other settings: learning_rate was 0.001, now 0.5" in line


def test_a_failing_run_ends_the_comparison(model, cola, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compare, "run_process", lambda argv: 3)
    assert main(flags(model, cola, tmp_path / "all", compare=["exact", "rows:0.2"])) == 3
    assert "exact with seed 42 ended with exit status 3" in capsys.readouterr().err
    assert not (tmp_path / "all" / "comparison.csv").exists()


def test_a_child_gets_the_signal_once_and_its_status_is_passed_on(monkeypatch, tmp_path):
    # In place of the child: a script that waits for SIGTERM and exits with its own status.
    script = tmp_path / "child.py"
    ready = tmp_path / "ready"
    script.write_text(
        "import signal, sys, time, pathlib\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
        f"pathlib.Path({str(ready)!r}).touch()\n"
        "time.sleep(60)\n"
    )
    popen = subprocess.Popen
    monkeypatch.setattr(compare.subprocess, "Popen", lambda command, **kw: popen([sys.executable, str(script)], **kw))
    parent = os.getpid()
    helper = popen(
        [
            sys.executable,
            "-c",
            "import os, pathlib, signal, sys, time\n"
            f"while not pathlib.Path({str(ready)!r}).exists(): time.sleep(0.05)\n"
            f"os.kill({parent}, signal.SIGTERM)\n",
        ]
    )
    began = time.monotonic()
    assert compare.run_process([]) == 143
    assert time.monotonic() - began < 30
    assert helper.wait() == 0
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def _result(best, kept, layers, seconds, peak):
    return {
        "task": "cola",
        "score": {"metric": "matthews_correlation", "best": best, "best_epoch": 1.0, "last": best},
        "memory": {
            "bytes_kept_for_backward": kept,
            "bytes_kept_by_layers": layers,
            "at_step": 10,
            "peak_bytes": peak,
            "peak_of": "process RSS",
        },
        "seconds_per_step": {"median": seconds},
        "versions": {"torch": "2"},
        "commit": None,
    }


def test_the_numbers_of_the_table():
    mib = 2**20
    results = {
        ("exact", 0): _result(0.5, 100 * mib, 80 * mib, 2.0, 900 * mib),
        ("exact", 1): _result(0.7, 100 * mib, 80 * mib, 2.0, 900 * mib),
        ("rows:0.1", 0): _result(0.4, 25 * mib, 5 * mib, 1.0, 800 * mib),
        ("rows:0.1", 1): _result(0.6, 35 * mib, 15 * mib, 1.4, 820 * mib),
    }
    table = summarize(collect_runs(results)).to_dict("index")
    assert list(table) == ["exact", "rows:0.1"]
    assert table["exact"]["best"] == pytest.approx(0.6)
    assert table["exact"]["best_std"] == pytest.approx(0.1 * 2**0.5)
    assert table["rows:0.1"]["bytes_ratio"] == pytest.approx(0.3)
    assert table["rows:0.1"]["layers_ratio"] == pytest.approx(0.125)
    assert table["rows:0.1"]["seconds_ratio"] == pytest.approx(0.6)
    text = format_table(summarize(collect_runs(results)))
    exact, rows = ([cell.strip() for cell in line.split("|")[2:8]] for line in text.splitlines()[2:])
    assert exact == [*["0.6000 ± 0.1414 (2)"] * 2, "80.0 MiB", "100.0 MiB", "1.00", "900 MiB"]
    assert rows[2:] == ["10.0 MiB (−87.5%)", "30.0 MiB (−70.0%)", "0.60", "810 MiB"]


def test_without_a_baseline_or_a_score_the_table_has_gaps_instead_of_numbers():
    text = format_table(summarize(collect_runs({("rows:0.1", 0): _result(None, 2**20, 2**19, 1.0, 2**20)})))
    cells = [cell.strip() for cell in text.splitlines()[2].split("|")[2:8]]
    assert cells == ["–", "–", "0.5 MiB", "1.0 MiB", "–", "1 MiB"]
