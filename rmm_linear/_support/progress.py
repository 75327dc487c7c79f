"""Say on stderr how far a long call is: a line per stage with the time since its begin, a bar where steps are counted.

What runs inside of a call says its stages by :func:`stage` and :func:`counting`, which do nothing where nobody reads
them. Calls inside of a call are a part of it. Where the lines go is kept per thread, for the time of the call.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

import torch

logger = logging.getLogger("rmm_linear")

_APART = 1.0  # seconds between two lines of steps that are counted


class Progress:
    """The lines of one call."""

    def __init__(self, name: str, out: Any) -> None:
        self.name, self.out = name, out
        self.took: dict[str, list[float]] = {}  # stage to the seconds that it took, each time
        self._begin = self._said = time.perf_counter()
        self._stage: tuple[str, float] | None = None

    def line(self, text: str) -> None:
        """Write a line, above the bars of others; a stream that is closed is no reason to fail."""
        self._said = time.perf_counter()
        text = f"{self.name}: {text} · {show_seconds(self._said - self._begin)}"
        with suppress(OSError, ValueError):
            if (tqdm := sys.modules.get("tqdm")) is not None:
                tqdm.tqdm.write(text, file=self.out)
            else:
                self.out.write(f"{text}\n")
            self.out.flush()

    def stage(self, text: str, *, is_said: bool = True) -> None:
        """End a stage and begin the next one."""
        self.end_stage()
        if is_said:
            self.line(text)
        self._stage = text, time.perf_counter()

    def end_stage(self) -> None:
        """Note how long a stage took."""
        if self._stage is not None:
            text, begin = self._stage
            self.took.setdefault(text, []).append(time.perf_counter() - begin)
            self._stage = None

    @contextmanager
    def counting(self, text: str, total: int) -> Iterator[Callable[[str], None]]:
        """Count the steps of a stage, by a bar on a terminal."""
        begun, bar = 0, _bar(f"{self.name}: {text}", total, self.out)
        self.stage(text, is_said=bar is None)

        def begins(name: str) -> None:
            nonlocal begun
            if bar is not None:
                bar.set_postfix_str(name, refresh=False)
                bar.update(min(begun, 1))
                bar.refresh()
            elif not begun or time.perf_counter() - self._said > _APART:
                self.line(f"{text}, {begun + 1} of {total}{f': {name}' if name else ''}")
            begun += 1

        try:
            yield begins
            if bar is not None:
                bar.update(total - bar.n)
        finally:
            self.end_stage()
            if bar is not None:
                bar.close()


_current: ContextVar[Progress | None] = ContextVar("rmm_linear_progress", default=None)


@contextmanager
def reporting(name: str, progress: bool | None = None, rank: int = 0) -> Iterator[None]:
    """Let the stages inside of the block be said: None on a terminal, or where the library's logger is at INFO.

    Nothing is said in other processes than that of a rank. Blocks inside of a block add to its lines.
    """
    check_progress(progress)
    outer, out = _current.get(), sys.stderr
    is_shown = progress is not False and out is not None and _rank() == rank
    if is_shown and (outer is not None or not (progress or _is_terminal(out) or logger.isEnabledFor(logging.INFO))):
        yield
        return
    found = Progress(name, out) if is_shown else None
    token = _current.set(found)
    try:
        yield
        if found is not None:
            found.end_stage()
            found.line("done")
    finally:
        _current.reset(token)


def check_progress(progress: object) -> None:
    """Raise unless a value says whether progress is shown."""
    if progress is not None and not isinstance(progress, bool):
        raise TypeError(f"progress must be True, False, or None for what the terminal allows, got {progress!r}.")


def stage(text: str) -> None:
    """Begin a stage of the call that runs."""
    if (progress := _current.get()) is not None:
        progress.stage(text)


def end_stage() -> None:
    """End a stage whose seconds will be asked for."""
    if (progress := _current.get()) is not None:
        progress.end_stage()


@contextmanager
def counting(text: str, total: int) -> Iterator[Callable[[str], None]]:
    """Begin a stage of counted steps; call what this returns as each of them begins, with its name."""
    progress = _current.get()
    if progress is None:
        yield lambda name: None
    else:
        with progress.counting(text, total) as begins:
            yield begins


def took(text: str) -> float | None:
    """Return the seconds that a stage took when it last ended; 0 if it did not run, None if nobody reads lines."""
    progress = _current.get()
    return None if progress is None else progress.took.get(text, [0.0])[-1]


def expect(steps: float, seconds: float | None = None, *, of: str = "steps' time", what: str = "") -> None:
    """Say beforehand about how long a call takes, in steps of training."""
    if (progress := _current.get()) is not None:
        progress.end_stage()
        in_all = "" if seconds is None else f" in all, {show_seconds(seconds)}"
        progress.line(f"{what}about {float(f'{max(steps, 1):.2g}'):,.0f} {of}{in_all}")


def show_seconds(seconds: float) -> str:
    """Show a time in the unit of its size.

    Example:
        >>> show_seconds(0.25), show_seconds(40), show_seconds(130), show_seconds(8000)
        ('0.2 s', '40 s', '2 min 10 s', '2 h 13 min')
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _rank() -> int:
    """Return the number of this process; launchers set RANK before processes are connected."""
    distributed = torch.distributed
    is_connected = distributed.is_available() and distributed.is_initialized()
    return distributed.get_rank() if is_connected else int(os.environ.get("RANK", "0"))


def _is_terminal(out: Any) -> bool:
    with suppress(ValueError):  # of a stream that is closed
        return out.isatty()
    return False


def _bar(text: str, total: int, out: Any) -> Any:
    """Return a bar of tqdm on a terminal where tqdm is installed, without the thread that watches bars; else None."""
    if not _is_terminal(out) or os.environ.get("TQDM_DISABLE"):
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None

    class Bar(tqdm):
        monitor_interval = 0

    return Bar(total=total, desc=text, file=out, dynamic_ncols=True)
