"""Attention with dropout on a GPU: PyTorch's own output, the same scores dropped in the backward pass, memory."""

import logging
from contextlib import nullcontext

import pytest
import torch
from attention_helpers import relative, tensors
from helpers import tiny_model
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from rmm_linear import RMMConfig, convert
from rmm_linear.activations import attention_function
from rmm_linear.activations.attention import scaled_dot_product_attention
from rmm_linear.ops import fused_attention as fused
from rmm_linear.packing.attention import AttentionSpec, attention_rows

pytestmark = pytest.mark.gpu
FLASH, EFFICIENT, CUDNN = fused.KERNELS
P = 0.3
ERROR = 0.05**2  # 8 bits have 0.02; another mask of dropout has 0.6
KINDS = ["plain", "causal", "mask", "shared heads", "shared heads and mask"]
every_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
every_kernel = pytest.mark.parametrize("kernel", [None, *fused.KERNELS], ids=str)


def inputs(kind="plain", dtype=torch.bfloat16, batch=3, tokens=96, width=64):
    """Queries, keys, values, the gradient of the output, and a mask."""
    kv_heads = 2 if kind.startswith("shared") else 4
    q, k, v, y = (one.cuda() for one in tensors(batch, 4, kv_heads, tokens, tokens, width, width, dtype))
    valid = torch.arange(tokens, device="cuda") < tokens - 20
    mask = valid.view(1, 1, 1, -1).expand(batch, 1, tokens, -1) if kind.endswith("mask") else None
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), y.transpose(1, 2), mask


def exact(q, k, v, mask, p, is_causal):
    shares = fused.shares_heads(q, k, v, mask)
    if not shares:
        k, v = (fused.repeated(one, q.shape[1]) for one in (k, v))
    return F.scaled_dot_product_attention(q, k, v, mask, p, is_causal, enable_gqa=shares)


def packed(q, k, v, mask, p, is_causal):
    return scaled_dot_product_attention(q, k, v, mask, p, is_causal, bits=8)


def step(attend, kind, given, seed=3):
    """Output, gradients, and the generator's state after both passes."""
    q, k, v, y, mask = given
    torch.manual_seed(seed)
    output = attend(q, k, v, mask, P, kind == "causal")
    torch.rand(5, device="cuda")  # what other modules draw
    found = torch.autograd.grad(output, (q, k, v), y)
    return output.detach(), found, torch.cuda.get_rng_state()


def allowed(kernel, kind, given):
    """A context in which PyTorch takes one kernel; skips where it cannot."""
    if kernel is None:
        return nullcontext()
    try:
        with sdpa_kernel(kernel):
            step(exact, kind, given)
    except RuntimeError as error:
        pytest.skip(f"PyTorch's own {kernel} does not take {kind}, {given[0].dtype} on this device: {error}")
    return sdpa_kernel(kernel)


@pytest.fixture(autouse=True)
def _nothing_is_said(caplog):
    """No test falls back to float32 scores, unless it says so."""
    attention_function._warn_of_scores.cache_clear()
    with caplog.at_level(logging.WARNING):
        yield
    assert not [one for one in caplog.get_records("call") if "makes all scores" in one.getMessage()]


@pytest.mark.parametrize("kind", KINDS)
@every_dtype
@every_kernel
def test_the_output_is_that_of_pytorch_and_the_gradients_have_its_dropout(kernel, kind, dtype):
    if kind == "shared heads" and dtype == torch.float32:
        pytest.skip("PyTorch makes all scores there, and has no kernel to repeat")
    given = inputs(kind, dtype)
    with allowed(kernel, kind, given):
        expected, found = step(exact, kind, given), step(packed, kind, given)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[2], expected[2])  # and draws as many numbers
    assert relative(found[1], expected[1]) < ERROR


@pytest.mark.parametrize("kernel", [FLASH, EFFICIENT, CUDNN], ids=str)
@pytest.mark.parametrize("kind", ["plain", "causal", "mask", "shared heads"])
@pytest.mark.parametrize("batch", [2, 6])
@pytest.mark.parametrize("p", [0.0, P])
def test_parts_of_a_backward_pass_drop_what_the_whole_drops(kernel, kind, batch, p, monkeypatch):
    if p and kernel == CUDNN:
        pytest.skip("with dropout, its backward pass is one call")
    q, k, v, y, mask = inputs(kind, torch.float16, batch)
    allowed(kernel, kind, (q, k, v, y, mask))
    if p == 0:
        monkeypatch.setattr(fused, "_kernel_for_gradients", lambda *_: kernel)
    spec = AttentionSpec(96, k.shape[1], 64, 0.125, kind == "causal", p)
    number = torch.tensor([kernel.value], dtype=torch.uint8)
    state = torch.cat((torch.cuda.get_rng_state(), number)) if p else None
    found = []
    for largest in (1 << 30, 0):
        monkeypatch.setattr(fused, "_WHOLE", largest)
        rows = [row.clone() for row in attention_rows(*(one.detach() for one in (q, k, v)))]
        found.append(fused.fused_gradients(y.transpose(1, 2), rows, spec, mask, state))
    assert relative(*found) < 1e-5


@pytest.mark.parametrize("use_reentrant", [False, True])
@every_dtype
def test_checkpoints_repeat_the_dropout(use_reentrant, dtype):
    def attend(*given):
        return checkpoint(packed, *given, use_reentrant=use_reentrant)

    def last(attend, given):  # a reentrant checkpoint takes no torch.autograd.grad
        torch.manual_seed(3)
        q, k, v, y, mask = given
        for one in (q, k, v):
            one.grad = None
        attend(q, k, v, mask, P, False).backward(y)
        return [one.grad.clone() for one in (q, k, v)]

    given = inputs("plain", dtype)
    assert relative(last(attend, given), last(exact, given)) < ERROR


def test_several_passes_have_their_own_dropout():
    given = inputs()
    q, k, v, y, mask = given
    torch.manual_seed(3)
    outputs = [packed(q, k, v, mask, P, False) for _ in range(2)]
    found = torch.autograd.grad(outputs, (q, k, v), [y, y])
    torch.manual_seed(3)
    expected = torch.autograd.grad([exact(q, k, v, mask, P, False) for _ in range(2)], (q, k, v), [y, y])
    assert not torch.equal(*outputs)
    assert relative(found, expected) < ERROR


def test_compiled_code_has_the_dropout_of_eager_code():
    """A graph of forward and backward operators: as they are, not through Inductor, which draws as eager code too."""
    given = inputs()
    expected, found = step(exact, "plain", given), step(torch.compile(packed, backend="aot_eager"), "plain", given)
    assert relative([found[0]], [expected[0]]) < 1e-5
    assert relative(found[1], expected[1]) < ERROR


@every_dtype
@pytest.mark.parametrize("architecture", ["roberta", "llama"])
def test_a_model_with_padding(architecture, dtype):
    """Only attention is packed, so that the output is that of the exact model to the bit."""
    ids, found = torch.randint(3, 60, (4, 32), generator=torch.Generator().manual_seed(1)).cuda(), []
    mask = torch.ones_like(ids)
    mask[1, 20:] = mask[3, 9:] = 0
    for converted in (False, True):
        model = tiny_model(architecture, width=64).to("cuda", dtype).train()
        if converted:
            convert(model, RMMConfig(operations=["attention"], attention_bits=8, min_rows=1))
        for _ in range(2):  # the second step has the answers of the first
            model.zero_grad()
            torch.manual_seed(5)
            logits = model(input_ids=ids, attention_mask=mask).logits
            used = logits * mask.unsqueeze(-1) if logits.dim() == 3 else logits
            used.float().square().mean().backward()
        found.append((logits.detach(), [one.grad for one in model.parameters() if one.grad is not None]))
    (expected, exact_gradients), (output, gradients) = found
    assert torch.equal(output, expected)
    assert relative(gradients, exact_gradients) < ERROR


def test_no_scores_are_in_memory():
    """12 heads, 8 x 1024: all scores are 200 MB in bfloat16, the queries 13."""
    q, k, v, y, mask = inputs("plain", torch.bfloat16, 8, 1024)
    q, k, v, y = (torch.cat([one.detach()] * 3, 1) for one in (q, k, v, y))
    leaves = [one.requires_grad_() for one in (q, k, v)]
    for _ in range(2):  # the first compiles
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        output = packed(*leaves, mask, 0.1, False)
        torch.autograd.grad(output, leaves, y)
        del output
    assert torch.cuda.max_memory_allocated() - before < 8 * 12 * 1024 * 1024 * 2


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(64, 192)

    def forward(self, x):
        q, k, v = self.project(x).unflatten(-1, (3, 2, 32)).permute(2, 0, 3, 1, 4).unbind(0)
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)


def test_attention_is_exact_while_a_graph_is_captured(caplog):
    model = nn.Sequential(Attending()).cuda().train()
    convert(model, RMMConfig(operations=["attention"], min_rows=1))
    x = torch.randn(4, 32, 64, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            model(x).sum().backward()
    torch.cuda.current_stream().wait_stream(stream)
    assert model[0].rmm_exact is None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = model(x)
    graph.replay()
    first = output.detach().clone()
    graph.replay()
    assert not torch.equal(first, output)
    assert "a CUDA graph is captured" in model[0].rmm_exact
    assert [message for message in caplog.messages if "a CUDA graph is captured" in message]


@pytest.mark.parametrize(("why", "width"), [("no multiple of 8", 20), ("no fused kernel", 64)])
def test_what_no_kernel_takes_is_said_and_still_right(why, width, caplog):
    """With next to no dropout, as blocks of scores do not drop those that PyTorch drops."""
    q, k, v, y, mask = inputs(width=width)
    with nullcontext() if width == 20 else sdpa_kernel(SDPBackend.MATH):
        for _ in range(2):
            output = packed(q, k, v, mask, 1e-9, False)
        found = torch.autograd.grad(output, (q, k, v), y)
    expected = torch.autograd.grad(exact(q, k, v, mask, 0.0, False), (q, k, v), y)
    assert relative(found, expected) < ERROR
    (message,) = [message for message in caplog.messages if "makes all scores" in message]
    assert why in message
    caplog.clear()
