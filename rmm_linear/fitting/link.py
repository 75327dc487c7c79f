"""The link between a device and the host, by which offloaded activations go: its speed, and what time it adds."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from rmm_linear._support.sizes import read_bytes
from rmm_linear.planning.stores.transfers import pinned_memory

_HINT = 'Use bytes per second as a number, or a text such as "25GB/s".'
_MEASURED = 1 << 28  # bytes of a copy whose time is measured: 10 ms at 25 GB/s
_ROUNDS = 3
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # of containers on Linux
SPEED, BANDWIDTH = 5e14, 25e9  # of a simulated device: half of an H100's peak in bfloat16; PCIe 4 with 16 lanes


@dataclass(frozen=True)
class Link:
    """The link to the host."""

    bandwidth: float  # bytes per second in each direction
    # Of the times that it is compared with, those in a second: 1, or operations where these replace seconds
    unit: float = 1.0

    def added(self, copied: int, forward: float, backward: float) -> float:
        """Return the time that copies add to a block's passes, which hide the rest of it."""
        copy = copied / self.bandwidth * self.unit
        return max(0.0, copy - forward) + max(0.0, copy - backward)


def read_bandwidth(value: object) -> float:
    """Read bytes per second: a number, or a text such as "25GB/s".

    Example:
        >>> read_bandwidth("25GB/s"), read_bandwidth(1e9)
        (25000000000.0, 1000000000.0)
    """
    if isinstance(value, str):
        try:
            return float(read_bytes("bandwidth", value.removesuffix("/s").rstrip()))
        except ValueError:
            raise ValueError(f"bandwidth must be bytes per second, got {value!r}. {_HINT}") from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"bandwidth must be bytes per second, got {value!r}. {_HINT}")
    if not 0 < value < float("inf"):
        raise ValueError(f"bandwidth must be positive, got {value!r}. {_HINT}")
    return float(value)


def measured_bandwidth(device: torch.device) -> float:
    """Measure the slower direction between an accelerator and pinned memory, in bytes per second."""
    try:
        there = torch.empty(_MEASURED, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        return BANDWIDTH
    here = pinned_memory(_MEASURED)
    here = torch.empty(_MEASURED, dtype=torch.uint8, device="cpu") if here is None else here
    slowest = 0.0
    for target, source in ((here, there), (there, here)):
        target.copy_(source, non_blocking=True)
        seconds = list[float]()
        for _ in range(_ROUNDS):
            torch.cuda.synchronize(device)
            begin = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - begin)
        slowest = max(slowest, min(seconds))
    return _MEASURED / slowest


def memory_of_host() -> int | None:
    """Return three quarters of the memory that this process may have, in bytes: the rest is for data and code.

    That is the machine's, or its container's, divided among the processes of a distributed run on it; None where the
    system does not say.
    """
    try:
        whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
    for limit in _LIMITS:
        with contextlib.suppress(OSError, ValueError):
            whole = min(whole, int(Path(limit).read_text(encoding="ascii")))
    processes = os.environ.get("LOCAL_WORLD_SIZE", "")
    return whole * 3 // 4 // (int(processes) if processes.isdigit() and int(processes) else 1)
