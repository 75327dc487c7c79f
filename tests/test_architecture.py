"""The parts import those below them only, as the contracts in pyproject.toml say."""

import ast
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[1]


def lint(folder):
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as lint; lint()", "--no-cache"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.fixture
def copied(tmp_path):
    """A copy of the package and its contracts; the working folder comes before what is installed."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / "rmm_linear", tmp_path / "rmm_linear", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return tmp_path


def test_the_contracts_are_kept(copied):
    found = lint(copied)
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize(
    ("module", "imported"),
    [
        ("sketches/rows.py", "rmm_linear.packing"),
        ("memory/inputs.py", "rmm_linear.conversion.convert"),
        ("packing/pack.py", "rmm_linear.backends.native"),
        ("config.py", "rmm_linear.ops.sketches"),
        ("context/surroundings.py", "rmm_linear.layers.linear"),
        ("planning/blocks/plan.py", "rmm_linear.conversion.convert"),
        ("planning/graphs/plan.py", "rmm_linear.fitting.fit"),
    ],
)
def test_an_import_upward_is_found(module, imported, copied):
    with (copied / "rmm_linear" / module).open("a", encoding="utf-8") as file:
        file.write(f"\n\ndef late():\n    import {imported}\n")
    found = lint(copied)
    assert found.returncode == 1
    assert imported in found.stdout


def circles(package):
    """Modules that import one another, also inside of functions and for types alone."""
    graph = grimp.build_graph(package, cache_dir=None)
    leads = {
        module: graph.find_upstream_modules(module) - {module}
        for module in graph.modules
        if graph.find_modules_directly_imported_by(module)
    }
    return {
        frozenset(other for other in to if module in leads.get(other, ())) | {module} for module, to in leads.items()
    }


def test_a_class_name_is_there_once():
    names = Counter(
        node.name
        for path in (ROOT / "rmm_linear").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    )
    assert len(names) > 100
    assert [name for name, count in names.items() if count > 1] == []


def test_no_modules_import_one_another():
    assert [sorted(found) for found in circles("rmm_linear") if len(found) > 1] == []


def test_a_circle_is_found(tmp_path, monkeypatch):
    (tmp_path / "ring").mkdir()
    for name, text in (("__init__", ""), ("a", "from ring import b"), ("b", "def f():\n    import ring.c"), ("c", "")):
        (tmp_path / "ring" / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    assert all(len(found) == 1 for found in circles("ring"))
    text = "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    import ring.a\n"
    (tmp_path / "ring" / "c.py").write_text(text, encoding="utf-8")
    assert {frozenset({"ring.a", "ring.b", "ring.c"})} == {found for found in circles("ring") if len(found) > 1}


def test_a_part_without_a_place_in_the_list_is_found(copied):
    (copied / "rmm_linear" / "misplaced.py").write_text("", encoding="utf-8")
    assert lint(copied).returncode == 1
