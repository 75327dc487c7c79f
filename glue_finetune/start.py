"""Start the command: its help at once, and what is missing before anything large is imported."""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Sequence

from rmm_linear._support.installing import INSTALL_EXTRA

_NEEDED = ("transformers", "datasets", "evaluate", "filelock", "sklearn", "scipy", "pandas", "matplotlib", "rich")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: Its arguments; None takes those of the process.

    Returns:
        The exit status: 0, 2 for bad input or missing packages, or 128 plus the number of the signal that ended it.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if "--help-all" not in words and {"-h", "--help"} & set(words):
        from glue_finetune.own_flags import short_help

        print(short_help())
        return 0
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"glue_finetune: error: The script needs packages that are not installed: {', '.join(missing)}. "
            f"Run {INSTALL_EXTRA}.",
            file=sys.stderr,
        )
        return 2
    # Imported by transformers where it is installed, it warns of kernels that it does without.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    from glue_finetune.cli import main as run

    return run(words)
