"""Rows of results, and what every one of them says about where it comes from."""

from __future__ import annotations

import csv
import dataclasses
import functools
import io
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from rmm_linear import __version__
from rmm_linear._support.files import write_text

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True)
class Row:
    """One provider on one case.

    Attributes:
        suite: "linear", "model" or "kernels".
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
        device: "cpu" or "cuda".
        machine: Name of the CPU or GPU.
        threads: Threads of the CPU.
        torch: Version.
        triton: Version, or empty.
        transformers: Version, or empty.
        python: Version.
        rmm_linear: Version.
        commit: Commit of the checkout, with "+" if files differed from it.
        seed: Seed of the run.
        date: UTC.
    """

    suite: str
    case: str
    provider: str
    dtype: str
    ratio: float = 0.1
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
    device: str = ""
    machine: str = ""
    threads: int = 0
    torch: str = ""
    triton: str = ""
    transformers: str = ""
    python: str = ""
    rmm_linear: str = ""
    commit: str = ""
    seed: int = 0
    date: str = ""


COLUMNS = tuple(field.name for field in dataclasses.fields(Row))
_NUMBERS = {"ratio", "median", "lower", "upper", "relative", "copy_share"}
_COUNTS = {"samples", "moved_bytes", "kept_bytes", "peak_bytes", "threads", "seed"}


def environment(device: str, commit: str | None = None) -> dict[str, str | int]:
    """Return the columns that are the same for a whole run.

    Args:
        device: "cpu" or "cuda".
        commit: What to write as the commit; None asks git.

    Returns:
        Column to value.
    """
    return {
        "device": device,
        "machine": torch.cuda.get_device_name() if device == "cuda" else _cpu_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "transformers": _version("transformers"),
        "python": platform.python_version(),
        "rmm_linear": __version__,
        "commit": commit or _commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write a suite's file, or leave the old one if that fails.

    Args:
        path: The csv file.
        rows: All rows of the suite.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: _text(value) for name, value in dataclasses.asdict(row).items()})
    write_text(path, buffer.getvalue())


def read_rows(path: Path) -> list[Row]:
    """Read what :func:`write_rows` wrote.

    Args:
        path: The csv file.

    Returns:
        Its rows.

    Raises:
        ValueError: If the columns are others.
    """
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise ValueError(
                f"{path} must have the columns {', '.join(COLUMNS)}, got {', '.join(reader.fieldnames or ())}. "
                "Run the suite again: python -m benchmarks run."
            )
        return [Row(**{name: _value(name, text) for name, text in record.items()}) for record in reader]


def _text(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _value(name: str, text: str) -> Any:
    if name in _NUMBERS:
        return float(text) if text else None
    if name in _COUNTS:
        return int(text) if text else None
    return text


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


@functools.cache
def _commit() -> str:
    def git(*words: str) -> str:
        command = ["git", "-C", str(ROOT), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results", ":!README.md")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
