"""Long sequences: what stays between the passes, tiles, the least memory, random models, and sizes on paper.

Peaks and bytes between the passes are live bytes, to which the machine does not matter; times are ratios within one
run. Files are in the system's folder for temporary ones. The part "longest" simulates models of 8 billion weights and
more, for minutes each: what its csv file has already is not simulated again.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.planning import long_longest, long_random, long_sequence, long_store, long_tiles
from benchmarks.planning.long_longest import Longest
from benchmarks.records import add_choices, add_output, known_rows, origin, put_rows, show, write_rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_choices(parser, "--parts", _PARTS)
    add_output(parser)


def run(arguments: argparse.Namespace) -> Iterator[str]:
    for part in arguments.parts:
        about, path = origin("cpu", arguments.commit), arguments.out / f"long-{part}.csv"
        if part == "longest":
            for row in long_longest.longest(about, known_rows(path, Longest), tiny=arguments.tiny):
                put_rows(path, [row], lambda other, command=row.command: other.command == command)
                yield show([row]) + "\n"
            if not arguments.tiny:
                long_longest.picture(known_rows(path, Longest)).savefig(arguments.out / "long-longest.png", dpi=150)
        elif part == "random":  # a model at a time: they take long
            for row in long_random.drawn(about, tiny=arguments.tiny):
                put_rows(path, [row], lambda other, number=row.number: other.number == number)
                yield show([row]) + "\n"
        elif part == "sequence":  # a dtype at a time
            for rows in long_sequence.sequences(about, tiny=arguments.tiny):
                put_rows(path, rows, lambda other, dtype=rows[0].dtype: other.dtype == dtype)
                yield show(rows) + "\n"
        else:
            rows = _PARTS[part](about, tiny=arguments.tiny)
            write_rows(path, rows)
            yield show(rows) + "\n"


def _stored(about: dict[str, Any], *, tiny: bool) -> list[Any]:
    return long_store.stored(long_store.small(tiny), about, tiny=tiny)


_PARTS: dict[str, Callable[..., Any]] = {
    "store": _stored,
    "sequence": long_sequence.sequences,
    "tiles": long_tiles.working,
    "least": long_random.lowest,
    "random": long_random.drawn,
    "longest": long_longest.longest,
}
