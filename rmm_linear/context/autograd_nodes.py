"""Find the forward pass that is being recomputed by autograd's sequence number.

PyTorch numbers the nodes of the autograd graph in the order in which they are made. The node whose backward pass runs
while activation checkpointing recomputes was made by the forward pass that is repeated, so its number lies between
those that were next when this pass began and when it ended.
"""

from __future__ import annotations

import torch


def in_backward() -> bool:
    """Say whether a backward pass is running, as it is while activation checkpointing recomputes.

    Returns:
        True inside the backward pass.
    """
    return torch._C._current_graph_task_id() != -1


def next_node() -> int:
    """Return the number of the node that this thread makes next.

    Returns:
        A number that never falls; every thread has its own.
    """
    return torch.autograd._get_sequence_nr()  # pyright: ignore[reportPrivateImportUsage]


def running_node() -> int | None:
    """Return the number of the node whose backward pass is running.

    Returns:
        The number, or None outside of a node.
    """
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()  # pyright: ignore[reportAttributeAccessIssue]
