"""Settings that are written to and read from JSON files, with the version of the library that wrote them."""

from __future__ import annotations

import dataclasses
import json
import os
import warnings
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from rmm_linear._support.files import write_text
from rmm_linear._support.json_files import naming_file, read_json
from rmm_linear._support.validation import did_you_mean, is_newer_version

VERSION_KEY = "rmm_linear_version"

Self = TypeVar("Self", bound="SavedSettings")


class SavedSettings:
    """Base class of dataclasses whose fields are saved as JSON."""

    version: ClassVar[str]  # of the library that writes
    other_keys: ClassVar[tuple[str, ...]] = ()  # keys that other parts of the library put next to the fields

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON types."""
        return {field.name: _plain(getattr(self, field.name)) for field in dataclasses.fields(self)}  # pyright: ignore[reportArgumentType]

    @classmethod
    def from_dict(cls: type[Self], values: Mapping[str, Any]) -> Self:
        """Make the settings from :meth:`to_dict`'s result.

        Args:
            values: Field names to values. Unknown keys are ignored with a warning if a newer version of the library
                wrote them, and are an error otherwise. What other parts of the library put next to the fields is
                ignored.

        Raises:
            TypeError: If ``values`` is not a mapping.
            ValueError: If a key is unknown or a value is out of range.
        """
        if not isinstance(values, Mapping):
            raise TypeError(f"A configuration is a mapping of field names to values, got {type(values).__name__}.")
        known = [field.name for field in dataclasses.fields(cls)]  # pyright: ignore[reportArgumentType]
        unknown = sorted(set(values) - {*known, VERSION_KEY, *cls.other_keys})
        if unknown:
            written = values.get(VERSION_KEY)
            if not is_newer_version(written, cls.version):
                raise ValueError(
                    f"Unknown keys {', '.join(unknown)}. A configuration has the fields {', '.join(known)}."
                    f"{did_you_mean(unknown[0], known)}"
                )
            warnings.warn(
                f"Ignoring {', '.join(unknown)}: written by rmm_linear {written}, this is {cls.version}. "
                "Upgrade rmm_linear to use them.",
                stacklevel=2,
            )
        return cls(**{name: values[name] for name in known if name in values})

    def to_saved(self) -> dict[str, Any]:
        """Return the content of the file that :meth:`save` writes."""
        return {VERSION_KEY: self.version, **self.to_dict()}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the settings as JSON, atomically, with the version of the library."""
        write_text(path, json.dumps(self.to_saved(), indent=2) + "\n")

    @classmethod
    def load(cls: type[Self], path: str | os.PathLike[str]) -> Self:
        """Read settings that :meth:`save` wrote.

        Raises:
            ValueError: If the file has no such settings, a key twice, or more than 32 MiB; the message names the file.
        """
        with naming_file(path, f" is not a valid {cls.__name__}"):
            return cls.from_dict(read_json(path))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    return list(value) if isinstance(value, tuple) else value
