"""See in the first training step which modules save a code of what stays in memory anyway: they become exact.

A module's exact form keeps its input, or its output, for the backward pass. Where another operation that is not
converted keeps the same tensor, as a convolution keeps the output of the ReLU before it, a code frees nothing and adds
its bytes. Whether a tensor is kept shows at the end of the forward pass: its memory is still there, although every
converted module has let it go, and a node of the graph has it. Weak references tell the memory, not addresses, which
are used again. What a caller keeps does not count: only the caller knows for how long. But the batch of a convolution
does, such as the pixels of images, which callers keep until the step is over.

Ranks of a distributed run ask nobody: they decide by the same code in the same step, and gradients are unbiased
whatever they decide.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from rmm_linear._support.layouts import is_channels_last
from rmm_linear._support.saved_graph import saved_in_graph
from rmm_linear.context.surroundings import in_backward, is_checkpointed

Exact = Callable[[Tensor], Any]


@dataclass
class Survey:
    """The calls of one forward pass, each with the memory that its exact form would keep."""

    batch: Any = None  # the arguments of the model
    _kept: dict[int | tuple[int, int], list[list[StorageWeakRef]]] = field(default_factory=dict)

    def note(
        self,
        module: Any,
        input: Tensor,
        output: Tensor,
        run: Exact | None = None,
        dims: int = 1,
        site: int | None = None,
    ) -> None:
        """Note a call of a module that saves a code.

        ``run`` is its exact form, which is tried on one row of ``dims`` dimensions; None keeps the input alone.
        ``site``: The place in the module's own code, of several that are decided by themselves.
        """
        if isinstance(input, FakeTensor) or in_backward():
            return
        # Of an input of the model, the caller knows how long it stays. Of a checkpoint, what is kept does not show, and
        # its recomputation is to do the same. Of what is not contiguous, products and norms keep a copy, but neither
        # convolutions do nor activations of images whose channels lie side by side.
        key = module.rmm_index if site is None else (module.rmm_index, site)
        is_convolution = module.rmm_operation == "convolution"  # which keeps its input itself
        is_result = input.grad_fn is not None or is_convolution
        is_activation = module.rmm_operation == "activation" and site is None
        is_itself = is_convolution or (is_activation and is_channels_last(input))
        if not is_result or is_checkpointed() or not (is_itself or input.is_contiguous()):
            self._kept.setdefault(key, []).append([])
            return
        keeps = (True, False) if run is None else _what_is_kept(module, input, run, dims)
        found = [
            StorageWeakRef(one.untyped_storage())
            for one, is_kept in zip((input, output), keeps, strict=True)
            if is_kept
        ]
        self._kept.setdefault(key, []).append(found)

    def decide(self, output: Any) -> tuple[list[int], set[tuple[int, int]]]:
        """Return the modules all of whose calls would keep what the graph behind the model's output keeps."""
        calls, self._kept = self._kept, {}
        alive = {one.cdata for each in calls.values() for call in each for one in call if not one.expired()}
        if not alive:
            return [], set()
        given = [one for one in tree_leaves(self.batch) if isinstance(one, Tensor)]
        kept = {one.untyped_storage()._cdata for _, one in saved_in_graph(output) if type(one) in _PLAIN}
        kept |= {one.untyped_storage()._cdata for one in given if type(one) is Tensor and not one.requires_grad}
        kept &= alive
        frees = {
            i for i, each in calls.items() for call in each if not call or any(one.cdata not in kept for one in call)
        }
        sites = {key for key in calls.keys() - frees if isinstance(key, tuple)}
        partly = {key[0] for key in calls if isinstance(key, tuple) and key not in sites}
        whole = {key if isinstance(key, int) else key[0] for key in calls.keys() - frees} - partly
        return sorted(whole), sites


_PLAIN = {Tensor, nn.Parameter}


def _what_is_kept(module: nn.Module, input: Tensor, run: Exact, dims: int) -> tuple[bool, bool]:
    """Say whether an exact form keeps its input and its output; neither where it keeps more, which a code frees."""
    if any(True for _ in module.buffers()):
        return False, False  # in which it may count
    before = dict(vars(module))
    row = input.detach().reshape(-1, *input.shape[input.dim() - dims :])[:1].clone().requires_grad_()
    own, saved = {one.untyped_storage()._cdata for one in module.parameters()}, list[Tensor]()
    try:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_noting(saved), lambda one: one):
            given = row.clone()  # no leaf, into which modules that work in place may write
            output = run(given)
    except Exception:  # of what takes other shapes
        return False, False
    finally:
        vars(module).update(before)
    places = given.untyped_storage()._cdata, output.untyped_storage()._cdata
    found = {one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in saved}
    others = sum(size for place, size in found.items() if place not in (*places, *own))
    if others > row.numel() // 8:  # a bit per element is the least that a code takes
        return False, False
    return places[0] in found, places[1] in found and places[1] != places[0]


def _noting(saved: list[Tensor]) -> Callable[[Tensor], Tensor]:
    def note(tensor: Tensor) -> Tensor:
        saved.append(tensor.detach())
        return saved[-1]  # an output that its node saves would never be freed

    return note
