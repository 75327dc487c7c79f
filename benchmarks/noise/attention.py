"""The bias of packed attention on real queries and keys.

MiniLM as RoBERTa is fine-tuned for a few exact steps on GLUE tasks. On the next batch every layer's queries, keys,
values and the gradient of its output are recorded, packed many times, and the gradients compared with the exact ones.
Then the gradients of all parameters are compared, with attention alone packed, and with D²_SGD of the batch.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from benchmarks.library import AttentionNoise, Passes, exact_but, measuring, set_aside, simulate_attention, table
from benchmarks.noise.glue import add_glue, load_glue, train
from rmm_linear import convert

WIDTHS = ((4, 4), (8, 4), (8, 8))  # of queries and keys, and of values
GROUPS = 10  # of draws of the whole model, between which the bias is estimated


@dataclass
class AttentionCall:
    query: Tensor  # shape (B, h, Tq, d)
    key: Tensor  # shape (B, h, Tk, d)
    value: Tensor  # shape (B, h, Tk, d)
    mask: Tensor | None  # bool or additive, or None
    grad_output: Tensor | None = None  # shape (B, h, Tq, d)

    def deviation(self) -> float:
        """Return how far scores are from the mean of their query, over what it sees, root mean square."""
        scores = self.query @ self.key.transpose(-1, -2) * self.query.shape[-1] ** -0.5
        seen = torch.ones_like(scores, dtype=torch.bool)
        if self.mask is not None:
            seen &= self.mask if self.mask.dtype == torch.bool else self.mask > -1
        count = seen.sum(-1, keepdim=True).clamp_min(1)
        mean = (scores * seen).sum(-1, keepdim=True) / count
        return float((((scores - mean) * seen).square().sum() / seen.sum()).sqrt())


class _Recorder(TorchFunctionMode):
    def __init__(self, calls: list[AttentionCall]) -> None:
        super().__init__()
        self.calls = calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is F.scaled_dot_product_attention:
            mask = (kwargs or {}).get("attn_mask", args[3] if len(args) > 3 else None)
            call = AttentionCall(args[0].detach(), args[1].detach(), args[2].detach(), mask)
            output.register_hook(lambda y: setattr(call, "grad_output", y.detach()))
            self.calls.append(call)
        return output


def record(model: nn.Module, batch: Mapping[str, Any]) -> list[AttentionCall]:
    """Record the calls of attention of a batch, in eval mode, so without dropout."""
    calls: list[AttentionCall] = []
    model.eval()
    with _Recorder(calls):
        loss = model(**batch).loss
    loss.backward()
    model.zero_grad()
    model.train()
    return calls


def by_layer(calls: list[AttentionCall], draws: int) -> Iterator[tuple[str, ...]]:
    for layer, call in enumerate(calls):
        assert call.grad_output is not None  # noqa: S101
        for bits, value_bits in WIDTHS:
            dq, dk, _ = simulate_attention(
                call.query, call.key, call.value, call.grad_output,
                bits=bits, value_bits=value_bits, draws=draws, mask=call.mask,
            )  # fmt: skip
            yield str(layer), f"{call.deviation():.2f}", f"{bits}, {bits}, {value_bits}", *_cells(dq), *_cells(dk)


def _cells(noise: AttentionNoise) -> tuple[str, str]:
    ratio, error = noise.bias / noise.variance, noise.standard_error / noise.variance
    return f"{noise.variance / noise.exact:.2g}", f"{ratio:.5f} ± {error:.5f}"


def by_block(model: nn.Module, batch: Mapping[str, Any], draws: int) -> Iterator[tuple[str, ...]]:
    """Noise and bias of the gradients by queries', keys' and all parameters, with attention alone packed."""
    convert(model, operations="attention")
    passes = Passes(model, batch)
    with measuring(model), set_aside(model) as (context,):
        with exact_but(model):
            sgd, exact = passes.sgd_variance(), passes.gradients()
        means = [one.new_zeros(GROUPS, one.numel()) for one in exact]
        squares = [0.0] * len(exact)
        each = -(-draws // GROUPS)
        for draw in range(each * GROUPS):
            context.salt = draw + 1
            for place, (found, right) in enumerate(zip(passes.gradients(), exact, strict=True)):
                error = (found - right).flatten()
                means[place][draw % GROUPS] += error / each
                squares[place] += float(error.square().sum()) / (each * GROUPS)
    names = list(passes.trained)
    parts = {name: [name] for name in names if name.endswith((".query.weight", ".key.weight"))}
    for title, chosen in {**parts, "whole gradient": names}.items():
        places = [names.index(name) for name in chosen]
        products = sum((means[i] @ means[i].T).double() for i in places)
        pairs = products[tuple(torch.triu_indices(GROUPS, GROUPS, 1))]  # pyright: ignore[reportIndexIssue]
        bias, error = float(pairs.mean()), float(pairs.std()) / len(pairs) ** 0.5
        variance, minibatch = sum(squares[i] for i in places) - bias, sum(sgd[names[i]] for i in places)
        ratios = f"{bias / variance:.4f} ± {error / variance:.4f}", f"{bias / minibatch:.2g} ± {error / minibatch:.2g}"
        yield title, f"{variance / minibatch:.2g}", *ratios


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_glue(parser, ("sst2", "cola"), batch=16)
    parser.add_argument("--model_name_or_path", help="model folder, or model of the hub; default: MiniLM")
    parser.add_argument("--steps", type=int, default=25, help="exact training steps before")
    parser.add_argument("--max_seq_length", type=int, default=128, help="tokens per text at most")
    parser.add_argument("--draws", type=int, default=60, help="draws of every layer")
    parser.add_argument("--whole", type=int, default=40, help="draws of the whole model; 0 makes none")


def run(arguments: argparse.Namespace) -> Iterator[str]:
    shape = {"batch": arguments.batch, "steps": arguments.steps, "max_length": arguments.max_seq_length}
    for task in arguments.tasks:
        model, batches = load_glue(task, arguments.data_dir, arguments.model_name_or_path, **shape, seed=0)
        train(model, batches[:-1])
        header = ("layer", "scores", "bits q, k, v", "dQ noise", "dQ bias² / noise", "dK noise", "dK bias² / noise")
        yield f"{task}\n{table(header, list(by_layer(record(model, batches[-1]), arguments.draws)))}"
        if arguments.whole:
            header = ("gradient with respect to", "variance ratio", "bias² / noise", "bias² / minibatch variance")
            yield table(header, list(by_block(model, batches[-1], arguments.whole)))
