"""Find the forward pass that is being recomputed by autograd's sequence number.

PyTorch numbers the nodes of the autograd graph in the order of their creation. While activation checkpointing
recomputes, the node whose backward pass is running was created by the forward pass that is being recomputed. So its
number lies between the next number at the beginning of that pass and the next number at its end.
"""

from __future__ import annotations

import torch


def in_backward() -> bool:
    """Say whether a backward pass is running, as it is while activation checkpointing recomputes.

    Returns:
        True inside the backward pass.
    """
    return torch._C._current_graph_task_id() != -1


def is_checkpointed() -> bool:
    """Say whether non-reentrant activation checkpointing drops what is saved now, or makes it a second time.

    The first pass of a reentrant checkpoint runs without gradients, and cannot be told from other passes without them.

    Returns:
        True where the innermost hooks for saved tensors are those of a checkpoint.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)  # pyright: ignore[reportAttributeAccessIssue]
    return hooks is not None and getattr(hooks[0], "__module__", None) == "torch.utils.checkpoint"


def next_node() -> int:
    """Return the number of the node that this thread creates next.

    Returns:
        A number that never decreases; every thread counts by itself.
    """
    return torch.autograd._get_sequence_nr()  # pyright: ignore[reportPrivateImportUsage]


def running_node() -> int | None:
    """Return the number of the node whose backward pass is running.

    Returns:
        The number, or None outside of a node.
    """
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()  # pyright: ignore[reportAttributeAccessIssue]
