"""Every model of transformers, small: what a conversion leaves, and whether outputs and gradients are right.

Build each type of causal, masked and sequence-to-sequence language models and of classifiers of images and audio with
random weights, convert it, train it for a few steps, and write what it saves, and what of it stays uncompressed and
why. Each type has a process of its own.
"""

from __future__ import annotations

import argparse
import logging
import re
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.library import explain, quiet, storage_key
from benchmarks.processes import ProcessError, call, last_line
from benchmarks.records import Origin, add_choices, add_output, origin, put_rows, show
from rmm_linear import convert, revert

CSV = "zoo.csv"
_MAPPINGS = {
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES", "image": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "audio": "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
}  # fmt: skip
TASKS = tuple(_MAPPINGS)
TEXT = TASKS[:3]
STEPS = 6  # before bytes are counted: modules have then learned what they learn
_TOKENS = 4, 128  # more rows than the chunks of a loss have
_CLASSES = 10
# What a type takes, and else what the main input of a model is: images of 64 pixels, a second of audio.
_INPUTS = {
    "siglip2": (4, 64, 192), "whisper": (4, 80, 256), "audio-spectrogram-transformer": (4, 256, 128),
    "wav2vec2-bert": (4, 128, 160), "pixel_values": (4, 3, 64, 64), "input_values": (4, 16000),
}  # fmt: skip
_MOST_PARAMETERS = 40_000_000
# Names of a configuration's sizes, and what they become where there is a whole number.
_WIDE = "hidden_size d_model n_embd dim embed_dim embedding_size encoder_hidden_size decoder_hidden_size"
_INNER = "intermediate_size ffn_dim d_ff n_inner d_inner encoder_ffn_dim decoder_ffn_dim ffn_hidden_size"
_LAYERS = (
    "num_hidden_layers n_layer n_layers num_layers num_decoder_layers num_encoder_layers encoder_layers decoder_layers "
    "num_hidden_groups"
)
_HEADS = (
    "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads "
    "num_encoder_attention_heads num_decoder_attention_heads"
)
_EXPERTS = "num_experts num_local_experts n_routed_experts moe_num_experts"
_SIZES = {
    **dict.fromkeys(_WIDE.split(), 128), **dict.fromkeys(_INNER.split(), 256), **dict.fromkeys(_LAYERS.split(), 2),
    **dict.fromkeys(_HEADS.split(), 4), **dict.fromkeys(_EXPERTS.split(), 4), "moe_intermediate_size": 128,
    "num_key_value_heads": 2, "num_kv_heads": 2, "head_dim": 32, "d_kv": 32, "vocab_size": 500,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
    "decoder_start_token_id": 0, "max_position_embeddings": 256, "n_positions": 256, "kv_lora_rank": 32,
    "q_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32, "type_vocab_size": 2,
    "src_vocab_size": 500, "tgt_vocab_size": 500, "decoder_vocab_size": 500, "rotary_dim": 16,
    "first_k_dense_replace": 1,
}  # fmt: skip
_INPUT_SIZES = {
    "image_size": 64, "window_size": 4, "max_length": 256, "max_source_positions": 128, "width_coefficient": 1.0,
    "depth_coefficient": 1.0, "layerdrop": 0.0, "num_labels": _CLASSES,
}  # fmt: skip
_OWN: dict[str, dict[str, Any]] = {  # without which a type does not run on so small an input
    **{name: {"depths": (2, 2, 2), "num_heads": (3, 6, 12)} for name in ("swin", "donut-swin")},
    "cvt": {"depth": (1, 2, 3)}, "efficientnet": {"hidden_dim": 1280},
}  # fmt: skip
_BATCH = "the batch itself"  # what stays, but takes no memory of a step
_STAGES = "depths", "depth"
_DEPTH = 2  # of each stage of networks in stages, at most, whose widths stay


@dataclass(frozen=True, kw_only=True)
class ZooRow(Origin):
    """One type of model."""

    model: str  # its type
    task: str  # "causal", "masked", "seq2seq", "image" or "audio"
    status: str = "ok"  # "ok", or why it was not measured
    before: int = 0  # bytes that the exact model saves
    after: int = 0  # bytes that the converted one saves, after some steps
    share: float = 0.0  # the latter by the former
    logits: str = ""  # "equal", or how far those of a training step are from the exact model's
    loss: float = 0.0  # difference of the loss, relative
    noise: float = 0.0  # ‖ĝ − g‖ / ‖g‖ of the whole gradient, root mean square over draws
    mean: float = 0.0  # ‖mean(ĝ) − g‖² by its expectation without bias, over draws
    gradients: str = ""  # "same" parameters have one, or how many differ
    reverted: str = ""  # "same" classes, names of the state_dict and gradients as before, or what differs
    draws: int = 0  # gradients with other codes
    stays: str = ""  # what stays uncompressed above 5 % of the exact bytes, and why


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_output(parser)
    parser.add_argument("--types", nargs="+", help="types of models; all by default")
    add_choices(parser, "--tasks", TASKS)
    parser.add_argument("--draws", type=int, default=8, help="gradients per type")
    parser.add_argument("--limit", type=float, default=90.0, help="seconds for one type")
    parser.add_argument("--until", type=float, default=float("inf"), help="seconds after which no type is begun")


def run(arguments: argparse.Namespace) -> Iterator[str]:
    tasks = types()
    known = sorted(model for model, task in tasks.items() if task in arguments.tasks)
    asked = arguments.types or (known[::20] if arguments.tiny else known)
    unknown = sorted(set(asked) - tasks.keys())
    if unknown:
        raise ValueError(f"--types takes types of transformers for {', '.join(TASKS)}, got {', '.join(unknown)}.")
    begin, path = time.monotonic(), arguments.out / CSV
    for model in asked:
        if time.monotonic() - begin > arguments.until:
            yield f"{model} and what follows it were not begun: {arguments.until:.0f} s have passed."
            return
        task = tasks[model]
        try:
            values = call(measured, model, task, arguments.draws, timeout=arguments.limit)
        except ProcessError as error:
            values = {"status": re.sub(r"\s+", " ", last_line(error))[:160]}
        row = ZooRow(model=model, task=task, **values, **origin("cpu", arguments.commit))
        put_rows(path, [row], lambda one, model=model: one.model == model)
        yield show([row])


def types() -> dict[str, str]:
    """Map the types of models to their task; a type of several tasks has the first."""
    found: dict[str, str] = {}
    for task in TASKS:
        for model in _names(task):
            found.setdefault(model, task)
    return found


def _names(task: str) -> dict[str, Any]:
    from transformers.models.auto import modeling_auto

    return getattr(modeling_auto, _MAPPINGS[task])


def made(model: str, task: str) -> nn.Module:
    """Make a small model of a type, with random weights."""
    import transformers

    name = _names(task)[model]
    kind = getattr(transformers, name if isinstance(name, str) else name[0])
    config = _small(transformers.CONFIG_MAPPING[model], task)
    with torch.device("meta"):
        count = sum(one.numel() for one in kind(config).parameters())
    if count > _MOST_PARAMETERS:
        raise ValueError(f"its small configuration has {count:,} parameters")
    torch.manual_seed(0)
    return kind(_small(transformers.CONFIG_MAPPING[model], task)).train()


def inputs(model: nn.Module, name: str, task: str) -> dict[str, Tensor]:
    """Make a batch for a model of a type, with labels."""
    generator = torch.Generator().manual_seed(1)
    if task in TEXT or model.main_input_name == "input_ids":
        ids = torch.randint(5, 490, _TOKENS, generator=generator)
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "labels": ids.clone() if task in TEXT else ids[:, 0] % _CLASSES,
        }
    takes: Any = model.main_input_name
    batch = {takes: torch.randn(_INPUTS[name if name in _INPUTS else takes], generator=generator)}
    batch["labels"] = torch.arange(len(batch[takes])) % _CLASSES
    if name == "siglip2":  # whose images are of several shapes
        batch["spatial_shapes"] = torch.full((4, 2), 8)
        batch["pixel_attention_mask"] = torch.ones(4, 64)
    return batch


def _small(kind: Any, task: str) -> Any:
    default = kind()
    if task not in TEXT:
        return _small_input(kind, default)
    sizes = {name: size for name, size in _SIZES.items() if _is_size(default, name)}
    if "kv_lora_rank" in sizes:  # as many heads of keys as of queries
        sizes["num_key_value_heads"] = 4
    config = _built(kind, sizes)
    if getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0
    for name in ("text_config", "decoder", "encoder"):
        inner = getattr(config, name, None)
        for size, value in _SIZES.items():
            if hasattr(inner, "model_type") and _is_size(inner, size):
                setattr(inner, size, value)
    return config


def _small_input(kind: Any, default: Any) -> Any:
    """Make a configuration for small images, or a second of audio."""
    sizes: dict[str, Any] = dict(_INPUT_SIZES)
    lists = {name: value for name, value in default.to_dict().items() if isinstance(value, (list, tuple))}
    if stages := {name: value for name, value in lists.items() if name in _STAGES}:
        sizes |= {name: type(value)(min(one, _DEPTH) for one in value) for name, value in stages.items()}
    else:
        sizes |= _SIZES | _patch(default)
    sizes = {
        name: [size] * len(lists[name]) if name in lists and isinstance(size, int) else size
        for name, size in sizes.items()
        if name in lists or _is_size(default, name)
    }
    config = _built(kind, sizes | _OWN.get(default.model_type, {}))
    vision = getattr(config, "vision_config", None)
    if vision is not None:
        for size, value in (_SIZES | _INPUT_SIZES | _patch(vision)).items():
            if _is_size(vision, size):
                setattr(vision, size, value)
    config.num_labels = _CLASSES
    return config


def _patch(config: Any) -> dict[str, int]:
    size = getattr(config, "patch_size", 0)
    return {"patch_size": min(8, size)} if isinstance(size, int) else {}


def _built(kind: Any, sizes: dict[str, int]) -> Any:
    """Make a configuration of as many of the sizes as its type accepts together."""
    for chosen in (sizes, *({name: size for name, size in sizes.items() if name != left} for left in sizes)):
        try:
            return kind(**chosen)
        except Exception:  # noqa: S112  (a size that this type checks against others)
            continue
    chosen = dict[str, int]()
    for name, size in sizes.items():
        try:
            kind(**chosen, **{name: size})
            chosen[name] = size
        except Exception:  # noqa: S112
            continue
    return kind(**chosen)


def _is_size(config: object, name: str) -> bool:
    try:
        value = getattr(config, name, "")
    except AttributeError:  # that layers have their own
        return False
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))


def measured(name: str, task: str, draws: int) -> dict[str, Any]:
    """Measure one type; runs in a process of its own."""
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity(logging.CRITICAL)
    with quiet():
        model = made(name, task)
        batch = inputs(model, name, task)
        step(model, batch)  # some prepare something in their first pass
        loss, logits, exact = step(model, batch)
        before, keys = saved_bytes(model, batch), list(model.state_dict())
        classes = [type(one) for one in model.modules()]
        left = [one for one in explain(model, batch).remaining if one.share > 0.05 and _BATCH not in one.reason]
        stays = "; ".join(f"{100 * one.share:.0f} % {one.reason}" for one in left)
        context = convert(model).context
        for seed in range(STEPS):
            step(model, batch, seed)
        found_loss, found_logits, found = step(model, batch)
        after, errors = saved_bytes(model, batch), dict[str, Any]()
        noise = 0.0
        for draw in range(draws):
            vars(context)["salt"] = draw + 1
            gradients = step(model, batch)[2]
            for one, gradient in exact.items():
                error = gradients.get(one, torch.zeros_like(gradient)) - gradient
                errors[one] = errors.get(one, 0) + error / draws
                noise += float(error.square().sum()) / draws
        revert(model)
        again = step(model, batch)[2]
    size = sum(float(one.square().sum()) for one in exact.values())
    mean = sum(float(one.square().sum()) for one in errors.values())
    same = [type(one) for one in model.modules()] == classes and list(model.state_dict()) == keys
    same_gradients = all(torch.equal(one, again[name]) for name, one in exact.items())
    return {
        "before": before,
        "after": after,
        "share": after / before,
        "logits": _distance(logits, found_logits),
        "loss": abs(found_loss - loss) / max(abs(loss), 1e-30),
        "noise": (noise / size) ** 0.5,
        "mean": mean * draws / noise if noise else 0.0,
        "gradients": "same" if found.keys() == exact.keys() else f"{len(found.keys() ^ exact.keys())} differ",
        "reverted": "same" if same and same_gradients else "gradients differ" if same else "names or classes differ",
        "draws": draws,
        "stays": stays,
    }


def _distance(one: Tensor | None, other: Tensor | None) -> str:
    if one is None or other is None:
        return "none"
    return "equal" if torch.equal(one, other) else f"{float((one - other).abs().max()):.1e}"


def step(model: nn.Module, batch: dict[str, Tensor], seed: int = 3) -> tuple[float, Tensor | None, dict[str, Tensor]]:
    """Return the loss, the logits and the gradients of one training step."""
    model.zero_grad(set_to_none=True)
    _seed(seed)
    output = model(**batch)
    logits = getattr(output, "logits", None)
    output.loss.backward()
    gradients = {name: one.grad.double() for name, one in model.named_parameters() if one.grad is not None}
    return float(output.loss.detach()), None if logits is None else logits.detach().clone(), gradients


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002  (masks of some models)


@dataclass(eq=False)
class _Held:
    tensor: Tensor


def saved_bytes(model: nn.Module, batch: dict[str, Tensor]) -> int:
    """Count the bytes of all that a forward pass saves, each storage once, without what is there anyway.

    That are parameters, buffers and the batch. What no output needs is gone, and does not count.
    """
    own = {storage_key(one) for one in (*model.parameters(), *model.buffers(), *batch.values())}
    held = weakref.WeakSet[_Held]()

    def save(tensor: Tensor) -> _Held:
        held.add(one := _Held(tensor))
        return one

    _seed(3)
    with torch.autograd.graph.saved_tensors_hooks(save, lambda one: one.tensor):
        output = model(**batch)
    found = {storage_key(one.tensor): one.tensor for one in held if type(one.tensor) in (Tensor, nn.Parameter)}
    del output
    return sum(one.untyped_storage().nbytes() for key, one in found.items() if key not in own)
