"""Measurements, their csv files and pictures, and the tables of the pages: ``python -m benchmarks --help``."""

import sys
from pathlib import Path

# The kernels' comparisons belong to their project, which is no package: see kernels/tests/conftest.py.
sys.path.append(str(Path(__file__).resolve().parents[1] / "kernels" / "tests"))
