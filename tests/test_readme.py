"""The README's snippets run, in order, and its table of kinds is complete."""

import functools
import re
import socket
from pathlib import Path

import pytest
import torch

from glue_finetune.acceptability import DEV_SIZE, TRAIN_SIZE
from glue_finetune.demo import _INTRODUCTION, SETTINGS
from rmm_linear import RMMLinear
from rmm_linear.sketches import KINDS

ROOT = Path(__file__).resolve().parents[1]
LORA_A = "base_model.model.roberta.encoder.layer.0.attention.self.query.lora_A.default"
README = (ROOT / "README.md").read_text(encoding="utf-8")
# PyTorch 2.6 does not run fully_shard on CPU, nor trace whole models of a newer transformers.
IS_OLD = torch.__version__.startswith("2.6.")


def test_python_snippets_run_one_after_the_other(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    # Inductor would compile for a minute; what torchrun sets, with one process.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    snippets = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(snippets) >= 4
    names = {}
    for snippet in snippets:
        if IS_OLD and "fullgraph=True" in snippet:
            continue
        if IS_OLD and "fully_shard" in snippet:
            torch.distributed.destroy_process_group()
            continue
        exec(compile(snippet, "README.md", "exec"), names)
    assert capsys.readouterr().out.startswith(
        "rmm_linear: converted=14 skipped=0 frozen=0 kind=countsketch memory=0.1 bits=auto "
    )
    assert isinstance(names["model"].roberta.encoder.layer[0].output.dense, RMMLinear)
    assert names["model"].roberta.encoder.layer[0].output.dense.rmm_config.ratio == 0.2
    assert names["report"].skipped == {
        "classifier.dense": "in exclude_modules",
        "classifier.out_proj": "not in target_modules",
    }
    assert names["layer"].rmm_config.spec(32 * 128, 256, 4).rows == 410
    assert torch.isfinite(names["weight"].grad).all()
    assert (tmp_path / "rmm_config.json").is_file()
    assert {row.step for row in names["probe"].rows} == {2, 4}
    assert (tmp_path / "variance.csv").is_file()
    assert (tmp_path / "out" / "model" / "rmm_config.json").is_file()
    assert isinstance(names["again"].roberta.encoder.layer[0].output.dense, RMMLinear)
    assert isinstance(names["lora"].get_submodule(LORA_A), RMMLinear)
    assert torch.isfinite(names["parallel"].module.classifier.dense.weight.grad).all()
    for trained in ("again",) if IS_OLD else ("again", "sharded"):
        gradient = names[trained].roberta.encoder.layer[1].intermediate.dense.weight.grad
        assert gradient is not None


def test_the_demos_output_is_that_of_the_demo():
    (block,) = re.findall(r"```text\n(.*?)```", README, flags=re.DOTALL)
    model = "MiniLM, pretrained, in RoBERTa's classes (6 layers, 384 wide)"
    assert block.startswith(_INTRODUCTION.format(train=TRAIN_SIZE, dev=DEV_SIZE, model=model))
    assert re.findall(r"^\| (\S+)", block, flags=re.MULTILINE)[1:] == list(SETTINGS)
    seconds = int(re.search(r"The demo took (\d+) s\.", block)[1])
    assert seconds < 300


def test_table_of_kinds_is_complete():
    rows = re.findall(r"^\| `(\w+)`", README, flags=re.MULTILINE)
    assert sorted(rows) == sorted(KINDS)


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_to_files_lead_somewhere(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
        assert (ROOT / target).exists(), target


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_make_targets_that_are_named_exist(document):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    named = set(re.findall(r"^make ([\w-]+)", (ROOT / document).read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert named
    assert named <= targets
