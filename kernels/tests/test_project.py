"""kernels/ is a project of its own that hides no package of that name, ships in the wheel, and loads from a build."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import setuptools
import torch

if sys.platform != "linux":  # where the test extra has Triton, and a failing import of it is a failure
    pytest.skip("Triton has no build for this platform", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "kernels" / "torch-ext" / "rmm_kernels"


def run(code, cwd=ROOT):
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_project_file_is_one_that_the_builder_takes():
    from kernels._rust import Build

    general = Build.open(ROOT / "kernels").general
    assert sorted(map(str, general.backends)) == ["cuda", "rocm", "xpu"]
    text = (ROOT / "kernels" / "build.toml").read_text()
    assert all(line in text.splitlines() for line in ('name = "rmm-kernels"', "edition = 5", "[torch-noarch]"))


def test_the_kernels_import_nothing_but_torch_triton_and_themselves():
    for path in SOURCE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            for name in names:
                assert name.split(".")[0] in {"torch", "triton", *sys.stdlib_module_names}, (path.name, name)


@pytest.mark.parametrize("installed", [pytest.param(True, marks=pytest.mark.thorough), False])
def test_transformers_imports_from_the_repository_root(installed):
    """With the package `kernels` installed and without: then Python finds the folder, as a namespace package."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    absent = """
import importlib.metadata, sys
from importlib.machinery import PathFinder
class Absent:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return PathFinder.find_spec(name, ['.']) if name == 'kernels' else None
sys.meta_path.insert(0, Absent)
version = importlib.metadata.version
def without(name):
    if name == 'kernels':
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)
importlib.metadata.version = without
"""
    code = "from transformers import RobertaForSequenceClassification\nimport kernels\nprint(kernels.__file__)"
    found = run(code if installed else absent + code)
    assert ("site-packages" in found) == installed
    assert (found == "None") == (not installed)


def test_the_wheel_ships_the_kernels_inside_the_library(tmp_path):
    copy = tmp_path / "copy"
    ignored = shutil.ignore_patterns(".*", "build", "out", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, copy, ignore=ignored)
    command = [sys.executable, "-W", "ignore", "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path)]
    environment = os.environ | {"CC": "false"}  # the C library, which is optional, has tests of its own
    done = subprocess.run([*command, str(copy)], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "installed")
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"rmm_linear", "glue_finetune"}
    for path in SOURCE.glob("*.py"):
        assert f"rmm_linear/kernels/{path.name}" in names
    # The list of packages in pyproject.toml is complete.
    packages = setuptools.find_packages(str(ROOT), include=["rmm_linear*", "glue_finetune*"])
    for package in packages:
        assert f"{package.replace('.', '/')}/__init__.py" in names, package
    code = "import sys; sys.path.insert(0, '.'); import rmm_linear.backends.triton as t; print(t.kernels().__file__)"
    assert run(code, tmp_path / "installed") == str(tmp_path / "installed" / "rmm_linear" / "kernels" / "__init__.py")


def test_a_checkout_that_is_not_installed_finds_its_kernels(tmp_path):
    shutil.copytree(ROOT / "rmm_linear", tmp_path / "rmm_linear", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(SOURCE, tmp_path / "kernels" / "torch-ext" / "rmm_kernels")
    code = (
        "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in repr(f)]\n"
        "sys.path.insert(0, '.'); import rmm_linear.backends.triton as t\n"
        "print(t.kernels().__file__); import rmm_linear.kernels as k; print(k is t.kernels())"
    )
    found = run(code, tmp_path).splitlines()
    assert found == [str(tmp_path / "kernels" / "torch-ext" / "rmm_kernels" / "__init__.py"), "True"]


def test_the_built_kernel_loads_and_runs(tmp_path):
    from kernels import get_local_kernel

    built = tmp_path / "build" / "torch-universal"
    shutil.copytree(SOURCE, built)
    metadata = {"name": "rmm-kernels", "id": "rmm_kernels_test", "version": 1, "license": "Apache-2.0"}
    (built / "metadata.json").write_text(json.dumps({**metadata, "python-depends": [], "backend": {"type": "cpu"}}))
    loaded = get_local_kernel(tmp_path, backend="cpu")
    x = torch.randn(12, 5, device="cuda" if torch.cuda.is_available() else "cpu")
    torch.testing.assert_close(loaded.row_norms(x), x.norm(dim=1))


def test_the_card_names_every_function():
    card = (ROOT / "kernels" / "CARD.md").read_text(encoding="utf-8")
    exported = re.findall(r'"(\w+)"', (SOURCE / "__init__.py").read_text().split("__all__")[1])
    assert exported
    assert all(f"`{name}`" in card for name in exported)
