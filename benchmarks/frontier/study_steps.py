"""What a training step of a study takes with each of its methods: bytes, and seconds in turns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from benchmarks.frontier.cost import OWN_HOOKS, ROUNDS
from benchmarks.frontier.curves import make, weights_of
from benchmarks.frontier.methods import METHODS, NUDGED
from benchmarks.frontier.rows import Cost
from benchmarks.frontier.runs import Asked
from benchmarks.library import LiveTensors, Peak
from benchmarks.planning.fit_steps import live_peak, timed
from benchmarks.processes import call
from benchmarks.records import put_rows
from benchmarks.timing import quartiles
from rmm_linear.memory import track_saved

_SETTLED = 4  # steps, after which everything is learned
_TIMEOUT = 3600.0


def steps(asked: Asked, about: Mapping[str, Any]) -> Iterator[str]:
    """Measure the methods of every study, in one process: times of one run, relative to the study's first method."""
    path = asked.out / "frontier-cost.csv"
    for name in asked.studies:
        if name == "adapters" and not weights_of(asked).is_file():
            yield f"{name} wait for their base, see part curves"
            continue
        rows = [Cost(**found, **about) for found in call(measured, name, asked, timeout=_TIMEOUT)]
        new = {(row.task, row.method) for row in rows}
        put_rows(path, rows, lambda row, new=new: (row.task, row.method) in new)
        yield f"{name}: {len(rows)} methods measured"


def measured(name: str, asked: Asked) -> list[dict[str, Any]]:
    """Return the columns of :class:`Cost`."""
    study, rows, runs = make(name, asked), dict[str, dict[str, Any]](), dict[str, Any]()
    batch = next(study.batches(0, study.batch))
    shape = " × ".join(map(str, next(iter(batch.values())).shape))
    for method in (one for one in study.methods if one in {study.methods[0], *asked.methods} - {NUDGED}):
        how = METHODS[method]
        model = how.prepare(study.model(0)).train()

        def step(model: Any = model) -> None:
            model.zero_grad(set_to_none=True)
            model(**batch).loss.backward()

        for _ in range(_SETTLED):
            step()
        row = rows[method] = {"task": name, "method": method, "batch": shape, "settings": how.settings()}
        model.zero_grad(set_to_none=True)
        if method not in OWN_HOOKS:
            with track_saved(model) as ledger:
                loss = model(**batch).loss
            row["saved"] = ledger.total
            loss.backward()
        model.zero_grad(set_to_none=True)
        with LiveTensors(Peak()) as live:
            loss = model(**batch).loss
            row["kept"] = live.now
            loss.backward()
        row["peak"] = live_peak(model, step)
        runs[method] = step
    seconds = {
        method: quartiles(found) for method, found in timed(nn.Module(), runs, 1 if asked.tiny else ROUNDS).items()
    }
    first = seconds[study.methods[0]][1]
    for method, (lower, median, upper) in seconds.items():
        rows[method] |= {"lower": lower, "seconds": median, "upper": upper, "time": median / first}
    return [*rows.values()]
