"""Steps of models as large as those that people train, compared with what PyTorch has for little memory.

Every case, a shape in one dtype, runs in a process of its own: all methods in turns, on the same parameters. Bytes are
the allocator's, so that compiled steps count too; times are the processor's, so run it with OMP_NUM_THREADS=1. Cases
that are there are not measured again, unless --again asks for it.
"""

from __future__ import annotations

import argparse
import functools
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from benchmarks.library import LEARNING_STEPS, OFFLOAD, QUALITIES, RECOMPUTE, BlockPlan, PlannedBlock, allocations
from benchmarks.noise.blocks import SMALL, inputs, llama, roberta
from benchmarks.planning import fit_steps
from benchmarks.processes import ProcessError, call, first_line, last_line
from benchmarks.records import Origin, add_choices, add_output, known_rows, origin, show, write_rows
from benchmarks.suites import models
from benchmarks.timing import quartiles
from rmm_linear import RMMConfig, convert

EXACT, CHECKPOINT, OFFLOADED, SELECTIVE, COMPILED, FIT = (
    "exact", "checkpointing, all blocks", "checkpointing, to files", "selective checkpointing, products kept",
    "torch.compile, budget 0.5", "fit, least + 25 %",
)  # fmt: skip
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_PRODUCTS = ("mm", "addmm", "bmm", "_scaled_dot_product_flash_attention_for_cpu")
_BUDGET, _SHARE, _ROUNDS = 0.5, 0.25, 4
_MEMORY = "[memory]"  # an allocation, as the profiler names it


@dataclass(frozen=True, kw_only=True)
class Shape(Origin):
    """One shape in one dtype with one method. Bytes are what a step makes: gradients too, but no parameters."""

    case: str  # title, with the batch
    dtype: str  # of the parameters
    method: str  # "exact", what PyTorch has, a quality of ours, or "fit"
    kept: int | None = None  # bytes alive between forward and backward pass
    host: int | None = None  # bytes that wait in files then
    peak: int | None = None  # the allocator's highest
    seconds: float | None = None  # median of a step, of the processor
    lower: float | None = None  # lower quartile
    upper: float | None = None  # upper quartile
    time: float | None = None  # the median by the exact step's
    noise: float | None = None  # of "fit": variance that is added to the gradient, by the minibatch's own
    plan: str = ""  # of "fit": how many blocks have each option
    status: str = "ok"  # "ok", or why there is no measurement
    seed: int = fit_steps.SEED  # of the weights


def shapes(tiny: bool) -> dict[str, tuple[Callable[[], nn.Module], tuple[int, int]]]:
    """Titles, what makes the model, and batch and sequence."""
    size = SMALL if tiny else {}
    encoders, decoders = (((2, 128),), ((2, 128),)) if tiny else (((8, 128), (2, 512)), ((4, 256), (1, 2048)))
    made = [(f"RoBERTa-base, {b} × {n}", partial(roberta, 0.1, **size), (b, n)) for b, n in encoders]
    made += [(f"LLaMA 12 × 768, {b} × {n}", partial(llama, **size), (b, n)) for b, n in decoders]
    return {title: (make, shape) for title, make, shape in made}


def measure(title: str, dtype: str, tiny: bool) -> list[Shape]:
    """Measure all methods on one shape."""
    make, shape = shapes(tiny)[title]
    torch.manual_seed(fit_steps.SEED)
    model = make().to(DTYPES[dtype])
    batch, base = inputs(model, *shape), Shape(case=title, dtype=dtype, method=EXACT)
    runs, rows = dict[str, Callable[[], Any]](), dict[str, Shape]()
    with tempfile.TemporaryDirectory() as folder:
        for method, prepare in _methods(folder).items():
            try:
                prepared = prepare(models.twin(model))
                row = _bytes(replace(base, method=method), prepared, batch, Path(folder))
            except Exception as error:  # of a method of PyTorch's, on this machine
                rows[method] = replace(base, method=method, status=first_line(error))
                continue
            runs[method], rows[method] = fit_steps.step_of(prepared, batch), row
        fitting = fit_steps.options_of(models.twin(model), batch)
        found = fit_steps.fitted(fitting, fit_steps.budget_of(fitting, _SHARE))
        if isinstance(found, str):
            rows[FIT] = replace(base, method=FIT, status=found)
        else:
            planned = found.plan.apply(models.twin(model))
            fitted = replace(base, method=FIT, noise=found.noise, plan=fit_steps.counts(found.plan.blocks))
            runs[FIT], rows[FIT] = fit_steps.step_of(planned, batch), _bytes(fitted, planned, batch, Path(folder))
        seconds = fit_steps.timed(model, runs, 1 if tiny else _ROUNDS, clock=time.process_time)
    return [replace(row, **_times(seconds, method)) for method, row in rows.items()]


def _times(seconds: Mapping[str, list[float]], method: str) -> dict[str, float]:
    if method not in seconds:
        return {}
    lower, median, upper = quartiles(seconds[method])
    return {"seconds": median, "lower": lower, "upper": upper, "time": median / quartiles(seconds[EXACT])[1]}


def _methods(folder: str) -> dict[str, Callable[[nn.Module], nn.Module]]:
    """What each method makes of a model."""
    ours = {quality: partial(_converted, quality=quality) for quality in QUALITIES}
    return {
        EXACT: lambda model: model,
        CHECKPOINT: lambda model: models.checkpoint(model) or model,
        OFFLOADED: partial(_offloaded, folder=folder),
        SELECTIVE: _selective,
        COMPILED: _compiled,
        **ours,
    }


def _converted(model: nn.Module, quality: str) -> nn.Module:
    convert(model, RMMConfig.preset(quality))
    for _ in range(LEARNING_STEPS + 1):
        model(**inputs(model, 2, 66)).loss.backward()  # more than min_rows
    return model


def _offloaded(model: nn.Module, folder: str) -> nn.Module:
    names = [name for name in fit_steps.find_blocks(model) if name.rpartition(".")[2].isdigit()]
    blocks = [PlannedBlock(name, f"{RECOMPUTE} + {OFFLOAD}") for name in names]
    return BlockPlan(blocks=blocks, folder=folder).apply(model)


def _selective(model: nn.Module) -> nn.Module:
    aten = torch.ops.aten
    products = [packet.default for name in _PRODUCTS if (packet := getattr(aten, name, None)) is not None]
    contexts = functools.partial(create_selective_checkpoint_contexts, products)
    for block in (block for blocks in fit_steps.lists_of_blocks(model) for block in blocks):
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)
    return model


def _compiled(model: nn.Module) -> nn.Module:
    base: Any = lookup_backend("inductor" if shutil.which("g++") else "aot_eager")

    def backend(graph: Any, batch: Any) -> Any:
        from torch._functorch import config

        with config.patch(activation_memory_budget=_BUDGET):
            return base(graph, batch)

    return torch.compile(model, backend=backend)  # pyright: ignore[reportReturnType]


def _bytes(row: Shape, model: nn.Module, batch: Mapping[str, Any], folder: Path) -> Shape:
    """Count what a step keeps and needs, after one that makes buffers and compiles."""
    step = fit_steps.step_of(model, batch)
    step()
    fit_steps.clear(model)
    held, before = list[Any](), _settled(folder)
    kept = sum(_changes(lambda: held.append(model(**batch).loss)))
    host = _settled(folder) - before
    held.clear()
    fit_steps.clear(model)
    now = peak = 0
    for change in _changes(step):
        now += change
        peak = max(peak, now)
    fit_steps.clear(model)
    return replace(row, kept=kept, host=host, peak=peak)


def _changes(run: Callable[[], Any]) -> Iterator[int]:
    return (entry["args"]["Bytes"] for entry in allocations(run) if entry["name"] == _MEMORY)


def _settled(folder: Path) -> int:
    """Return the bytes of all files, once none is written any more."""
    before = -1
    while (now := sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())) != before:
        before = now
        time.sleep(0.2)
    return now


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_choices(parser, "--cases", tuple(shapes(tiny=False)))
    add_choices(parser, "--dtypes", tuple(DTYPES))
    parser.add_argument("--again", action="store_true", help="measure cases that are there, too")
    add_output(parser)


def run(arguments: argparse.Namespace) -> Iterator[str]:
    path, about = arguments.out / "shapes.csv", origin("cpu", arguments.commit)
    asked = tuple(shapes(arguments.tiny)) if arguments.tiny else arguments.cases
    for case, dtype in ((case, dtype) for dtype in arguments.dtypes for case in asked):
        rows = known_rows(path, Shape)
        here = [row for row in rows if (row.case, row.dtype) == (case, dtype)]
        if here and not arguments.again:
            continue
        try:
            found = [replace(row, **about) for row in call(measure, case, dtype, arguments.tiny, timeout=3600.0)]
        except ProcessError as error:
            yield f"{case}, {dtype}: {last_line(error)}"
            continue
        write_rows(path, [*(row for row in rows if row not in here), *found])
        yield show(found)
