"""Entry point of ``python -m glue_finetune``."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    try:
        from glue_finetune.start import main

        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
