"""Keep the library from logging while it tries things out."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet() -> Iterator[None]:
    """Log nothing of this library inside the block: what is tried there is no training step of the user's."""
    loggers = [logging.getLogger(name) for name in ("rmm_linear", "torch._subclasses.fake_tensor")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
