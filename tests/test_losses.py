"""Cross entropy in chunks is F.cross_entropy of the logits, and one chunk of them is alive at a time."""

import math

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from rmm_linear import losses
from rmm_linear.losses import chunked_cross_entropy
from rmm_linear.memory import peak
from rmm_linear.memory.peak import Peak
from rmm_linear.planning.step.follow import FollowedTensors, Place

TOKENS, WIDTH, CLASSES = 13, 6, 50


def inputs(dtype=torch.float64, tokens=TOKENS, width=WIDTH, classes=CLASSES):
    generator = torch.Generator().manual_seed(1)
    shapes = (tokens, width), (classes, width), (classes,)
    hidden, weight, bias = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes
    )
    return hidden, weight, bias, torch.randint(classes, (tokens,), generator=generator)


def exact(hidden, weight, bias, labels, *, scale=1.0, softcap=None, **options):
    """As transformers computes it: logits in the dtype of the hidden states, the loss in float32 or wider."""
    logits = F.linear(hidden, weight, bias) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), labels, **options)


def gradients(loss, tensors):
    return torch.autograd.grad(loss * 1.5, [tensor for tensor in tensors if tensor is not None])


def assert_same(found, expected, tensors, eps):
    """Loss and gradients, to ``eps`` of the largest element."""
    assert found.shape == ()
    assert abs(found.item() - expected.item()) <= eps * abs(expected.item())
    for one, other in zip(gradients(found, tensors), gradients(expected, tensors), strict=True):
        assert one.dtype == other.dtype
        assert (one - other).abs().max() <= eps * other.abs().max()


EPS = 2**-53 * 256  # sums of at most 50 and of 13 products, a few roundings each


@pytest.mark.parametrize("chunk", [1, 4, 13, 100])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("with_bias", [True, False])
def test_it_is_cross_entropy_to_rounding(chunk, reduction, with_bias):
    hidden, weight, bias, labels = inputs()
    labels[[2, 3, 12]] = -100
    tensors = hidden, weight, bias if with_bias else None
    found = chunked_cross_entropy(hidden, weight, labels, bias=tensors[2], chunk=chunk, reduction=reduction)
    assert_same(found, exact(*tensors, labels, reduction=reduction), tensors, EPS)


@pytest.mark.parametrize("options", [{"scale": 0.25}, {"softcap": 3.0}, {"scale": 2.0, "softcap": 1.5}])
def test_logits_may_be_scaled_and_capped(options):
    hidden, weight, bias, labels = inputs()
    found = chunked_cross_entropy(hidden, weight, labels, bias=bias, chunk=4, **options)
    assert_same(found, exact(hidden, weight, bias, labels, **options), (hidden, weight, bias), EPS)


def test_the_sum_is_divided_by_the_items_of_a_batch():
    hidden, weight, _, labels = inputs()
    for items in (29, torch.tensor(29), 29.0):
        found = chunked_cross_entropy(hidden, weight, labels, chunk=4, num_items_in_batch=items)
        assert_same(found, exact(hidden, weight, None, labels, reduction="sum") / 29, (hidden, weight), EPS)


def test_labels_are_shifted_as_in_causal_models():
    from transformers.loss.loss_utils import ForCausalLMLoss

    hidden, weight, _, labels = inputs(torch.float32, tokens=12)
    hidden, labels = hidden.view(3, 4, WIDTH), labels.view(3, 4)
    labels[1, 2] = -100
    found = chunked_cross_entropy(hidden, weight, labels, chunk=5, shift=True)
    expected = ForCausalLMLoss(hidden @ weight.T, labels, CLASSES)
    assert_same(found, expected, (hidden, weight), 2**-24 * 256)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_half_types_have_the_softmax_in_float32(dtype):
    hidden, weight, bias, labels = inputs(dtype)
    found = chunked_cross_entropy(hidden, weight, labels, bias=bias, chunk=4)
    assert found.dtype == torch.float32
    # Logits and products are rounded to the dtype, by half an eps each; the loss's own sums are in float32.
    assert_same(found, exact(hidden, weight, bias, labels), (hidden, weight, bias), 4 * torch.finfo(dtype).eps * 8)
    wide = exact(*(tensor.float() for tensor in (hidden, weight, bias)), labels)
    assert abs(found.item() - wide.item()) < 8 * torch.finfo(dtype).eps


def test_products_that_are_added_in_parts_are_those_of_the_whole(monkeypatch):
    hidden, weight, _, labels = inputs(torch.bfloat16)
    found = []
    for part in (1, 3 * hidden.shape[1], 1 << 20):  # a row, some, which do not divide the classes, and all
        monkeypatch.setattr(losses, "_PART", part)
        found.append(losses._loss_and_gradients(hidden, weight, None, labels, 4, -100, 1.0, None, True, True, False))
    for one in found[:2]:
        assert all(map(torch.equal, one[:2], found[2][:2]))
        # A product may be summed in another order, and is rounded once in each of the chunks.
        torch.testing.assert_close(one[2], found[2][2], rtol=0, atol=2**-8 * found[2][2].abs().max().item())


def test_chunk_rows_follow_from_bytes_on_an_accelerator():
    for classes, rows in ((128_256, 1024), (151_936, 768), (32_000, 4096), (50_257, 2560), (10**7, 256)):
        assert losses.chunk_rows(classes, "cuda", 4) == rows
        assert rows == 256 or rows * classes * 4 <= 2**29 < (rows + 128) * classes * 4
        assert losses.chunk_rows(classes, "cpu", 4) == losses.chunk_rows(classes, "meta", 4) == 256
    assert losses.chunk_rows(32_000, "cuda", 8) == 2048


def test_a_chunk_that_is_not_given_is_that_of_the_device(monkeypatch):
    monkeypatch.setattr(losses, "chunk_rows", lambda *arguments: asked.append(arguments) or 5)
    asked, (hidden, weight, _, labels) = [], inputs()
    found = chunked_cross_entropy(hidden, weight, labels)
    assert asked == [(CLASSES, "cpu", 8)]
    assert found.item() == chunked_cross_entropy(hidden, weight, labels, chunk=5).item()
    with pytest.raises(ValueError, match="chunk must be"):
        chunked_cross_entropy(hidden, weight, labels, chunk=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_of_half_types_are_added_in_float32_where_pytorch_can(dtype, monkeypatch):
    """As on CUDA: no product is rounded before it is added, so the gradient is that of half the logits' roundings."""
    calls = []

    def addmm(total, a, b, *, out_dtype, out):
        calls.append(a.shape)
        assert out is total
        assert out_dtype == total.dtype == torch.float32
        return out.addmm_(a.float(), b.float())

    hidden, weight, _, labels = inputs(dtype)
    rounded = losses._loss_and_gradients(hidden, weight, None, labels, 4, -100, 1.0, None, True, True, False)
    monkeypatch.setattr(losses, "_adds_in_float32", lambda device: device == "cpu")
    monkeypatch.setattr(torch, "addmm", addmm)
    found = losses._loss_and_gradients(hidden, weight, None, labels, 4, -100, 1.0, None, True, True, False)
    assert calls == [(CLASSES, 4)] * 3 + [(CLASSES, 1)]
    logits = (hidden @ weight.T).detach().float()
    y = (logits.softmax(1) - F.one_hot(labels, CLASSES)).to(dtype)  # what the products are given
    expected = y.T.double() @ hidden.double()
    errors = [(one[2].double() - expected).abs().max() / expected.abs().max() for one in (found, rounded)]
    assert errors[0] < 2**-19 < torch.finfo(dtype).eps / 64 < errors[1]
    assert all(map(torch.equal, found[:2], rounded[:2]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("adds", [False, True], ids=["sums in a pass of their own", "sums as they are made"])
@pytest.mark.parametrize("sizes", [(300, 8, 4000), (300, 600, 1000), (100, 8, 4000)])
def test_the_workspace_is_what_a_chunk_takes(sizes, adds, softcap, dtype, monkeypatch):
    """Of all tensors inside of the operator; in float32 some numbers for each row in addition."""
    hidden, weight, _, labels = (tensor.detach() for tensor in inputs(dtype, *sizes))
    arguments = hidden, weight, None, labels, 256, -100, 1.0, softcap, True, True, False
    monkeypatch.setattr(losses, "_adds_in_float32", lambda device: adds)
    monkeypatch.setattr(torch, "addmm", lambda total, a, b, *, out_dtype, out: out)  # as it is on CUDA, without memory
    operator = losses._loss_and_gradients
    with torch.no_grad(), peak("cpu") as measured:
        results = operator.function(*arguments)
    found = measured.bytes - sum(result.nbytes for result in results)
    assert 0 <= found - operator.workspace(*arguments) <= 32 * 256 * (dtype == torch.float32)


def test_a_simulated_step_counts_the_workspace_on_cuda_alone():
    for device in ("cuda", "cpu"):
        result = Peak()
        with FakeTensorMode(), torch.no_grad(), FollowedTensors(result, Place()) as live:
            hidden, weight = (
                torch.empty(shape, device=device, dtype=torch.bfloat16) for shape in ((2000, 64), (32000, 64))
            )
            labels = torch.zeros(2000, dtype=torch.int64, device=device)
            arguments = hidden, weight, None, labels, 1024, -100, 1.0, None, True, True, False
            results = losses._loss_and_gradients(*arguments)
            live.finish()
        known = sum(tensor.nbytes for tensor in (hidden, weight, labels, *results))
        assert result.bytes == known + (1024 * 32000 * 6 if device == "cuda" else 0)


def test_autocast_casts_as_for_a_linear_layer():
    hidden, weight, bias, labels = inputs(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = chunked_cross_entropy(hidden, weight, labels, bias=bias, chunk=4)
        logits = F.linear(hidden, weight, bias)
    expected = F.cross_entropy(logits.float(), labels)
    assert_same(found, expected, (hidden, weight, bias), 32 * torch.finfo(torch.bfloat16).eps)
    halves = [tensor.detach().bfloat16() for tensor in (hidden, weight, bias)]
    assert found.item() == chunked_cross_entropy(halves[0], halves[1], labels, bias=halves[2], chunk=4).item()


def test_no_label_and_no_row():
    hidden, weight, bias, labels = inputs()
    ignored = torch.full_like(labels, -100)
    found = chunked_cross_entropy(hidden, weight, ignored, bias=bias)
    assert found.isnan()  # as F.cross_entropy
    assert not any(gradient.any() for gradient in gradients(found, (hidden, weight, bias)))
    assert chunked_cross_entropy(hidden, weight, ignored, reduction="sum") == 0
    empty = hidden[:0], weight, labels[:0]
    found = chunked_cross_entropy(*empty, reduction="sum")
    assert found == 0
    assert not any(gradient.any() for gradient in gradients(found, (hidden, weight)))


def test_a_label_beyond_the_vocabulary_is_refused():
    hidden, weight, _, labels = inputs()
    labels[3] = CLASSES
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        chunked_cross_entropy(hidden, weight, labels)


def test_only_what_is_needed_is_computed():
    hidden, weight, bias, labels = inputs()
    products = 2 * TOKENS * WIDTH * CLASSES
    for needed, count in (("hwb", 3), ("h", 2), ("w", 2), ("b", 1), ("", 1)):
        tensors = [
            t.detach().requires_grad_(name in needed) for t, name in zip((hidden, weight, bias), "hwb", strict=True)
        ]
        with FlopCounterMode(display=False) as counted:
            found = chunked_cross_entropy(tensors[0], tensors[1], labels, bias=tensors[2], chunk=4)
        assert counted.get_total_flops() == count * products
        assert found.requires_grad == bool(needed)
        expected = exact(*tensors, labels)
        assert_same(found, expected, [t for t in tensors if t.requires_grad], EPS) if needed else None
    with torch.no_grad(), FlopCounterMode(display=False) as counted:
        assert not chunked_cross_entropy(hidden, weight, labels, bias=bias).requires_grad
    assert counted.get_total_flops() == products


def test_a_tied_weight_gets_both_gradients():
    _, weight, _, labels = inputs()
    found, expected = (
        torch.autograd.grad(loss(weight[labels].square(), weight), weight)[0]
        for loss in (lambda h, w: chunked_cross_entropy(h, w, labels, chunk=4), lambda h, w: exact(h, w, None, labels))
    )
    assert (found - expected).abs().max() <= EPS * expected.abs().max()


def test_a_graph_that_is_retained_gives_the_same_again():
    hidden, weight, _, labels = inputs()
    loss = chunked_cross_entropy(hidden, weight, labels)
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(loss, (hidden, weight))))


def test_double_backward_is_refused():
    hidden, weight, _, labels = inputs()
    with pytest.raises(RuntimeError, match="chunked_cross_entropy does not support double backward"):
        torch.autograd.grad(chunked_cross_entropy(hidden, weight, labels), hidden, create_graph=True)


def test_it_compiles_without_a_break_for_any_length():
    _, weight, bias, _ = inputs()
    function = torch.compile(chunked_cross_entropy, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (5, 9):
        hidden, _, _, labels = inputs(tokens=tokens)
        labels[2] = -100
        found = function(hidden, weight, labels, bias=bias, chunk=4)
        assert_same(found, exact(hidden, weight, bias, labels), (hidden, weight, bias), EPS)


@pytest.mark.parametrize("ignored", [False, True])
def test_one_chunk_of_logits_is_alive(ignored, monkeypatch):
    # A dispatch mode sees what an operator returns; its Python function shows what is alive inside of it.
    monkeypatch.setattr(losses, "_loss_and_gradients", losses._loss_and_gradients.function)
    tokens, width, classes, chunk = 512, 8, 4000, 64
    hidden, weight, bias, labels = inputs(torch.float32, tokens, width, classes)
    if ignored:
        labels[::3] = -100
    logits, products = 4 * chunk * classes, 4 * (classes * (width + 1) + tokens * width)
    with peak("cpu") as measured:
        loss = chunked_cross_entropy(hidden, weight, labels, bias=bias, chunk=chunk)
    # In addition: one number or index per row, a chunk of hidden states, one row of sums for the bias.
    small = 16 * 4 * tokens + 4 * chunk * width * 2 + 4 * classes + 1000
    assert logits + products < measured.bytes < logits + products + small
    with peak("cpu") as measured:
        gradients(loss, (hidden, weight, bias))
    assert measured.bytes < 2 * products + 1000
    with peak("cpu") as measured:
        exact(hidden, weight, bias, labels).backward()
    assert measured.bytes > 2 * 4 * tokens * classes > 4 * logits


def test_wrong_arguments_are_refused():
    hidden, weight, bias, labels = inputs()
    for change, match in (
        ({"labels": labels[1:]}, "must have the shapes"),
        ({"weight": weight.T}, "must have the shapes"),
        ({"bias": bias[1:]}, "bias must have the shape"),
        ({"reduction": "none"}, "reduction must be 'mean' or 'sum'"),
        ({"softcap": 0.0}, "softcap must be above 0"),
        ({"chunk": 0}, "chunk must be at least 1"),
    ):
        with pytest.raises(ValueError, match=match):
            chunked_cross_entropy(**{"hidden": hidden, "weight": weight, "labels": labels, "bias": bias, **change})


def test_large_logits_stay_finite():
    hidden, weight, _, labels = inputs()
    found = chunked_cross_entropy(hidden * 1e4, weight, labels, chunk=4)
    assert math.isfinite(found.item())
    assert_same(found, exact(hidden * 1e4, weight, None, labels), (hidden, weight), EPS)


def test_nan_reaches_the_loss():
    hidden, weight, _, labels = inputs()
    hidden.data[3, 2] = math.nan
    assert chunked_cross_entropy(hidden, weight, labels, chunk=4).isnan()
