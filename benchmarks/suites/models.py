"""Suite ``model``: a training step of whole models: time, bytes kept for the backward pass, and peak memory.

RoBERTa-base's shape and two of LLaMA's layers (on a CPU of half the width) with random weights, both in transformers'
own classes. All providers of a case share one set of parameters and one AdamW, so that nothing but the step differs and
memory suffices for all of them.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.suites.case import Case, Outcome, Setup
from rmm_linear import RMMConfig, convert
from rmm_linear.memory import track_saved

REFERENCE = "exact"
CHECKPOINT = "torch checkpoint"
SKETCHED = "countsketch"
ALL_SKETCHED = "countsketch, all operations"
DEFAULT = "default, example="
_TINY: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 64}
_TWO_LAYERS: dict[str, Any] = {"num_hidden_layers": 2}  # of LLaMA's 32, and each of them like the others
HALF_OF_LLAMA: dict[str, Any] = {"hidden_size": 2048, "intermediate_size": 5504, "num_attention_heads": 16}


def cases(device: str, *, tiny: bool) -> list[Case]:
    check_transformers("model")
    sizes = ((8, 32), (4, 32)) if tiny else ((8, 128), (4, 256)) if device == "cpu" else ((64, 128), (8, 2048))
    return [
        Case(
            "model", f"{title} {shape[0]} x {shape[1]}", device, "float32" if device == "cpu" else "bfloat16", shape,
            check=shape[0] if device == "cuda" or tiny else 2, rounds=2 if tiny else 5, tiny=tiny,
        )
        for title, shape in zip(("roberta-base", "llama layers"), sizes, strict=True)
    ]  # fmt: skip


def build(kind: str, head: str, **sizes: Any) -> Any:
    import transformers

    return getattr(transformers, kind + head)(getattr(transformers, f"{kind}Config")(**sizes))


def twin(model: nn.Module) -> nn.Module:
    """Copy a model, but for its parameters, which both have."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


def check_transformers(suite: str) -> None:
    if importlib.util.find_spec("transformers") is None:
        raise ImportError(f"The suite {suite} needs transformers: pip install transformers. Choose others by --suite.")


@functools.lru_cache(maxsize=4)
def providers(case: Case) -> list[str]:
    """Return the titles of the providers, the reference first.

    Checkpointed are all layers, half of them, and as many as leave the kept bytes no fewer than those of the sketched
    model: that one may be compared with it.
    """
    layers = len(_layers(_base(case)[0]))
    counts = [count for count in dict.fromkeys((matched_layers(case), layers // 2, layers)) if count]
    checkpointed = (f"{CHECKPOINT} {count} of {layers}" for count in sorted(counts))
    return [REFERENCE, *checkpointed, SKETCHED, ALL_SKETCHED, DEFAULT]


def matched_layers(case: Case) -> int:
    """Count the layers that may be recomputed so that no fewer bytes are kept than by the sketched model."""
    layers = len(_layers(_base(case)[0]))
    exact, full, ours = (_kept(case, one) for one in (REFERENCE, f"{CHECKPOINT} {layers} of {layers}", SKETCHED))
    return min(layers, max(0, int((exact - ours) / (exact - full) * layers)))


def setup(case: Case, provider: str) -> Setup:
    model, batch = _model(case, provider), _batch(case, case.sizes[0])
    optimizer = _base(case)[1]

    def forward() -> Tensor:
        return _loss(case, model, batch)[0]

    def run() -> None:
        optimizer.zero_grad()
        forward().backward()
        optimizer.step()

    def outcome(seed: int) -> Outcome:
        torch.manual_seed(seed)
        return _outcome(case, model, provider)

    # On an accelerator attention's backward pass adds in any order, and the layers hand on what half types make of it.
    tolerance = 1e-5 if case.dtype == "float32" else 2e-2
    return Setup(run, outcome, lambda _: _expected(case, provider), model, forward, tolerance=tolerance)


@functools.lru_cache(maxsize=1)
def _base(case: Case) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    is_llama = case.name.startswith("llama")
    with torch.device(case.device):
        model = _llama(case) if is_llama else _roberta(case.tiny)
    model.set_attn_implementation("sdpa")
    if is_llama:
        model = model.to(case.torch_dtype)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # The step is timed, and moves nothing: the weights stay what the gate has seen.
    return model.train(), torch.optim.AdamW(parameters, lr=0.0, fused=True)


def _roberta(tiny: bool) -> Any:
    sizes = {"vocab_size": 50265, "max_position_embeddings": 514, **({**_TINY, "vocab_size": 50} if tiny else {})}
    without = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return build("Roberta", "ForSequenceClassification", **sizes, **without)


def _llama(case: Case) -> Any:
    sizes = _TINY if case.tiny else _TWO_LAYERS | (HALF_OF_LLAMA if case.device == "cpu" else {})
    model: Any = build("Llama", "Model", **sizes, vocab_size=32, use_cache=False)  # the words are no part of a layer
    model.embed_tokens.requires_grad_(False)
    return model


def _model(case: Case, provider: str) -> nn.Module:
    model = twin(_base(case)[0])
    if provider.startswith(CHECKPOINT):
        checkpoint(model, int(provider.removeprefix(CHECKPOINT).split()[0]))
    elif provider == SKETCHED:
        convert(model, RMMConfig(operations=("linear",), kind="countsketch", ratio=case.ratio, bits=None))
    elif provider == ALL_SKETCHED:
        convert(model, RMMConfig(kind="countsketch", ratio=case.ratio, bits=None))
    elif provider == DEFAULT:
        convert(model, example=_batch(case, case.sizes[0]))
    return model


def _layers(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if hasattr(type(module), "gradient_checkpointing")]


def checkpoint(model: Any, count: int | None = None, every: int = 1) -> None:
    """Recompute the first ``count`` layers, or all; of these, one in ``every``."""
    # Older versions of transformers know it by the second name alone.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    layers = _layers(model)
    for place, layer in enumerate(layers):
        layer.__dict__["gradient_checkpointing"] = place in range(0, len(layers) if count is None else count, every)


def _batch(case: Case, sequences: int) -> dict[str, Tensor]:
    generator, length = torch.Generator().manual_seed(3), case.sizes[1]
    if case.name.startswith("llama"):
        config: Any = _base(case)[0].config
        x = torch.randn(sequences, length, config.hidden_size, generator=generator).to(case.device, case.torch_dtype)
        return {"inputs_embeds": x.requires_grad_()}
    ids = torch.randint(3, 50 if case.tiny else 50000, (sequences, length), generator=generator)
    labels = torch.randint(0, 2, (sequences,), generator=generator)
    return {"input_ids": ids.to(case.device), "labels": labels.to(case.device)}


def _loss(case: Case, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    if case.name.startswith("llama"):
        hidden = model(**batch).last_hidden_state
        # Half of the features: of all, the last norm makes the mean square 1 and the gradient 0.
        return hidden[..., ::2].float().square().mean(), hidden
    half = case.dtype != "float32"
    with torch.autocast(case.device, case.torch_dtype) if half else contextlib.nullcontext():
        found = model(**batch)
        return found.loss, found.logits


def _outcome(case: Case, model: nn.Module, provider: str) -> Outcome:
    model.zero_grad()
    loss, output = _loss(case, model, _batch(case, case.check))
    loss.backward()
    return outcome_of(model, {"output": output.detach()}, is_all=provider in (ALL_SKETCHED, DEFAULT))


def outcome_of(model: nn.Module, exact: dict[str, Tensor], *, is_all: bool) -> Outcome:
    """Add gradients to the output: where linear layers alone are sketched, those of biases and norms are exact, too."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    if is_all:
        return Outcome(exact, gradients)
    vectors = torch.cat([gradient for gradient in gradients if gradient.dim() == 1])
    exact |= {"gradients with respect to biases and norms": vectors}
    return Outcome(exact, [gradient for gradient in gradients if gradient.dim() > 1])


@functools.lru_cache(maxsize=2)
def _expected(case: Case, provider: str) -> Outcome:
    return _outcome(case, _model(case, REFERENCE), provider)


def _kept(case: Case, provider: str) -> int:
    """Bytes that one forward pass keeps. What checkpoints keep is saved outside of them, and so is seen."""
    model = _model(case, provider)
    with track_saved(model) as ledger:
        loss = _loss(case, model, _batch(case, case.sizes[0]))
    del loss
    return ledger.total
