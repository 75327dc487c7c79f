"""Suite ``kernels``: bytes per second of every kernel against size, with a copy in the same run as the limit.

Counted are the bytes that cannot but be moved: what is read once and what is written. A copy reads and writes its
matrix. The dense sketch is bound by arithmetic where K is large, the others by memory alone.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks import library as ops
from benchmarks.suites.case import Case, Outcome, Setup
from benchmarks.suites.linear import BLOCK

REFERENCE = "copy"
SKETCHES = {"countsketch": "countsketch", "rows": "rows", f"rademacher block {BLOCK}": "rademacher"}
BITS = 4
PACKED, PACK, UNPACK, NORMS = f"countsketch {BITS} bits", f"pack {BITS} bits", f"unpack {BITS} bits", "row norms"


def cases(device: str, *, tiny: bool) -> list[Case]:
    if tiny:
        runs = [((96, 64), "float32")]
    elif device == "cpu":
        runs = [((tokens, 768), dtype) for dtype in ("float32", "bfloat16") for tokens in (1024, 4096, 16384)]
    else:
        runs = [((tokens, 4096), "bfloat16") for tokens in (1024, 4096, 16384, 65536)]
        runs += [((16384, 768), "bfloat16"), ((16384, 4096), "float32")]
    backend = "torch" if device == "cpu" else "triton"
    return [
        Case(
            "kernels", f"{tokens} x {columns}", device, dtype, (tokens, columns), rounds=1 if tiny else 3, tiny=tiny,
            check=min(tokens, 1024) if device == "cpu" else tokens, backend=backend,
        )
        for (tokens, columns), dtype in runs
    ]  # fmt: skip


def providers(case: Case) -> list[str]:
    return [REFERENCE, *SKETCHES, PACKED, PACK, UNPACK, NORMS]


def setup(case: Case, provider: str) -> Setup:
    makers = {REFERENCE: _copy, PACKED: _packed_sketch, PACK: _pack, UNPACK: _unpack, NORMS: _row_norms}
    if provider in SKETCHES:
        return _sketch(case, SKETCHES[provider])
    return makers[provider](case, _matrix(case, case.sizes[0]), _matrix(case, case.check))


def _calls(case: Case) -> Any:
    """The kernels' functions, or what runs without them, by the same names and arguments."""
    columns, dtype = case.sizes[1], case.torch_dtype
    if case.backend == "torch":
        return SimpleNamespace(
            packed_sketch=lambda x, seed, rows: ops.PACKED_SKETCH(
                x, seed, ops.SaveSpec("countsketch", rows, bits=BITS), None
            ),
            pack=ops.PACK,
            unpack=lambda codes, scales, seed: ops.UNPACK(codes, scales, seed, BITS, columns, dtype),
            row_norms=ops.row_norms,
        )
    found = ops.kernels()
    return SimpleNamespace(
        packed_sketch=lambda x, seed, rows: found.sparse_sketch(x, seed, rows, bits=BITS),
        pack=found.pack,
        unpack=lambda codes, scales, seed: found.unpack(codes, scales, seed, BITS, columns, dtype),
        row_norms=found.row_norms,
    )


def _sketcher(case: Case, kind: str, tokens: int, seed: Tensor) -> Callable[[Tensor], Tensor]:
    """The sketch of a matrix of so many tokens. The index that Triton gathers `rows` by is sampled beforehand."""
    rows, block = _rows(case, tokens), BLOCK if kind == "rademacher" else None
    if case.backend == "torch":
        return lambda x: ops.SKETCH(x, kind=kind, seed=seed, rows=rows, block=block)
    if kind == "countsketch":
        return lambda x: ops.kernels().sparse_sketch(x, seed, rows)
    if kind == "rows":
        index, scale = ops.sample(seed, tokens, rows), torch.full((rows,), (tokens / rows) ** 0.5, device=case.device)
        return lambda x: ops.kernels().sparse_sketch(x, seed, rows, index=index, scale=scale)
    size, _, rows_per_block = ops.block_rows(tokens, rows, block)
    return lambda x: ops.kernels().dense_sketch(x, seed, kind, size, rows_per_block)


def _matrix(case: Case, tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(tokens)
    return torch.randn(tokens, case.sizes[1], generator=generator).to(case.device, case.torch_dtype)


def _seed(number: int, case: Case) -> Tensor:
    return torch.full((1,), number, dtype=torch.int64, device=case.device)


def _bytes(*tensors: Tensor) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _rows(case: Case, tokens: int) -> int:
    return max(1, round(case.ratio * tokens))


def _sketch(case: Case, kind: str) -> Setup:
    """E‖SᵀX‖² = ‖X‖², and on an accelerator the very sketch of the reference."""
    tokens = case.sizes[0]
    x, check = _matrix(case, tokens), _matrix(case, case.check)
    run = _sketcher(case, kind, tokens, _seed(0, case))
    rows, block = _rows(case, case.check), BLOCK if kind == "rademacher" else None

    def outcome(number: int) -> Outcome:
        z = _sketcher(case, kind, case.check, _seed(number, case))(check)
        return Outcome({} if case.backend == "torch" else {"SᵀX": z}, [z.float().square().sum().view(1)])

    def expected(number: int) -> Outcome:
        exact = {}
        if case.backend != "torch":
            exact["SᵀX"] = ops.sketch(check, kind=kind, seed=_seed(number, case), rows=rows, block=block)
        return Outcome(exact, [check.float().square().sum().view(1)])

    kept = ops.kept_rows(tokens, _rows(case, tokens), block)
    read = kept if kind == "rows" else tokens
    moved = (read + kept) * x.shape[1] * x.element_size()
    return Setup(lambda: run(x), outcome, expected, moved=moved)


def _packed_sketch(case: Case, x: Tensor, check: Tensor) -> Setup:
    run = _calls(case).packed_sketch
    seed, rows, checked = _seed(0, case), _rows(case, len(x)), _rows(case, len(check))
    outcome = _unpacked(case, lambda seed: run(check, seed, checked))

    def expected(number: int) -> Outcome:
        return Outcome({}, [ops.sketch(check, kind="countsketch", seed=_seed(number, case), rows=checked)])

    return Setup(lambda: run(x, seed, rows), outcome, expected, moved=_bytes(x, *run(x, seed, rows)))


def _pack(case: Case, x: Tensor, check: Tensor) -> Setup:
    pack, seed = _calls(case).pack, _seed(0, case)
    outcome, moved = _unpacked(case, lambda seed: pack(check, BITS, seed)), _bytes(x, *pack(x, BITS, seed))
    return Setup(lambda: pack(x, BITS, seed), outcome, lambda _: Outcome({}, [check]), moved=moved)


def _unpacked(case: Case, make: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Callable[[int], Outcome]:
    """E[unpack(pack(Z))] = Z, unpacked by the reference."""

    def outcome(number: int) -> Outcome:
        seed = _seed(number, case)
        codes, scales = make(seed)
        return Outcome({}, [ops.packing.unpack(codes, scales, seed, BITS, case.sizes[1], case.torch_dtype)])

    return outcome


def _unpack(case: Case, x: Tensor, check: Tensor) -> Setup:
    unpack, seed = _calls(case).unpack, _seed(0, case)
    codes, scales = ops.packing.pack(x, BITS, seed)

    def outcome(number: int) -> Outcome:
        seed = _seed(number, case)
        return Outcome({}, [unpack(*ops.packing.pack(check, BITS, seed), seed)])

    moved = _bytes(codes, scales, x)
    return Setup(lambda: unpack(codes, scales, seed), outcome, lambda _: Outcome({}, [check]), moved=moved)


def _row_norms(case: Case, x: Tensor, check: Tensor) -> Setup:
    run = _calls(case).row_norms
    expected = Outcome({"norms": check.double().square().sum(1).sqrt()}, [])
    outcome = Outcome({"norms": run(check)}, [])
    return Setup(lambda: run(x), lambda _: outcome, lambda _: expected, moved=_bytes(x, run(x)))


def _copy(case: Case, x: Tensor, check: Tensor) -> Setup:
    target = torch.empty_like(x)

    def outcome(number: int) -> Outcome:
        target.fill_(number)
        return Outcome({"copy": target.copy_(x)}, [])

    return Setup(lambda: target.copy_(x), outcome, lambda _: Outcome({"copy": x}, []), moved=2 * x.nbytes)
