"""Entry point of ``python -m rmm_linear``, the same as the command ``rmm-linear``."""

import sys

from rmm_linear.command.main import main

if __name__ == "__main__":
    sys.exit(main())
