"""A cell, a plain loop over cells, and what one training step gives with it or with bptt."""

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from rmm_linear.planning import bptt

T, B, H = 40, 3, 8  # steps, batch and width


def inputs(steps=T, **options):
    """Inputs that need a gradient, shape (steps, B, H)."""
    torch.manual_seed(3)
    return torch.randn(steps, B, H, requires_grad=True, **options)


class Dropping(nn.Module):
    """A cell with dropout, with a dictionary as state, and with a step count and a tuple as output."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.head = nn.LSTMCell(H, H), nn.Linear(H, 2)

    def forward(self, x, state):
        h, c = self.cell(nn.functional.dropout(x, 0.3), (state["h"], state["c"]))
        count = state["count"] + 1
        return (h, {"logits": self.head(h), "count": count}), {"h": h, "c": c, "count": count}

    def start(self):
        return {"h": torch.zeros(B, H), "c": torch.zeros(B, H), "count": torch.tensor(0)}


def loop(cell, inputs, state):
    """Run a cell as a user would; return outputs, stacked, and the last state."""
    outputs = []
    for t in range(len(tree_leaves(inputs)[0])):
        x = tree_map(lambda leaf, t=t: leaf[t], inputs)
        if isinstance(cell, nn.RNNCellBase):
            state = cell(x, state)
            outputs.append(state[0] if isinstance(state, tuple) else state)
        else:
            output, state = cell(x, state)
            outputs.append(output)
    return tree_map(lambda *found: torch.stack(found), *outputs), state


def outcome(run, cell, inputs, state):
    """Return outputs and last state, all gradients, and the generator's state after one training step.

    ``run`` is ``loop`` or ``bptt`` with its options. The loss weights every number of the outputs and the last state.
    """
    module = getattr(cell, "func", cell)  # of a partial call of a method
    module = getattr(module, "__self__", module)
    parameters = module.parameters() if isinstance(module, nn.Module) else []
    leaves = [leaf for leaf in (*tree_leaves((inputs, state)), *parameters) if isinstance(leaf, torch.Tensor)]
    for leaf in leaves:
        leaf.grad = None
    torch.manual_seed(0)
    outputs, last = run(cell, inputs, state)
    generator = torch.get_rng_state()
    found = [leaf for leaf in tree_leaves((outputs, last)) if isinstance(leaf, torch.Tensor)]
    draw = torch.Generator().manual_seed(1)
    weights = [torch.randn(leaf.shape, generator=draw).to(leaf.device) for leaf in found]
    sum((x * weight).sum() for x, weight in zip(found, weights, strict=True) if x.is_floating_point()).backward()
    return found, [leaf.grad for leaf in leaves], generator


def same(expected, found, compare=torch.equal):
    """Whether results, gradients and the generator's state are alike, and the same ones are there."""
    for old, new in ((expected[0], found[0]), (expected[1], found[1])):
        if [one is None for one in old] != [one is None for one in new]:
            return False
    pairs = zip((*expected[0], *expected[1]), (*found[0], *found[1]), strict=True)
    return torch.equal(expected[2], found[2]) and all(compare(*pair) for pair in pairs if pair[0] is not None)


def planned(**options):
    """Return bptt with options."""
    return lambda cell, inputs, state: bptt(cell, inputs, state, **options)


def counted(cell):
    """Count the calls of a module: a list that gets one entry per call."""
    calls = []
    cell.register_forward_pre_hook(lambda *_: calls.append(1))
    return calls
