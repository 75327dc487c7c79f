"""Budgets for torch.compile: torch's own solver beside ours, on the kind of model on which its peaks rise."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition

from benchmarks.planning import fit_steps
from benchmarks.records import Origin
from rmm_linear.planning import CompileBudget, KnapsackSolver, Partition

BUDGETS = tuple(n / 10 for n in range(10, -1, -1))
TORCH, SAME_SHARE, THEIR_PEAK, LEAST = "torch", "same share", "their peak", "least"


@dataclass(frozen=True, kw_only=True)
class Compiled(Origin):
    """One model, compiled with one budget; peaks are counted on the graphs, of what a step makes."""

    network: str  # title, with the batch
    budget: float  # torch's, as a share of what is saved
    solver: str  # torch's "dp", ours with the same share, ours with their peak as the budget in bytes, or ours, "least"
    peak: int = 0  # bytes
    work: float = 1.0  # estimated operations, by those without a budget
    seconds: float = 0.0  # of the processor, of compiling and one step, without a code generator
    is_equal: str = ""  # whether gradients are those without a budget, to the bit
    seed: int = fit_steps.SEED


def compiled(title: str, make: Callable[[], Any], about: dict[str, Any]) -> Iterator[Compiled]:
    """Compile a model with every budget."""
    _, expected, _ = exact, _, _ = _step(make, _torchs(1.0, "dp"))
    theirs = dict[float, Partition]()

    def row(budget: float, solver: str, partition: Callable[..., Any]) -> Compiled:
        found, gradients, seconds = _step(make, partition)
        if solver == TORCH:
            theirs[budget] = found
        is_equal = all(torch.equal(a, b) for a, b in zip(expected, gradients, strict=True))
        return Compiled(
            network=title, budget=budget, solver=solver, peak=found.peak, work=found.work / exact.work,
            seconds=seconds, is_equal="equal" if is_equal else "differ", **about,
        )  # fmt: skip

    for budget in BUDGETS:
        yield row(budget, TORCH, _torchs(budget, "dp"))
        yield row(budget, SAME_SHARE, _torchs(max(budget, 1e-9), KnapsackSolver()))
        yield row(budget, THEIR_PEAK, CompileBudget(theirs[budget].peak))
    yield row(0.0, LEAST, CompileBudget("least"))


def _torchs(budget: float, solver: Any) -> Callable[..., Any]:
    def partition(graph: Any, inputs: Any, **named: Any) -> Any:
        with config.patch(activation_memory_budget=budget, activation_memory_budget_solver=solver):
            return min_cut_rematerialization_partition(graph, inputs, **named)

    return partition


def _step(make: Callable[[], Any], partition: Callable[..., Any]) -> tuple[Partition, list[Tensor], float]:
    """The partition of a step, its gradients, and the time of compiling and running it."""
    found = list[Partition]()

    def judged(graph: Any, inputs: Any, **named: Any) -> Any:
        split = partition(graph, inputs, **named)
        found.append(Partition.of(split[0].graph, split[1].graph, named["num_fwd_outputs"]))
        return split

    def runs(graph: Any, _: Any) -> Any:
        return make_boxed_func(graph.forward)

    model, batch = make()
    torch._dynamo.reset()
    step = torch.compile(model, backend=aot_autograd(fw_compiler=runs, bw_compiler=runs, partition_fn=judged))  # pyright: ignore[reportArgumentType]
    begin = time.process_time()
    step(batch).backward()
    seconds = time.process_time() - begin
    return found[0], [p.grad for p in model.parameters() if p.grad is not None], seconds


class Decoder(nn.Module):
    """A decoder in the manner of LLaMA, with a large head, that returns its loss."""

    def __init__(self, layers: int, width: int = 128, inner: int = 344, vocabulary: int = 2048) -> None:
        """Make the layers."""
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=False)
        self.layers = nn.ModuleList(_Layer(width, inner) for _ in range(layers))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss of predicting the next token."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class _Layer(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = (part.view(batch, length, 4, -1).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        y = self.norms[1](x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


def _made(layers: int, *shape: int) -> Callable[[], Any]:
    def make() -> Any:
        torch.manual_seed(fit_steps.SEED)
        model = Decoder(layers)
        return model, torch.randint(0, 2048, shape)

    return make


def decoders(tiny: bool) -> dict[str, Callable[[], Any]]:
    """Models by their titles."""
    if tiny:
        return {"2 layers, 1 × 32": _made(2, 1, 32)}
    return {"6 layers, 4 × 256": _made(6, 4, 256), "16 layers, 1 × 512": _made(16, 1, 512)}
