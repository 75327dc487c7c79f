"""Find the formula of a module that may be a norm, by running it on probes, not by its name.

How it rounds is found in the same way: the dtype of its output, and whether the normalized rows are rounded before γ.
In half types, nn.LayerNorm and Gemma's RMSNorm round once, at the end; LLaMA's and T5's round the normalized rows
first. A kernel that makes the output must do the same, so a copy of the module is run on a few rows in each dtype.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rmm_linear._support.distributed import is_dtensor, shape_of
from rmm_linear.activations.base import PackedModule
from rmm_linear.activations.own_forward import runs_its_class
from rmm_linear.layers.converted import original_of
from rmm_linear.packing.norms import normalize

EPS = ("eps", "variance_epsilon", "epsilon")
_ELEMENTS, _WIDTH = 4096, 64  # of a probe, at least; columns where the module has no weight
_TOLERANCE = 1e-5  # of float32 sums of few thousand elements, made in another order


@dataclass(frozen=True)
class NormForm:
    """The formula of a norm: γ ∘ (x − mean) · rstd + β over the last dimensions."""

    centered: bool  # true for LayerNorm, False for RMSNorm, which has no mean
    eps: float | None  # added to the variance; None, as in nn.RMSNorm, for that of the dtype it is computed in
    shift: float = 0.0  # γ = shift + weight: 1 in Gemma's form, else 0
    dims: int = 1

    @property
    def layout(self) -> tuple[bool, int]:
        """``centered`` and ``dims``, which the packed copy depends on."""
        return self.centered, self.dims

    def gamma(self, weight: Tensor | None) -> Tensor | None:
        """Return γ, one dimension; None without a weight."""
        if weight is None:
            return None
        gamma = weight.detach()
        gamma = gamma if gamma.dim() == 1 else gamma.reshape(-1)
        if not self.shift:
            return gamma
        return gamma.to(torch.promote_types(gamma.dtype, torch.float32)) + self.shift

    def eps_of(self, dtype: torch.dtype) -> float:
        if self.eps is not None:
            return self.eps
        # Without torch.promote_types, an operator that selective checkpoints count.
        return torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps


def norm_of(module: nn.Module) -> NormForm | None:
    """Find out whether a module is a LayerNorm or an RMSNorm over the last dimension, and in which form.

    nn.LayerNorm and nn.RMSNorm are known, over any number of dimensions. Other modules without children and buffers
    whose forward takes one tensor, with a ``weight`` and a ``bias`` of one dimension or without, are run on random
    input with random parameters, in train and in eval mode, and compared with what a norm computes: this tells them
    from BatchNorm, GroupNorm, dropout and activations. Inputs as small as √eps confirm the eps that an attribute
    states. A copy of the module is run, in float32 and without hooks; random number generators are as before
    afterwards. Where the module is sharded or on the meta device, the copy is whole and on a real one.
    """
    parameters = dict(module.named_parameters(recurse=False))
    has_more = [*module.children(), *module.buffers(), *(set(parameters) - {"weight", "bias"})]
    if has_more:
        return None
    forward = forward_of(module)
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)) and forward in (nn.LayerNorm.forward, nn.RMSNorm.forward):
        return NormForm(isinstance(module, nn.LayerNorm), module.eps, 0.0, len(module.normalized_shape))
    eps = next((getattr(module, name) for name in EPS if isinstance(getattr(module, name, None), float)), 0.0)
    if not 0 < eps < 1 or forward is None or not _can_run(parameters):
        return None
    shifts = (0.0, 1.0) if "weight" in parameters else (0.0,)
    forms = [NormForm(centered, eps, shift) for centered in (True, False) for shift in shifts]
    try:
        return _probe(module, forward, parameters, forms)
    except Exception:  # whatever a module that is no norm may raise
        return None


def forward_of(module: nn.Module) -> Callable[..., object] | None:
    """Return the function that computes a module's output of one tensor, not a packed class's forward, which calls it.

    None if there is more to its forward.
    """
    own = (
        vars(kind)["forward"]
        for kind in type(module).__mro__
        if "forward" in vars(kind) and not issubclass(kind, PackedModule)
    )
    forward = next(own)
    is_simple = inspect.isfunction(forward) and len(inspect.signature(forward).parameters) == 2  # and self
    return forward if is_simple and runs_its_class(module) else None


def _can_run(parameters: dict[str, nn.Parameter]) -> bool:
    shapes = {tuple(shape_of(parameter)) for parameter in parameters.values()}
    is_vector = len(shapes) <= 1 and all(len(shape) == 1 and shape[0] > 1 for shape in shapes)
    is_whole = all(type(p) is nn.Parameter or is_dtensor(p) for p in parameters.values())
    return is_vector and is_whole and all(p.is_floating_point() for p in parameters.values())


def _probe(
    module: nn.Module, forward: Callable[..., object], parameters: dict[str, nn.Parameter], forms: list[NormForm]
) -> NormForm | None:
    """Return the one of the forms that a copy of the module, with random parameters and without hooks, computes."""
    columns = next((shape_of(p)[0] for p in parameters.values()), _WIDTH)
    device = next((p.device for p in parameters.values() if not p.is_meta), torch.device("cpu"))
    generator, copy = torch.Generator("cpu").manual_seed(0), object.__new__(original_of(type(module)))

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cpu").to(device)

    chosen = {name: random(columns) for name in parameters}
    rows = 2 + math.ceil(_ELEMENTS / columns)
    x = random(2, rows + (rows == columns), columns) + 0.5  # channels are told from columns
    small = x * (forms[0].eps_of(x.dtype) ** 0.5)
    own = {name: None if p is None else nn.Parameter(chosen[name], False) for name, p in module._parameters.items()}
    devices = [device] if device.type == "cuda" else []
    with (
        torch.no_grad(),
        torch.random.fork_rng(devices=devices),
        torch.autocast(device.type, enabled=False),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        for mode in (True, False):
            vars(copy).update({**vars(module), "_parameters": own, "training": mode})
            for values in (x, x[:, :2].unsqueeze(0), small):
                output = forward(copy, values.clone())
                forms = [form for form in forms if _is_close(output, _norm(values, form, **chosen))]
    return forms[0] if len(forms) == 1 else None


def _norm(x: Tensor, form: NormForm, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    x = x - x.mean(-1, keepdim=True) if form.centered else x
    h = x * (x.square().mean(-1, keepdim=True) + form.eps_of(x.dtype)).rsqrt()
    h = h if weight is None else h * (weight + form.shift)
    return h if bias is None else h + bias


def _is_close(found: object, expected: Tensor) -> bool:
    if not isinstance(found, Tensor) or found.shape != expected.shape or not found.is_floating_point():
        return False
    return bool((found.float() - expected).norm() <= _TOLERANCE * expected.norm())


Dtypes = tuple[torch.dtype, torch.dtype | None]  # of the input, and of the parameters
Casts = tuple[torch.dtype, torch.dtype]  # before γ, float32 for none, and of the output

_ELEMENTS, _WIDTH = 4096, 64  # of a probe, at least; columns where the module has no weight and no normalized_shape
_HALF = (torch.float16, torch.bfloat16)
_SHARE = 0.1  # of a last bit: rounding in another order moves a third of the elements by one
_TOLERANCE = 1e-5  # of float32 sums in another order


def casts_of(module: nn.Module, form: NormForm) -> dict[Dtypes, Casts]:
    """Find how a norm rounds, by running a copy of it on the CPU: by the dtypes of the input and of the parameters."""
    has_parameters = any(parameter is not None for parameter in module._parameters.values())
    found: dict[Dtypes, Casts] = {}
    for dtype in (torch.float32, *_HALF):
        for own in dict.fromkeys((dtype, torch.float32) if has_parameters else (None,)):
            casts = _casts(module, form, dtype, own)
            if casts is not None:
                found[dtype, own] = casts
    return found


def _casts(module: nn.Module, form: NormForm, dtype: torch.dtype, own: torch.dtype | None) -> Casts | None:
    forward, copy = forward_of(module), object.__new__(original_of(type(module)))
    if forward is None:
        return None
    generator = torch.Generator("cpu").manual_seed(0)
    shape = next((shape_of(p) for p in module._parameters.values() if p is not None), None)
    shape = shape or getattr(module, "normalized_shape", (_WIDTH,))
    rows = 2 + _ELEMENTS // max(1, torch.Size(shape).numel())
    x = (torch.randn(rows, *shape, generator=generator, device="cpu") + 0.5).to(dtype)
    chosen: dict[str, Tensor | None] = {
        name: None if parameter is None else torch.randn(shape, generator=generator, device="cpu").to(own)
        for name, parameter in module._parameters.items()
    }
    wrapped = {name: None if one is None else nn.Parameter(one, False) for name, one in chosen.items()}
    vars(copy).update({**vars(module), "_parameters": wrapped, "training": False})
    with torch.no_grad(), torch.autocast("cpu", enabled=False), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            output = forward(copy, x.clone())
        except Exception:  # of dtypes that the module does not take together
            return None
    if not isinstance(output, Tensor) or output.shape != x.shape or not output.is_floating_point():
        return None
    beta, errors = chosen.get("bias"), {}
    for before in dict.fromkeys((torch.float32, dtype, own or dtype)):
        if before in (torch.float32, *_HALF):
            affine = form.gamma(chosen.get("weight")), None if beta is None else beta.view(-1)
            how = (before, output.dtype), form.eps_of(dtype), form.centered
            expected = normalize(x.flatten(-form.dims), *affine, *how).view(x.shape).double()
            errors[before] = float((output.double() - expected).norm() / expected.norm())
    before = min(errors, key=lambda one: errors[one])
    limit = _TOLERANCE + (_SHARE * torch.finfo(output.dtype).eps if output.dtype in _HALF else 0.0)
    return (before, output.dtype) if errors[before] <= limit else None
