"""Count the bytes of live tensors by weak references of PyTorch's own, without the library's counters."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class CpuStorages(TorchDispatchMode):
    """Keeps the highest sum of the bytes that storages on the CPU take at once, but for those that were there before.

    A storage that has been freed is found so when the next operator has run: the sum rises with operators only.
    """

    def __init__(self, before):
        super().__init__()
        self.before = {leaf.untyped_storage()._cdata for leaf in tree_leaves(before)}
        self.known = {}  # a weak reference keeps an address from being used again
        self.highest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        self.known = {key: entry for key, entry in self.known.items() if not entry[0].expired()}
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.device == torch.device("cpu"):
                storage = leaf.untyped_storage()
                if storage._cdata not in self.before:
                    self.known[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.highest = max(self.highest, sum(size for _, size in self.known.values()))
        return output


def highest(model, example, step):
    """Bytes that a step makes at most at once, from no gradients on."""
    model.zero_grad(set_to_none=True)
    with CpuStorages([*model.parameters(), *model.buffers(), *tree_leaves(example)]) as counter:
        step()
    model.zero_grad(set_to_none=True)
    return counter.highest
