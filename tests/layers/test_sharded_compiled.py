"""Tensor parallel modules in compiled code: exact, and said."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from rmm_linear import convert
from rmm_linear.layers import sharded


def test_compiled_code_says_that_it_is_exact(process_group, no_graphs_left, caplog):
    sharded._say_exact.cache_clear()
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).train()
    convert(model, min_rows=1)
    parallelize_module(model, init_device_mesh("cpu", (1,)), {"0": ColwiseParallel(), "1": ColwiseParallel()})
    compiled = torch.compile(model, backend="aot_eager")
    compiled(torch.randn(16, 8)).sum().backward()
    assert sum("are exact in compiled code" in one for one in caplog.messages) == 1
    assert model[0].weight.grad.to_local().isfinite().all()
