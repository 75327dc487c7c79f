"""Compute gradients of a whole model, of a batch and of every sequence in it, without a trace in training."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rmm_linear._support.distributed import is_dtensor, is_fsdp_module
from rmm_linear._support.generators import States, other_generators, set_other_generators
from rmm_linear.memory.inputs import sequences_in

_COUNT = "num_items_in_batch"  # so transformers calls what divides a loss that is a sum over tokens
_IGNORED = -100  # label of tokens that the loss leaves out
_measuring: ContextVar[bool] = ContextVar("measuring", default=False)


def is_measuring() -> bool:
    """Say whether the forward pass that is running belongs to a measurement and not to training."""
    return _measuring.get()


@contextmanager
def measuring(model: nn.Module) -> Iterator[None]:
    """Run passes of a model in training mode, eagerly and with gradients; restore modes and random numbers."""
    modes = {module: module.training for module in model.modules()}
    devices = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    # What is compiled for training would be compiled again for the classes that modules have meanwhile.
    is_compiling = "torch._dynamo" in sys.modules
    eager: Any = torch.compiler.set_stance("force_eager") if is_compiling else nullcontext()
    token, drawn = _measuring.set(True), other_generators()
    try:
        if not model.training:
            model.train()
        with torch.random.fork_rng(devices=sorted(devices)), torch.enable_grad(), eager:
            yield
    finally:
        _measuring.reset(token)
        set_other_generators(drawn)
        for module, mode in modes.items():
            module.training = mode


@dataclass
class Passes:
    """Forward and backward passes of a model over one batch. The parameters' ``grad`` is not touched."""

    model: nn.Module
    batch: Mapping[str, Any]
    adds_up: bool | None = None  # whether the loss is a sum over sequences; None finds out
    trained: dict[str, nn.Parameter] = field(init=False)  # name to parameter, of those that require a gradient
    # States of the random number generators by device, with which each pass over the batch begins
    states: dict[torch.device, Tensor] = field(init=False)
    others: States = field(init=False)  # of Python's and NumPy's

    def __post_init__(self) -> None:
        """Find the parameters; raises ValueError if there are none, or they are sharded."""
        self.trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        if not self.trained:
            raise ValueError("gradient_noise needs a model with trained parameters, got one where all are frozen.")
        is_sharded = any(is_dtensor(p) or hasattr(p, "ds_id") for p in self.trained.values())
        is_sharded |= any(is_fsdp_module(m) or "_fsdp_wrapped_module" in m._modules for m in self.model.modules())
        if is_sharded:
            raise ValueError(
                "gradient_noise needs whole parameters on every process, got a model sharded by FSDP, tensor "
                "parallelism or ZeRO-3. Measure before it is sharded."
            )
        devices = {p.device for p in self.trained.values() if p.device.type == "cuda"}
        self.states = {torch.device("cpu"): torch.get_rng_state()}
        self.states |= {device: torch.cuda.get_rng_state(device) for device in devices}
        self.others = other_generators()

    def gradients(self) -> list[Tensor]:
        """Compute the gradient of the batch, with the same random numbers of the model every time."""
        self._rewind()
        return self._gradients(self.batch)

    def sgd_variance(self, at_most: int | None = None) -> dict[str, float]:
        """Compute D²_SGD = n / (n − 1) · Σ ‖G_s − G/n‖², with G_s the part of sequence s in the batch's gradient G.

        With fewer passes than sequences, ``at_most`` (three or more), m in each, it is n / (n/m − 1) / m · Σ ‖G_p − G
        m/n‖², with G_p the part of a pass, which has the same mean, as sequences are drawn independently; the n mod m
        last ones are left out.
        """
        count = sequences_in(dict(self.batch))
        if count < 2:
            raise ValueError(f"gradient_noise needs a batch of at least 2 sequences, got {count}.")
        is_sum = self._adds_up()
        self._rewind()
        size = 1 if at_most is None else -(-count // at_most)
        parts = list(_parts(self.model, self.batch, size))
        total = 1.0 if is_sum else sum(weight for _, weight in parts)
        sums = [torch.zeros_like(parameter, dtype=torch.float64) for parameter in self.trained.values()]
        squares = [0.0] * len(sums)
        n = count // size
        for inputs, weight in parts[:n]:
            for place, gradient in enumerate(self._gradients(inputs)):
                part = gradient.double() * (1.0 if is_sum else weight / total)
                sums[place] += part
                squares[place] += float(part.square().sum())
        spread = (square - float(g.square().sum()) / n for square, g in zip(squares, sums, strict=True))
        factor = count / size / (n - 1)
        return {name: factor * max(value, 0.0) for name, value in zip(self.trained, spread, strict=True)}

    def _adds_up(self) -> bool:
        """Say whether the loss is a sum over sequences, divided by a number that is given with the batch.

        transformers gives that number to models whose loss is a mean, too; these ignore it.
        """
        if self.adds_up is not None or (count := self.batch.get(_COUNT)) is None:
            return bool(self.adds_up)
        losses = list[float]()
        for factor in (1, 2):
            self._rewind()
            with torch.no_grad():
                losses.append(abs(float(_loss(self.model(**{**self.batch, _COUNT: count * factor})))))
        return losses[1] < 0.75 * losses[0]  # half of it, but for what is added to it, as a router's loss

    def _rewind(self) -> None:
        set_other_generators(self.others)
        for device, state in self.states.items():
            if device.type == "cpu":
                torch.set_rng_state(state)
            else:
                torch.cuda.set_rng_state(state, device)

    def _gradients(self, inputs: Mapping[str, Any]) -> list[Tensor]:
        loss = _loss(self.model(**inputs))
        with torch.autocast(loss.device.type, enabled=False):
            found = torch.autograd.grad(loss, list(self.trained.values()), allow_unused=True)
        return [
            torch.zeros_like(p) if g is None else g.detach() for g, p in zip(found, self.trained.values(), strict=True)
        ]


def _loss(output: Any) -> Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ValueError(
            f"gradient_noise needs a model whose output has a scalar loss, got {type(output).__name__} without one. "
            "Give the labels with the batch."
        )
    return loss


def _parts(model: nn.Module, batch: Mapping[str, Any], size: int) -> Iterator[tuple[dict[str, Any], float]]:
    """So many sequences of the batch at a time, without columns that are padding only, and their weight in the mean."""
    count = sequences_in(dict(batch))
    # The mask of a model with a decoder is that of its encoder.
    has_decoder = any(getattr(getattr(m, "config", None), "is_encoder_decoder", False) for m in model.modules())
    # Without a name for its loss, transformers takes that of causal models, where the first label has no part in it.
    loss_type = next((m.loss_type for m in model.modules() if hasattr(m, "loss_type")), "")
    is_shifted = loss_type in (None, "ForCausalLM") and not has_decoder
    mask, labels = batch.get("attention_mask"), batch.get("labels")
    is_tokenwise = isinstance(labels, Tensor) and labels.dim() == 2 and not labels.is_floating_point()
    for begin in range(0, count, size):
        rows = slice(begin, begin + size)
        one = {
            key: value[rows] if isinstance(value, Tensor) and value.dim() and len(value) == count else value
            for key, value in batch.items()
        }
        here = min(size, count - begin)
        if isinstance(mask, Tensor) and mask.dim() == 2:
            kept = mask[rows].bool().any(dim=0)
            one = {
                key: value[:, kept]
                if isinstance(value, Tensor)
                and value.shape[:2] == (here, len(kept))
                and not (has_decoder and (key == "labels" or key.startswith("decoder_")))
                else value
                for key, value in one.items()
            }
        counted = one["labels"][:, 1:] if is_tokenwise and is_shifted else one.get("labels")
        yield one, float((counted != _IGNORED).sum()) if is_tokenwise else float(here)
