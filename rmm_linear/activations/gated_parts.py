"""Find out whether a module is a gated MLP, by its structure and by what it computes, not by its name.

A gated MLP computes down(dropout(act(gate(x)) · up(x))) with children gate, up, down and, perhaps, act and dropout;
gate and up may be the two halves of one child's output. Which child is which follows from one forward pass of the
module itself: two linear children read its input, one writes its output, and the activation reads what the gate wrote.
Without an activation child, a module whose code calls a function that may be one is tried: the child after the product
must have read that of one of the functions and one of the two factors, to the bit. The answer is confirmed by computing
the formula with these children: it must give the module's output to the bit.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rmm_linear._support.autocast import is_autocast
from rmm_linear._support.distributed import is_elsewhere
from rmm_linear.memory.quantized import undisturbed
from rmm_linear.packing.gated import ACTIVATIONS
from rmm_linear.packing.pointwise import FUNCTIONS

_TOKENS = 3  # of the probe's input
_LARGE = 1e4  # in float16 too
_APART = 6.0  # largest factor where functions are told apart: small ones are all linear, large ones 0 or themselves
# As modules, which call the functions of PyTorch.
_FUNCTIONS = {"silu": nn.SiLU(), "gelu": nn.GELU(), "gelu_tanh": nn.GELU("tanh"), "relu": nn.ReLU()}
_NARROW, _WIDE = 8, 1024  # the least width of a narrow copy, and the largest by their greatest common divisor


@dataclass(frozen=True)
class GatedParts:
    """Names of the children of a gated MLP."""

    gate: str  # the linear child whose output goes into the activation
    up: str  # the linear child whose output the activation's is multiplied by; gate itself if both are halves of one
    # The activation child, or None if the module calls a function. Whoever packs the MLP replaces it, so it must not be
    # packed by itself.
    act: str | None
    down: str  # the linear child that reads the product
    dropout: str | None  # the child between the product and down, or None
    activation: str  # the function of act, one of packing.gated.ACTIVATIONS
    gate_first: bool  # whether the gate is called before up; of halves, whether it is the first one

    def act_of(self, module: nn.Module) -> nn.Module:
        """Return the activation of a module with these parts."""
        return _FUNCTIONS[self.activation] if self.act is None else module.get_submodule(self.act)

    def gate_and_up(self, module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs of gate and up, called in the module's own order."""
        if self.gate == self.up:
            first, second = module.get_submodule(self.gate)(x).chunk(2, dim=-1)
        else:
            names = (self.gate, self.up) if self.gate_first else (self.up, self.gate)
            first, second = (module.get_submodule(name)(x) for name in names)
        return (first, second) if self.gate_first else (second, first)

    def output(self, module: nn.Module, product: Tensor) -> Tensor:
        """Return what the module makes of act(gate(x)) · up(x)."""
        if self.dropout is not None:
            product = module.get_submodule(self.dropout)(product)
        down = module.get_submodule(self.down)
        # To read a parametrized weight would change the buffers of spectral_norm.
        weight = None if "parametrizations" in down._modules else getattr(down, "weight", None)
        dtype = getattr(weight, "dtype", product.dtype)
        # Some models keep this weight in float32 and cast its input, see T5. Autocast casts by itself.
        if dtype.is_floating_point and not is_autocast(product.device.type):
            product = product.to(dtype)
        return down(product)


def gated_parts(module: nn.Module) -> GatedParts | None:
    """Find the children of a module that are the parts of a gated MLP.

    Runs the module on a few random rows, small and large ones, in eval mode, without gradients; hooks of its children
    run too, random numbers and modes stay as they were. Of a module whose weights are on the meta device, or divided
    among processes, a narrower copy with random weights is run.

    Returns None if the module is not a gated MLP, its activation cannot be packed, its weights are not here and it has
    no narrow copy, or its output is not that of the formula to the bit.
    """
    return _tried(module)[0]


def lacks_weights(module: nn.Module) -> bool:
    """Say whether a module has the children of a gated MLP, and cannot be tried because their weights are not here."""
    found = _children(module)
    if found is None or not found[1]:
        return False
    return any(map(is_elsewhere, found[2])) and not _tried(module)[1]


def _tried(module: nn.Module) -> tuple[GatedParts | None, bool]:
    """Return the parts, and whether the module could be run."""
    found = _children(module)
    if found is not None and any(map(is_elsewhere, found[2])):
        module = _narrow_copy(module, found[0]) or module
        found = _children(module)
    if found is None or any(map(is_elsewhere, found[2])):
        return None, False
    widths, kinds, tensors = found
    has_run = False
    dtypes = [tensor.dtype for tensor in tensors if tensor.is_floating_point()]
    forward = getattr(module, "exact_forward", module.forward)
    generator = torch.Generator("cpu").manual_seed(0)
    # The wanted width is that of two children, or of the one whose output is cut in halves.
    for features in dict.fromkeys(width[0] for width in widths.values()):
        x = torch.randn(1, _TOKENS, features, generator=generator, device="cpu")
        x = x.to(tensors[0].device, dtypes[0] if dtypes else torch.float32)
        with _eval_mode(module), undisturbed(module), torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            try:
                parts, has_run = _probe(module, forward, x, *(kinds.items() or [(None, "")])), True
            except Exception:  # a forward that takes other arguments, or an input of another width
                parts = None
        if parts is not None:
            return parts, True
    return None, has_run


def _narrow_copy(module: nn.Module, widths: dict[str, tuple[int, int]]) -> nn.Module | None:
    """Make a copy of a module with weights and narrow widths in the same proportions; None if these are wide."""
    every = [width for pair in widths.values() for width in pair]
    divisor = math.gcd(*every)
    if not min(every) or max(every) > divisor * _WIDE:
        return None
    factor = math.ceil(_NARROW * divisor / min(every))
    generator = torch.Generator("cpu").manual_seed(0)
    children = dict(module._modules)
    for name, pair in widths.items():
        features, outputs = (width // divisor * factor for width in pair)
        own = module.get_submodule(name)
        # Of quantized weights, any floating dtype will do: theirs is not told by the packed ones.
        dtype = next((weight.dtype for weight in own.parameters() if weight.is_floating_point()), torch.float32)
        child = nn.Linear(features, outputs, getattr(own, "bias", None) is not None, "meta", dtype)
        for kind, parameter in child.named_parameters():
            values = torch.randn(parameter.shape, generator=generator, device="cpu") / features**0.5
            child._parameters[kind] = nn.Parameter(values.to(dtype), False)
        children[name] = child
    copy = object.__new__(type(module))
    vars(copy).update({**vars(module), "_modules": children})
    return copy


def _children(module: nn.Module) -> tuple[dict[str, tuple[int, int]], dict[str, str], list[Tensor]] | None:
    """Return the widths of the linear children, the child that is an activation if there is one, and the weights."""
    widths = {name: width for name, child in module.named_children() if (width := width_of(child)) is not None}
    if len(widths) not in (2, 3) or next(iter(module._parameters.values()), None) is not None:
        return None
    with torch.random.fork_rng([]):
        kinds = {name: kind for name, child in module.named_children() if (kind := activation_kind(child)) is not None}
    tensors: list[Tensor] = [tensor for name in widths for tensor in module.get_submodule(name).parameters()]
    has_activation = len(kinds) == 1 or (not kinds and _calls_function(module))
    return (widths, kinds, tensors) if has_activation and tensors else None


def _calls_function(module: nn.Module) -> bool:
    """Say whether a module's code, or one of its attributes, names a function that may be an activation."""
    kinds = (kind for kind in type(module).__mro__ if issubclass(kind, nn.Module))
    codes = [getattr(inspect.unwrap(kind.forward), "__code__", None) for kind in kinds]
    names = {name for code in codes if code is not None for name in code.co_names}
    names |= {getattr(value, "__name__", "") for value in vars(module).values()}
    return not names.isdisjoint(_FUNCTIONS)


def activation_kind(module: nn.Module) -> str | None:
    """Find which of :data:`rmm_linear.packing.gated.ACTIVATIONS` a module computes, by its values from −12 to 12."""
    if any(True for _ in (*module.parameters(), *module.buffers(), *module.children())):
        return None
    if isinstance(module, (nn.Identity, nn.modules.dropout._DropoutNd)):
        return None
    points = torch.linspace(-12, 12, 193, dtype=torch.float64, device="cpu")
    try:
        with torch.no_grad():
            found = module.forward(points.clone())
    except Exception:  # whatever a module of another kind raises when it is given one tensor
        return None
    if not isinstance(found, Tensor) or found.shape != points.shape:
        return None
    for name in ACTIVATIONS:
        # The constants of one and the same function are written with seven digits and more.
        if torch.allclose(found.double(), FUNCTIONS[name].value(points), rtol=1e-7, atol=1e-7):
            return name
    return None


def width_of(module: nn.Module) -> tuple[int, int] | None:
    """in_features and out_features of a linear layer, wrapped, sketched or plain, or of GPT-2's Conv1D."""
    for names in (("in_features", "out_features"), ("nx", "nf")):
        width = tuple(getattr(module, name, None) for name in names)
        if all(isinstance(features, int) for features in width):
            return width  # pyright: ignore[reportReturnType]
    return None


Calls = list[tuple[str, Tensor, Tensor]]  # name of a child, what it read, what it wrote


def _probe(
    module: nn.Module, forward: Callable[..., Any], x: Tensor, kind: tuple[str | None, str]
) -> GatedParts | None:
    output, calls = _noted(module, forward, x)
    if kind[0] is None:
        x = x * (_APART / max(float(written.abs().max()) for _, read, written in calls if read is x))
        output, calls = _noted(module, forward, x)
    parts = _parts_of(x, output, calls, *kind)
    if parts is None:
        return None
    # Large numbers in another shape, as a formula may clamp; the module's own flag in both states, as a functional
    # dropout looks at it.
    for rows in (x, _LARGE * x.repeat(2, 2, 1)):
        for training in (False, True):
            module.training = training
            a, b = parts.gate_and_up(module, rows)
            expected = parts.output(module, parts.act_of(module)(a) * b)
            if not torch.allclose(forward(rows), expected, rtol=0, atol=0, equal_nan=True):
                return None
    return parts


def _noted(module: nn.Module, forward: Callable[..., Any], x: Tensor) -> tuple[Any, Calls]:
    """Return the output, and the calls of the children."""
    calls: Calls = []

    def note(name: str) -> Callable[..., None]:
        return lambda _module, args, output: calls.append((name, args[0], output))

    handles = [child.register_forward_hook(note(name)) for name, child in module.named_children()]
    try:
        return forward(x), calls
    finally:
        for handle in handles:
            handle.remove()


def _parts_of(x: Tensor, output: Any, calls: Calls, act: str | None, activation: str) -> GatedParts | None:
    """Return the parts, as far as what the children read and wrote tells; each is called once."""
    by_name = {name: (read, written) for name, read, written in calls}
    readers = [name for name, read, _ in calls if read is x and name != act]
    if len(by_name) != len(calls) or (act is not None and act not in by_name) or len(readers) not in (1, 2):
        return None
    writers = [name for name, _, written in calls if written is output and name not in readers]
    others = [name for name in by_name if name not in (*readers, *writers, act)]
    if len(writers) != 1 or len(others) > 1:
        return None
    written = [by_name[name][1] for name in readers]
    if len(written) == 1 and written[0].shape[-1] % 2:
        return None
    halves = written if len(written) == 2 else written[0].chunk(2, dim=-1)
    if act is None:
        found = list(_factors(halves, by_name[(others or writers)[0]][0]))
    else:
        gated = by_name[act][0]
        found = [(i, activation) for i, half in enumerate(halves) if half.shape == gated.shape and half.equal(gated)]
    if len(found) != 1:
        return None
    (gate, activation), names = found[0], readers if len(readers) == 2 else readers * 2
    dropout = others[0] if others else None
    return GatedParts(names[gate], names[1 - gate], act, writers[0], dropout, activation, gate == 0)


def _factors(halves: Sequence[Tensor], product: Tensor) -> Iterator[tuple[int, str]]:
    """Find which half goes into which function, if a product is that of the result and the other half."""
    for gate, name in itertools.product((0, 1), _FUNCTIONS):
        made = _FUNCTIONS[name](halves[gate]) * halves[1 - gate]
        if made.shape == product.shape and made.to(product.dtype).equal(product):
            yield gate, name


@contextmanager
def _eval_mode(module: nn.Module) -> Iterator[None]:
    """All flags as in eval mode, then as before; random numbers stay as they were."""
    flags = [(child, child.training) for child in module.modules()]
    devices = [tensor.device for tensor in module.parameters() if tensor.device.type == "cuda"][:1]
    with torch.random.fork_rng(devices):
        try:
            for child, _ in flags:
                child.training = False
            yield
        finally:
            for child, training in flags:
                child.training = training
