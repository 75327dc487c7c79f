"""Long sequences, in real steps on this machine: what stays between the passes, tiles, the least memory, random models.

Peaks and bytes between the passes are live bytes, to which the machine does not matter; times are ratios within one
run. Files are in the system's folder for temporary ones.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.planning import long_random, long_store, long_tiles
from benchmarks.records import add_choices, add_output, origin, put_rows, show, write_rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_choices(parser, "--parts", _PARTS)
    add_output(parser)


def run(arguments: argparse.Namespace) -> Iterator[str]:
    for part in arguments.parts:
        about, path = origin("cpu", arguments.commit), arguments.out / f"long-{part}.csv"
        if part == "random":  # a model at a time: they take long
            for row in long_random.drawn(about, tiny=arguments.tiny):
                put_rows(path, [row], lambda other, number=row.number: other.number == number)
                yield show([row]) + "\n"
        else:
            rows = _PARTS[part](about, tiny=arguments.tiny)
            write_rows(path, rows)
            yield show(rows) + "\n"


def _stored(about: dict[str, Any], *, tiny: bool) -> list[Any]:
    return long_store.stored(long_store.small(tiny), about, tiny=tiny)


_PARTS: dict[str, Callable[..., Any]] = {
    "store": _stored,
    "tiles": long_tiles.working,
    "least": long_random.lowest,
    "random": long_random.drawn,
}
