"""Suite ``linear``: forward and backward pass of one layer, by nn.Linear's."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from benchmarks.library import KINDS
from benchmarks.suites.case import Case, Outcome, Setup
from benchmarks.suites.paper import PaperLinear
from rmm_linear import RMMConfig, RMMLinear

REFERENCE = "nn.Linear"
DEFAULT = "default"
BLOCK = 128  # tokens per block of rademacher: faster on two CPU cores than 512, and K_b is still 13 at ratio 0.1
RATIOS = (0.05, 0.1, 0.2, 0.5)
_TENTH = 0.1


def cases(device: str, *, tiny: bool) -> list[Case]:
    shapes = [(4096, 768, 3072), (4096, 3072, 768), (4096, 768, 768)]
    runs = [(shape, dtype) for dtype in ("float32", "bfloat16") for shape in shapes]
    if device == "cuda":
        runs[:0] = [((16384, 4096, 4096), "bfloat16"), ((16384, 2048, 5632), "bfloat16")]
    if tiny:
        runs = [((512, 64, 48), "float32")]

    def rounds(shape: tuple[int, ...], dtype: str, ratio: float) -> int:  # more where a run is short: machines drift
        if tiny or ratio != 0.1:
            return 2 if tiny else 3
        return (13 if dtype == "float32" else 5) * (3 if shape[1] == shape[2] else 1)

    return [
        Case(
            "linear", f"{shape[0]} x {shape[1]} -> {shape[2]}", device, dtype, shape, ratio=ratio, tiny=tiny,
            # On a CPU, a part of the tokens makes the gate cheaper than one run instead of as dear as six.
            check=min(shape[0], 256) if device == "cpu" else shape[0], rounds=rounds(shape, dtype, ratio),
        )
        for shape, dtype in runs
        # A CPU is slow in half types: there one shape is plotted.
        for ratio in (RATIOS if not tiny and (device == "cuda" or dtype == "float32" or shape == shapes[0]) else [0.1])
    ]  # fmt: skip


def configs(case: Case) -> dict[str, RMMConfig]:
    """Return our providers: at a tenth in float32 every kind and width, else the fastest ones."""
    ratio = case.ratio
    found = {
        "countsketch": RMMConfig(kind="countsketch", ratio=ratio, bits=None),
        "rows": RMMConfig(kind="rows", ratio=ratio, bits=None),
        "wta": RMMConfig(kind="wta", ratio=ratio, bits=None),
        f"rademacher block {BLOCK}": RMMConfig(kind="rademacher", ratio=ratio, bits=None, block=BLOCK),
        "countsketch 4 bits": RMMConfig(memory=ratio, bits=4),
    }
    default = RMMConfig()
    if case.ratio != _TENTH:
        return found
    if case.dtype != "float32":
        return found | {DEFAULT: default}
    widths = {f"countsketch {bits} bits": RMMConfig(memory=ratio, bits=bits) for bits in (8, 2)}
    kinds = {kind: RMMConfig(kind=kind, ratio=ratio, bits=None) for kind in KINDS if kind not in found}
    return found | {DEFAULT: default} | widths | kinds


def providers(case: Case) -> list[str]:
    return [REFERENCE, "paper", *configs(case)]


def setup(case: Case, provider: str) -> Setup:
    layer = _layer(case, provider)
    x, y = _inputs(case, case.sizes[0])

    def forward() -> Tensor:
        return layer(x)

    def run() -> None:
        layer.zero_grad()
        x.grad = None
        forward().backward(y)

    def outcome(seed: int) -> Outcome:
        torch.manual_seed(seed)
        return _outcome(layer, *_inputs(case, case.check))

    return Setup(run, outcome, lambda seed: _expected(case), layer, forward)


def _layer(case: Case, provider: str) -> nn.Linear:
    _, inputs, outputs = case.sizes
    options = {"device": case.device, "dtype": case.torch_dtype}
    if provider == "paper":
        layer = PaperLinear(inputs, outputs, case.ratio, **options)
    elif provider == REFERENCE:
        layer = nn.Linear(inputs, outputs, **options)
    else:
        layer = RMMLinear(inputs, outputs, config=configs(case)[provider], **options)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(outputs, inputs, generator=generator) * inputs**-0.5)
        nn.init.zeros_(layer.bias)
    return layer


def _inputs(case: Case, tokens: int) -> tuple[Tensor, Tensor]:
    _, inputs, outputs = case.sizes
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(tokens, inputs, generator=generator).to(case.device, case.torch_dtype).requires_grad_()
    return x, torch.randn(tokens, outputs, generator=generator).to(case.device, case.torch_dtype)


def _outcome(layer: nn.Linear, x: Tensor, y: Tensor) -> Outcome:
    output = layer(x)
    gradients = torch.autograd.grad(output, (x, layer.bias, layer.weight), y)
    return Outcome({"output": output.detach(), "dX": gradients[0], "db": gradients[1]}, [gradients[2]])


@functools.lru_cache(maxsize=1)
def _expected(case: Case) -> Outcome:
    return _outcome(_layer(case, REFERENCE), *_inputs(case, case.check))
