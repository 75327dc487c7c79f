"""Sketches of a matrix and their packing, with the fastest implementation for its device.

For simulations and predictions, which make thousands of sketches. Arguments and results are those of
:mod:`rmm_linear.sketches` and :mod:`rmm_linear.packing`.
"""

from __future__ import annotations

from rmm_linear.ops import table

sketch = table.SKETCH
pack = table.PACK
unpack = table.UNPACK
