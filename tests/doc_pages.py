"""The pages: README and docs/, and what the tests read out of them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
RULES = [ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", ROOT / "CHANGELOG.md"]


def name(page: Path) -> str:
    """Say which page it is: README.md, docs/kinds.md."""
    return page.relative_to(ROOT).as_posix()


def text(page: Path | str) -> str:
    """Read a page."""
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: Path | str, language: str) -> list[str]:
    """Return the code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text(page), flags=re.DOTALL | re.MULTILINE)


def commands(page: Path) -> list[str]:
    """Return the shell commands of a page, those in its sentences too."""
    lines = "".join(blocks(page, "sh")).replace("\\\n", " ").splitlines()
    inline = re.findall(r"`((?:python|make|pip|torchrun|accelerate) [^`]+)`", text(page))
    return [command for line in (*lines, *inline) if (command := line.split("  #")[0].strip())]
