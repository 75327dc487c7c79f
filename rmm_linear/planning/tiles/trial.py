"""Find out by running it whether a module is position-wise: a row of its output depends on the same row of its input.

With values, it is run on random rows, and with random parameters where all numbers of one are near 0: as a whole, with
one row changed, in two slices with the sequences one after the other, and on rows that are all the same, which routing
with a capacity does not treat alike; and without values on few rows and on many, for which code may do something else.
On the meta device, and where parameters are sharded, only operators can be looked at (:mod:`operators`). All run in
train mode, without gradients, hooks and dropout, and leave no trace.
"""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module  # pyright: ignore[reportPrivateUsage]
from torch.utils._pytree import tree_leaves

from rmm_linear._support.distributed import is_dtensor
from rmm_linear._support.quiet import quiet
from rmm_linear.activations.own_forward import exact_inside, original_forward
from rmm_linear.context.surroundings import running_again
from rmm_linear.planning.replay.buffers import buffers_kept, parts_of
from rmm_linear.planning.replay.replayed import accelerators, forked, versions
from rmm_linear.planning.tiles.operators import META_LEAD, Mixed, Names, Operators, SteadyNumbers

_LEAD = (2, 67)  # primes: rows are told from columns by their number
_LONG_LEAD = (2, 65_537)  # more rows than a loop over them would take long for
_CUT = 64
_LARGE = 30.0  # of what one row is changed to: a mean over 134 rows then moves by a fifth of a standard deviation
_HIDES = 1e-2  # of the largest entry of a parameter: what it scales may be lost in rounding
_MOST_INPUTS = 3
_WIDTHS = 3  # that are tried for every input

MIXES = "its output at a position depends on other positions"


@dataclass(frozen=True)
class Verdict:
    """What a trial has found."""

    reason: str | None = None  # why the module cannot run in slices; None if it can
    mixes: bool = False  # whether that is because of what it computes: then a module around it mixes positions too
    ran: tuple[str, ...] = ()  # names of the children that have run


def try_module(module: nn.Module, method: str, widths: Sequence[int]) -> Verdict:
    try:
        own = _own_method(module, method)
        count = _inputs(own)
    except (TypeError, ValueError) as error:
        return Verdict(f"it cannot be tried: {error}")
    tensors = [*module.parameters(), *module.buffers()]
    on_meta = any(one.is_meta or is_dtensor(one) for one in tensors)
    if not tensors or not 0 < count <= _MOST_INPUTS or not widths:
        return Verdict(f"it cannot be tried: it takes {count} inputs, of unknown width")
    reason = ""
    for chosen in itertools.product(widths[:_WIDTHS], repeat=count):
        ran = set[str]()
        with _untouched(module, ran) as stack:
            stack.enter_context(_reparametrize_module(module, _on_meta(module) if on_meta else _instead(module)))
            try:
                (_check_operators if on_meta else _check_values)(module, own, chosen)
                if not on_meta:
                    _check_length(module, own, chosen)
                return Verdict(ran=tuple(name for name, _ in module.named_children() if name in ran))
            except Mixed as error:
                return Verdict(str(error), mixes=True)
            except Exception as error:  # of inputs that it does not take, whatever it raises
                reason = reason or _line(error)
    return Verdict(f"it cannot be tried on rows alone ({reason})")


def _check_values(module: nn.Module, own: Callable[..., Any], widths: Sequence[int]) -> None:
    like = next((p for p in module.parameters() if p.is_floating_point() and p.itemsize > 1), None)
    device = next(iter([*module.parameters(), *module.buffers()])).device
    dtype = torch.get_default_dtype() if like is None else like.dtype
    generator = torch.Generator("cpu").manual_seed(0)

    def random() -> list[Tensor]:
        made = [torch.randn(*_LEAD, width, generator=generator, device="cpu") for width in widths]
        return [one.to(device=device, dtype=dtype) for one in made]

    def run(given: Sequence[Tensor]) -> list[Tensor]:
        with SteadyNumbers(given[0].shape[:-1]):
            found = own(*given)
        return [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]

    given, others = random(), random()
    before, buffers = versions(given), versions(module.buffers())
    expected = run(given)
    if versions(given) != before:
        raise Mixed("it writes into its input")
    if versions(module.buffers()) != buffers:
        raise Mixed("it changes its buffers")
    _check_outputs(expected, _LEAD)
    rows = [_rows(one, _LEAD) for one in expected]
    changed = [one.clone() for one in given]
    for one, other in zip(changed, others, strict=True):
        one[0, 1] = other[0, 1] * _LARGE
    is_other = torch.arange(rows[0].shape[0], device=device) != 1
    _compare([one[is_other] for one in map(_of_lead, run(changed))], [one[is_other] for one in rows], MIXES)
    flat = [one.view(1, -1, one.shape[-1]) for one in given]
    count = flat[0].shape[1]
    pieces = [run([one[:, a:b] for one in flat]) for a, b in ((0, _CUT), (_CUT, count))]
    for piece, length in zip(pieces, (_CUT, count - _CUT), strict=True):
        _check_outputs(piece, (1, length))
    joined = [
        torch.cat([_rows(a, (1, _CUT)), _rows(b, (1, count - _CUT))]) for a, b in zip(pieces[0], pieces[1], strict=True)
    ]
    _compare(joined, rows, "its output for slices is another than for the whole")
    same = [_of_lead(one) for one in run([one[:1, :1].expand(one.shape).contiguous() for one in given])]
    _compare(same, [one[:1].expand(one.shape) for one in same], "it treats equal rows differently, as by a capacity")


def _of_lead(output: Tensor) -> Tensor:
    return _rows(output, _LEAD)


def _check_operators(module: nn.Module, own: Callable[..., Any], widths: Sequence[int]) -> None:
    given = _given(module, widths, META_LEAD)
    before = versions(given)
    with Operators(module.buffers()):
        found = own(*given)
    if versions(given) != before:
        raise Mixed("it writes into its input")
    _check_outputs([leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)], META_LEAD)


def _check_length(module: nn.Module, own: Callable[..., Any], widths: Sequence[int]) -> None:
    """Raise where a module runs other operators on many rows than on few; one that needs values is not looked at."""
    given = [_given(module, widths, lead) for lead in (_LEAD, _LONG_LEAD)]
    with _reparametrize_module(module, _on_meta(module)):
        found = [Names(), Names()]
        try:
            for one, names in zip(given, found, strict=True):
                with names:
                    own(*one)
        except Exception:  # of operators that have no rule for the meta device, whatever they raise
            return
    if found[0].names != found[1].names:
        raise Mixed("its code does something else with many positions than with few")


def _given(module: nn.Module, widths: Sequence[int], lead: Sequence[int]) -> list[Tensor]:
    like = next((p for p in module.parameters() if p.is_floating_point() and p.itemsize > 1), None)
    dtype = torch.get_default_dtype() if like is None else like.dtype
    return [torch.empty(*lead, width, dtype=dtype, device="meta") for width in widths]


def _check_outputs(found: Sequence[Tensor], lead: Sequence[int]) -> None:
    if not found:
        raise Mixed("it returns no tensor")
    for one in found:
        if tuple(one.shape[: len(lead)]) != tuple(lead) and one.shape[:1] != (lead[0] * lead[1],):
            raise Mixed(f"it returns a tensor of shape {tuple(one.shape)} for rows of shape {tuple(lead)}")


def _rows(output: Tensor, lead: Sequence[int]) -> Tensor:
    rest = output.shape[len(lead) :] if tuple(output.shape[: len(lead)]) == tuple(lead) else output.shape[1:]
    return output.reshape(lead[0] * lead[1], *rest)


def _compare(found: Sequence[Tensor], expected: Sequence[Tensor], reason: str) -> None:
    for one, other in zip(found, expected, strict=True):
        if not one.is_floating_point():
            is_same = torch.equal(one, other)
        else:
            limit = (2e-2 if one.itemsize < 4 else 1e-3) * other.double().abs().max()
            is_same = bool(((one.double() - other.double()).abs() <= limit).all())
        if not is_same:
            raise Mixed(reason)


def _own_method(module: nn.Module, method: str) -> Callable[..., Any]:
    """Return what a tile would run, without what this library has put in its place."""
    replaced = vars(module).get(method)
    if replaced is not None and not type(replaced).__module__.startswith("rmm_linear."):
        return replaced
    if method == "forward" and hasattr(module, "rmm_config"):
        return original_forward(module)
    return MethodType(getattr(type(module), method), module)


def _inputs(own: Callable[..., Any]) -> int:
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    named = [one for one in inspect.signature(own).parameters.values() if one.kind in kinds]
    required = [one for one in named if one.default is inspect.Parameter.empty]
    return len(required) or min(1, len(named))


def _instead(module: nn.Module) -> dict[str, Tensor]:
    """Return random parameters for those that hide, by being near 0, what others compute: gates, say."""
    generator = torch.Generator("cpu").manual_seed(1)
    found = dict[str, Tensor]()
    for name, one in module.named_parameters(remove_duplicate=False):
        is_plain = type(one) is nn.Parameter and one.is_floating_point() and one.itemsize > 1 and one.numel() > 0
        if is_plain and bool(one.detach().abs().max() < _HIDES):
            drawn = torch.randn(one.shape, generator=generator, device="cpu")
            drawn = drawn / one.shape[-1] ** 0.5 if one.dim() > 1 else 1 + drawn / 4
            found[name] = drawn.to(device=one.device, dtype=one.dtype)
    return found


def _on_meta(module: nn.Module) -> dict[str, Tensor]:
    tensors = itertools.chain(module.named_parameters(remove_duplicate=False), module.named_buffers())
    return {name: torch.empty(one.shape, dtype=one.dtype, device="meta") for name, one in tensors}


@contextmanager
def _untouched(module: nn.Module, ran: set[str]) -> Iterator[ExitStack]:
    """Run a module inside of the block so that nothing is left of it; ``ran`` gets the children that run."""
    parts = parts_of([module])
    tensors = [*module.parameters(), *module.buffers()]
    devices = accelerators(tensors)
    kinds = {device.type for device in devices} | {"cpu"}
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(forked(devices))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        for kind in kinds:
            stack.enter_context(torch.autocast(kind, enabled=False))
        for make in (quiet, running_again):
            stack.enter_context(make())
        stack.enter_context(buffers_kept(parts))
        for part in parts:
            stack.callback(setattr, part, "training", part.training)
            part.training = True
        stack.enter_context(exact_inside(module))
        names = {part: name for name, child in module.named_children() for part in child.modules()}
        for part in parts:
            stack.enter_context(_without_hooks(part, names.get(part), ran))
        yield stack


@contextmanager
def _without_hooks(part: nn.Module, name: str | None, ran: set[str]) -> Iterator[None]:
    own = {kind: vars(part)[kind] for kind in ("_forward_hooks", "_forward_pre_hooks")}
    note = {} if name is None else {0: lambda *_: ran.add(name)}
    try:
        vars(part).update({kind: type(hooks)() for kind, hooks in own.items()})
        vars(part)["_forward_pre_hooks"].update(note)
        yield
    finally:
        vars(part).update(own)


def _line(error: Exception) -> str:
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return text if len(text) <= 80 else f"{text[:77]}..."
