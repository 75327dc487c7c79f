"""What every kernel must move between memory and chip, per element of its matrix: by formula, from its contract.

Counted is what is read once and what is written. What a program reads again, from a cache, is not; nor is what is read
once for a whole matrix: seeds, γ, the shifts of CountSketch. A formula is a text, such as "2 + 4/8 + 1/64" for packing
bfloat16 in 4 bits: element, code, and scale of 64 elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

COLUMNS = 4096  # of the matrix: what belongs to a row is shared by so many elements
KEPT = "1/10"  # K/N of sketches
_SIZES = {"*u8": 1, "*bf16": 2, "*fp16": 2, "*fp32": 4, "*i64": 8}
_ROW = {"index": f"8/{COLUMNS}", "rstd": f"4/{COLUMNS}", "norm": f"4/{COLUMNS}", "key": f"8/{COLUMNS}"}


def moved(name: str, dtype: str, constants: dict[str, Any]) -> str:
    """Return the formula of a variant.

    Args:
        name: The variant's name, of which the first word is the kernel.
        dtype: "*bf16", or of the matrix and of the sketch "*fp16 *fp32".
        constants: Its constants.

    Returns:
        Bytes per element, a sum of products of numbers and fractions.

    Raises:
        ValueError: If the kernel has no formula.
    """
    kernel = name.split()[0]
    if kernel not in FORMULAS:
        raise ValueError(f"A kernel must have a formula in rmm_kernels_moved.FORMULAS, got {kernel!r}. Add its line.")
    read, made = (_SIZES[one] for one in (dtype.split() * 2)[:2])
    terms = FORMULAS[kernel](read, made, constants)
    if constants.get("HAS_INDEX") or constants.get("HAS_PLACE"):
        terms.append(_ROW["index"])
    if constants.get("MASKED") and kernel != "random_keys":
        terms.append(_ROW["index"])  # the order of all rows
    return " + ".join(map(str, terms))


def value(formula: str) -> float:
    """Return the number that a formula stands for.

    Args:
        formula: A text of :func:`moved`.

    Returns:
        Bytes per element.

    Example:
        >>> value("2 + 4/8 + 1/64")
        2.515625
    """
    return float(sum(math.prod(map(Fraction, term.split(" · "))) for term in formula.split(" + ")))


def _packed(bits: int) -> list[Any]:
    return [f"{bits}/8", "1/64"]


def _normal(constants: dict[str, Any]) -> list[Any]:
    return [f"{constants['SIZE']}/128", "1/128"]


def _kept(made: int, constants: dict[str, Any]) -> list[Any]:
    """What a sketch writes."""
    bits = constants["BITS"]
    return [f"{KEPT} · {term}" for term in (_packed(bits) if bits else [made])]


def _sparse_sketch(read: int, made: int, constants: dict[str, Any]) -> list[Any]:
    if constants["HASHED"]:
        return [read, f"1/8 · 1/{COLUMNS}", *_kept(made, constants)]  # one bit of sign for a token
    return [f"{KEPT} · {read}", f"{KEPT} · 8/{COLUMNS}", *_kept(made, constants)]  # index and scale of a row


def _dense_sketch(read: int, made: int, constants: dict[str, Any]) -> list[Any]:
    index = [f"{KEPT} · 8/{COLUMNS}"] if constants["KIND"] == 2 else []  # rows of the Hadamard matrix
    return [read, *index, *_kept(made, constants)]


def _norm_backward(read: int, made: int, constants: dict[str, Any]) -> list[Any]:
    return [read, *_packed(constants["BITS"]), _ROW["rstd"], made, f"{1 + constants['CENTERED']} · 4/{COLUMNS}"]


def _norm_sums(read: int, made: int, constants: dict[str, Any]) -> list[Any]:
    return [read, *_packed(constants["BITS"]), f"{1 + constants['CENTERED']} · 4/64"]  # of every row and group alone


def _norm_totals(read: int, made: int, constants: dict[str, Any]) -> list[Any]:
    return [f"{1 + constants['CENTERED']} · 4/64", f"{1 + constants['CENTERED']} · 4/{COLUMNS}"]


def _channel_sums(read: int, made: int, constants: dict[str, Any]) -> list[Any]:
    return [read, *_packed(constants["BITS"]), _of_channels(constants)]


def _of_channels(constants: dict[str, Any]) -> str:
    """Four sums of a row and group, or of a column and two tiles."""
    return "4 · 4/64" if constants["FIRST"] else "4 · 4/128"


# Of the bytes of an element read and written, and of the constants.
FORMULAS: dict[str, Callable[[int, int, dict[str, Any]], list[Any]]] = {
    "sparse_sketch": _sparse_sketch,
    "dense_sketch": _dense_sketch,
    "hash": lambda read, made, c: [f"1/8 · 1/{COLUMNS}"],
    "random_keys": lambda read, made, c: [_ROW["key"]],
    "row_norms": lambda read, made, c: [read, _ROW["norm"]],
    "pack": lambda read, made, c: [read, *_packed(c["BITS"])],
    "unpack": lambda read, made, c: [*_packed(c["BITS"]), made],
    "row_statistics": lambda read, made, c: [read, f"{1 + c['CENTERED']} · 4/{COLUMNS}"],
    "encode_normal": lambda read, made, c: [read, *_normal(c)],
    "decode_normal": lambda read, made, c: [*_normal(c), made],
    "pack_norm": lambda read, made, c: [read, *_packed(c["BITS"]), f"{1 + c['CENTERED']} · 4/{COLUMNS}"],
    "norm_sums": _norm_sums,
    "norm_totals": _norm_totals,
    "norm_backward": _norm_backward,
    "pack_derivative": lambda read, made, c: [read, f"{c['BITS']}/8"],
    "apply_derivative": lambda read, made, c: [read, f"{c['BITS']}/8", made],
    "channel_statistics": lambda read, made, c: [read, f"2 · 4/{16 * c['B_L']}"],
    "channel_moments": lambda read, made, c: [f"2 · 4/{COLUMNS}"],
    "pack_channels": lambda read, made, c: [read, *_packed(c["BITS"])],
    "channel_sums": _channel_sums,
    "channel_totals": lambda read, made, c: [_of_channels(c)],
    "channel_backward": lambda read, made, c: [read, *_packed(c["BITS"]), made],
    # Of an output, of 3 × 3 elements in steps of 2; and of an input.
    "max_pool": lambda read, made, c: [f"4 · {read}", made, f"{c['BITS']}/8"],
    "max_pool_backward": lambda read, made, c: [f"1/4 · {read}", f"1/4 · {c['BITS']}/8", made],
    "pack_mask": lambda read, made, c: [read, "1/8"],
    "apply_mask": lambda read, made, c: [read, "1/8", made],
    "dropout": lambda read, made, c: [read, made],
    "pack_gated": lambda read, made, c: [read, read, *_packed(c["BITS"]) * 2],
    "apply_gated": lambda read, made, c: [read, *_packed(c["BITS"]) * 2, made, made],
    "activate": lambda read, made, c: [read, made, f"{c['BITS']}/8"],
    "square": lambda read, made, c: [read, made, *_packed(c["BITS"])],
    "gate": lambda read, made, c: [read, read, made, *_packed(c["BITS"]) * 2],
    "normalize": lambda read, made, c: [read, made, *_packed(c["BITS"]), f"{1 + c['CENTERED']} · 4/{COLUMNS}"],
}
