"""What the tests of the benchmarks share: the smallest case of every suite, and pages without tables."""

from __future__ import annotations

from pathlib import Path

from benchmarks import bandwidth, block_steps, host, linear, models, operators, pages

LINEAR = linear.cases("cpu", tiny=True)[0]
ROBERTA, LLAMA = models.cases("cpu", tiny=True)
KERNELS = bandwidth.cases("cpu", tiny=True)[0]
HOST = host.cases("cpu", tiny=True)[0]
OPERATORS = operators.cases("cpu", tiny=True)
BLOCKS = block_steps.cases("cpu", tiny=True)


def empty_pages(folder: Path) -> Path:
    """A folder with README and docs/ whose pages have markers and nothing between them."""
    for name, command, _ in pages.GENERATED:
        lines = ("before", f"<!-- {command}: begin -->", f"<!-- {command}: end -->", "after")
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("".join(f"{line}\n" for line in lines))
    return folder
