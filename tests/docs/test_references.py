"""What pages name is there: files, commands, flags, kinds, objects of the API."""

import dataclasses
import functools
import importlib
import inspect
import io
import pkgutil
import re
import runpy
import sys
import warnings
from contextlib import redirect_stdout

import pytest
from doc_pages import PAGES, README, ROOT, RULES, blocks, commands, name, text

from glue_finetune.demo import SETTINGS
from rmm_linear.sketches import KINDS

WITH_COMMANDS = [page for page in [*PAGES, *RULES] if commands(page)]
API = "rmm_linear", "rmm_linear.memory", "rmm_linear.variance", "rmm_linear.estimators", "rmm_linear.planning"
NO_OBJECTS = {"__version__", "MEMORIES"}  # values, which have no docstring


@pytest.mark.parametrize("page", [*PAGES, *RULES], ids=name)
def test_links_to_files_lead_somewhere(page):
    prose = re.sub(r"```.*?```|`[^`\n]+`", "", text(page), flags=re.DOTALL)  # RMMTrainer[...](...) in code is none
    for target in re.findall(r"\]\((?!\w+:)([^)#\s]+)", prose):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=name)
def test_commands_exist_and_know_their_flags(page):
    for command in commands(page):
        tool, *words = command.split()
        if tool == "make":
            assert words[0] in targets(), command
        elif tool == "pip":
            extra = re.search(r"\.\[(\w+)\]", command)
            assert command == "pip install -e ." or extra[1] in extras(), command
        elif "-m" in words:
            module, *arguments = words[words.index("-m") + 1 :]
            sub = arguments[0] if module == "benchmarks" and arguments else ""
            known = help_of(module, sub)
            for flag in (word for word in arguments if word.startswith("--")):
                assert re.search(rf"{flag}(?![\w-])", known), f"{flag} in {command}"


def targets():
    return re.findall(r"^([\w-]+):", text("Makefile"), flags=re.MULTILINE)


def extras():
    section = re.search(r"^\[project\.optional-dependencies\]\n(.*?)^\[", text("pyproject.toml"), flags=re.M | re.S)
    return re.findall(r"^(\w+) = \[", section[1], flags=re.MULTILINE)


@functools.cache
def help_of(module, sub):
    """What ``python -m module sub --help`` prints."""
    argv, printed = sys.argv, io.StringIO()
    sys.argv = [module, *filter(None, [sub]), "--help-all" if module == "glue_finetune" else "--help"]
    try:
        with redirect_stdout(printed), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # another test has imported the module already
            with pytest.raises(SystemExit) as end:
                runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        sys.argv = argv
    assert not end.value.code, f"{module} {sub}"
    return printed.getvalue()


def test_table_of_kinds_is_complete():
    rows = re.findall(r"^\| `(\w+)`", text("docs/kinds.md"), flags=re.MULTILINE)
    assert sorted(rows) == sorted(KINDS)


def test_modules_of_the_design_page_exist():
    (table,) = re.findall(r"^\| module \|.*?\n\n", text("docs/design.md"), flags=re.M | re.S)
    named = re.findall(r"^\| `([\w./]+)` \|", table, flags=re.MULTILINE)
    assert [module for module in named if not (ROOT / "rmm_linear" / module).exists()] == []
    library = ROOT / "rmm_linear"
    folders = {f"{path.parent.relative_to(library)}/" for path in library.rglob("*/__init__.py")}
    files = {path.name for path in library.glob("*.py") if not path.name.startswith("_")}
    assert sorted((folders | files) - {*named, "./", "estimators.py"}) == []  # the public name of norm_estimators


@pytest.mark.parametrize("page", [*PAGES, *RULES], ids=name)
def test_names_of_the_packages_lead_somewhere(page):
    """Dotted ones in code: modules, classes, functions, methods."""
    for full in set(re.findall(r"`((?:rmm_linear|glue_finetune)(?:\.\w+)+)[`(]", text(page))):
        pkgutil.resolve_name(full)


def test_the_demos_table_is_that_of_the_demo():
    (block,) = blocks(README, "text")
    assert re.findall(r"^\| (\S+)", block, flags=re.MULTILINE)[1:] == list(SETTINGS)


def api_names():
    pages = (ROOT / "docs" / "api").glob("*.md")
    return [found for page in pages for found in re.findall(r"^::: (\S+)$", text(page), flags=re.MULTILINE)]


def test_the_api_pages_name_objects_that_exist():
    for full in api_names():
        module, _, attribute = full.rpartition(".")
        assert callable(getattr(importlib.import_module(module), attribute)), full


@pytest.mark.parametrize("module", API)
def test_every_public_name_is_on_an_api_page(module):
    public = set(importlib.import_module(module).__all__) - NO_OBJECTS
    named = [full.rpartition(".")[2] for full in api_names() if full.rpartition(".")[0] == module]
    assert sorted(named) == sorted(public)


def api_functions():
    """The functions that API pages show, methods too, and how they are named there."""
    for full in api_names():
        module, _, attribute = full.rpartition(".")
        found = getattr(importlib.import_module(module), attribute)
        if not inspect.isclass(found):
            yield full, found
            continue
        for own, each in vars(found).items():
            function = each.__func__ if isinstance(each, classmethod | staticmethod) else each
            shown = not own.startswith("_") or (own == "__init__" and not dataclasses.is_dataclass(found))
            if inspect.isfunction(function) and shown:
                yield f"{full}.{own}", function


def test_what_api_pages_show_says_what_it_takes_and_returns():
    lacking = []
    for full, function in api_functions():
        doc = function.__doc__
        if doc is None:  # its base class says it, or its name
            lacking += [] if inspect.getdoc(function) or full.endswith("__init__") else [full]
            continue
        if "\n" not in doc.strip():  # one line says all
            continue
        signature = inspect.signature(function)
        section = re.search(r"^ +Args:\n(.*?)(?=^ +(?:Returns|Yields|Raises|Example):|\Z)", doc, flags=re.M | re.S)
        said = set(re.findall(r"\*{0,2}(\w+)(?= ?(?:\([^)]*\))?:)", section[1])) if section else set()
        lacking += [f"{full}({each})" for each in signature.parameters if each not in {"self", "cls"} | said]
        if signature.return_annotation not in (None, "None") and not re.search(r"^ +(Returns|Yields):", doc, re.M):
            lacking += [f"{full} -> {signature.return_annotation}"]
    assert lacking == []
