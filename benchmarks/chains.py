"""Long chains of steps: every section prints its tables, and writes a csv file and pictures of what it found."""

from __future__ import annotations

from pathlib import Path

from benchmarks import chains_sweep

SECTIONS = {"sweep": chains_sweep.run}


def run(out: Path, *, sections: tuple[str, ...] = tuple(SECTIONS), tiny: bool = False, commit: str = "") -> None:
    """Run sections.

    Args:
        out: Folder of the csv files.
        sections: Names of sections.
        tiny: Whether to take small sizes, to try the command.
        commit: What to write as the commit; "" asks git.
    """
    for section in sections:
        SECTIONS[section](out, tiny=tiny, commit=commit)
