"""Suite ``growth``: forward and backward pass of one layer from few tokens to many; time per token should stay flat."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.records import Row
from benchmarks.suites import linear
from benchmarks.suites.case import Case

REFERENCE = linear.REFERENCE
BASE = 4096  # tokens; time per token is by that of this case
setup = linear.setup
_PROVIDERS = (linear.DEFAULT, "countsketch", "rows", "countsketch 4 bits", "countsketch 2 bits")


def cases(device: str, *, tiny: bool) -> list[Case]:
    width = 16 if tiny else 768
    return [
        Case(
            "growth", f"{tokens} x {width} -> {width}", device, "float32", (tokens, width, width), tiny=tiny,
            check=min(tokens, 256), rounds=2 if tiny else max(5, min(60, (1 << 17) // tokens)),
        )
        for tokens in ((128, BASE) if tiny else [1 << power for power in range(8, 17)])
    ]  # fmt: skip


def providers(case: Case) -> list[str]:
    return [REFERENCE, *_PROVIDERS]


def tokens_of(row: Row) -> int:
    """Return N of a case "N x I -> O"."""
    return int(row.case.split(" x ")[0])


def per_token(rows: Sequence[Row]) -> dict[tuple[str, int], float]:
    """Return the time per token relative to that of the base case, by provider and tokens."""
    times = {(row.provider, tokens_of(row)): row.median / tokens_of(row) for row in rows if row.median is not None}
    bases = {name: time for (name, tokens), time in times.items() if tokens == BASE}
    return {(name, tokens): time / bases[name] for (name, tokens), time in times.items() if name in bases}
