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
FOLDERS = ("rmm_linear", "glue_finetune", "kernels", "benchmarks", "notebooks", "examples")
SOURCES = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]

# Modules whose formats hold code, whatever is imported from them.
MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
METHODS = {"read_pickle", "to_pickle", "unsafe_load", "full_load", "torch.save", "yaml.load", "os.system"}


def dangers(source):
    """What a source could execute of what it reads, or write for others to execute, however it is imported."""
    tree = ast.parse(source)
    names = {}  # of what is imported, to what it is
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update({alias.asname or alias.name: alias.name for alias in node.names})
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
            modules = [node.module or "" for alias in node.names if not alias.name.endswith("Error")]
        else:
            continue
        yield from (module for module in modules if module.split(".")[0] in MODULES)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        first, dot, rest = ast.unparse(node.func).partition(".")
        function = names.get(first, first) + dot + rest
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if function in BUILTINS or any(function == name or function.endswith(f".{name}") for name in METHODS):
            yield function
        if function == "torch.load" and given.get("weights_only") != "True":
            yield "torch.load without weights_only=True"
        yield from (name for name in ("allow_pickle", "trust_remote_code") if given.get(name, "False") != "False")
        if given.get("shell", "False") != "False":
            yield "shell"


def test_nothing_is_unpickled_or_evaluated():
    assert len(SOURCES) > 100
    assert {path.relative_to(ROOT).parts[0] for path in SOURCES} == set(FOLDERS)
    found = {path: list(dangers(path.read_text(encoding="utf-8"))) for path in SOURCES}
    # Only the source of a class that is imported already is compiled, and nothing that is read from elsewhere.
    expected = {ROOT / "rmm_linear/activations/own_code.py": ["compile"]}
    assert {path: names for path, names in found.items() if names} == expected


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import UnpicklingError, loads",
        "import numpy, dill as d",
        "from joblib.numpy_pickle import load",
        "def f():\n    import marshal",
        "import numpy as np\nnp.load(path, allow_pickle=True)",
        "frame.to_pickle(path)",
        "from pandas import read_pickle as read\nread(path)",
        "import yaml\nyaml.load(text, yaml.Loader)",
        "from yaml import load\nload(text)",
        "import torch\ntorch.load(path)",
        "import torch\ntorch.load(path, weights_only=False)",
        "import torch as t\nt.load(path)",
        "import torch\ntorch.save(model, path)",
        "eval(text)",
        "exec(text)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
        "import subprocess\nsubprocess.run(command, shell=True)",
        "import os\nos.system(command)",
    ],
)
def test_what_is_looked_for_is_found(source):
    assert list(dangers(source))


@pytest.mark.parametrize(
    "source",
    [
        "import numpy as np\nnp.load(path)",
        "import numpy as np\nnp.load(path, allow_pickle=False)",
        "import torch\ntorch.load(path, weights_only=True)",
        "import json\njson.load(file)",
        "import re\nre.compile(text)",
        "from pickle import UnpicklingError",
        "model.eval()",
        "import evaluate\nevaluate.load(path)",
    ],
)
def test_what_is_harmless_passes(source):
    assert not list(dangers(source))


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
