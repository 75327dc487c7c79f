"""Methods that save memory, in training: what a step costs, the share of every operator, scores, and curves."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.frontier.methods import METHODS
from benchmarks.frontier.runs import Asked
from benchmarks.frontier.study import GLOSSES, check_glosses
from benchmarks.records import RESULTS, add_choices, add_output, known_rows, origin

PARTS = ("cost", "shares", "accuracy", "curves", "steps")
_STUDIES = ("images", "convolutions", "language", "experts", "adapters")
_OF_ADAPTERS = ("peft", "bitsandbytes")
_TASKS = (
    "sst2",
    "cola",
    "stsb",
    "rte",
    "sst2-bf16",
    "cola-bf16",
    "stsb-bf16",
    "rte-bf16",
    "sst2-full",
    "cola-long",
    "cola-slow",
    "cola-raised",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_choices(parser, "--parts", PARTS)
    parser.add_argument("--data_dir", default="data/glue", help="folder in the official GLUE layout")
    parser.add_argument("--model_dir", default="out/minilm", help="MiniLM in RoBERTa's classes; made if missing")
    add_choices(parser, "--tasks", _TASKS)
    add_choices(parser, "--studies", _STUDIES, "of parts curves and steps; all by default")
    parser.add_argument("--wordnet", default=GLOSSES, help="folder with data.noun, as in wordnet-base")
    parser.add_argument("--base_dir", default="out/base", help="the model that adapters have; made if missing")
    add_choices(parser, "--methods", METHODS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; they share the threads")
    parser.add_argument("--minutes", type=float, help="begin nothing after that; the same command goes on later")
    add_output(parser)


def run(arguments: argparse.Namespace) -> Iterator[str]:
    from benchmarks.frontier import cost, curves, shares, study_steps, tasks  # they import transformers

    _check(arguments)
    about: dict[str, Any] = origin("cpu", arguments.commit)
    deadline = None if arguments.minutes is None else time.monotonic() + 60 * arguments.minutes
    named = {one.name: getattr(arguments, one.name) for one in dataclasses.fields(Asked) if one.name != "deadline"}
    asked = Asked(**named, deadline=deadline)
    parts = {"cost": cost.cost, "shares": shares.shares, "accuracy": tasks.accuracy, "curves": curves.curves}
    parts["steps"] = study_steps.steps
    for part in (part for part in PARTS if part in arguments.parts):
        yield from parts[part](asked, about)
    yield from draw(asked.out)


def _check(arguments: argparse.Namespace) -> None:
    """Raise a ValueError for what would be found after hours."""
    if arguments.tiny and arguments.out == RESULTS:
        raise ValueError("--tiny needs --out FOLDER: runs that are there are not run again, and these are no results.")
    if arguments.jobs < 1:
        raise ValueError(f"--jobs must be at least 1, got {arguments.jobs}.")
    if {"cost", "accuracy"} & {*arguments.parts} and not Path(arguments.data_dir).is_dir():
        raise ValueError(f"--data_dir must be a folder in the official GLUE layout; there is no {arguments.data_dir}.")
    digits = {"images", "convolutions"}
    studies = {*arguments.studies} if {"curves", "steps"} & {*arguments.parts} else set[str]()
    if studies - digits:
        check_glosses(Path(arguments.wordnet))
    if studies & digits and importlib.util.find_spec("sklearn") is None:
        raise ImportError("The digits come from scikit-learn. pip install scikit-learn, or --studies language.")
    if "adapters" in studies and (missing := [one for one in _OF_ADAPTERS if importlib.util.find_spec(one) is None]):
        raise ImportError(
            f"Adapters need {' and '.join(missing)}. pip install {' '.join(missing)}, or other --studies."
        )


def draw(out: Path) -> Iterator[str]:
    from benchmarks.frontier import plots
    from benchmarks.frontier.rows import Cost, Epoch, Point
    from benchmarks.frontier.study import BATCHES, DRAWN, LONG

    epochs = known_rows(out / "frontier-accuracy.csv", Epoch)
    costs, points = known_rows(out / "frontier-cost.csv", Cost), known_rows(out / "frontier-curves.csv", Point)
    points = [row for row in points if row.study in DRAWN]
    long = [row for row in epochs if row.task == LONG]
    figures = {
        "frontier": plots.plot_frontier(epochs, costs),
        "readme": plots.plot_readme(epochs, costs),
        "frontier-tasks": plots.plot_tasks(epochs, costs),
        "frontier-curves": plots.plot_curves(points, BATCHES) if points else None,
        "frontier-long": plots.plot_long(long) if long else None,
    }
    for name, figure in figures.items():
        if figure is not None:
            path = out / f"{name}.png"
            figure.savefig(path, dpi=150)
            yield str(path)
