"""Results as csv files: one dataclass per kind of row, whose fields are the columns and their types."""

from __future__ import annotations

import csv
import dataclasses
import io
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

import torch

from rmm_linear import __version__
from rmm_linear._support import provenance
from rmm_linear._support.files import write_text
from rmm_linear._support.tables import table

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
    """Where a row comes from.

    Attributes:
        device: "cpu" or "cuda".
        machine: Name of the CPU or GPU.
        threads: Threads of the CPU.
        torch: Version.
        triton: Version, or empty.
        transformers: Version, or empty.
        python: Version.
        rmm_linear: Version.
        commit: Commit of the checkout, with "-dirty" if files differed from it.
        date: UTC.
    """

    device: str = ""
    machine: str = ""
    threads: int = 0
    torch: str = ""
    triton: str = ""
    transformers: str = ""
    python: str = ""
    rmm_linear: str = ""
    commit: str = ""
    date: str = ""


@dataclass(frozen=True)
class Row(Origin):
    """One provider on one case.

    Attributes:
        suite: "linear", "model", "kernels", "growth", "host", "operators" or "blocks".
        case: Title of the case.
        provider: Title of the provider.
        dtype: dtype of the input; for models on cuda, that of autocast.
        ratio: The case's K/N, or for packed sketches bytes kept by bytes of the input.
        status: "ok", or why there is no time.
        median: Median time.
        lower: Lower quartile.
        upper: Upper quartile.
        unit: Unit of the three.
        samples: Times measured.
        relative: Median by the median of the reference (nn.Linear, exact) in the same run.
        copy_share: For kernels, bytes that must be moved per second, by those of a copy in the same run.
        moved_bytes: Those bytes of one call.
        kept_bytes: Bytes alive between forward and backward pass, parameters excluded.
        peak_bytes: Peak of one step: tensors made in it on the CPU, all that is allocated on cuda.
        seed: Seed of the run.
    """

    suite: str
    case: str
    provider: str
    dtype: str
    ratio: float = RATIO
    status: str = "ok"
    median: float | None = None
    lower: float | None = None
    upper: float | None = None
    unit: str = "s"
    samples: int = 0
    relative: float | None = None
    copy_share: float | None = None
    moved_bytes: int | None = None
    kept_bytes: int | None = None
    peak_bytes: int | None = None
    seed: int = 0


@dataclass(frozen=True)
class Parity(Origin):
    """One check of a kernel against its reference.

    Attributes:
        comparison: Title of the comparison.
        what: What was compared.
        error: Relative RMS error, or share of elements that differ.
        limit: The most it may be.
        status: "ok", "failed", or the error that was raised.
    """

    comparison: str
    what: str = ""
    error: float = float("nan")
    limit: float = 0.0
    status: str = "ok"


@dataclass(frozen=True, kw_only=True)
class Noise(Origin):
    """Noise of sketches on a GLUE task: the median over layers of D²_sketch / D²_SGD.

    Attributes:
        task: The GLUE task.
        noise: Mean over seeds.
        least: Least of the seeds.
        most: Most of the seeds.
        seeds: Number of seeds.
        layers: Layers.
        padding: Part of the tokens that is padding, mean over seeds.
        seed: The seeds.
    """

    task: str
    noise: float
    least: float
    most: float
    seeds: int
    layers: int
    padding: float
    seed: str = ""


@dataclass(frozen=True, kw_only=True)
class Sampled(Noise):
    """Noise of one kind of sketch with one norm estimator.

    Attributes:
        kind: Kind of sketch.
        norm_estimator: Name of the estimator, "oracle", or empty where none applies.
    """

    kind: str
    norm_estimator: str


@dataclass(frozen=True, kw_only=True)
class Surveyed(Noise):
    """Noise of one setting at one memory.

    Attributes:
        setting: Kind of sketch and bits, as :func:`rmm_linear.variance.survey.survey.medians` names them.
        memory: Bytes kept by bytes of the input.
    """

    setting: str
    memory: float


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
    """Read what :func:`write_rows` wrote.

    Args:
        path: The csv file.
        kind: Class of its rows. An empty cell that holds no text becomes the field's default.

    Returns:
        The rows.

    Raises:
        ValueError: If the columns are others.
    """
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
    """Read what :func:`write_rows` wrote.

    Args:
        path: The csv file.
        kind: Class of its rows.

    Returns:
        The rows; none if there is no file.

    Raises:
        ValueError: If the columns are others.
    """
    return read_rows(path, kind) if path.is_file() else []


def put_rows(path: Path, rows: Sequence[Record], is_replaced: Callable[[Record], bool]) -> None:
    """Put rows behind those of a csv file, which is read just before: another command may have written meanwhile.

    Args:
        path: The csv file; made if there is none.
        rows: At least one.
        is_replaced: Whether a row that is there goes.
    """
    there = known_rows(path, type(rows[0]))
    write_rows(path, [*(row for row in there if not is_replaced(row)), *rows])


def show(rows: Sequence[Origin]) -> str:
    """Return a table for the terminal: all columns in which rows say something, but for those of :class:`Origin`."""
    names = [name for name in _columns(type(rows[0])) if name not in Origin.__dataclass_fields__]
    names = [name for name in names if any(getattr(row, name) not in (None, "") for row in rows)]
    return table(names, [[_text(getattr(row, name)) for name in names] for row in rows])


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _columns(kind: type[Origin]) -> dict[str, type]:
    """The fields and their types, without ``| None``; where a row comes from is last."""
    types = {name: (typing.get_args(hint) or (hint,))[0] for name, hint in typing.get_type_hints(kind).items()}
    return dict(sorted(types.items(), key=lambda item: item[0] in Origin.__dataclass_fields__))
