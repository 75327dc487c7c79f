"""RMMConfig: which layers are sketched, and how."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rmm_linear._version import __version__
from rmm_linear.sketches import FAMILIES, KINDS

_VERSION_KEY = "rmm_linear_version"
_SELECTION = ("target_modules", "exclude_modules", "overrides")


@dataclass(frozen=True)
class RMMConfig:
    """How layers keep their input for the backward pass. Immutable, validated when it is made.

    Attributes:
        kind: Family of the sketch, one of :data:`rmm_linear.sketches.KINDS`.
        ratio: Rows kept by rows seen, K/N, in (0, 1]. 1 keeps every row: exact.
        block: Tokens per block of a block-diagonal sketch (gaussian, rademacher); None mixes all tokens.
        min_rows: K is never smaller, so heads that see one row per sequence stay exact. At least 1.
        target_modules: Layers to convert: "all-linear" (all but the output head), a regular expression that the whole
            name must match, or a list of names, each exact or a dotted suffix ("query", "attention.self.query").
        exclude_modules: Layers to leave alone, a regular expression or a list as above.
        overrides: Pattern to fields that differ for the layers it matches, as ``{"query": {"ratio": 0.5}}``. A pattern is
            a name, a dotted suffix or a regular expression for the whole name; the first that matches is taken.

    Raises:
        ValueError: If a value is outside its range.
        TypeError: If a value has the wrong type.

    Example:
        >>> RMMConfig(ratio=0.2).rows(1000)
        200
        >>> RMMConfig(ratio=1.5)
        Traceback (most recent call last):
        ...
        ValueError: ratio must be in (0, 1], got 1.5. Use ratio=1 to store every row.
    """

    kind: str = "countsketch"
    ratio: float = 0.1
    block: int | None = None
    min_rows: int = 64
    target_modules: str | Sequence[str] = "all-linear"
    exclude_modules: str | Sequence[str] | None = None
    overrides: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Validate, and freeze the containers."""
        _check_kind(self.kind)
        _check_ratio(self.ratio)
        _check_integer("block", self.block, optional=True)
        _check_integer("min_rows", self.min_rows)
        if self.block is not None and not FAMILIES[self.kind].blocks:
            able = " and ".join(name for name in KINDS if FAMILIES[name].blocks)
            raise ValueError(
                f"block is for {able} only, got block={self.block} with kind={self.kind!r}. Use block=None."
            )
        object.__setattr__(self, "target_modules", _names("target_modules", self.target_modules))
        if self.exclude_modules is not None:
            object.__setattr__(self, "exclude_modules", _names("exclude_modules", self.exclude_modules))
        object.__setattr__(self, "overrides", self._checked_overrides())

    def _checked_overrides(self) -> dict[str, dict[str, Any]]:
        if not isinstance(self.overrides, Mapping):
            raise TypeError(f"overrides must map a name pattern to fields, got {type(self.overrides).__name__}.")
        checked: dict[str, dict[str, Any]] = {}
        for pattern, changes in self.overrides.items():
            _check_pattern("overrides", pattern)
            if not isinstance(changes, Mapping):
                raise TypeError(f"overrides[{pattern!r}] must map field names to values, got {changes!r}.")
            allowed = [f.name for f in dataclasses.fields(self) if f.name not in _SELECTION]
            unknown = sorted(set(changes) - set(allowed))
            if unknown:
                raise ValueError(f"overrides[{pattern!r}] may change {', '.join(allowed)}; got {', '.join(unknown)}.")
            try:
                dataclasses.replace(self, overrides={}, **changes)
            except (TypeError, ValueError) as error:
                raise type(error)(f"overrides[{pattern!r}]: {error}") from None
            checked[pattern] = dict(changes)
        return checked

    def rows(self, tokens: int) -> int:
        """Return K for a layer that sees ``tokens`` rows.

        Args:
            tokens: N.

        Returns:
            max(min_rows, round(ratio · N)), at most N; N means that the layer stores its input itself.
        """
        return min(tokens, max(self.min_rows, round(self.ratio * tokens)))

    def for_module(self, name: str) -> RMMConfig:
        """Return the configuration of one layer: this one with the first matching override applied.

        Args:
            name: Dotted name of the layer in the model.

        Returns:
            A configuration without overrides.
        """
        pattern = self.override_pattern(name)
        return dataclasses.replace(self, overrides={}, **(self.overrides[pattern] if pattern is not None else {}))

    def override_pattern(self, name: str) -> str | None:
        """Return the first pattern of ``overrides`` that matches a layer.

        Args:
            name: Dotted name of the layer in the model.

        Returns:
            The pattern, or None.
        """
        for pattern in self.overrides:
            if name == pattern or name.endswith(f".{pattern}") or re.fullmatch(pattern, name):
                return pattern
        return None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON types.

        Returns:
            A dictionary that :meth:`from_dict` takes back.
        """
        return {
            f.name: list(value) if isinstance(value := getattr(self, f.name), tuple) else value
            for f in dataclasses.fields(self)
        } | {"overrides": {pattern: dict(changes) for pattern, changes in self.overrides.items()}}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RMMConfig:
        """Make a configuration from :meth:`to_dict`'s result.

        Args:
            values: Field names to values. Unknown keys are ignored with a warning when a newer version of the library
                wrote them, and are an error otherwise.

        Returns:
            The configuration.

        Raises:
            TypeError: If ``values`` is not a mapping.
            ValueError: If a key is unknown or a value is out of range.
        """
        if not isinstance(values, Mapping):
            raise TypeError(f"A configuration is a mapping of field names to values, got {type(values).__name__}.")
        known = [f.name for f in dataclasses.fields(cls)]
        unknown = sorted(set(values) - {*known, _VERSION_KEY})
        if unknown:
            written = values.get(_VERSION_KEY)
            if not _is_newer(written):
                raise ValueError(
                    f"Unknown keys {', '.join(unknown)}. A configuration has the fields {', '.join(known)}."
                )
            warnings.warn(
                f"Ignoring {', '.join(unknown)}: written by rmm_linear {written}, this is {__version__}. "
                "Upgrade rmm_linear to use them.",
                stacklevel=2,
            )
        return cls(**{name: values[name] for name in known if name in values})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the configuration as JSON, atomically, with the version of the library.

        Args:
            path: File to write.
        """
        path = Path(path)
        text = json.dumps({_VERSION_KEY: __version__, **self.to_dict()}, indent=2) + "\n"
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8") as file:
            temporary = Path(file.name)
        try:
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> RMMConfig:
        """Read a configuration that :meth:`save` wrote.

        Args:
            path: File to read.

        Returns:
            The configuration.

        Raises:
            ValueError: If the file is not such a configuration; the message names the file.
        """
        try:
            return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{os.fspath(path)} is not a valid RMMConfig: {error}") from error


def _check_kind(kind: object) -> None:
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}.")


def _check_ratio(ratio: object) -> None:
    if isinstance(ratio, bool) or not isinstance(ratio, int | float):
        raise TypeError(f"ratio must be a number in (0, 1], got {ratio!r}.")
    if not 0 < ratio <= 1:
        raise ValueError(f"ratio must be in (0, 1], got {ratio}. Use ratio=1 to store every row.")


def _check_integer(name: str, value: object, *, optional: bool = False) -> None:
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a positive integer{' or None' if optional else ''}, got {value!r}.")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}.")


def _names(name: str, value: object) -> str | tuple[str, ...]:
    if isinstance(value, str):
        _check_pattern(name, value)
        return value
    if isinstance(value, Sequence | set | frozenset) and all(isinstance(entry, str) for entry in value):
        if not value:
            raise ValueError(f"{name} must name at least one layer, got an empty list.")
        return tuple(value)
    raise TypeError(f"{name} must be a regular expression or a list of layer names, got {value!r}.")


def _check_pattern(name: str, pattern: object) -> None:
    if not isinstance(pattern, str):
        raise TypeError(f"{name} must be made of strings, got {pattern!r}.")
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{name} must be a valid regular expression, got {pattern!r} ({error}).") from None


def _is_newer(version: object) -> bool:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in re.findall(r"\d+", text)[:3]]

    return isinstance(version, str) and numbers(version) > numbers(__version__)
