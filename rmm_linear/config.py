"""RMMConfig selects the layers to sketch and how each is sketched."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rmm_linear._support.files import write_text
from rmm_linear._support.validation import check_fraction, check_integer, check_pattern, is_newer_version, read_names
from rmm_linear._version import __version__
from rmm_linear.norm_estimators.registry import NONE, check_norm_estimator
from rmm_linear.packing import WIDTHS, packed_bytes
from rmm_linear.sketches import KINDS, SAMPLERS, UNIFORM_MIX, check_block, check_kind
from rmm_linear.spec import ROW_SAMPLE_BYTES, SaveSpec

STATE_KEY = "sketch_state"
_VERSION_KEY = "rmm_linear_version"
_DEFAULT_MEMORY, _AUTO_BITS = 0.1, 4
_SELECTION = ("target_modules", "exclude_modules", "overrides")


def _field(default: Any, help: str) -> Any:
    """A field with the help text of its command line flag."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class RMMConfig:
    """How layers save their input for the backward pass. Immutable; validated on construction.

    Attributes:
        kind: Family of the sketch, one of :data:`rmm_linear.sketches.KINDS`.
        ratio: Saved rows as a fraction of the input's rows, K/N, in (0, 1]; 1 saves every row. Give ``ratio`` or
            ``memory``, not both.
        memory: Saved bytes as a fraction of the input's bytes, in (0, 1]; K follows from it and from ``bits``. 0.1 if
            neither is given.
        bits: Bits per stored element: 8, 4, 2, None for the dtype itself, or "auto". With ``memory``, "auto" chooses
            for each layer from the noise predicted on the first steps; with ``ratio`` it is the dtype itself.
        block: Tokens per block of a block-diagonal sketch (gaussian, rademacher, hadamard); None mixes all tokens.
        uniform_mix: For kinds that sample rows by importance (norm_rows, wta): the part of the probability that is
            uniform over the tokens, in (0, 1]. It bounds what a token with a small input can add to the variance.
        norm_estimator: For the same kinds, how the norm of a token's output gradient is predicted: "none" (by the norm
            of the input alone), "position", "token" or "position_token" (running means), "sample_cache" or
            "sequence_cache" (the last epoch's, by dataset index), or a name given to
            :func:`rmm_linear.estimators.register_norm_estimator`.
        min_rows: Lower limit of K, at least 1. Layers whose input has no more rows stay exact, such as heads with one
            row per sequence.
        mask_padding: Whether padding is left out of the sketch, in models whose forward takes ``attention_mask``.
        target_modules: Layers to convert: "all-linear" (all but the output head), a regular expression that the whole
            name must match, or a list of names, each exact or a dotted suffix ("query", "attention.self.query").
        exclude_modules: Layers not to convert, a regular expression or a list as above.
        overrides: Pattern to fields that differ for the layers it matches, such as ``{"query": {"ratio": 0.5}}``. A
            pattern is a name, a dotted suffix or a regular expression for the whole name; the first match is used.

    Raises:
        ValueError: If a value is outside its range.
        TypeError: If a value has the wrong type.

    Example:
        >>> RMMConfig(ratio=0.2).spec(1000, 768, itemsize=4).rows
        200
        >>> RMMConfig(ratio=1.5)
        Traceback (most recent call last):
        ...
        ValueError: ratio must be in (0, 1], got 1.5. Use ratio=1 to store every row.
    """

    kind: str = _field("countsketch", f"Family of the sketch: {', '.join(KINDS)}.")
    ratio: float | None = _field(None, "Saved rows as a fraction of the rows seen, in (0, 1].")
    memory: float | None = _field(None, "Saved bytes as a fraction of the input's bytes, in (0, 1]; instead of ratio.")
    bits: int | str | None = _field("auto", "Bits per stored element: 8, 4, 2, none for the dtype itself, or auto.")
    block: int | None = _field(
        None, "Tokens per block of a block-diagonal gaussian, rademacher or hadamard sketch. Default: one block."
    )
    uniform_mix: float = _field(UNIFORM_MIX, "For norm_rows and wta: share of the uniform distribution, in (0, 1].")
    norm_estimator: str = _field(
        NONE,
        "For norm_rows and wta: what the size of a token's gradient is expected from: none, position, token, "
        "position_token, sample_cache, sequence_cache, or a registered name.",
    )
    min_rows: int = _field(64, "Rows saved at least, so that heads which see one row per sequence stay exact.")
    mask_padding: bool = _field(True, "Whether padding is left out of the sketch: true or false.")
    target_modules: str | Sequence[str] = _field(
        "all-linear", "Layers to convert: all-linear, names (exact or dotted suffixes), or one regular expression."
    )
    exclude_modules: str | Sequence[str] | None = _field(
        None, "Layers to leave alone: names or one regular expression."
    )
    overrides: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Validate the fields, and convert lists and mappings to private copies."""
        check_kind(self.kind)
        if self.ratio is not None and self.memory is not None:
            got = f"ratio={self.ratio}, memory={self.memory}"
            raise ValueError(f"ratio and memory exclude each other, got {got}. Give one.")
        if self.ratio is None and self.memory is None:
            object.__setattr__(self, "memory", _DEFAULT_MEMORY)
        check_fraction("ratio", self.ratio, "Use ratio=1 to store every row.")
        check_fraction("memory", self.memory, "It is a fraction of the input's bytes.")
        check_fraction(
            "uniform_mix", self.uniform_mix, "1 samples all tokens alike; 0 would never sample some.", needed=True
        )
        check_norm_estimator(self.norm_estimator)
        if self.norm_estimator != NONE and self.kind not in SAMPLERS:
            raise ValueError(
                f"norm_estimator is for {' and '.join(SAMPLERS)}, got {self.norm_estimator!r} with kind={self.kind!r}. "
                'Use norm_estimator="none".'
            )
        if self.bits not in (None, "auto", *WIDTHS) or type(self.bits) not in (type(None), str, int):
            raise ValueError(f'bits must be 8, 4, 2, None or "auto", got {self.bits!r}. None stores the dtype itself.')
        if not isinstance(self.mask_padding, bool):
            raise TypeError(f"mask_padding must be True or False, got {self.mask_padding!r}.")
        check_integer("block", self.block, optional=True)
        check_integer("min_rows", self.min_rows)
        check_block(self.kind, self.block)
        object.__setattr__(self, "target_modules", read_names("target_modules", self.target_modules))
        if self.exclude_modules is not None:
            object.__setattr__(self, "exclude_modules", read_names("exclude_modules", self.exclude_modules))
        object.__setattr__(self, "overrides", self._checked_overrides())

    def _checked_overrides(self) -> dict[str, dict[str, Any]]:
        if not isinstance(self.overrides, Mapping):
            raise TypeError(f"overrides must map a name pattern to fields, got {type(self.overrides).__name__}.")
        checked: dict[str, dict[str, Any]] = {}
        for pattern, changes in self.overrides.items():
            check_pattern("overrides", pattern)
            if not isinstance(changes, Mapping):
                raise TypeError(f"overrides[{pattern!r}] must map field names to values, got {changes!r}.")
            allowed = [f.name for f in dataclasses.fields(self) if f.name not in _SELECTION]
            unknown = sorted(set(changes) - set(allowed))
            if unknown:
                raise ValueError(f"overrides[{pattern!r}] may change {', '.join(allowed)}; got {', '.join(unknown)}.")
            try:
                self.replace(overrides={}, **changes)
            except (TypeError, ValueError) as error:
                raise type(error)(f"overrides[{pattern!r}]: {error}") from None
            checked[pattern] = dict(changes)
        return checked

    def spec(self, tokens: int, features: int, itemsize: int, bits: int | None = None) -> SaveSpec | None:
        """Return how an input is saved.

        K = max(min_rows, round(ratio · N)), or with ``memory`` the most rows whose bytes fit; at most N.

        Args:
            tokens: N.
            features: I.
            itemsize: Bytes per element of the input.
            bits: Replaces ``bits="auto"`` if ``memory`` is set; None is 4.

        Returns:
            The spec, or None if the input itself is saved: N ≤ min_rows, or K ≥ N in the input's own dtype.
        """
        if tokens <= self.min_rows:
            return None
        width = self.bits
        if width == "auto":
            width = None if self.ratio is not None else (bits or _AUTO_BITS)
        if self.ratio is not None:
            rows = round(self.ratio * tokens)
        else:
            row_bytes = features * itemsize if width is None else packed_bytes(1, features, int(width))
            budget = (self.memory or 0) * tokens * features * itemsize
            rows = int(budget / row_bytes)
            if self.kind in SAMPLERS and rows < tokens:
                rows = int(budget / (row_bytes + ROW_SAMPLE_BYTES))
        rows = min(tokens, max(self.min_rows, rows))
        if rows == tokens and width is None:
            return None
        mix = self.uniform_mix if self.kind in SAMPLERS else 0.0
        return SaveSpec(self.kind, rows, self.block, None if width is None else int(width), mix)

    def replace(self, **changes: Any) -> RMMConfig:
        """Return a copy with other values; a new ``ratio`` replaces ``memory`` and vice versa.

        Args:
            **changes: Fields to change.

        Returns:
            The new configuration.
        """
        if changes.get("ratio") is not None:
            changes.setdefault("memory", None)
        if changes.get("memory") is not None:
            changes.setdefault("ratio", None)
        return dataclasses.replace(self, **changes)

    def for_module(self, name: str) -> RMMConfig:
        """Return the configuration of one layer: this one with the first matching override applied.

        Args:
            name: Dotted name of the layer in the model.

        Returns:
            A configuration without overrides.
        """
        pattern = self.override_pattern(name)
        return self.replace(overrides={}, **(self.overrides[pattern] if pattern is not None else {}))

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
            A dictionary for :meth:`from_dict`.
        """
        return {
            f.name: list(value) if isinstance(value := getattr(self, f.name), tuple) else value
            for f in dataclasses.fields(self)
        } | {"overrides": {pattern: dict(changes) for pattern, changes in self.overrides.items()}}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RMMConfig:
        """Make a configuration from :meth:`to_dict`'s result.

        Args:
            values: Field names to values. Unknown keys are ignored with a warning if a newer version of the library
                wrote them, and are an error otherwise. The state of the sketches, which ``save_conversion`` puts beside
                the fields, is ignored.

        Returns:
            The configuration.

        Raises:
            TypeError: If ``values`` is not a mapping.
            ValueError: If a key is unknown or a value is out of range.
        """
        if not isinstance(values, Mapping):
            raise TypeError(f"A configuration is a mapping of field names to values, got {type(values).__name__}.")
        known = [f.name for f in dataclasses.fields(cls)]
        unknown = sorted(set(values) - {*known, _VERSION_KEY, STATE_KEY})
        if unknown:
            written = values.get(_VERSION_KEY)
            if not is_newer_version(written, __version__):
                raise ValueError(
                    f"Unknown keys {', '.join(unknown)}. A configuration has the fields {', '.join(known)}."
                )
            warnings.warn(
                f"Ignoring {', '.join(unknown)}: written by rmm_linear {written}, this is {__version__}. "
                "Upgrade rmm_linear to use them.",
                stacklevel=2,
            )
        return cls(**{name: values[name] for name in known if name in values})

    def to_saved(self) -> dict[str, Any]:
        """Return the content of the file that :meth:`save` writes.

        Returns:
            The version of the library, and the fields as plain JSON types.
        """
        return {_VERSION_KEY: __version__, **self.to_dict()}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the configuration as JSON, atomically, with the version of the library.

        Args:
            path: File to write.
        """
        write_text(path, json.dumps(self.to_saved(), indent=2) + "\n")

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
        except (RecursionError, TypeError, ValueError) as error:  # RecursionError: very deeply nested brackets
            raise ValueError(f"{os.fspath(path)} is not a valid RMMConfig: {error}") from error
