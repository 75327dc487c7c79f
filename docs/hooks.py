"""Hooks of ``mkdocs build``, named in mkdocs.yml.

Pages link to files outside of docs/ (pictures, csv files, CONTRIBUTING.md) by relative paths, which also work where the
repository itself is browsed. The build copies these files into the site and changes the links accordingly.

API pages name objects as users import them (``::: rmm_linear.convert``). mkdocstrings reads source files without
importing them, so it takes a name that a function and a module share for the module. The hook imports the object, tells
mkdocstrings where it is defined, and keeps the public name as the heading.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from posixpath import dirname, join, normpath, relpath
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)")
# Integrations are not imported: they load what their libraries load, and share no name with a module.
OBJECT = re.compile(r"^::: (rmm_linear\.(?!integrations)[\w.]+)$", flags=re.MULTILINE)
ROLE = re.compile(r":\w+:`(?:~[\w.]*?(\w+)|([^`]+))`")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside of docs/ that pages link to, and those that mkdocs.yml has as pages.

    Args:
        files: The files in docs/.
        config: The settings of mkdocs.yml.

    Returns:
        All files.
    """
    wanted = {page for section in config.nav or [] for page in _pages(section)}
    for page in files.documentation_pages():
        wanted |= {site for _, site in _links(page.content_string, join("docs", page.src_uri))}
    known = {file.src_uri for file in files}
    for name in sorted(wanted - known):
        if (ROOT / name).is_file():
            files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Change links to files outside of docs/, and say where the objects of API pages are defined.

    Args:
        markdown: The page.
        page: Its place.
        config: The settings of mkdocs.yml.
        files: All files.

    Returns:
        The page as mkdocs takes it.
    """
    here = page.file.src_uri
    source = join("docs", here) if (Path(config.docs_dir) / here).is_file() else here
    targets = dict(_links(markdown, source))
    markdown = LINK.sub(lambda link: relpath(targets[link[1]], dirname(here) or "."), markdown)
    return OBJECT.sub(lambda found: _directive(found[1]), markdown)


class Docstrings(griffe.Extension):
    """Docstrings as mkdocstrings reads them: its section is called Examples, and roles are plain code."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Change the docstring of an object.

        Args:
            obj: A module, class, function or attribute.
            **kwargs: Not needed.
        """
        if obj.docstring:
            text = re.sub("^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
            text = ROLE.sub(lambda role: f"`{role[1] or role[2]}`", text)
            obj.docstring.value = re.sub(r"\(\*(?=[,)])", r"(\\*", text)  # a shape, not emphasis


def _links(markdown: str, source: str) -> list[tuple[str, str]]:
    """Relative links of a page, each with the path of its target in the site."""
    targets = [(link, normpath(join(dirname(source), link))) for link in LINK.findall(markdown)]
    return [(link, target.removeprefix("docs/")) for link, target in targets]


def _pages(section: Any) -> list[str]:
    """Paths in a part of the navigation."""
    if isinstance(section, str):
        return [section]
    inner = section.values() if isinstance(section, dict) else section
    return [page for part in inner for page in _pages(part)]


def _directive(name: str) -> str:
    module, _, attribute = name.rpartition(".")
    found = getattr(importlib.import_module(module), attribute)
    defined = f"{found.__module__}.{found.__qualname__}"
    return f"::: {defined}\n    options:\n      heading: {name}\n      toc_label: {attribute}"
