"""Suite ``operators``: what makes and reads the stand-ins of whole blocks, beside the operations of PyTorch.

A case is one operation. ``exact`` is its forward and backward pass in PyTorch, ``packed`` the same with the stand-in:
the exact forward, packing, and the gradients made of what was packed. The passes that make and read the stand-in are
timed alone, too, and have the bytes that they read and write, beside a copy in the same run. Where Triton's kernels
run, ``fused`` is ``packed`` with the output and the stand-in made in one pass, as ``RMMConfig.fused`` does it.

The gate runs what is timed, with seeds of its own. By the bounds of docs/blocks.md, a fused output is off by at most
1e-5 of its RMS at the 66 columns that run in float32, and at 4,096 in half types by 4e-5, far below their rounding: the
gate's tolerances hold for it, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks import library as ops
from benchmarks.suites.case import Case, Outcome, Setup

REFERENCE, PACKED, FUSED, PACK, APPLY, COPY = "exact", "packed", "fused", "pack", "apply", "copy"
HAS_FUSED = "layer norm", "gelu", "swiglu"
DROPOUT, EPS = 0.1, 1e-5
BITS = {"layer norm": 2, "gelu": 4, "swiglu": 4, "attention": 4, "causal attention": 4}
BIAS = 0.005  # of attention's gradient, whose queries and keys go through softmax: 0.0012 of 1,024 causal tokens


Passes = tuple[Tensor | None, Sequence[Tensor]]  # what both passes made: the output, if it is made, and the gradients


@dataclass(frozen=True)
class Operation:
    inputs: Sequence[Tensor]  # what gets gradients
    y: Tensor  # gradient with respect to the output
    exact: Callable[..., Tensor]  # pyTorch's own function of the inputs
    pack: Callable[[int | None], Tensor]  # makes the stand-in for a seed; None draws one
    apply: Callable[[Tensor], Sequence[Tensor]]  # the gradients with respect to the inputs, from the stand-in
    # the output and its stand-in, where they share random numbers; else ``exact`` and ``pack`` make them
    forward: Callable[[], tuple[Tensor, Tensor]] | None = None
    # the output and its gradients, for the same random numbers: those drawn from PyTorch's seed, or for None those of
    # what ``pack`` reads. Given where the stand-in is exact
    right: Callable[[int | None], tuple[Tensor, Sequence[Tensor]]] | None = None
    read: int | None = None  # bytes that packing reads; None is those of the inputs
    # the output and its stand-in for a seed, made in one pass
    fused: Callable[[int | None], tuple[Tensor, Tensor]] | None = None

    def packed(self, seed: int | None) -> Passes:
        output, stored = (self.exact(*self.inputs), self.pack(seed)) if self.forward is None else self.forward()
        return output, self.apply(stored)

    def packed_at_once(self, seed: int | None) -> Passes:
        """Run both passes, the forward pass in one kernel."""
        if self.fused is None:
            raise ValueError(f"{FUSED} has kernels for {', '.join(HAS_FUSED)}. Leave it out of the other operations.")
        output, stored = self.fused(seed)
        return output, self.apply(stored)


def cases(device: str, *, tiny: bool) -> list[Case]:
    if tiny:
        rows = {"layer norm": (16, 66), "gelu": (16, 66), "swiglu": (16, 66), "dropout": (16, 66)}
        heads = {"attention": (2, 2, 8, 16)}
    elif device == "cpu":
        rows = {"layer norm": (4096, 768), "gelu": (4096, 3072), "swiglu": (2048, 5504), "dropout": (4096, 768)}
        heads = {"attention": (8, 12, 128, 64), "causal attention": (2, 16, 512, 128)}
    else:
        rows = {"layer norm": (16384, 4096), "gelu": (16384, 3072), "swiglu": (16384, 11008), "dropout": (16384, 4096)}
        heads = {"attention": (32, 12, 512, 64), "causal attention": (4, 32, 4096, 128)}
    dtype, backend = ("bfloat16", "triton") if device == "cuda" else ("float32", "torch")
    return [
        Case(
            "operators", f"{name} {' x '.join(map(str, sizes))}", device, dtype, sizes, rounds=1 if tiny else 5,
            tiny=tiny, backend=backend, draws=3 if tiny else 6,
        )
        for name, sizes in (rows | heads).items()
    ]  # fmt: skip


def providers(case: Case) -> list[str]:
    fused = [FUSED] if case.backend == "triton" and case.name.startswith(HAS_FUSED) else []
    return [REFERENCE, PACKED, *fused, PACK, APPLY, COPY]


def setup(case: Case, provider: str) -> Setup:
    """Make one of the providers ready; the gate compares outputs and gradients with PyTorch's."""
    one = _operation(case)
    if provider == COPY:
        return _copy(one)
    if provider == REFERENCE:
        return Setup(lambda: _gradients(one), lambda seed: Outcome({}, []), lambda seed: Outcome({}, []))
    with case.on_backend(), torch.no_grad():
        stored = one.pack(0)
        made = one.apply(stored)

    # What is timed, given a seed or a stand-in; and what the gate makes of it for a seed.
    timed, argument, passes = {
        PACKED: (one.packed, None, one.packed),
        FUSED: (one.packed_at_once, None, one.packed_at_once),
        PACK: (one.pack, None, lambda seed: (None, one.apply(one.pack(seed)))),
        APPLY: (one.apply, stored, lambda seed: (None, one.apply(one.pack(seed)))),
    }[provider]

    def run() -> None:
        with case.on_backend(), torch.no_grad():
            timed(argument)

    def outcome(seed: int) -> Outcome:
        torch.manual_seed(seed)
        with case.on_backend(), torch.no_grad():
            return _as_outcome(one, *passes(seed))

    def expected(seed: int) -> Outcome:
        output, gradients = _expected(case, seed if provider == PACKED and one.right is not None else None)
        return _as_outcome(one, output if provider in (PACKED, FUSED) else None, gradients)

    read = sum(tensor.nbytes for tensor in one.inputs) if one.read is None else one.read
    moved = {PACK: read + stored.nbytes, APPLY: stored.nbytes + sum(t.nbytes for t in (one.y, *made))}
    slack = BIAS if "attention" in case.name else None
    return Setup(run, outcome, expected, moved=moved.get(provider, 0), slack=slack)


@functools.lru_cache(maxsize=1)
def _operation(case: Case) -> Operation:
    name = case.name.rstrip("0123456789 x")
    makers = {"layer norm": _norm, "gelu": _gelu, "swiglu": _swiglu, "dropout": _dropout}
    return makers[name](case) if name in makers else _attention(case, is_causal=name.startswith("causal"))


@functools.lru_cache(maxsize=1)
def _expected(case: Case, seed: int | None) -> tuple[Tensor, Sequence[Tensor]]:
    one = _operation(case)
    if one.right is not None:
        return one.right(seed)
    output = one.exact(*one.inputs)
    return output.detach(), torch.autograd.grad(output, one.inputs, one.y)


def _as_outcome(one: Operation, output: Tensor | None, gradients: Sequence[Tensor]) -> Outcome:
    exact = {} if output is None else {"output": output}
    return Outcome(exact, list(gradients)) if one.right is None else Outcome(exact | {"gradient": gradients[0]}, [])


def _gradients(one: Operation) -> Sequence[Tensor]:
    return torch.autograd.grad(one.exact(*one.inputs), one.inputs, one.y)


def _copy(one: Operation) -> Setup:
    source = one.inputs[0].detach()
    target = torch.empty_like(source)

    def outcome(seed: int) -> Outcome:
        return Outcome({"copy": target.fill_(seed).copy_(source)}, [])

    return Setup(
        lambda: target.copy_(source), outcome, lambda seed: Outcome({"copy": source}, []), moved=2 * source.nbytes
    )


def _tensors(case: Case, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(case.sizes, generator=generator).to(case.device, case.torch_dtype) for _ in range(count)]


def _norm(case: Case) -> Operation:
    (x, y), columns, bits = _tensors(case, 2), case.sizes[1:], BITS["layer norm"]
    gamma, beta = (torch.full(columns, value, device=case.device, dtype=case.torch_dtype) for value in (1.1, 0.1))
    return Operation(
        [tensor.requires_grad_() for tensor in (x, gamma, beta)],
        y,
        lambda x, gamma, beta: F.layer_norm(x, columns, gamma, beta, EPS),
        lambda seed: ops.pack_norm(x.detach(), None, seed, bits, EPS, True),
        lambda stored: ops.norm_backward(y, stored, gamma.detach(), None, bits, True, x.dtype, True),
        read=x.nbytes,
        fused=lambda seed: ops.normalize_and_pack(
            x.detach(), gamma.detach(), beta.detach(), None, seed, bits, EPS, True, torch.float32, x.dtype
        ),
    )


def _gelu(case: Case) -> Operation:
    (x, y), how = _tensors(case, 2), ("gelu", (), BITS["gelu"])
    return Operation(
        [x.requires_grad_()],
        y,
        F.gelu,
        lambda seed: ops.pack_derivative(x.detach(), None, seed, *how),
        lambda stored: [ops.apply_derivative(y, stored, None, *how)],
        fused=lambda seed: ops.activate_and_pack(x.detach(), None, seed, *how),
    )


def _swiglu(case: Case) -> Operation:
    (a, b, y), bits = _tensors(case, 3), BITS["swiglu"]

    def apply(stored: Tensor) -> list[Tensor]:
        return [one for one in ops.apply_gated(y, stored, bits, None, True, True) if one is not None]

    return Operation(
        [a.requires_grad_(), b.requires_grad_()],
        y,
        lambda a, b: F.silu(a) * b,
        lambda seed: ops.keep_gated(a.detach(), b.detach(), "silu", bits, seed, None, True, True),
        apply,
        fused=lambda seed: ops.gate_and_pack(a.detach(), b.detach(), "silu", bits, seed, None, True, True),
    )


def _dropout(case: Case) -> Operation:
    """Exact: one bit for each element. What is packed alone is one mask; whole passes draw theirs."""
    x, y = _tensors(case, 2)
    _, mask = torch.native_dropout(x, DROPOUT, True)

    def forward() -> tuple[Tensor, Tensor]:
        output, drawn = torch.native_dropout(x, DROPOUT, True)
        return output, ops.pack_mask(drawn, None)

    def right(seed: int | None) -> tuple[Tensor, Sequence[Tensor]]:
        drawn = mask
        if seed is not None:
            torch.manual_seed(seed)
            _, drawn = torch.native_dropout(x.detach(), DROPOUT, True)
        output, gradient = (torch.where(drawn, one.detach() / (1 - DROPOUT), 0.0) for one in (x, y))
        return output, [gradient]

    return Operation(
        [x.requires_grad_()],
        y,
        lambda x: F.dropout(x, DROPOUT),
        lambda seed: ops.pack_mask(mask, None),
        lambda stored: [ops.apply_mask(y, stored, 1 / (1 - DROPOUT), None)],
        forward,
        right,
        mask.nbytes,
    )


def _attention(case: Case, *, is_causal: bool) -> Operation:
    (query, key, value, y), bits = _tensors(case, 4), (BITS["attention"],) * 3
    y = y.transpose(1, 2).contiguous().transpose(1, 2)  # as it comes from the layer after
    _, heads, length, width = case.sizes
    spec = ops.AttentionSpec(length, heads, width, width**-0.5, is_causal)

    def apply(stored: Tensor) -> list[Tensor]:
        found = ops.attention_backward(y.transpose(1, 2), stored, None, None, None, None, spec, bits)
        return [gradient.transpose(1, 2) for gradient in found[:3]]

    return Operation(
        [tensor.requires_grad_() for tensor in (query, key, value)],
        y,
        lambda query, key, value: F.scaled_dot_product_attention(query, key, value, is_causal=is_causal),
        lambda seed: ops.pack_attention(query.detach(), key.detach(), value.detach(), None, None, seed, *bits),
        apply,
    )
