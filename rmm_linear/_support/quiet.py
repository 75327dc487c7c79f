"""Keep the library from logging while it tries things out."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet() -> Iterator[None]:
    """Log nothing of this library inside the block: what is tried there is no training step of the user's."""
    logger = logging.getLogger("rmm_linear")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
