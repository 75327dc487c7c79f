"""Mixtures of experts of transformers that save codes instead of all that their products and gates save.

A token x goes to k of E experts, each down(gate(up(x))) with weights of its own; the output is the sum, weighted by the
router. With h = gate(up(x)), D = ∂h/∂(up x), g = downᵀ dOut and the routing weight w,

    d(up x) = w · g ∘ D     dup = Σ d(up x) xᵀ     ddown = Σ w · dOut hᵀ     dw = ⟨g, h⟩ (+ ⟨dOut, bias of down⟩)

Saved are D, h and each token's x once, encoded with independent errors, and the routing as it is. Every gradient is
linear in each of the three, so all are unbiased; the output of down is not needed. D is made by autograd with a vector
of ones through the module's own gate, which may be any function that takes one or two columns to one: it is tried on a
few numbers in float64 before the conversion.

The converted module is of a class derived from its own, whose forward calls the module's own without gradients. So it
is below transformers' ``ALL_EXPERTS_FUNCTIONS``: the implementation stays the user's, outputs are equal to the bit, and
neither the registry nor the configuration, which other models may share, changes.

Implementations that call the gate once for all rows give up x to it, so it is not computed again. In which order its
rows are ("sorted" by expert, or those of "tokens") is found in the first call, by comparing them with the product.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from rmm_linear._support.autocast import autocast_dtype, autocast_off, cast
from rmm_linear._support.distributed import is_dtensor
from rmm_linear.activations.base import PackedModule, SavingCall
from rmm_linear.config import RMMConfig
from rmm_linear.layers.function import SavingFunction
from rmm_linear.ops.experts import coded_shapes, decode_experts, encode_experts, grouped_outer, grouped_product
from rmm_linear.packing import CODES
from rmm_linear.sketches.seeds import is_capturing

logger = logging.getLogger(__name__)

_ARGUMENTS = ("hidden_states", "top_k_index", "top_k_weights")  # of the functions of the registry
_WEIGHTS = {"gate_up_proj", "up_proj", "down_proj", "gate_up_proj_bias", "up_proj_bias", "down_proj_bias"}
_BITS = 4  # of what is encoded where linear layers save the dtype itself, or fewer rows
_NEAR = 4e-3  # relative to the norm of a row: more than the rounding of TF32
_DIVIDED = (
    "Mixtures of experts run outside of compiled code, which is divided around them: %s is the first. With "
    "fullgraph=True, leave 'experts' out of operations."
)


class PackedExperts(PackedModule):
    """Experts that save a token, the gate's output and its derivative in few bits, see the module's docstring.

    The output is exact. In compiled code, the module runs outside of the graph.

    Memory, for N tokens with k experts each, hidden width H and intermediate width I: the codes of (N, H) and
    (N · k, I) in ``bits``, those of (N · k, 2 I) in ``activation_bits``, and 4 bytes per token and expert.
    """

    rmm_operation = "experts"
    rmm_pairs: str  # which columns the gate takes together: "halves", "pairs" or "single"
    # By the name of an implementation, the order of the rows that it gives to the gate
    rmm_orders: dict[str | None, str]
    rmm_take: Callable[[Tensor], Tensor] | None  # during a call: gets the rows that the gate is given
    is_transposed: bool
    config: Any

    def _set_up(self, config: RMMConfig | None, *arguments: Any, **named: Any) -> None:
        super()._set_up(config, *arguments, **named)
        found = gate_pairs(self)
        if found is None:
            raise ValueError(f"{type(self).__name__} has no gate of one or two columns each: gate_pairs finds none.")
        self.rmm_pairs, self.rmm_orders, self.rmm_take = found, {}, None

    def exact_forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    def own_gate(self, rows: Tensor) -> Tensor:
        """Apply the module's own gate to rows of the first product."""
        if not _has(self, "has_gate", True):
            return self.act_fn(rows)  # pyright: ignore[reportCallIssue]
        return super()._apply_gate(rows)  # pyright: ignore[reportAttributeAccessIssue]

    def _apply_gate(self, rows: Tensor) -> Tensor:
        take = vars(self).get("rmm_take")
        return self.own_gate(rows) if take is None else take(rows)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Apply the experts to tokens, (N, H), with indices and weights of the routing, (N, k)."""
        given = [*args, *(kwargs[name] for name in _ARGUMENTS[len(args) :] if name in kwargs)]
        is_known = len(given) == len(_ARGUMENTS) == len(args) + len(kwargs)
        if not self.training or not is_known:
            return self.exact_forward(*args, **kwargs)
        return (_run_uncompiled if torch.compiler.is_compiling() else _run)(self, *given)


def _run(module: PackedExperts, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    call = module._packed_call(tuple(x.shape[:-1]), x.device)
    first, last = ("gate_up_proj" if _has(module, "has_gate", True) else "up_proj"), "down_proj"
    parameters: list[Any] = [getattr(module, first), None, getattr(module, last), None]
    if _has(module, "has_bias"):
        parameters[1::2] = [getattr(module, f"{name}_bias") for name in (first, last)]
    tensors = [one for one in (x, weights, *parameters) if one is not None]
    is_saving = torch.is_grad_enabled() and any(one.requires_grad for one in tensors) and x.numel() and index.numel()
    is_divided = _has(module, "_is_expert_parallel", True) or any(map(is_dtensor, tensors))
    if call.is_exact or is_divided or not is_saving or x.dim() != 2:
        return module.exact_forward(x, index, weights)
    return ExpertsFunction.run(x, weights, *parameters, index, module, call)


def _run_divided(module: PackedExperts, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    context = module.rmm_context
    if context is not None and _DIVIDED not in context.checks.said:
        context.checks.said.add(_DIVIDED)
        logger.warning(_DIVIDED, context.names[module.rmm_index])
    return _run(module, x, index, weights)


# Compilers do not trace autograd inside of a function of it.
_run_uncompiled: Any = torch.compiler.disable(_run_divided)


class ExpertsFunction(SavingFunction):
    """A mixture of experts that saves codes of its tokens, products and derivatives."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weights: Tensor,
        up: Tensor,
        up_bias: Tensor | None,
        down: Tensor,
        down_bias: Tensor | None,
        index: Tensor,
        module: PackedExperts,
        call: SavingCall,
    ) -> Tensor:
        """Run the module's own forward, and encode."""
        needs_x, needs_weights, needs_up, needs_up_bias, needs_down, _ = ctx.needs_input_grad[:6]
        valid = call.index
        rows = _Rows(index, valid, up, up_bias, module)
        output, h, d = rows.gated(x, weights)
        needs_d = needs_x or needs_up or needs_up_bias
        needs = needs_weights or needs_down, needs_d, needs_up
        tokens = x if valid is None or not needs_up else x.index_select(0, valid)
        bits = experts_bits(module.rmm_config), module.rmm_config.activation_bits
        matrices = [one if needed else None for one, needed in zip((h, d, tokens), needs, strict=True)]
        ctx.shapes = coded_shapes(matrices, *bits)
        with autocast_off(x.device.type):
            stored = encode_experts(*matrices, *bits, call.seed) if any(needs) else None
        ctx.call, ctx.pairs, ctx.is_transposed, ctx.dtype = call, module.rmm_pairs, rows.is_transposed, d.dtype
        ctx.dtypes = [None if one is None else one.dtype for one in (x, weights, up, up_bias, down, down_bias)]
        kept = up if needs_x else None, down if needs_d or needs_weights else None, down_bias if needs_weights else None
        # The order too, as sorting is not stable, and need not find the same one again.
        ctx.save_for_backward(stored, rows.order.int(), valid, index, weights, *kept)
        ctx.experts = len(down)
        return output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        y = SavingFunction.received(ctx, grad_outputs[0], "packed experts")
        with autocast_off(y.device.type):
            found = _gradients(ctx, y)
        cast_back = (None if one is None else one.to(dtype) for one, dtype in zip(found, ctx.dtypes, strict=True))
        return *cast_back, None, None, None


def _gradients(ctx: Any, y: Tensor) -> list[Tensor | None]:
    """Return the gradients of tokens, routing weights, and weights and biases of up and down."""
    stored, order, valid, index, weights, up, down, down_bias = ctx.saved_tensors
    needs_x, needs_weights, needs_up, needs_up_bias, needs_down, needs_down_bias = ctx.needs_input_grad[:6]
    tokens, dtype, is_transposed = len(y), ctx.dtype, ctx.is_transposed
    if valid is not None:
        y, index, weights = (one.index_select(0, valid) for one in (y, index, weights))
    order = order.long()
    experts, source = index.reshape(-1)[order], order // index.shape[1]
    ends = _ends(experts, ctx.experts)
    w = weights.reshape(-1)[order].unsqueeze(1)
    coded = decode_experts(stored, ctx.shapes, dtype) if stored is not None else iter((None,) * 3)
    ys = y.to(dtype)[source]
    yw = (ys * w).to(dtype) if needs_down or needs_down_bias else None

    def back(rows: Tensor) -> Tensor:
        """Put rows in the order of tokens, and zeros where nothing was saved."""
        placed = torch.empty_like(rows).index_copy_(0, order, rows).view(*index.shape, *rows.shape[1:])
        return placed if valid is None else placed.new_zeros(tokens, *placed.shape[1:]).index_copy_(0, valid, placed)

    def outer(outputs: Tensor, inputs: Tensor) -> Tensor:
        return grouped_outer(inputs, outputs, ends) if is_transposed else grouped_outer(outputs, inputs, ends)

    def inwards(rows: Tensor, weight: Tensor) -> Tensor:
        weight = cast(weight, dtype)
        return grouped_product(rows, weight.transpose(1, 2) if is_transposed else weight, ends)

    found: list[Tensor | None] = [None] * 6
    wide = torch.promote_types(dtype, torch.float32)
    g, h = (inwards(ys, down) if down is not None else None), next(coded)
    if needs_weights and g is not None and h is not None:
        each = (g.unsqueeze(1) @ h.unsqueeze(2)).flatten().to(wide)
        if down_bias is not None:
            each += (ys * down_bias.to(dtype)[experts]).sum(1, dtype=wide)
        found[1] = back(each)
    if needs_down and h is not None and yw is not None:
        found[4] = outer(yw, h)
    if needs_down_bias and yw is not None:
        found[5] = _sums(yw, experts, ctx.experts, wide)
    del h, ys, yw  # one after the other, as all gradients of the model may be there
    if (d := next(coded)) is not None and g is not None:
        of_up = _by_derivative(d, g.mul_(w), ctx.pairs)
        del g
        if needs_up and (x := next(coded)) is not None:
            found[2] = outer(of_up, x[source])
            del x
        if needs_up_bias:
            found[3] = _sums(of_up, experts, ctx.experts, wide)
        if needs_x:
            found[0] = back(inwards(of_up, up)).sum(1)
    return found


def _by_derivative(d: Tensor, rows: Tensor, pairs: str) -> Tensor:
    """Multiply the derivative by the gradient of the column that each of its columns is taken to, in place."""
    if pairs == "single":
        return d.mul_(rows)
    shape = (2, -1) if pairs == "halves" else (-1, 2)
    d.unflatten(1, shape).mul_(rows.unsqueeze(1 if pairs == "halves" else 2))
    return d


def _sums(rows: Tensor, experts: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    return rows.new_zeros(count, rows.shape[1], dtype=dtype).index_add_(0, experts, rows.to(dtype))


def _ends(experts: Tensor, count: int) -> Tensor:
    """Return where the rows of every expert end, of sorted ones."""
    numbers = torch.arange(count, dtype=experts.dtype, device=experts.device)
    return torch.searchsorted(experts, numbers, right=True, out_int32=True)


class _Rows:
    """The rows of one call: a token for each of its experts, sorted by expert, of those tokens that are saved.

    Attributes:
        order: Their places among the rows (token, expert) of the tokens that are saved.
        places: The same among the rows of all tokens.
    """

    def __init__(
        self, index: Tensor, valid: Tensor | None, up: Tensor, up_bias: Tensor | None, module: PackedExperts
    ) -> None:
        self.index, self.up, self.up_bias, self.module = index, up, up_bias, module
        self.is_transposed = bool(_has(module, "is_transposed"))
        flat = index.reshape(-1)
        self._is_all = valid is None
        if valid is None:
            self.order = self.places = torch.sort(flat).indices
        else:
            places = torch.arange(index.shape[1], device=valid.device) + valid.unsqueeze(1) * index.shape[1]
            places = places.flatten()
            self.order = torch.sort(flat[places]).indices
            self.places = places[self.order]

    def gated(self, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Run the module's own forward; return its output, the gate's of the rows, and its derivative."""
        module, name = self.module, getattr(self.module.config, "_experts_implementation", None)
        known, given, taken = module.rmm_orders.get(name), list[Tensor](), list[tuple[Tensor, Tensor]]()

        def take(rows: Tensor) -> Tensor:
            if known is None:  # else not held in addition to what is made of it
                given.append(rows)
            taken.append(gate_and_derivative(module.own_gate, rows))
            return taken[-1][0]

        has_values = not isinstance(x, FakeTensor) and not is_capturing(x.device)
        is_taking = known != "other" if has_values else known not in (None, "other")
        vars(module)["rmm_take"] = take if is_taking else None
        try:
            output = module.exact_forward(x, self.index, weights)
        finally:
            vars(module)["rmm_take"] = None
        is_whole = len(taken) == 1 and len(taken[0][0]) == self.index.numel()
        own = None
        if is_taking and known is None:
            own = self._product(x)
            orders = self._orders_like(own, given[0]) if is_whole else []
            known = orders[0] if orders else "other"
            if len(orders) < 2:  # else they are the same in this call
                module.rmm_orders[name] = known
        if is_whole and known in ("sorted", "tokens"):
            (h, d), place = taken[0], self._place(known)
            return (output, h, d) if place is None else (output, h[place], d[place])
        taken.clear()
        return output, *gate_and_derivative(module.own_gate, self._product(x) if own is None else own)

    def _place(self, order: str) -> Tensor | None:
        """Return where the rows are among those of all tokens in an order; None if they are the same."""
        if order == "tokens":
            return self.places
        if self._is_all:
            return None
        everything = torch.sort(self.index.reshape(-1)).indices
        return torch.empty_like(everything).index_copy_(0, everything, _numbers(everything))[self.places]

    def _orders_like(self, own: Tensor, rows: Tensor) -> list[str]:
        """Return the orders in which rows that the gate was given are those of the product."""
        room = max(_NEAR, *(4 * torch.finfo(one.dtype).eps for one in (rows, own)))
        found: list[str] = []
        for order in ("sorted", "tokens"):
            place = self._place(order)
            error = (rows if place is None else rows[place]).float() - own.float()
            if bool((error.norm(dim=1) <= room * own.float().norm(dim=1)).all()):
                found.append(order)
        return found

    def _product(self, x: Tensor) -> Tensor:
        """Compute the first product of the rows, as autocast would a linear layer's."""
        dtype = autocast_dtype(x.device.type, x.dtype) or self.up.dtype
        with autocast_off(x.device.type):
            weight = cast(self.up, dtype)
            experts = self.index.reshape(-1)[self.places]
            rows = x[self.places // self.index.shape[1]].to(weight.dtype)
            weight = weight if self.is_transposed else weight.transpose(1, 2)
            output = grouped_product(rows, weight, _ends(experts, len(weight)))
            return output if self.up_bias is None else output.add_(self.up_bias[experts])


def _numbers(like: Tensor) -> Tensor:
    return torch.arange(len(like), device=like.device)


def gate_and_derivative(gate: Callable[[Tensor], Tensor], rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gate's output, and the derivative of its only column that depends on it by every column of the rows.

    Hooks around, which count, checkpoint or offload what is saved, do not see what autograd saves for this moment.
    """
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda one: one, lambda one: one):
        leaf = rows.detach().requires_grad_()
        output = gate(leaf)
        (derivative,) = torch.autograd.grad(output, leaf, output.new_ones(()).expand_as(output))
    return output.detach(), derivative


def experts_bits(config: RMMConfig) -> float:
    """Return the width in which experts save tokens and products: that of linear layers, or 4 if they have none."""
    width = config.width(1, 1) if config.memory is None else config.bits
    return width if width in CODES else _BITS


def _has(module: nn.Module, name: str, default: bool = False) -> bool:
    """Return what transformers' decorator says of experts, which versions before 5.24 do not say all of."""
    return getattr(module, name, default)


def is_experts(module: nn.Module) -> bool:
    """Say whether a module looks its function up in transformers' ``ALL_EXPERTS_FUNCTIONS``."""
    registry = getattr(sys.modules.get("transformers.integrations.moe"), "ALL_EXPERTS_FUNCTIONS", None)
    cells = getattr(type(module).forward, "__closure__", None) or ()
    return registry is not None and any(cell.cell_contents is registry for cell in cells)


def why_exact(module: nn.Module) -> str | None:
    """Return why experts stay exact, before they are converted."""
    if not hasattr(module, "_is_expert_parallel"):
        return "this version of transformers does not say whether its experts are divided among devices"
    if _has(module, "_is_expert_parallel"):
        return "its experts are divided among devices (expert parallelism)"
    if _has(module, "has_post_expert_norm"):
        return "a norm follows each of its experts"
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    is_quantized = any(not one.dtype.is_floating_point or one.itemsize < 2 for one in own.values())
    if is_quantized or hasattr(module, "parametrizations"):
        return "its weights are quantized or parametrized"
    if others := sorted(set(own) - _WEIGHTS):
        return f"its gate has tensors of its own ({', '.join(others)})"
    return None if gate_pairs(module) else "its gate takes other columns together than one of each half, or neighbours"


def gate_pairs(module: Any) -> str | None:
    """Say which columns the gate takes together, by its derivatives of a few numbers: None where it mixes others.

    "halves": one of each half; "pairs": neighbours; "single": each alone.
    """
    gate, columns = (module._apply_gate, 8) if _has(module, "has_gate", True) else (module.act_fn, 4)
    x = torch.linspace(-1.3, 1.7, 3 * columns, dtype=torch.float64, device="cpu").view(3, columns)
    try:
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
            touched = torch.autograd.functional.jacobian(gate, x) != 0
    except (RuntimeError, TypeError, ValueError):
        return None
    one = torch.eye(4, dtype=torch.bool, device="cpu")
    if touched.shape != (3, 4, 3, columns) or bool((touched.any(3).any(1) & ~one[:3, :3]).any()):
        return None
    found, patterns = touched.any(2).any(0), {"single": one}
    if columns != len(one):
        patterns = {"halves": one.repeat(1, 2), "pairs": one.repeat_interleave(2, 1)}
    return next(
        (name for name, pattern in patterns.items() if bool(found.any() and not (found & ~pattern).any())), None
    )
