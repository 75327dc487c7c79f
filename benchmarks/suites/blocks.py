"""Suite ``blocks``: forward and backward pass of whole blocks, without embeddings, head and optimizer.

Blocks of RoBERTa-base, with and without dropout, of LLaMA-7B and, on cuda, of a LLaMA of 1.1 billion parameters, in
transformers' own classes with random weights. On cuda two blocks of each on 16,384 tokens: of LLaMA-7B, 4e13 FLOPs of
products both ways, 0.1 s at half of an H200's peak, which makes a case some twenty seconds; of RoBERTa, 1.6e12, a few
milliseconds. All providers share one set of parameters. RoBERTa's blocks come with the norm and the dropout before the
first. Where Triton's kernels run, all operations are there with ``fused=True``, too.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.suites import models
from benchmarks.suites.case import Case, Outcome, Setup
from benchmarks.suites.operators import BIAS
from rmm_linear import RMMConfig, convert

REFERENCE = "exact"
CHECKPOINT = "torch checkpoint"
LINEARS, ALL = "countsketch", "countsketch, all operations"
FUSED = f"{ALL}, fused"
_UNIT = 2.0**-24  # half a last bit of float32, relative
_SIZES: dict[str, dict[str, Any]] = {
    "roberta": {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12},
    "llama": {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32},
    "llama-1b": {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32, "num_key_value_heads": 4},
}
_HALF_OF_LLAMA: dict[str, Any] = {"hidden_size": 2048, "intermediate_size": 5504, "num_attention_heads": 16}
_TINY: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}


def cases(device: str, *, tiny: bool) -> list[Case]:
    models.check_transformers("blocks")
    half, single = "bfloat16", "float32"
    if tiny:
        runs = [("roberta", (2, 8, 1), 0.1, single), ("llama", (2, 8, 1), 0.0, single)]
    elif device == "cpu":
        runs = [("roberta", (8, 128, 2), p, single) for p in (0.1, 0.0)] + [("llama", (2, 256, 1), 0.0, single)]
    else:
        runs = [("llama", (4, 4096, 2), 0.0, half), ("llama-1b", (8, 2048, 2), 0.0, half)]
        runs += [("roberta", (32, 512, 2), p, dtype) for dtype in (half, single) for p in (0.1, 0.0)]
    return [
        Case(
            "blocks", f"{name} {' x '.join(map(str, sizes))}" + f", dropout {dropout}" * (name == "roberta"), device,
            dtype, sizes, rounds=1 if tiny else 5, tiny=tiny, dropout=dropout, draws=3 if tiny else 6,
            backend="torch" if device == "cpu" else "triton",
        )
        for name, sizes, dropout, dtype in runs
    ]  # fmt: skip


def providers(case: Case) -> list[str]:
    return [REFERENCE, CHECKPOINT, LINEARS, ALL, *([FUSED] if case.backend == "triton" else [])]


def setup(case: Case, provider: str) -> Setup:
    model, x = _model(case, provider), _input(case)

    def forward() -> Tensor:
        with case.on_backend():
            return _loss(model, x)[0]

    def run() -> None:
        model.zero_grad()
        x.grad = None
        loss = forward()
        with case.on_backend():
            loss.backward()

    def outcome(seed: int) -> Outcome:
        with case.on_backend():
            return _outcome(case, model, provider, seed)

    bias = BIAS if provider in (ALL, FUSED) else None
    expected = lambda seed: _expected(case, provider, seed if case.dropout else 0)  # noqa: E731
    return Setup(run, outcome, expected, model, forward, tolerance=_tolerance(case, provider), slack=bias)


def _tolerance(case: Case, provider: str) -> float:
    """Relative error that the output may have; of whole models the same, but for the outputs that kernels make."""
    # Of these, norms have the largest bound of docs/blocks.md: their elements have the RMS 1, and no element of normal
    # numbers is beyond 6. Random weights of this size pass a relative error on to the sums of the residual stream as it
    # is, so that those of all operations add up at most. In half types the float32 results are rounded to the same
    # number but for the few next to a boundary: 2e-2 has room for them.
    if case.dtype != "float32":
        return 2e-2
    width = int(_base(case).config.hidden_size)  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]
    roundings = 16 + 4 * -(-width // 256)
    norm = _UNIT * (roundings * 6 + roundings + 16 + 2 * 4)
    operations = 3 * case.sizes[2] + 1  # two norms and an activation in a block, and the norm before or after all
    return 1e-5 + (operations * norm if provider == FUSED else 0.0)


@functools.lru_cache(maxsize=1)
def _base(case: Case) -> Any:
    import transformers

    torch.manual_seed(0)
    with torch.device(case.device):
        name, shared = case.name.split()[0], {"vocab_size": 32, "use_cache": False}  # which are no part of a block
        half = _HALF_OF_LLAMA if case.device == "cpu" else _SIZES["llama"]
        sizes = _TINY if case.tiny else half if name == "llama" else _SIZES[name]
        sizes = sizes | shared | {"num_hidden_layers": case.sizes[2]}
        if name.startswith("llama"):
            model: Any = models.build("Llama", "Model", **sizes)
        else:
            p = {"hidden_dropout_prob": case.dropout, "attention_probs_dropout_prob": case.dropout}
            config: Any = transformers.RobertaConfig(**sizes, **p, max_position_embeddings=514)  # pyright: ignore[reportArgumentType]
            model = transformers.RobertaModel(config, add_pooling_layer=False)
    model.to(case.torch_dtype)
    model.get_input_embeddings().requires_grad_(False)
    model.set_attn_implementation("sdpa")
    return model.train()


def _model(case: Case, provider: str) -> nn.Module:
    model = models.twin(_base(case))
    # Fewer rows than the default keeps at least would be all rows of a toy.
    options: dict[str, Any] = {"kind": "countsketch", "ratio": case.ratio, "bits": None}
    options |= {"min_rows": 8} if case.tiny else {}
    if provider == CHECKPOINT:
        models.checkpoint(model)
    elif provider == LINEARS:
        convert(model, RMMConfig(operations=("linear",), **options))
    elif provider in (ALL, FUSED):
        convert(model, RMMConfig(fused=provider == FUSED, **options))
    return model


def _input(case: Case) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    shape = *case.sizes[:2], int(_base(case).config.hidden_size)  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]
    return torch.randn(shape, generator=generator).to(case.device, case.torch_dtype).requires_grad_()


def _loss(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    hidden = model(inputs_embeds=x).last_hidden_state
    # Half of the features: of all, the last norm makes the mean square 1 and the gradient 0.
    return hidden[..., ::2].float().square().mean(), hidden


def _outcome(case: Case, model: nn.Module, provider: str, seed: int) -> Outcome:
    model.zero_grad()
    x = _input(case)
    torch.manual_seed(seed)
    with _without_other_random_numbers(model, provider):
        loss, output = _loss(model, x)
        loss.backward()
    assert x.grad is not None  # noqa: S101
    is_all = provider in (ALL, FUSED)
    found = {"output": output.detach()} | ({} if is_all else {"dX": x.grad})
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    if is_all:
        return Outcome(found, gradients)
    # Those of biases and norms are exact where linear layers alone are sketched.
    found["gradients with respect to biases and norms"] = torch.cat([one for one in gradients if one.dim() == 1])
    return Outcome(found, [one for one in gradients if one.dim() > 1])


@contextlib.contextmanager
def _without_other_random_numbers(model: nn.Module, provider: str) -> Iterator[None]:
    """Fused kernels draw other numbers for dropout, of attention's scores always: the gate compares without."""
    named, is_fused = model.named_modules(), provider == FUSED
    found: list[Any] = [
        module
        for name, module in named
        if name.endswith("attention.self.dropout") or (is_fused and isinstance(module, nn.Dropout))
    ]
    before = [module.p for module in found]
    for module in found:
        module.p = 0.0
    try:
        yield
    finally:
        for module, p in zip(found, before, strict=True):
            module.p = p


@functools.lru_cache(maxsize=1)
def _expected(case: Case, provider: str, seed: int) -> Outcome:
    return _outcome(case, _model(case, REFERENCE), provider, seed)
