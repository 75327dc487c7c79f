"""The commands of docs/training-stack.md that launch the GLUE script in two processes run as they are printed there."""

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from distributed_helpers import environment
from glue_helpers import results_of
from transformers import AutoModelForSequenceClassification

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "training-stack.md").read_text(encoding="utf-8").replace("\\\n", " ")
COMMANDS = re.findall(r"^(?:torchrun|accelerate) .*", PAGE, flags=re.MULTILINE)
ACCUMULATED = "--gradient_accumulation_steps 2 --per_device_train_batch_size 4"
EXAMPLES, PROCESSES = 48, 2


def test_the_page_has_a_command_for_each_launcher():
    assert [command.split()[0] for command in COMMANDS] == ["torchrun", "accelerate"]


@pytest.mark.parametrize(
    ("number", "more", "batch"),
    [
        pytest.param(0, "", 16, id="torchrun", marks=pytest.mark.stack),
        pytest.param(1, "", 16, id="accelerate", marks=pytest.mark.stack),
        pytest.param(0, ACCUMULATED, 8, id="torchrun, accumulated", marks=pytest.mark.stack),
        pytest.param(1, ACCUMULATED, 8, id="accelerate, accumulated", marks=pytest.mark.stack),
    ],
)
def test_commands_of_the_page_run(model, cola, tmp_path, number, more, batch):
    """Each epoch's batches are shared by the processes, results are printed once, and the model loads anywhere."""
    shutil.copytree(model, tmp_path / "out" / "minilm")
    shutil.copytree(cola, tmp_path / "data" / "glue")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = COMMANDS[number].replace("accelerate launch", f"accelerate launch --main_process_port {port}")
    scripts = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", f"{command} {more}"],
        cwd=tmp_path,
        env={**environment(), "PATH": scripts},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("results: ") == 1
    folder = tmp_path / re.search(r"--output_dir (\S+)", command)[1]
    assert results_of(folder)["steps"] == 3 * -(-EXAMPLES // (PROCESSES * batch))
    assert (folder / "rmm_config.json").is_file()
    loaded = AutoModelForSequenceClassification.from_pretrained(folder)
    assert all(torch.isfinite(parameter).all() for parameter in loaded.parameters())
