"""What is read and written is data: JSON and safetensors, never pickle."""

import ast
import json
from pathlib import Path

import pytest
import torch
from helpers import Mlp
from safetensors import safe_open

from rmm_linear import convert
from rmm_linear.integrations.pretrained import save_conversion

ROOT = Path(__file__).resolve().parents[1]
SOURCES = [path for folder in ("rmm_linear", "glue_finetune", "kernels") for path in (ROOT / folder).rglob("*.py")]


def calls(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}


def test_nothing_is_unpickled_or_evaluated():
    assert len(SOURCES) > 60
    for path in SOURCES:
        for function, arguments in calls(path):
            assert function not in {"eval", "exec", "pickle.load", "pickle.loads", "torch.save", "joblib.load"}, path
            if function == "torch.load":
                assert arguments.get("weights_only") == "True", path
            assert "trust_remote_code" not in arguments, path
            assert arguments.get("shell") != "True", path


@pytest.mark.parametrize("estimator", ["none", "position"])
def test_a_saved_conversion_is_json_and_safetensors(tmp_path, estimator):
    model = Mlp()
    kind = "wta" if estimator != "none" else "countsketch"
    convert(model, kind=kind, ratio=0.5, min_rows=1, norm_estimator=estimator)
    for _ in range(2):
        model(torch.randn(4, 10, 12)).square().sum().backward()
    save_conversion(model, tmp_path)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert [name for name in files if name.endswith(".json")] == ["rmm_config.json"]
    for path in tmp_path.iterdir():
        if path.suffix == ".json":
            assert isinstance(json.loads(path.read_text()), dict)
        else:
            assert path.suffix == ".safetensors"
            with safe_open(path, "pt") as tensors:
                assert list(tensors.keys())
    assert len(files) == (2 if estimator != "none" else 1)
