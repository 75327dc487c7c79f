"""The command: parse, check, then train, compare or demonstrate."""

from __future__ import annotations

import logging
import os
import sys

import datasets
import transformers

from glue_finetune.arguments import PROGRAM, parse
from glue_finetune.compare import run_comparison
from glue_finetune.demo import run_demo
from glue_finetune.errors import Interrupted, UserError
from glue_finetune.training import train


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its status: 0, 2 for bad input, or 128 plus the number of the signal that ended it."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("glue_finetune").setLevel(logging.INFO)
    for name in ("huggingface_hub", "datasets", "evaluate", "httpx"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # what fails in the end is reported here
    try:
        arguments = parse(sys.argv[1:] if argv is None else list(argv))
        if arguments.training.disable_tqdm:
            datasets.disable_progress_bars()
            transformers.logging.disable_progress_bar()
        run = run_demo if arguments.glue.demo else train if arguments.glue.compare is None else run_comparison
        return run(arguments)
    except UserError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 2
    except Interrupted as stop:
        print(f"\n{PROGRAM}: stopped before the first step; there is nothing to save.", file=sys.stderr)
        return 128 + stop.args[0]
