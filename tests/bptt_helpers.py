"""A cell, a plain loop over cells, and what one training step gives with it or with bptt."""

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from rmm_linear.planning import bptt

T, B, H = 40, 3, 8  # steps, batch and width


def inputs(steps=T):
    """Inputs that need a gradient, shape (steps, B, H)."""
    torch.manual_seed(3)
    return torch.randn(steps, B, H, requires_grad=True)


class Dropping(nn.Module):
    """A cell with dropout, of a dictionary as state, with a step count and a tuple as output."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.head = nn.LSTMCell(H, H), nn.Linear(H, 2)

    def forward(self, x, state):
        h, c = self.cell(nn.functional.dropout(x, 0.3), (state["h"], state["c"]))
        count = state["count"] + 1
        return (h, {"logits": self.head(h), "count": count}), {"h": h, "c": c, "count": count}


def zeros(*names):
    """A dictionary of zero states, shape (B, H) each."""
    return {name: torch.zeros(B, H) for name in names}


def loop(cell, inputs, state):
    """Run a cell as a user would; return outputs, stacked, and the last state."""
    steps = len(tree_leaves(inputs)[0])
    leaves = tree_map(lambda leaf: leaf.unbind(0), inputs, is_leaf=lambda x: isinstance(x, torch.Tensor))
    outputs = []
    for t in range(steps):
        x = tree_map(lambda leaf, t=t: leaf[t], leaves, is_leaf=is_steps)
        if isinstance(cell, nn.RNNCellBase):
            state = cell(x, state)
            outputs.append(state[0] if isinstance(state, tuple) else state)
        else:
            output, state = cell(x, state)
            outputs.append(output)
    return tree_map(lambda *found: torch.stack(found), *outputs), state


def is_steps(node):
    """Whether a node is what ``unbind`` makes of a tensor."""
    return isinstance(node, tuple) and bool(node) and all(isinstance(leaf, torch.Tensor) for leaf in node)


def outcome(run, cell, inputs, state, parameters, seed=0, weighting=1):
    """Outputs, last state, all gradients, and the generator's state after one training step.

    ``run`` is ``loop`` or ``bptt`` with its options. The loss weights every number of the outputs and the last state.
    """
    torch.manual_seed(seed)
    for leaf in (leaves := [*tree_leaves(inputs), *tree_leaves(state), *parameters]):
        if isinstance(leaf, torch.Tensor):
            leaf.grad = None
    outputs, last = run(cell, inputs, state)
    generator = torch.get_rng_state()
    found = [leaf for leaf in (*tree_leaves(outputs), *tree_leaves(last)) if isinstance(leaf, torch.Tensor)]
    draw = torch.Generator().manual_seed(weighting)
    loss = sum(
        (leaf * torch.randn(leaf.shape, generator=draw).to(leaf.device)).sum()
        for leaf in found
        if leaf.is_floating_point()
    )
    loss.backward()
    grads = [leaf.grad for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return found, grads, generator


def planned(**options):
    """Return bptt with options."""
    return lambda cell, inputs, state: bptt(cell, inputs, state, **options)


def counted(cell):
    """Count the calls of a module: a list that gets one entry per call."""
    calls = []
    cell.register_forward_pre_hook(lambda *_: calls.append(1))
    return calls
