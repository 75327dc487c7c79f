"""Results as csv files: what is written is read again, the committed files too."""

from __future__ import annotations

import csv
import dataclasses
import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import benchmarks
from benchmarks.records import RESULTS, Origin, Row, origin, read_rows, write_rows


def kinds(base: type[Origin] = Origin) -> Iterator[type[Origin]]:
    for kind in base.__subclasses__():
        yield kind
        yield from kinds(kind)


def test_modules_can_be_imported_and_rooms_make_no_circle() -> None:
    for module in pkgutil.walk_packages(benchmarks.__path__, "benchmarks."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    rooms = ("suites", "planning", "noise", "gpu", "frontier", "pages")
    for place, room in enumerate(rooms):
        for path in (RESULTS.parent / room).glob("*.py"):
            text = path.read_text(encoding="utf-8")
            assert not [later for later in rooms[place + 1 :] if f"from benchmarks.{later}" in text], path


def test_a_run_replaces_its_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "linear-cpu.csv"
    first = Row("linear", "a, b", "paper", "float32", median=0.125, kept_bytes=3)
    rows = [first, Row("linear", "c", "rows", "float32")]
    write_rows(path, rows * 2)
    write_rows(path, rows)
    assert read_rows(path, Row) == rows
    assert list(tmp_path.iterdir()) == [path]
    path.write_text("suite,case\nlinear,a\n")
    with pytest.raises(ValueError, match=r"must have the columns suite, case.*Run the benchmark again"):
        read_rows(path, Row)


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.csv")), ids=lambda path: path.name)
def test_the_committed_results_are_read_to_the_last_digit(path: Path, tmp_path: Path) -> None:
    with path.open(newline="", encoding="utf-8") as file:
        texts = list(csv.DictReader(file))
    (kind,) = [one for one in kinds() if {field.name for field in dataclasses.fields(one)} == texts[0].keys()]
    rows = read_rows(path, kind)
    assert len(rows) == len(texts) > 0
    for row, text in zip(rows, texts, strict=True):
        for name, value in dataclasses.asdict(row).items():
            if isinstance(value, float):
                assert value == float(text[name]), name
            elif isinstance(value, int):
                assert value == int(text[name] or 0), name
            else:
                assert value == (text[name] or value), name
    write_rows(tmp_path / "again.csv", rows)
    assert read_rows(tmp_path / "again.csv", kind) == rows


def test_every_row_says_where_it_comes_from() -> None:
    about = origin("cpu", "abc")
    assert about.keys() == {field.name for field in dataclasses.fields(Origin)}
    assert all(about.values())
