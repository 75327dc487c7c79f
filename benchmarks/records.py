"""Results as csv files: one dataclass per kind of row, whose fields are the columns and their types."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import io
import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks.library import provenance, table, write_text
from rmm_linear import __version__

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
RATIO = 0.1  # of the cases that the tables show


def _generated() -> list[str]:
    """List what is written from results, so that it does not make a commit another one: pages with tables too."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    named = [page for page in pages if page.is_file() and "<!-- table: " in page.read_text(encoding="utf-8")]
    return ["benchmarks/results", *(page.relative_to(ROOT).as_posix() for page in named)]


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a row comes from."""

    device: str = ""  # "cpu" or "cuda"
    machine: str = ""  # name of the CPU or GPU
    threads: int = 0  # threads of the CPU
    torch: str = ""  # version
    triton: str = ""  # version, or empty
    transformers: str = ""  # version, or empty
    python: str = ""  # version
    rmm_linear: str = ""  # version
    commit: str = ""  # commit of the checkout, with "-dirty" if files differed from it
    date: str = ""  # UTC


@dataclass(frozen=True)
class Row(Origin):
    suite: str  # "linear", "kernels", "host", "operators" or "blocks"
    case: str  # title of the case
    provider: str  # title of the provider
    dtype: str  # dtype of the input
    ratio: float = RATIO  # the case's K/N, or for packed sketches bytes kept by bytes of the input
    status: str = "ok"  # "ok", or why there is no time
    median: float | None = None  # median time
    lower: float | None = None  # lower quartile
    upper: float | None = None  # upper quartile
    unit: str = "s"  # unit of the three
    samples: int = 0  # times measured
    relative: float | None = None  # median by the median of the reference (nn.Linear, exact) in the same run
    # for kernels, bytes that must be moved per second, by those of a copy in the same run
    copy_share: float | None = None
    moved_bytes: int | None = None  # those bytes of one call
    kept_bytes: int | None = None  # bytes alive between forward and backward pass, parameters excluded
    peak_bytes: int | None = None  # peak of one step: tensors made in it on the CPU, all that is allocated on cuda
    seed: int = 0  # seed of the run


@dataclass(frozen=True)
class Parity(Origin):
    comparison: str  # title of the comparison
    what: str = ""  # what was compared
    error: float = float("nan")  # relative RMS error, or share of elements that differ
    limit: float = 0.0  # the most it may be
    status: str = "ok"  # "ok", "failed", or the error that was raised


@dataclass(frozen=True, kw_only=True)
class PresetRow(Origin):
    """The noise of one quality at one moment."""

    case: str  # name of the task or model
    step: int  # exact steps before
    batch: str  # whether the measured batch has padding: "one length" or "padded"
    dtype: str  # float32, or bfloat16 for autocast
    quality: str  # name of the preset
    saved: float = 0.0  # bytes that the whole model saves, by the exact model's
    linear_saved: float = 0.0  # bytes saved of valid rows of linear inputs, by those of the rows
    whole: float = 0.0  # D² / D²_SGD of the whole gradient
    whole_error: float = 0.0  # its standard error, over draws
    median: float = 0.0  # the same ratio of the median linear weight, with everything converted
    median_error: float = 0.0  # its standard error, over draws
    alone: float = 0.0  # the same of the median linear weight with linear layers alone converted
    coordinate: float = 0.0  # median over coordinates of the blocks of D² / (D²_SGD + g²)
    draws: int = 0  # gradients with new random numbers


@dataclass(frozen=True, kw_only=True)
class Noise(Origin):
    """Noise of sketches on a GLUE task: the median over layers of D²_sketch / D²_SGD."""

    task: str  # the GLUE task
    noise: float  # mean over seeds
    least: float  # least of the seeds
    most: float  # most of the seeds
    seeds: int  # number of seeds
    layers: int  # layers
    padding: float  # part of the tokens that is padding, mean over seeds
    seed: str = ""  # the seeds


@dataclass(frozen=True, kw_only=True)
class Sampled(Noise):
    """Noise of one kind of sketch with one norm estimator."""

    kind: str  # kind of sketch
    norm_estimator: str  # name of the estimator, "oracle", or empty where none applies


@dataclass(frozen=True, kw_only=True)
class Surveyed(Noise):
    """Noise of one setting at one memory."""

    setting: str  # kind of sketch and bits, as :func:`rmm_linear.variance.survey.survey.medians` names them
    memory: float  # bytes kept by bytes of the input


Record = TypeVar("Record", bound=Origin)


def origin(device: str, commit: str = "") -> dict[str, Any]:
    """Return the fields of :class:`Origin` for this process; without ``commit``, git is asked."""
    return {
        "device": device,
        "machine": torch.cuda.get_device_name() if device == "cuda" else provenance.machine(),
        "threads": torch.get_num_threads(),
        **provenance.versions("torch", "triton", "transformers"),
        "rmm_linear": __version__,
        "commit": commit or provenance.commit(__file__, ignored=_generated()) or "unknown",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def write_rows(path: Path, rows: Sequence[Origin]) -> None:
    """Write a csv file whole, or leave the old one if that fails; the columns are those of the first row."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(_columns(type(rows[0]))), lineterminator="\n")
    writer.writeheader()
    writer.writerows(dataclasses.asdict(row) for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, buffer.getvalue())


def read_rows(path: Path, kind: type[Record]) -> list[Record]:
    """Read what :func:`write_rows` wrote."""
    columns = _columns(kind)
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        found = reader.fieldnames or ()
        if set(found) != columns.keys():
            raise ValueError(
                f"{path} must have the columns {', '.join(columns)}, got {', '.join(found)}. "
                "Run the benchmark again, which writes it anew."
            )
        return [
            kind(**{name: columns[name](text) for name, text in row.items() if text or columns[name] is str})
            for row in reader
        ]


def known_rows(path: Path, kind: type[Record]) -> list[Record]:
    return read_rows(path, kind) if path.is_file() else []


def put_rows(path: Path, rows: Sequence[Record], is_replaced: Callable[[Record], bool]) -> None:
    """Put rows behind those of a csv file, which is read just before: another command may have written meanwhile."""
    there = known_rows(path, type(rows[0]))
    write_rows(path, [*(row for row in there if not is_replaced(row)), *rows])


def show(rows: Sequence[Origin]) -> str:
    """Return a table for the terminal: all columns in which rows say something, but for those of :class:`Origin`."""
    names = [name for name in _columns(type(rows[0])) if name not in Origin.__dataclass_fields__]
    names = [name for name in names if any(getattr(row, name) not in (None, "") for row in rows)]
    return table(names, [[_text(getattr(row, name)) for name in names] for row in rows])


def add_output(parser: argparse.ArgumentParser, out: Path | None = RESULTS) -> None:
    """Add what most commands take; without a folder to write into, one must be named."""
    parser.add_argument("--out", type=Path, default=out, required=out is None, help="folder of the csv files")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the command")
    parser.add_argument("--commit", default="", help="commit to write into the csv where there is no git")


def add_choices(parser: argparse.ArgumentParser, flag: str, every: Iterable[str], note: str = "all by default") -> None:
    """Add a flag that takes some of several names."""
    names = list(every)
    parser.add_argument(flag, choices=names, nargs="+", default=names, help=note)


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _columns(kind: type[Origin]) -> dict[str, type]:
    """The fields and their types, without ``| None``; where a row comes from is last."""
    types = {name: (typing.get_args(hint) or (hint,))[0] for name, hint in typing.get_type_hints(kind).items()}
    return dict(sorted(types.items(), key=lambda item: item[0] in Origin.__dataclass_fields__))
