"""Make fake tensors, which have shapes but no memory, in the place of real ones and of those on the meta device."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from rmm_linear.memory.peak import consists_of_others
from rmm_linear.memory.quantized import is_of, replaced_weight
from rmm_linear.planning.step.remembered import Remembered
from rmm_linear.planning.step.ring import merged

_GROUPED = getattr(getattr(torch.ops.aten, "_grouped_mm", None), "default", None)
_READ, _NONZERO = torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default
_SELECT = torch.ops.aten.masked_select.default
_ALIGNED = 16  # bytes, of which rows are multiples on CUDA


class _Mode(FakeTensorMode):
    """Multiplies groups in every dtype, as the real operator does; PyTorch's rule for fakes has bfloat16 alone.

    With ``guesses``, every number that is read is one, which is noted there, and every mask selects everything, which
    takes the most memory: losses of trainers read numbers for their metrics, and leave padding out.
    """

    guesses: set[str] | None = None

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.known = Remembered(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _GROUPED and not consists_of_others(set(types) - {FakeTensor}):
            return _grouped(self, *args, **(kwargs or {}))
        if self.guesses is not None and func in (_READ, _NONZERO, _SELECT):
            self.guesses |= {str(func)} if func is _READ else set()
            return _guessed(func, *args)
        usual = partial(super().__torch_dispatch__, func, types, args, kwargs)
        found = usual() if consists_of_others(set(types) - {FakeTensor}) else self.known(func, args, kwargs, usual)
        return merged(func, found)


def _guessed(func: Any, tensor: Tensor, mask: Tensor | None = None) -> Any:
    """Return a number of one, or the shape of what a mask of ones selects."""
    if func is _READ:
        return {torch.bool: True}.get(tensor.dtype, 1.0 if tensor.dtype.is_floating_point else 1)
    if mask is not None:
        return tensor.new_empty(torch.broadcast_shapes(tensor.shape, mask.shape).numel())
    return tensor.new_empty((tensor.numel(), tensor.dim()), dtype=torch.int64)


def _grouped(
    mode: FakeTensorMode,
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return a product of (M, K) or (G, M, K) with (K, N) or (G, K, N); ``offs`` divides what has no dimension G."""
    del bias  # there is none yet
    groups = () if a.dim() != b.dim() else (a.shape[0] if offs is None else offs.shape[0],)
    dtype, rows, columns = out_dtype or a.dtype, a.shape[-2], b.shape[-1]
    step = _ALIGNED // dtype.itemsize if a.device.type == "cuda" else 1
    width = -(-columns // step) * step
    with mode:
        return torch.empty_strided(
            (*groups, rows, columns), (*(rows * width for _ in groups), width, 1), dtype=dtype, device=a.device
        )


class Fakes:
    """Makes fake tensors, the same one for the same tensor.

    Quantized weights keep the attributes that their layers read: those of bitsandbytes have no subclass any more, as
    it replaces no operator. Subclasses that consist of other tensors stay, with fake ones inside.
    """

    def __init__(self, guesses: set[str] | None = None) -> None:
        """Begin without any. With ``guesses``, values that are read are guessed and noted, see :class:`_Mode`."""
        self.mode = _Mode(allow_non_fake_inputs=True)
        self.mode.guesses = guesses
        self._known: dict[int, tuple[Tensor, Tensor]] = {}  # by the identity of a tensor, which is kept with its own

    def __call__(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._known:
            self._known[id(tensor)] = tensor, self._made(tensor)
        return self._known[id(tensor)][1]

    def _made(self, tensor: Tensor) -> Tensor:
        if is_of(tensor):
            return replaced_weight(tensor, self)
        if not tensor.is_meta:
            made = self.mode.from_tensor(tensor, static_shapes=True)
            made.grad = None
            return made
        if is_traceable_wrapper_subclass(tensor):
            made = self._rebuilt(tensor)
        else:
            with self.mode:
                made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        made = nn.Parameter(made, False) if isinstance(tensor, nn.Parameter) else made
        return made.requires_grad_(tensor.requires_grad)

    def _rebuilt(self, tensor: Any) -> Any:
        """Return a tensor subclass with fake tensors inside."""
        names, context = tensor.__tensor_flatten__()
        inner = {name: self(getattr(tensor, name)) for name in names}
        with self.mode:
            return type(tensor).__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())
