"""Methods of the comparison: others save what they say and err as they say, exact ones are exact."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import gradients, tiny_model, token_ids
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.frontier.compiled import use_compiled
from benchmarks.frontier.few_bits import FewBitGELU, gelu_steps, pack_codes, unpack_codes, use_few_bits
from benchmarks.frontier.gact import use_gact
from benchmarks.frontier.loract import low_rank
from benchmarks.frontier.methods import METHODS, TUNED
from benchmarks.frontier.offloaded import host_bytes, use_offloaded
from benchmarks.frontier.prac import PracLinear, use_prac
from benchmarks.suites.paper import PaperLinear, use_paper
from rmm_linear.memory import track_saved
from rmm_linear.memory.peak import LiveTensors, Peak
from rmm_linear.packing.pack import packed_bytes


def test_a_derivative_of_few_bits_is_the_value_of_its_piece() -> None:
    for bits, count in itertools.product((1, 2, 3, 4), (1, 8, 21)):
        codes = torch.randint(0, 2**bits, (count,), dtype=torch.uint8)
        stored = pack_codes(codes, bits)
        assert stored.nbytes == -(-count // 8) * bits
        assert torch.equal(unpack_codes(stored, bits, count), codes)
    x = torch.linspace(-4, 4, 999).view(3, 333)
    inputs = x.clone().requires_grad_()
    output = FewBitGELU(3)(inputs)
    assert torch.equal(output, nn.GELU()(x))
    output.sum().backward()
    borders, levels = gelu_steps(3)
    assert inputs.grad is not None
    assert torch.equal(inputs.grad, levels[(x[..., None] > borders).sum(-1)])
    with pytest.raises(ValueError, match="needs a GELU"):
        use_few_bits(nn.Linear(2, 2), 3)


def test_gact_packs_once_what_is_saved_twice() -> None:
    torch.manual_seed(0)
    layers, x = nn.ModuleList([nn.Linear(64, 32), nn.Linear(64, 32)]), torch.randn(100, 64, requires_grad=True)
    layers.forward = lambda x: layers[0](x) + layers[1](x)  # pyright: ignore[reportAttributeAccessIssue]
    use_gact(layers, 2)
    with LiveTensors(Peak()) as live:
        output = layers(x)
        kept = live.now - output.nbytes
    assert kept == packed_bytes(100, 64, 2)


def test_the_published_layer_is_unbiased_under_checkpointing() -> None:
    torch.manual_seed(0)
    model, x, y = nn.Sequential(nn.Linear(16, 8)), torch.randn(64, 16), torch.randn(64, 8)
    exact = y.T @ x
    use_paper(model, 0.5)
    found, layer = [], model[0]
    assert isinstance(layer, PaperLinear)
    for _ in range(100):
        layer.weight.grad = None
        checkpoint(model, x, use_reentrant=False).backward(y)
        assert layer.weight.grad is not None
        found.append(float((layer.weight.grad * exact).sum() / exact.square().sum()))
    # With another step's S in the backward pass, it would be 0.
    assert statistics.mean(found) == pytest.approx(1, abs=4 * statistics.stdev(found) / 10)
    assert statistics.stdev(found) < 1


def test_prac_is_unbiased_with_the_variance_of_the_paper() -> None:
    """Of theorem 15, with dYᵀX in place of X: the error of dW is dYᵀX times that of QQᵀ."""
    torch.manual_seed(0)
    model, draws, n, rank = nn.Sequential(nn.Linear(24, 5)), 400, 24, 3
    x, y = torch.randn(40, n) * torch.linspace(3, 0.3, n), torch.randn(40, 5)
    use_prac(model, rank, interval=1)
    layer, exact = model[0], y.T @ x
    assert isinstance(layer, PracLinear)
    along, errors = list[float](), list[float]()
    for _ in range(draws):
        layer.weight.grad = None
        model(x).backward(y)
        assert layer.weight.grad is not None
        along.append(float((layer.weight.grad * exact).sum() / exact.square().sum()))
        errors.append(float((layer.weight.grad - exact).square().sum()))
    assert statistics.mean(along) == pytest.approx(1, abs=4 * statistics.stdev(along) / math.sqrt(draws))
    principal = torch.linalg.svd(x).Vh[:rank]
    rest = (exact - exact @ principal.T @ principal).square().sum()
    expected = float(((n - rank) / rank - 1) * rest)
    assert statistics.mean(errors) == pytest.approx(expected, abs=4 * statistics.stdev(errors) / math.sqrt(draws))


def test_prac_keeps_one_pair_of_subspaces_for_one_input_until_they_are_made_again() -> None:
    layers, x = nn.ModuleList([nn.Linear(64, 32), nn.Linear(64, 32)]), torch.randn(100, 64)
    use_prac(layers, 0.25, interval=2)
    first, second = layers
    assert isinstance(first, PracLinear)
    seen, saved = list[torch.Tensor | None](), list[int]()
    for _ in range(3):
        x = x.clone()  # of another step
        with track_saved(layers) as ledger:
            output = first(x) + second(x)
        output.sum().backward()
        saved.append(ledger.total)
        seen.append(first.subspaces.random)
    rows, made = 4 * 100 * (16 + 16), 4 * 64 * (16 + 16)  # subspaces are buffers, which no ledger counts
    assert saved == [rows + made, rows, rows + made]
    assert seen[0] is seen[1] is not seen[2]
    assert [sum(1 for _ in layer.buffers()) for layer in layers] == [2, 0]


@pytest.mark.parametrize("shape", [(40, 12), (12, 40)])
def test_loract_keeps_a_matrix_of_low_rank(shape: tuple[int, int]) -> None:
    a = torch.randn(shape[0], 3) @ torch.randn(3, shape[1])
    left, right = low_rank(a, 3, torch.Generator().manual_seed(0))
    assert (left.shape, right.shape) == ((shape[0], 3), (3, shape[1]))
    torch.testing.assert_close(left @ right, a, atol=1e-4, rtol=1e-4)


def test_offloaded_checkpoints_wait_in_files_which_go_with_the_model() -> None:
    model, ids = tiny_model("roberta").train(), token_ids(80, 16)
    use_offloaded(model)
    loss = model(input_ids=ids, labels=torch.arange(80) % 2).loss
    width, layers = model.config.hidden_size, model.config.num_hidden_layers
    # Of the inputs of layers, and a header each.
    assert 0 <= (host_bytes(model) or 0) - 4 * 80 * 16 * width * layers < 512 * layers
    loss.backward()
    assert host_bytes(model) == 0
    assert host_bytes(nn.Linear(2, 2)) is None


@pytest.mark.stack
def test_a_compiled_step_has_graphs_for_all_shapes_and_saves_eight_bits_if_asked() -> None:
    from torch._dynamo.utils import counters

    found, graphs = dict[str, tuple[list[float], dict[str, torch.Tensor], int]](), list[int]()
    for name in ("exact", "compiled", "fp8"):
        model, losses = tiny_model("roberta", dropout=0.1, width=64).train(), list[float]()
        if name != "exact":
            counters.clear()
            graphs.clear()
            use_compiled(model, quantized=name == "fp8")
        for rows, tokens in ((40, 20), (32, 10), (7, 33), (36, 14)):
            ids = token_ids(rows, tokens)
            batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.arange(rows) % 2}
            model.zero_grad()
            torch.manual_seed(0)
            model(**batch).loss.backward()  # the first compiles
            with track_saved(model) as ledger:
                loss = model(**batch).loss
            loss.backward()
            losses.append(float(loss.detach()))
            graphs.append(counters["stats"]["unique_graphs"])
        found[name] = losses, gradients(model), ledger.total
        if name != "exact":
            assert 0 < graphs[-1] <= 4, graphs  # one per shape, with hooks and without, would be eight
    (losses, exact, _), (_, same, whole), (others, other, saved) = found.values()
    assert others == pytest.approx(losses, abs=1e-5)  # with the masks of dropout that the exact model has
    size = torch.stack([exact[name].norm() for name in exact]).norm()
    errors = [
        torch.stack([(each[name] - exact[name]).norm() for name in exact]).norm() / size for each in (same, other)
    ]
    assert errors[0] < 1e-5
    # Numbers of e4m3 are within a sixteenth.
    assert 1e-3 < errors[1] < 1 / 16
    assert saved < 0.4 * whole


def trained(method: str, dropout: float = 0.0, seed: int = 0) -> tuple[nn.Module, float, int]:
    """A model after one backward pass, its loss, and what lived between the passes."""
    how = METHODS[method]
    model = how.prepare(tiny_model("roberta", dropout=dropout, width=64).train())
    ids = token_ids(40, 20)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.arange(40) % 2}
    if how.is_indexed:
        batch["sample_index"] = torch.arange(40)
    torch.manual_seed(seed)
    with LiveTensors(Peak()) as live:
        loss = model(**batch).loss
        kept = live.now
    loss.backward()
    return model, float(loss.detach()), kept


@pytest.mark.parametrize(("method", "most"), [("checkpoint", 0.2), ("checkpoint-offload", 0.15)])
def test_exact_methods_are_exact(method: str, most: float) -> None:
    (exact, loss, whole), (model, other, kept) = trained("exact", 0.1), trained(method, 0.1)
    assert (loss, METHODS[method].is_exact) == (other, True)
    assert kept < most * whole
    expected, found = gradients(exact), gradients(model)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_the_control_begins_a_millionth_apart() -> None:
    (exact, loss, whole), (model, other, kept) = trained("exact"), trained("nudged")
    assert other == pytest.approx(loss, rel=1e-4)
    assert kept == whole
    for one, nudged in zip(exact.parameters(), model.parameters(), strict=True):
        apart = (one - nudged).abs()
        assert (one.ndim > 1) <= bool(apart.any())
        assert bool((apart <= 1e-5 * one.abs()).all())


def others() -> Iterator[Any]:
    """One of each kind, and those that differ in a number where tests are thorough."""
    seen: set[str] = set()
    for name, one in METHODS.items():
        is_same_loss = not name.startswith("qlora")
        if one.budget is None and not one.is_exact and not one.is_compiled and is_same_loss:
            kind = name.split("-")[0]
            yield pytest.param(name, marks=[pytest.mark.thorough] * (kind in seen))
            seen.add(kind)


@pytest.mark.parametrize("method", others())
def test_every_other_method_keeps_less_and_errs(method: str) -> None:
    """The loss is the exact one; the gradient points the same way, and is another."""
    (exact, loss, whole), (model, other, kept) = trained("exact"), trained(method)
    assert other == pytest.approx(loss, rel=1e-5)
    found = gradients(model)
    if METHODS[method].group == "fewer parameters":
        assert all("lora_" in name or "classifier" in name for name in found)
        assert (model.peft_config["default"].velora_config is not None) == (method == "velora")
        assert method != "loract" or kept < 0.1 * whole
        return
    assert kept < whole
    expected = gradients(exact)
    name = "roberta.encoder.layer.0.attention.self.query.weight"
    assert not torch.equal(expected[name], found[name])

    def length(found: dict[str, torch.Tensor]) -> float:
        flat, right = (torch.cat([one[key].flatten() for key in expected]) for one in (found, expected))
        return float(flat @ right / (right @ right))

    # Along the exact one, its length is on average the exact one's: five draws tell half or twice of it.
    lengths = [length(gradients(trained(method, seed=seed)[0])) for seed in range(1, 6)]
    error = statistics.stdev(lengths) / math.sqrt(len(lengths))
    assert error < 0.12
    assert statistics.mean(lengths) == pytest.approx(
        1, abs=7 * error + (0.1 if method in ("few-bits", "prac-60") else 1e-3)
    )


@pytest.mark.parametrize(
    "method", [name for name in TUNED if METHODS[name].budget is None and not METHODS[name].is_compiled]
)
def test_all_methods_have_the_masks_of_dropout_that_the_exact_model_has(method: str) -> None:
    exact = [trained("exact", dropout=0.1, seed=seed)[1] for seed in (0, 1)]
    assert abs(exact[1] - exact[0]) > 1e-4
    # Outputs are the exact ones up to the order of sums: of eager attention, say.
    assert trained(method, dropout=0.1)[1] == pytest.approx(exact[0], abs=1e-5)
