"""The generated tables in README and docs/, from the csv files: ``python -m benchmarks table``, or ``--check``."""

from __future__ import annotations

from pathlib import Path

from benchmarks import chains_bptt, compiled, fit_page, fit_paper_page, graphs_page, roofline, tables
from benchmarks.frontier import noise_page
from benchmarks.frontier import page as frontier_page
from benchmarks.frontier import summary as frontier_summary
from benchmarks.records import RESULTS, ROOT

# Page, the command that its markers name, and what makes the text between them of a folder of results.
GENERATED = (
    ("README.md", "python -m benchmarks frontier", frontier_summary.summary),
    ("docs/benchmarks.md", "python -m benchmarks table", tables.performance),
    ("docs/estimators.md", "python -m benchmarks.sampling", tables.sampling),
    ("docs/comparison.md", "python -m benchmarks frontier", frontier_page.page),
    ("docs/training-noise.md", "python -m benchmarks frontier", noise_page.noise_page),
    ("docs/compiled.md", "python -m benchmarks compile", compiled.tables),
    ("docs/gpu.md", "python -m benchmarks roofline", lambda results: roofline.tables()),
    ("docs/noise.md", "python -m benchmarks.noise", tables.survey),
    ("docs/planning/chains.md", "python -m benchmarks chains", chains_bptt.page),
    ("docs/planning/graphs.md", "python -m benchmarks graphs", graphs_page.page),
    ("docs/planning/fit.md", "python -m benchmarks fit", fit_page.page),
    ("docs/planning/paper-sizes.md", "python -m benchmarks fit --parts paper", fit_paper_page.page),
)


def update(*, check: bool = False, root: Path = ROOT, results: Path = RESULTS) -> bool:
    """Write the tables into their pages.

    Args:
        check: Only say whether they are there already.
        root: Folder of README and docs/.
        results: Folder of the csv files.

    Returns:
        Whether the pages have the tables of the results.

    Raises:
        ValueError: If a page or its markers are not there.
    """
    texts = {root / name: inserted(root / name, make(results), command) for name, command, make in GENERATED}
    stale = [page for page, text in texts.items() if page.read_text(encoding="utf-8") != text]
    for page in () if check else stale:
        page.write_text(texts[page], encoding="utf-8")
    return not (check and stale)


def inserted(page: Path, content: str, command: str) -> str:
    """Put content between the markers of a page.

    Args:
        page: The page.
        content: What goes between the markers.
        command: The command that the markers name.

    Returns:
        The new text of the page.

    Raises:
        ValueError: If the page is not there, or does not have the markers once each, in order.
    """
    begin, end = (f"<!-- {command}: {word} -->" for word in ("begin", "end"))
    before, opened, rest = page.read_text(encoding="utf-8").partition(begin) if page.is_file() else ("", "", "")
    _, closed, after = rest.partition(end)
    if not opened or not closed or begin in rest or end in after:
        raise ValueError(f"{page} must have the lines {begin} and {end} once each, in this order. Put them back.")
    return f"{before}{begin}\n\n{content}\n\n{end}{after}"
