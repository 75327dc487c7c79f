"""What surrounds the fused attention kernels of CUDA: dropout from a state, parts, memory; without a GPU."""

import logging
import types
from contextlib import nullcontext

import pytest
import torch
from attention_helpers import formula, formula_gradients, packed_kept, relative, spec_of, tensors
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from rmm_linear.activations import attention_function
from rmm_linear.activations.attention_function import Attention, SavingCall, packed_attention
from rmm_linear.memory.peak import LiveTensors, Peak
from rmm_linear.ops import attention as operators
from rmm_linear.ops import fused_attention as fused
from rmm_linear.ops.attention import attention_with_dropout
from rmm_linear.packing.attention import AttentionSpec, attention_rows

FLASH, EFFICIENT, CUDNN = fused.KERNELS


class Counting:
    """A generator like that of CUDA: its state is a seed and an offset."""

    def __init__(self):
        self.offset = 0

    def get_state(self):
        return torch.tensor([5, self.offset]).view(torch.uint8)

    def set_state(self, state):
        self.offset = state.view(torch.int64)[1].item()

    def get_offset(self):
        return self.offset

    def set_offset(self, offset):
        assert offset % 4 == 0
        self.offset = offset


def kept_by(kernel, offset, shape):
    """The scores that a kernel keeps, by the numbers that it draws: one for each head, or for each score."""
    batch, heads, queries, keys = shape
    place = torch.arange(batch * heads).view(batch, heads, 1, 1)
    inside = torch.arange(queries * keys).view(1, 1, queries, keys)
    number = offset + place * 32 + inside * 10_007 if kernel == FLASH else offset + place * queries * keys + inside
    return torch.frac(torch.sin(number.double()) * 43758.5453).abs() > 0.3


@pytest.fixture
def generator(monkeypatch):
    """In place of the kernels of CUDA, the formula, with scores that are kept by position and state."""
    generator = Counting()

    def kernel_gradients(kernel, y, query, key, value, mask, spec):
        kept = None
        if spec.p:
            kept = kept_by(kernel, generator.offset, (*query.shape[:3], key.shape[2]))
            generator.offset += 4  # which the backward pass takes back
        found = formula_gradients(query, key, value, y.transpose(1, 2), spec, mask, kept)
        return [gradient.transpose(1, 2) for gradient in found]

    monkeypatch.setattr(fused, "generator_of", lambda device: generator)
    monkeypatch.setattr(fused, "kernel_gradients", kernel_gradients)
    monkeypatch.setattr(fused, "_kernel_for_gradients", lambda *_: EFFICIENT)
    return generator


def state_of(generator, kernel):
    return torch.cat((generator.get_state(), torch.tensor([kernel.value], dtype=torch.uint8)))


@pytest.mark.parametrize("kernel", fused.KERNELS)
@pytest.mark.parametrize("kind", ["plain", "causal", "mask", "padding"])
@pytest.mark.parametrize(("batch", "kv_heads"), [(7, 2), (2, 3), (1, 6)])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_parts_have_the_gradients_of_the_whole(kernel, kind, batch, kv_heads, p, generator, monkeypatch):
    q, k, v, y = tensors(batch, 2 * kv_heads, kv_heads, 10, 10, 8, 8)
    spec, tokens = spec_of(q, k, is_causal=kind == "causal", p=p), torch.arange(10 * batch)
    index = tokens[tokens % 10 < 4 + tokens // 10] if kind == "padding" else None
    mask = torch.rand(batch, 1, 10, 10) > 0.3 if kind == "mask" else None
    if kind == "padding":
        mask = torch.zeros(10 * batch).index_fill_(0, index, 1).bool().view(batch, 1, 1, 10).expand(-1, -1, 10, -1)
        y.view(10 * batch, -1)[~mask[:, 0, 0].flatten()] = float("nan")  # padding has no part in the gradients
    generator.offset, found = 40, []
    state = state_of(generator, kernel) if p else None
    for largest in (1 << 30, 0):
        generator.offset = 400
        monkeypatch.setattr(fused, "_WHOLE", largest)
        rows = [row.clone() for row in attention_rows(q, k, v, index, index)]
        found.append(fused.fused_gradients(y, rows, spec, mask, state, index, index))
        assert generator.offset == 400
    assert relative(*found) < 1e-24
    kept = kept_by(kernel, 40, (*q.shape[:3], 10)) if p else None
    y = torch.nan_to_num(y)
    expected = formula_gradients(q, k, v, y, spec, mask, kept)
    if index is not None:
        hidden = ~mask[:, 0, 0]
        for one in expected:
            assert one[hidden].abs().max() < 1e-12
    assert relative(found[0], expected) < 1e-20


def test_what_has_no_known_random_numbers_is_not_split(generator, monkeypatch):
    monkeypatch.setattr(fused, "_WHOLE", 0)
    calls = []
    made = fused.kernel_gradients
    monkeypatch.setattr(fused, "kernel_gradients", lambda *given: calls.append(1) or made(*given))
    for kernel, tokens, version, count in (
        (CUDNN, 10, None, 1),
        (EFFICIENT, 9, None, 1),  # 81 numbers: no generator begins there
        (EFFICIENT, 10, None, 4),
        (FLASH, 9, None, 4),
        (FLASH, 9, "6.4", 1),
    ):
        calls.clear()
        monkeypatch.setattr(torch.version, "hip", version)
        q, k, v, y = tensors(4, 2, 2, tokens, tokens, 8, 8)
        rows = [row.clone() for row in attention_rows(q, k, v)]
        fused.fused_gradients(y, rows, spec_of(q, k, p=0.3), None, state_of(generator, kernel))
        assert len(calls) == count


class Drawing:
    """In place of a kernel of CUDA, on CPU: dropout that is drawn from the generator, forward and again backward."""

    @staticmethod
    def kept(query, key, p):
        return torch.rand(*query.shape[:3], key.shape[2]) > p

    @classmethod
    def output(cls, query, key, value, mask, spec, kernel, enable_gqa):
        state = torch.cat((torch.get_rng_state(), torch.tensor([FLASH.value], dtype=torch.uint8)))
        kept = cls.kept(query, key, spec.p)
        return formula(query, key, value, spec, mask, kept).transpose(1, 2).contiguous(), state

    @classmethod
    def gradients(cls, kernel, y, query, key, value, mask, spec):
        """By hand, as an operator in a graph runs below autograd."""
        assert mask is None
        assert not spec.is_causal
        drop, group = cls.kept(query, key, spec.p) / (1 - spec.p), query.shape[1] // key.shape[1]
        key, value = (one.repeat_interleave(group, 1) for one in (key, value))
        p = torch.softmax(spec.scale * query @ key.mT, -1)
        dp = drop * (y @ value.mT)
        ds = spec.scale * p * (dp - (p * dp).sum(-1, keepdim=True))
        dk, dv = (one.unflatten(1, (-1, group)).sum(2) for one in (ds.mT @ query, (p * drop).mT @ y))
        return ds @ key, dk, dv


@pytest.fixture
def drawing(monkeypatch):
    monkeypatch.setenv("RMM_BACKEND", "torch")
    monkeypatch.setattr(operators, "dropped_output", Drawing.output)
    monkeypatch.setattr(fused, "kernel_gradients", Drawing.gradients)

    monkeypatch.setattr(attention_function, "runs_kernels", lambda tensor: True)
    monkeypatch.setattr(attention_function, "chosen_kernel", lambda *_: FLASH)


def attend(q, k, v):
    attention = Attention(q.shape[-1] ** -0.5, False, 0.3, 8)
    return packed_attention(q, k, v, None, attention, SavingCall(7), None)


@pytest.mark.parametrize("how", ["plain", "non-reentrant", "reentrant", "twice"])
def test_the_backward_pass_drops_what_the_forward_pass_dropped(how, drawing):
    """Whatever is drawn between them, and the generator is where it was; with checkpoints and several passes."""
    q, k, v, y = tensors(2, 4, 2, 40, 40, 64, 64, torch.float32)
    inputs = [tensor.requires_grad_() for tensor in (q, k, v)]
    torch.manual_seed(3)
    kept = Drawing.kept(q, k, 0.3)
    torch.manual_seed(3)
    if how in ("plain", "twice"):
        output = attend(*inputs)
        second = attend(*inputs) if how == "twice" else None
        torch.rand(17)
    else:
        output, second = checkpoint(attend, *inputs, use_reentrant=how == "reentrant"), None
    before = torch.get_rng_state()
    output.backward(y)
    assert torch.equal(torch.get_rng_state(), before)
    assert second is None or not torch.equal(second, output)  # and is left alone
    expected = formula_gradients(q, k, v, y, spec_of(q, k, p=0.3), None, kept)
    # 8 bits have an error of 0.02; another mask of dropout, one of 0.6.
    assert relative([tensor.grad.transpose(1, 2) for tensor in inputs], expected) < 0.03**2


class Largest(TorchDispatchMode):
    """The most elements of a tensor in memory."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        self.most = max([self.most, *(leaf.untyped_storage().nbytes() // leaf.itemsize for leaf in leaves)])
        return output


@pytest.fixture
def on_fake_gpu(monkeypatch):
    """Choose kernels by their rules, as builds of PyTorch without CUDA have none."""

    def chosen(query, key, value, mask, spec, enable_gqa):
        is_half = query.dtype in (torch.float16, torch.bfloat16)
        return FLASH if is_half and mask is None else EFFICIENT

    def attention(query, key, value, mask, p, is_causal, scale, enable_gqa):
        spec = AttentionSpec(key.shape[2], key.shape[1], key.shape[3], scale, is_causal, p)
        kernel, aten = chosen(query, key, value, mask, spec, enable_gqa), torch.ops.aten
        if kernel == FLASH:
            return aten._scaled_dot_product_flash_attention(query, key, value, p, is_causal, False, scale=scale)[0]
        bias = fused._bias(mask, query, key.shape[2], kernel)
        return aten._scaled_dot_product_efficient_attention(query, key, value, bias, True, p, is_causal)[0]

    named = types.SimpleNamespace(scaled_dot_product_attention=attention, pad=F.pad)
    monkeypatch.setattr(fused, "F", named)
    for module in (fused, attention_function):
        monkeypatch.setattr(module, "chosen_kernel", chosen)
    monkeypatch.setattr(fused, "_drawn_again", lambda *_: nullcontext())
    monkeypatch.setattr(fused, "generator_of", lambda device: Counting())
    # The methods ask for the device itself, which operators do not.
    monkeypatch.setattr(Tensor, "copy_", lambda self, other: torch.ops.aten.copy_(self, other))
    monkeypatch.setattr(Tensor, "contiguous", lambda self: torch.ops.aten.contiguous(self))
    with FakeTensorMode() as mode:
        yield mode


def made(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="cuda")


SHAPES = {
    "RoBERTa-base": (32, 512, 12, 12, 64),
    "LLaMA-1B": (4, 4096, 32, 8, 64),
    "one long sequence": (1, 8192, 32, 8, 128),
}
CASES = [(name, kind) for name in SHAPES for kind in ("plain", "causal", "mask", "padding")]


@pytest.mark.parametrize(("name", "kind"), CASES)
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_tensor_of_all_scores_and_a_peak_of_five_times_the_queries(name, kind, p, dtype, on_fake_gpu, monkeypatch):
    batch, tokens, heads, kv_heads, width = SHAPES[name]
    q, y = made(batch, heads, tokens, width, dtype=dtype), made(batch, tokens, heads, width, dtype=dtype)
    k, v = (made(batch, kv_heads, tokens, width, dtype=dtype) for _ in range(2))
    spec = AttentionSpec(tokens, kv_heads, width, width**-0.5, kind == "causal", p)
    mask = made(batch, 1, tokens, tokens, dtype=torch.bool) if kind in ("mask", "padding") else None
    index = made(batch * tokens, dtype=torch.int64) if kind == "padding" else None
    monkeypatch.setattr(fused, "kernel_in", lambda state: FLASH if mask is None and dtype.itemsize == 2 else EFFICIENT)
    scores, state = batch * heads * tokens * tokens, None
    with Largest() as largest:
        if p:
            output, state = attention_function._dropped(q, k, v, mask, None, spec, None)
            assert output.shape == y.shape
    columns = (heads * width, kv_heads * width, kv_heads * width)
    peak = Peak()
    with Largest() as backward, LiveTensors(peak):
        rows = [made(batch * tokens, count, dtype=dtype) for count in columns]
        found = fused.fused_gradients(y, rows, spec, mask, state, index, index)
        assert [one.shape for one in found] == [(batch, tokens, one, width) for one in (heads, kv_heads, kv_heads)]
        assert all(one.is_contiguous() for one in found)
    assert max(largest.most, backward.most) < scores
    added = 0 if mask is None else mask.numel() * q.itemsize  # to the scores, as exact training has it too
    assert peak.bytes <= 5 * q.numel() * q.itemsize + added


def test_operators_have_no_tensor_of_all_scores(on_fake_gpu):
    """As their rules for compilers and simulations say."""
    q, y = made(2, 4, 512, 64), made(2, 512, 4, 64)
    spec = spec_of(q, q, p=0.1)
    with torch.no_grad(), Largest() as largest:
        output, state = attention_with_dropout(q, q, q, None, spec.scale, False, 0.1, False)
        stored = operators.pack_attention(q, q, q, None, None, 7, 4, 4, 4)
        found = operators.attention_backward(y, stored, None, state, None, None, spec, (4, 4, 4))
    assert [one.shape for one in (output, *found[:3])] == [y.shape] * 4
    assert state.shape == (17,)
    assert state.device.type == "cpu"
    assert largest.most < 2 * 4 * 512 * 512


@pytest.fixture
def warned(caplog):
    attention_function._warn_of_scores.cache_clear()
    operators._warn_of_kernel.cache_clear()
    caplog.set_level(logging.WARNING)
    return caplog


@pytest.mark.parametrize(
    ("why", "width", "dtype", "biased"),
    [
        ("no multiple of 8", 20, torch.bfloat16, False),
        ("a bias is added", 64, torch.bfloat16, True),
        ("torch.float64", 64, torch.float64, False),
    ],
)
def test_dropout_without_a_kernel_is_said_once(why, width, dtype, biased, on_fake_gpu, warned):
    q = made(2, 4, 16, width, dtype=dtype)
    bias = made(1, 4, 16, 16, dtype=dtype) if biased else None
    for _ in range(2):
        attention_function._dropped(q, q, q, None, bias, spec_of(q, q, p=0.1), None)
    (message,) = [message for message in warned.messages if why in message]
    assert "makes all scores in float32" in message
    assert "Set the dropout of attention to 0" in message


def on_gpu(monkeypatch, error):
    """Run the branch of CUDA on CPU, with kernels that raise."""

    def raises(*_):
        raise error

    monkeypatch.setattr(fused, "_kernel_for_gradients", lambda *_: FLASH)
    monkeypatch.setattr(fused, "kernel_gradients", raises)
    monkeypatch.setattr(operators, "runs_kernels", lambda tensor: True)


def gradients(state=None, p=0.0):
    q, k, v, y = tensors(2, 4, 2, 9, 9, 16, 16, torch.float32)
    stored = operators.pack_attention(q, k, v, None, None, 5, 8, 8, 8)
    return operators.attention_backward(y, stored, None, state, None, None, spec_of(q, k, p=p), (8, 8, 8))[:3]


def test_a_kernel_without_a_backward_pass_gives_way_to_the_blocks(monkeypatch, warned):
    monkeypatch.setenv("RMM_BACKEND", "torch")
    expected = gradients()
    on_gpu(monkeypatch, RuntimeError("no kernel for this head\nand more"))
    for _ in range(2):
        assert relative(gradients(), expected) < 1e-12
    (message,) = [message for message in warned.messages if "no kernel for this head" in message]
    assert "and more" not in message


def test_dropout_without_a_kernel_of_pytorch_makes_scores_and_says_so(drawing, warned, monkeypatch):
    monkeypatch.setattr(attention_function, "chosen_kernel", lambda *_: SDPBackend.MATH)
    q, k, v, y = tensors(2, 4, 2, 40, 40, 64, 64, torch.float32)
    inputs = [tensor.requires_grad_() for tensor in (q, k, v)]
    for _ in range(2):
        torch.manual_seed(3)
        output = attend(*inputs)
    output.backward(y)
    torch.manual_seed(3)
    kept = torch.empty(2, 4, 40, 40, dtype=torch.bool).bernoulli(0.7)
    expected = formula_gradients(q, k, v, y, spec_of(q, k, p=0.3), None, kept)
    assert relative([tensor.grad.transpose(1, 2) for tensor in inputs], expected) < 0.03**2
    (message,) = [message for message in warned.messages if "makes all scores" in message]
    assert "no fused kernel" in message


def test_lack_of_memory_and_dropout_do_not_give_way(monkeypatch, warned):
    monkeypatch.setenv("RMM_BACKEND", "torch")
    on_gpu(monkeypatch, torch.OutOfMemoryError("out of memory"))
    with pytest.raises(torch.OutOfMemoryError):
        gradients()
    on_gpu(monkeypatch, RuntimeError("no kernel"))
    state = torch.cat((torch.get_rng_state(), torch.tensor([FLASH.value], dtype=torch.uint8)))
    with pytest.raises(RuntimeError, match="no kernel"):
        gradients(state, 0.3)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_compiled_code_drops_the_same_scores_again(checkpointed, drawing):
    """Also where a checkpoint repeats the operator: its tags say that it draws."""
    q, k, v, y = tensors(2, 4, 2, 40, 40, 64, 64, torch.float32)

    def run(*given):
        return checkpoint(attend, *given, use_reentrant=False) if checkpointed else attend(*given)

    compiled = torch.compile(run, backend="aot_eager_decomp_partition", fullgraph=True)
    inputs = [tensor.requires_grad_() for tensor in (q, k, v)]
    torch.manual_seed(3)
    output = compiled(*inputs)
    torch.rand(17)
    output.backward(y)
    torch.manual_seed(3)
    kept = Drawing.kept(q, k, 0.3)
    expected = formula_gradients(q.detach(), k.detach(), v.detach(), y, spec_of(q, k, p=0.3), None, kept)
    assert relative([tensor.grad.transpose(1, 2) for tensor in inputs], expected) < 0.03**2


class Watching(TorchDispatchMode):
    """Counts the backward passes of PyTorch's kernel for CPUs."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("causal", "kv_heads", "parts"), [(False, 4, 1), (True, 4, 1), (True, 2, 1), (True, 2, 4)])
def test_the_kernel_of_cpus_has_the_gradients_of_the_blocks(causal, kv_heads, parts, monkeypatch):
    """On long sequences in bfloat16, to which it rounds scores' gradients, and sums after every block."""
    monkeypatch.setattr(fused, "_has_tiles", lambda: True)
    monkeypatch.setattr(fused, "_WHOLE", 1 << 30 if parts == 1 else 0)
    q, k, v, y = tensors(2, 4, kv_heads, 800, 800, 16, 16, torch.bfloat16)
    spec = spec_of(q, k, is_causal=causal)
    stored = operators.pack_attention(q, k, v, None, None, 5, 8, 8, 8)
    with Watching() as watching:
        found = operators.attention_backward.function(y, stored, None, None, None, None, spec, (8, 8, 8))[:3]
    assert watching.count == parts
    monkeypatch.setattr(fused, "_has_tiles", lambda: False)
    expected = operators.attention_backward.function(y, stored, None, None, None, None, spec, (8, 8, 8))[:3]
    assert [one.dtype for one in found] == [torch.bfloat16] * 3
    assert all(one.is_contiguous() for one in found)
    assert relative(found, expected) < (4 * 2**-8) ** 2


@pytest.mark.parametrize("kind", ["float32", "short", "few keys", "mask", "padding", "dropout", "bias", "wide values"])
def test_everything_else_is_made_in_blocks_on_cpus(kind, monkeypatch):
    dtype, tokens = torch.float32 if kind == "float32" else torch.bfloat16, 600 if kind == "short" else 800
    keys = 64 if kind == "few keys" else tokens
    q, k, v, y = tensors(1, 2, 2, tokens, keys, 16, 24 if kind == "wide values" else 16, dtype)
    visible = torch.ones(1, 1, tokens, keys, dtype=torch.bool)
    kept = packed_kept(torch.rand(1, 2, tokens, keys) > 0.3) if kind == "dropout" else None
    index = torch.arange(700) if kind == "padding" else None
    bias = torch.zeros(1, 2, tokens, keys) if kind == "bias" else None
    stored = operators.pack_attention(q, k, v, index, index, 5, 8, 8, 8)
    spec, mask = spec_of(q, k, p=0.3 if kind == "dropout" else 0.0), visible if kind == "mask" else None
    found = []
    for tiles in (True, False):
        monkeypatch.setattr(fused, "_has_tiles", lambda tiles=tiles: tiles)
        with Watching() as watching:
            found.append(
                operators.attention_backward.function(y, stored, mask, kept, index, index, spec, (8, 8, 8), bias)
            )
        assert watching.count == 0
    assert all(map(torch.equal, *found))
