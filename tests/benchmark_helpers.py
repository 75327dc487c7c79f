"""What the tests of the benchmarks share: the smallest case of every suite."""

from __future__ import annotations

from benchmarks import bandwidth, block_steps, host, linear, models, operators

LINEAR = linear.cases("cpu", tiny=True)[0]
ROBERTA, LLAMA = models.cases("cpu", tiny=True)
KERNELS = bandwidth.cases("cpu", tiny=True)[0]
HOST = host.cases("cpu", tiny=True)[0]
OPERATORS = operators.cases("cpu", tiny=True)
BLOCKS = block_steps.cases("cpu", tiny=True)
