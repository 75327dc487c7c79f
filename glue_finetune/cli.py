"""The command: parse, check, then train, compare or demonstrate."""

from __future__ import annotations

import logging
import os
import sys

import datasets
import transformers

from glue_finetune.arguments import PROGRAM, Arguments, parse
from glue_finetune.errors import Interrupted, UserError


def main(argv: list[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: Its arguments; None takes those of the process.

    Returns:
        The exit status: 0, 2 for bad input, or 128 plus the number of the signal that ended it.
    """
    _set_up_logging()
    try:
        arguments = parse(sys.argv[1:] if argv is None else list(argv))
        if arguments.training.disable_tqdm:
            datasets.disable_progress_bars()
            transformers.logging.disable_progress_bar()
        return _dispatch(arguments)
    except UserError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 2
    except Interrupted as stop:
        print(f"\n{PROGRAM}: stopped before the first step; there is nothing to save.", file=sys.stderr)
        return 128 + stop.signum


def _dispatch(arguments: Arguments) -> int:
    if arguments.glue.demo:
        from glue_finetune.demo import run_demo

        return run_demo(arguments)
    if arguments.glue.compare is not None:
        from glue_finetune.compare import run_comparison

        return run_comparison(arguments)
    from glue_finetune.training import train

    return train(arguments)


def _set_up_logging() -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("glue_finetune").setLevel(logging.INFO)
    for name in ("huggingface_hub", "datasets", "evaluate", "httpx"):
        logging.getLogger(name).setLevel(logging.ERROR)  # their retries; what fails in the end is reported here
