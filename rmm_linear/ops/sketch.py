"""Sketches of a matrix and their storage in few bits, run by whatever is fastest for its device.

For simulations and predictions, which make thousands of sketches: what :mod:`rmm_linear.sketches` and
:mod:`rmm_linear.packing` define, with their arguments and results.
"""

from __future__ import annotations

from rmm_linear.ops import table

sketch = table.SKETCH
pack = table.PACK
unpack = table.UNPACK
