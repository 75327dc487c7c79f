"""Chains of steps in little memory: ``python -m benchmarks chains``.

Each part measures, writes a csv file and pictures into a folder, and returns what is printed. Steps and bytes are
counted, so that the machine does not matter; how long sweeps wait for their store is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import chains_bptt, chains_costs, chains_subsets, chains_sweep
from benchmarks.records import origin

# Title to a function of the folder, where rows come from (fields of Origin), and whether sizes are small.
PARTS: dict[str, Callable[[Path, dict[str, Any], bool], str]] = {
    "subsets": chains_subsets.run,
    "costs": chains_costs.run,
    "bptt": chains_bptt.run,
    "sweep": chains_sweep.run,
}


def run(out: Path, parts: Sequence[str], *, commit: str = "", tiny: bool = False) -> Iterator[str]:
    """Run parts one after the other.

    Args:
        out: Folder of the csv files.
        parts: Titles of the parts.
        commit: Commit to write into the csv files; without one, git is asked.
        tiny: Whether sizes are small, to try the command.

    Yields:
        What each part found, as tables.
    """
    about = origin("cpu", commit)
    for part in parts:
        yield PARTS[part](out, about, tiny)
