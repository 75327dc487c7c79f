"""Bytes and FLOPs of the bounds are those that the library declares; the bounds follow from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import rmm_kernels_moved
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.gpu import roofline
from benchmarks.gpu import roofline as work
from benchmarks.gpu.roofline import BLOCKS, EXACT, WAYS, works
from rmm_linear.losses import _loss_and_gradients, chunk_rows
from rmm_linear.ops.attention import attention_backward, attention_parts, pack_attention
from rmm_linear.ops.derivatives import activate_and_pack, apply_derivative, pack_derivative, stored_parts
from rmm_linear.ops.gated import apply_gated, gate_and_pack, keep_gated
from rmm_linear.ops.gated import stored_parts as gated_parts
from rmm_linear.ops.masks import apply_mask, pack_mask
from rmm_linear.ops.masks import dropout as seeded_dropout
from rmm_linear.ops.norms import norm_backward, norm_bytes, normalize_and_pack, pack_norm
from rmm_linear.ops.save import save_input
from rmm_linear.ops.sketches import weight_gradient
from rmm_linear.packing.attention import AttentionSpec
from rmm_linear.packing.pointwise import Pointwise
from rmm_linear.packing.stored import stored_bytes
from rmm_linear.spec import SaveSpec

N, C = 256, 4096


def counted(run: Callable[..., Any], *arguments: Any) -> int:
    """FLOPs that PyTorch counts of an operator of the library."""
    with FlopCounterMode(display=False) as counter:
        run(*arguments)
    return counter.get_total_flops()


def one(found: list[work.Work], name: str) -> work.Work:
    (same,) = [item for item in found if item.operator == name]
    return same


def flops(*found: work.Work) -> float:
    return sum(item.flops for item in found)


@pytest.fixture(scope="module")
def x() -> torch.Tensor:
    return torch.randn(N, C)


def test_flops_are_those_that_the_operators_declare(x: torch.Tensor) -> None:
    norm, gated, gelu = work.norm(N, C, 2), work.gated(N, C, 4), work.activation(N, C, 4)
    dropout, types = work.dropout(N, C, is_packed=True), (x.dtype, x.dtype)
    fused = [make(N, C, bits, is_fused=True) for make, bits in ((work.norm, 2), (work.gated, 4), (work.activation, 4))]
    copy, pair = pack_norm(x, None, 0, 2, 1e-5, True), keep_gated(x, x, "silu", 4, 0, None, True, True)
    seed, (seeded, _) = torch.zeros(1, dtype=torch.int64), work.dropout(N, C, is_packed=True, is_fused=True)
    codes, bits = pack_derivative(x, None, 0, "gelu", (), 4), pack_mask(x > 0, None)
    for found, name, declared in (
        (norm, "norm copy", counted(pack_norm, x, None, 0, 2, 1e-5, True)),
        (norm, "norm gradients", counted(norm_backward, x, copy, None, None, 2, True, x.dtype, True)),
        (gated, "gated, pack", counted(keep_gated, x, x, "silu", 4, 0, None, True, True)),
        (gated, "gated, apply", counted(apply_gated, x, pair, 4, None, True, True)),
        (gelu, "derivative, pack", counted(pack_derivative, x, None, 0, "gelu", (), 4)),
        (gelu, "derivative, apply", counted(apply_derivative, x, codes, None, "gelu", (), 4)),
        (fused[0], "norm with copy", counted(normalize_and_pack, x, None, None, None, 0, 2, 1e-5, True, *types)),
        (fused[1], "gated with products", counted(gate_and_pack, x, x, "silu", 4, 0, None, True, True)),
        (fused[2], "activation with derivative", counted(activate_and_pack, x, None, 0, "gelu", (), 4)),
        ([seeded], "dropout without a mask", counted(seeded_dropout, x, seed, 0.1)),
        (dropout, "mask, pack", counted(pack_mask, x > 0, None)),
        (dropout, "mask, apply", counted(apply_mask, x, bits, 1.0, None)),
    ):
        assert flops(one(found, name)) == declared > 0, name


def test_flops_of_attention_are_those_that_its_operators_declare() -> None:
    heads, length, width = 4, 32, 64
    query = torch.randn(2, heads, length, width)
    found = work.attention(2 * length, length, heads * width, 4, is_causal=False)
    assert flops(one(found, "attention, pack")) == counted(pack_attention, *[query] * 3, None, None, 0, 4, 4, 4)
    stored = pack_attention(query, query, query, None, None, 0, 4, 4, 4)
    spec = AttentionSpec(length, heads, width, width**-0.5)
    declared = counted(attention_backward, query.transpose(1, 2), stored, None, None, None, None, spec, (4, 4, 4))
    backward = [item for item in found if item.operator == "attention" and not item.is_forward]
    # The fused kernels run the forward pass again, which other implementations do not and the operator does not count.
    assert flops(one(found, "attention, unpack"), *backward) == declared
    (forward,) = [item for item in found if item.operator == "attention" and item.is_forward]
    assert one(found, "attention, forward again").flops == forward.flops
    halved = work.attention(2 * length, length, heads * width, 4, is_causal=True)
    assert 2 * halved[-1].flops == backward[0].flops


def test_flops_of_a_sketched_layer_are_those_that_its_operators_declare(x: torch.Tensor) -> None:
    rows, outputs = 100, 48
    spec, y = SaveSpec("countsketch", rows), torch.randn(N, outputs)
    saving = work.sketch(N, C, rows, is_forward=True, is_stored=True)
    assert flops(saving) == counted(save_input, x, spec, None, 0)
    saved = save_input(x, spec, None, 0)
    declared = counted(weight_gradient, y, saved, spec, C, None)
    expected = [
        work.sketch(N, outputs, rows, is_forward=False, is_stored=False),
        work.product(outputs, rows, C, is_forward=False),
    ]
    assert flops(*expected) == declared


def test_a_loss_in_chunks_takes_the_products_of_the_exact_one() -> None:
    n, width, classes = 256, 16, 100
    hidden, weight, labels = torch.randn(n, width), torch.randn(classes, width), torch.arange(n) % classes
    declared = counted(_loss_and_gradients, hidden, weight, None, labels, 64, -100, 1.0, None, True, True, False)
    assert flops(*work.head(n, width, classes, None)) == declared
    assert flops(*work.head(n, width, classes, 64)) == declared


def test_a_loss_in_chunks_takes_at_most_1_4_of_the_exact_time() -> None:
    """Of a vocabulary of 128,256; 256 rows at a time, whose sums take a pass of their own, take above twice."""
    rows = chunk_rows(work.HEAD[2], "cuda", 4)
    h100 = next(machine for machine in work.MACHINES if machine.name.startswith("H100"))

    def seconds(rows: int | None, machine: work.Machine, *, adds_wide: bool = True) -> float:
        return sum(map(machine.seconds, work.head(*work.HEAD, rows, adds_wide=adds_wide)))

    assert max(seconds(rows, machine) / seconds(None, machine) for machine in work.MACHINES) < 1.2
    assert max(seconds(rows, machine, adds_wide=False) / seconds(None, machine) for machine in work.MACHINES) < 1.4
    assert seconds(256, h100, adds_wide=False) / seconds(None, h100) > 2


def test_bytes_stored_are_those_that_the_library_stores() -> None:
    for rows, columns in ((256, 768), (37, 130)):
        for bits in (2, 3, 4, 8):
            assert one(work.norm(rows, columns, bits), "norm copy").stored == norm_bytes(rows, columns, bits)
            pair = one(work.gated(rows, columns, bits), "gated, pack").stored
            assert pair == stored_bytes(gated_parts(rows, columns, bits, 2))
            derivative = one(work.activation(rows, columns, bits), "derivative, pack").stored
            assert derivative == stored_bytes(stored_parts(Pointwise("gelu"), bits, rows, columns))
            attention = one(work.attention(rows, rows, columns, bits, is_causal=False), "attention, pack").stored
            assert attention == stored_bytes(attention_parts(rows, rows, (columns,) * 3, (bits,) * 3))
        mask = one(work.dropout(rows, columns, is_packed=True), "mask, pack").stored
        assert mask == pack_mask(torch.ones(rows, columns), None).nbytes


def test_bytes_moved_are_those_of_the_kernels_contracts() -> None:
    """Per element of 4096 columns, as in the table of compiled kernels."""
    half, elements = {"HAS_INDEX": False, "CENTERED": True}, N * C

    def bytes_of(kernel: str, constants: dict[str, Any]) -> float:
        return rmm_kernels_moved.value(rmm_kernels_moved.moved(kernel, "*bf16", half | constants))

    statistics, sums = bytes_of("row_statistics", {}), bytes_of("norm_sums", {"BITS": 2})
    for found, formula, constants, more in (
        (work.pack(N, C, 4), "pack", {"BITS": 4}, 0),
        (work.unpack(N, C, 4), "unpack", {"BITS": 4}, 0),
        (one(work.norm(N, C, 2), "norm copy"), "pack_norm", {"BITS": 2}, statistics),
        # The sums of rows are read again, by another kernel.
        (one(work.norm(N, C, 2), "norm gradients"), "norm_backward", {"BITS": 2}, sums + 8 / 64),
        (one(work.activation(N, C, 4), "derivative, pack"), "pack_derivative", {"BITS": 4}, 0),
        (one(work.activation(N, C, 4), "derivative, apply"), "apply_derivative", {"BITS": 4}, 0),
        (one(work.gated(N, C, 4), "gated, pack"), "pack_gated", {"BITS": 4}, 0),
        (one(work.gated(N, C, 4), "gated, apply"), "apply_gated", {"BITS": 4}, 0),
        (one(work.dropout(N, C, is_packed=True), "mask, apply"), "apply_mask", {}, 0),
        (work.dropout(N, C, is_packed=True, is_fused=True)[1], "dropout", {}, 0),
        (one(work.norm(N, C, 2, is_fused=True), "norm with copy"), "normalize", {"BITS": 2}, statistics),
        (one(work.activation(N, C, 4, is_fused=True), "activation with derivative"), "activate", {"BITS": 4}, 0),
        (one(work.gated(N, C, 4, is_fused=True), "gated with products"), "gate", {"BITS": 4}, 0),
    ):
        assert found.bytes / elements == pytest.approx(bytes_of(formula, constants) + more, rel=1e-3), formula
    mask = one(work.dropout(N, C, is_packed=True), "mask, pack")
    assert mask.bytes / elements == rmm_kernels_moved.value(rmm_kernels_moved.moved("pack_mask", "*u8", half))
    rows = round(N / 10)
    sketch = work.sketch(N, C, rows, is_forward=True, is_stored=True)
    contract = rmm_kernels_moved.moved("sparse_sketch", "*bf16", {"HASHED": True, "BITS": 0})
    assert sketch.bytes / elements == pytest.approx(rmm_kernels_moved.value(contract), rel=3e-3)


def test_a_bound_is_the_larger_of_bytes_and_flops() -> None:
    machine = roofline.Machine("m", 1e12, 1e14)
    assert machine.seconds(work.Work("a", True, bytes=2e12, flops=1e14)) == 2
    assert machine.seconds(work.Work("a", True, bytes=2e12, flops=3e14)) == 3


def test_blocks_differ_by_what_is_compressed() -> None:
    llama = BLOCKS[1]
    totals = {way.name: flops(*works(llama, way)) for way in WAYS}
    exact, parameters = totals["exact"], 4 * llama.width**2 + 3 * llama.width * llama.inner
    scores = llama.tokens * llama.length * llama.width / 2
    assert exact == pytest.approx(6 * llama.tokens * parameters + 14 * scores, rel=1e-3)
    forward = 2 * llama.tokens * parameters + 4 * scores
    assert totals["checkpointing"] - exact == pytest.approx(forward, rel=1e-3)
    saved = 0.9 * 2 * llama.tokens * parameters  # nine tenths of a third of the products
    assert exact - totals["linears sketched"] == pytest.approx(saved, rel=1e-3)
    # RoBERTa's block saves 16 units without dropout and half of one for each of two masks, see docs/design.md.
    roberta = BLOCKS[0]
    assert sum(item.stored for item in works(roberta, EXACT)) == 17 * work.SIZE * roberta.tokens * roberta.width
