"""Entry point of ``python -m glue_finetune``."""

from __future__ import annotations

import logging
import sys

if __name__ == "__main__":
    # Imported by transformers where it is installed, it warns of kernels that it does without.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    try:
        from glue_finetune.cli import main

        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
