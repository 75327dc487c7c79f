"""Capture a model's forward pass as one graph, by torch.compile's front end."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.exc import TorchDynamoException

from rmm_linear.memory.inputs import call_with
from rmm_linear.planning.step.step import as_in_training, needs_values

_CONVERTED = "A converted model draws its sketches in another order when it is captured. Use planning.plan_blocks()."


class CaptureError(ValueError):
    """A model is no single graph."""


class _Captured(Exception):
    """The graph is there; it need not run."""


def capture(model: nn.Module, example: Any) -> tuple[fx.GraphModule, list[Any]]:
    """Capture the forward pass of a training step, without its memory: the graph is not run."""
    if callable(example):
        raise CaptureError("A graph is captured from a batch, got a function. Pass the batch, or use plan_blocks().")
    if needs_values(model):
        raise CaptureError(_CONVERTED)
    found: list[tuple[fx.GraphModule, list[Any]]] = []

    def stop(*_: Any) -> Any:
        raise _Captured

    def record(graph: fx.GraphModule, inputs: list[Any]) -> Any:
        found.append((graph, list(inputs)))
        return stop

    attributes = dict(vars(model))
    compiled: Any = torch.compile(model, backend=record, fullgraph=True, dynamic=False)
    torch._dynamo.reset()
    try:
        with as_in_training(model), suppress(_Captured):
            call_with(compiled, example)
    except TorchDynamoException as error:
        raise CaptureError(
            f"The model cannot be captured as one graph: {_where(error)}. Use planning.plan_blocks(), which needs none."
        ) from error
    finally:
        torch._dynamo.reset()
        for name in vars(model).keys() - attributes:  # torch.compile's mark
            del vars(model)[name]
    if found:
        check_graph(found[0][0])
    if len(found) != 1:
        raise CaptureError(f"The model must be one graph, got {len(found)}. Use planning.plan_blocks().")
    return found[0]


def check_graph(graph: fx.GraphModule) -> None:
    """Refuse a graph that would draw other random numbers than its model: of sketches, or in its own checkpointing."""
    if any("rmm_linear" in str(node.target) for node in graph.graph.nodes):
        raise CaptureError(_CONVERTED)
    if any("activation_checkpoint" in str(node.target) for node in graph.graph.nodes):
        raise CaptureError(
            "A graph is planned without other activation checkpointing, and the model has its own. Turn it off, "
            "model.gradient_checkpointing_disable() in transformers."
        )


def _where(error: Exception) -> str:
    """Return the first line of the message, and the innermost line of the model."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    places = [line for line in lines if line.startswith("File ")]
    reason = lines[0] if lines else type(error).__name__
    return f"{reason}, at {places[-1]}" if places else reason
