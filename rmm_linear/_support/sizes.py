"""Sizes in bytes as people write them."""

from __future__ import annotations

import re

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_HINT = 'Use bytes as an integer, or a text such as "64MB" (10⁶ bytes) or "1.5GiB" (2³⁰ bytes).'


def read_bytes(name: str, value: object, others: str = "") -> int:
    """Read a number of bytes: an integer, or a text with B, KB … TB (powers of 1000) or KiB … TiB (powers of 1024).

    others: A sentence about what else may be given, for errors.

    Example:
        >>> read_bytes("memory", "64MB"), read_bytes("memory", "1.5 GiB")
        (64000000, 1610612736)
    """
    hint = f"{_HINT} {others}".rstrip()
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError(f"{name} must be a number of bytes or a text, got {value!r}. {hint}")
    if isinstance(value, str):
        match = re.fullmatch(r"(\d+|\d*\.\d+)([KMGT]I?|)B?", value.replace(" ", "").upper())
        if not match:
            raise ValueError(f"{name} must be a size, got {value!r}. {hint}")
        value = int(float(match[1]) * _UNITS[match[2]])
    if value < 1:
        raise ValueError(f"{name} must be at least one byte, got {value}. {hint}")
    return value


def read_share(name: str, value: object) -> float | None:
    """Read a share in (0, 1]: a float, or a text such as "60%" or "0.6"; None for anything else.

    Example:
        >>> [read_share("memory", value) for value in ("60%", "0.6", 0.6, "60MB")]
        [0.6, 0.6, 0.6, None]
    """
    share = value
    if isinstance(value, str) and (match := re.fullmatch(r"(\d+\.?\d*|\.\d+)%|\d*\.\d+", value.replace(" ", ""))):
        share = float(match[1]) / 100 if match[1] else float(match[0])
    if not isinstance(share, float):
        return None
    if not 0 < share <= 1:
        raise ValueError(
            f"{name} as a share must be in (0, 1], or (0 %, 100 %], got {value!r}. Use an integer or a text such as "
            '"2GB" for bytes.'
        )
    return share


def show_bytes(count: int) -> str:
    """Write a number of bytes with a unit, to three digits.

    Example:
        >>> show_bytes(28672), show_bytes(64_000_000)
        ('28.0 KiB', '61.0 MiB')
    """
    size, units = float(count), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return (
        f"{count} bytes"
        if units[0] == "bytes"
        else f"{size:.{0 if size >= 100 else 1 if size >= 10 else 2}f} {units[0]}"
    )


def show_both(count: int) -> str:
    """Write a number of bytes in powers of 1000 and of 1024, as "80GB" is 74.5 GiB.

    Example:
        >>> show_both(80_000_000_000), show_both(28)
        ('80.0 GB (74.5 GiB)', '28 bytes')
    """
    if count < 1000:
        return show_bytes(count)
    size, units = float(count), ["bytes", "KB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.{0 if size >= 100 else 1 if size >= 10 else 2}f} {units[0]} ({show_bytes(count)})"
