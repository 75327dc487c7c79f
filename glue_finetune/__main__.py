"""The command, ``python -m glue_finetune``: check the flags, then train, compare or demonstrate.

Help and a wrong flag are answered before anything large is imported.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from collections.abc import Sequence

from glue_finetune.errors import Interrupted, UserError
from rmm_linear._support.installing import INSTALL_EXTRA

_NEEDED = ("transformers", "datasets", "evaluate", "filelock", "sklearn", "scipy", "pandas", "matplotlib")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: Its arguments; None takes those of the process.

    Returns:
        The exit status: 0, 2 for bad input or missing packages, or 128 plus the number of the signal that ended it.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(words)
    except UserError as error:
        print(f"glue_finetune: error: {error}", file=sys.stderr)
        return 2
    except Interrupted as stop:
        print("\nglue_finetune: stopped before the first step; there is nothing to save.", file=sys.stderr)
        return 128 + stop.args[0]


def _run(words: list[str]) -> int:
    from glue_finetune import flags  # imports torch
    from glue_finetune.checks import check_values

    if "--help-all" not in words and {"-h", "--help"} & set(words):
        print(flags.short_help())
        return 0
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        raise UserError(f"The script needs packages that are not installed: {', '.join(missing)}. Run {INSTALL_EXTRA}.")
    flags.check_flags(words)
    check_values(words)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("glue_finetune").setLevel(logging.INFO)
    # Imported by transformers where it is installed, it warns of kernels that it does without.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    for name in ("huggingface_hub", "datasets", "evaluate", "httpx"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # what fails in the end is reported here
    import datasets
    import transformers

    from glue_finetune.arguments import parse
    from glue_finetune.compare import run_comparison
    from glue_finetune.demo import run_demo
    from glue_finetune.training import train

    arguments = parse(words)
    if arguments.training.disable_tqdm:
        datasets.disable_progress_bars()
        transformers.logging.disable_progress_bar()
    run = run_demo if arguments.glue.demo else train if arguments.glue.compare is None else run_comparison
    return run(arguments)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
