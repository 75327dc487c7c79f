"""Chains: the command writes what it prints, and the page has the counted figures."""

from __future__ import annotations

import csv
import itertools
import re
from pathlib import Path

import pytest
import torch
from doc_pages import text

from benchmarks import chains_sweep_counts as counted
from benchmarks.__main__ import main
from benchmarks.chains_sweep import Waits, compare, filesystem_of
from benchmarks.chains_sweep_counts import Steps
from benchmarks.records import RESULTS, read_rows
from rmm_linear.planning.chains import schedules

PAGE = text("docs/planning/sweep.md")


def test_the_command_writes_and_prints_its_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chains", "--parts", "sweep", "--tiny", "--out", str(tmp_path), "--commit", "abc"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^\| two levels \| 4\.28 \| 4\.28 \| 4\.28 \|$", printed, flags=re.MULTILINE)
    assert re.search(r"^\| Revolve +\| 4\.40 \| 6\.28 \| 8\.71 \|$", printed, flags=re.MULTILINE)
    steps = read_rows(tmp_path / "chains-sweep-steps.csv", Steps)
    assert {row.commit for row in steps} == {"abc"}
    assert all(row.checkpoint_schedules and row.machine for row in steps)
    (row,) = read_rows(tmp_path / "chains-sweep-waits.csv", Waits)
    assert (row.samples, row.threads) == (3, 1)
    assert row.filesystem in printed
    assert row.forward_steps >= 2 * row.steps - 1
    assert 0 <= row.waited_forward + row.waited_backward < row.seconds
    assert row.share == pytest.approx((row.waited_forward + row.waited_backward) / row.seconds)
    assert (tmp_path / "chains-sweep-waits.png").stat().st_size > 10_000


def test_the_page_has_what_was_measured() -> None:
    for row in read_rows(RESULTS / "chains-sweep-waits.csv", Waits):
        cells = (
            f"{row.step_seconds * 1e3:.1f}", str(row.steps), f"{row.transfer_seconds * 1e3:.1f}", str(row.interval),
            f"{row.share:.1%}".replace("%", " %"), f"{row.of_revolve:.2f}", f"{row.expected:.2f}",
        )  # fmt: skip
        assert f"| {' | '.join(cells)} |" in PAGE


def test_a_wrong_gradient_is_not_timed(tmp_path: Path) -> None:
    u = torch.linspace(0, 1, 8)
    compare(lambda number, u: torch.sin(u), u, tmp_path)
    runs = itertools.count()
    with pytest.raises(RuntimeError, match="must be the plain loop's to the bit"):
        compare(lambda number, u: torch.sin(u) * (1.0 + next(runs)), u, tmp_path)


def test_the_filesystem_is_that_of_the_deepest_mount(tmp_path: Path) -> None:
    if not Path("/proc/self/mounts").is_file():
        pytest.skip("the system has no list of mounts")
    assert filesystem_of(Path("/proc/self")) == "proc"
    assert filesystem_of(tmp_path) not in ("", "proc")


def cells(title: str) -> dict[tuple[str, ...], list[str]]:
    """Rows of the page's table that comes after a text, without its first line."""
    lines = PAGE[PAGE.index(title) :].partition("\n\n| ")[2].partition("\n\n")[0].splitlines()[2:]
    return {
        tuple(row[:1]): row[1:] for row in csv.reader(lines, delimiter="|") for row in [[c.strip() for c in row[1:-1]]]
    }


def test_the_page_has_the_counts_of_growing_chains() -> None:
    rows = {
        (title,): [f"{row.per_step:.2f}" for row in counted.flat() if row.schedule == title]
        for title in ("two levels", "Revolve")
    }
    assert cells("with 6 slots and I = 50:") == rows


@pytest.mark.thorough
def test_the_page_has_the_counts_of_all_schedules() -> None:
    found = counted.all_schedules(tiny=False)
    short, long = ([row for row in found if row.steps == steps] for steps in (100, 1000))
    expected = [
        [str(n) for row in pair for n in (row.forward_steps, row.stored)] for pair in zip(short, long, strict=True)
    ]
    assert list(cells("Forward steps with 6 slots, counted;").values()) == expected


def test_the_page_has_the_comparison_with_revolve() -> None:
    rows = counted.against_revolve()
    table = PAGE[PAGE.index("## Against Revolve") :].partition("|---|---|---|---|---|\n")[2].partition("\n\n")[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert len(lines) == 12
    for slots, interval, least, *shares in lines:
        about = [row for row in rows if (row.slots, row.interval) == (int(slots), int(interval))]
        assert [int(least.removesuffix(" steps"))] == [row.steps for row in about if row.table == "least"]
        assert shares == [f"{row.of_revolve:.2f}" for row in about if row.table == "long"]


@pytest.mark.parametrize("slots", [1, 2, 6])
@pytest.mark.parametrize("interval", [1, 3, 20])
def test_from_the_least_length_on_two_levels_never_take_more_steps(interval: int, slots: int) -> None:
    least = counted.fewest_steps(interval, slots)

    def loses(steps: int) -> bool:
        two = schedules.count(schedules.two_level(interval, slots), steps).forward_steps
        return two > schedules.count(schedules.in_memory(steps, slots), steps).forward_steps

    assert loses(least - 1)
    assert not any(loses(steps) for steps in range(least, least + 60))
