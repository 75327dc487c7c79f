"""How many kernels a converted block launches, counted in Triton's interpreter: small ones take as long as a launch."""

import collections

import pytest
import torch
from cases import needs_triton
from torch.profiler import ProfilerActivity, profile, record_function

from rmm_linear import RMMConfig, convert

FORWARD = {
    "_pack_kernel": 4 + 3,  # inputs of linear layers; queries, keys and values
    "_pack_mask_kernel": 2,
    "_row_statistics_kernel": 2,
    "_pack_norm_kernel": 2,
    "_pack_derivative_kernel": 1,
    "mean": 1,  # of the keys
    "fill_": 1,  # the seed of GELU, in whose place its kernel may put a mark
}
BACKWARD = {
    "_unpack_kernel": 6 + 3,
    "_apply_mask_kernel": 2,
    "_norm_sums_kernel": 2,
    "_norm_totals_kernel": 2,
    "_norm_backward_kernel": 2,
    "_apply_derivative_kernel": 1,
    "mm": 6,
}
VIEWS = {
    "as_strided",
    "detach",
    "empty",
    "flatten",
    "new_empty",
    "numpy_T",
    "reshape",
    "select",
    "slice",
    "t",
    "transpose",
    "view",
}
ON_CPU = {"zero_"}  # what fills seeds up, which a kernel writes on a GPU


def launches(run):
    """Count kernels of Triton, and operators of PyTorch that our operators call and that make something."""
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        run()
    found = collections.Counter()
    for event in recorded.events():
        parent, name = event.cpu_parent, event.name.removeprefix("aten::")
        if name.startswith("launch "):
            found[name.removeprefix("launch ")] += 1
        elif name != event.name and parent is not None and parent.name.startswith("rmm_linear::"):
            is_same = name in ("contiguous", "to") and not event.cpu_children
            # The backward pass of attention is PyTorch's on CPU.
            if not is_same and name not in VIEWS | ON_CPU and parent.name != "rmm_linear::attention_backward":
                found[name] += 1
    return dict(found)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.thorough)], ids=str)
def test_a_block_launches_no_more_kernels_than_it_needs(dtype, monkeypatch):
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    transformers = pytest.importorskip("transformers")
    run = interpreter.GridExecutor.__call__

    def named(self, *arguments, **constants):
        with record_function(f"launch {self.fn.__name__}"):
            return run(self, *arguments, **constants)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", named)
    monkeypatch.setenv("RMM_BACKEND", "triton")
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 1, "num_hidden_layers": 1}
    config = transformers.RobertaConfig(**shape, vocab_size=9, attention_probs_dropout_prob=0.0)
    model = transformers.RobertaModel(config, add_pooling_layer=False).to(dtype)
    block, x, outputs = model.encoder.layer[0].train(), torch.randn(2, 8, 64, dtype=dtype), []
    convert(block, RMMConfig(min_rows=1))

    def forward():
        made = block(x)
        outputs.append(made if isinstance(made, torch.Tensor) else made[0])

    x.requires_grad_()
    for _ in range(2):  # the first call finds what it can leave out
        forward()
        outputs.pop().backward(torch.randn_like(x))
    assert launches(forward) == FORWARD
    assert launches(lambda: outputs.pop().backward(torch.randn_like(x))) == BACKWARD
