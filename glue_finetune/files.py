"""Write JSON files completely or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rmm_linear.files import write_text


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file.

    Args:
        path: Where to.
        content: JSON types; a number that is not finite is an error.
    """
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
