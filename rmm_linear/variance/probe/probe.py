"""GradientProbe: compare the variance of the sketches with that of the minibatch while a model trains."""

from __future__ import annotations

import functools
import logging
import math
import sys
import weakref
from bisect import insort_left
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from rmm_linear._support.validation import check_integer
from rmm_linear.config import RMMConfig
from rmm_linear.context.model_context import ModelContext
from rmm_linear.context.surroundings import in_backward, in_checkpoint, runs_again
from rmm_linear.conversion.exact import converted_modules
from rmm_linear.layers.linear import SketchedLayer
from rmm_linear.variance.passes import is_measuring
from rmm_linear.variance.probe.call import ProbeCall, is_trained, sample
from rmm_linear.variance.probe.results import ProbeResults, ProbeRow
from rmm_linear.variance.probe.selection import choose_layers, measure_whole

logger = logging.getLogger(__name__)

_SAME_INPUT = 0.05  # recomputation repeats X exactly or nearly so; elements of other calls differ in size and sign


_stance: list[Any] = [0, None]  # how many probes want compiled code to run as it is written, and what ends that


def _eagerly(more: int) -> None:
    """Let compiled code run as it is written while some probe wants it."""
    _stance[0] += more
    if _stance[0] and _stance[1] is None:
        _stance[1] = torch.compiler.set_stance("force_eager")
    elif not _stance[0] and _stance[1] is not None:
        _stance[1].__exit__(None, None, None)
        _stance[1] = None


def _nothing() -> None:
    """End nothing."""


class GradientProbe(ProbeResults):
    """Computes D²_SGD, D²_sketch and α of a model's linear layers on a few steps of its training.

    A context manager around a training loop; both passes of a step must be inside. It probes every n-th forward pass in
    training mode with gradients, or the next one after :meth:`arm`, which a compiled model needs. On such a pass X is
    held from the layer's call until its output gradient Y arrives (under activation checkpointing from its
    recomputation). The weight gradient is unchanged: nothing is written into tensors and no random number is drawn. On
    other passes, the cost is one hook on the model. After the backward pass only floats remain, in ``rows``.

    For a sketched layer the sketch is the layer's own, with its mask and its norm estimator's prediction. For other
    linear layers it is the sketch that ``config`` would give them, without a prediction. The rounding term of packed
    sketches is computed for one S instead of averaged over several. Under loss scaling all variances are in units of
    the scaled gradient.

    D²_SGD is over sequences if X has the shape (batch, sequence, I) or an ``attention_mask`` defines the sequences.
    Otherwise, and if the batch has only one sequence, it is over tokens. ``samples`` names the case in every row, and
    medians never mix the two. D²_SGD over tokens, without padding, is always reported too.

    On every ``whole_every``-th probed pass, :func:`gradient_noise` measures the gradient of all parameters on the batch
    of that pass, before the pass itself, by operation and by depth; ``whole`` has the results. It takes one pass over
    every sequence and ``draws`` over the batch for every operation, so measure on few steps. A batch that cannot be
    used, such as one of a single sequence or without labels, is logged as a warning, once.

    Time of a probed step: up to four products like dW in float64 and one sketch, per layer; about as much as a training
    step on a CPU (``python -m benchmarks probe`` measures it). GPUs other than those for data centres compute float64
    products at 1/32 or 1/64 of their float32 speed: there one probed step costs as much as many training steps, so
    probe fewer steps or fewer ``modules``. Memory: X of the probed layers, and float64 copies of X and Y of one layer.

    Args:
        model: The module that the training loop calls: the outermost one, if one wraps another.
        modules: The layers, by the rule of ``RMMConfig.target_modules``. None is all sketched layers, or in a model
            without any, those that ``config`` would convert.
        every: Probe every n-th forward pass. None probes only after :meth:`arm`.
        config: The sketch for layers that are not converted; None is ``RMMConfig()``.
        whole_every: Measure the whole gradient on the probed passes n, 2n, …; None never does.
        draws: Gradients of the converted model for that, for all operations together and for each one.

    Attributes:
        passes: Number of forward passes so far, in training mode and with gradients; with ``every=None``, of those that
            were armed and those right behind them.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If no linear layer matches, or ``every``, ``whole_every`` or ``draws`` is less than one.

    Example:
        >>> import torch, rmm_linear
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
        >>> _ = rmm_linear.convert(model, kind="rademacher", ratio=0.25)
        >>> with GradientProbe(model, modules=["0"], every=2) as probe:
        ...     for _ in range(4):
        ...         model(torch.randn(4, 100, 8)).square().mean().backward()
        >>> [(row.step, row.module, row.kind, row.rows, row.tokens) for row in probe.rows]
        [(2, '0', 'rademacher', 100, 400), (4, '0', 'rademacher', 100, 400)]
    """

    def __init__(
        self,
        model: nn.Module,
        modules: str | Sequence[str] | None = None,
        every: int | None = 50,
        config: RMMConfig | None = None,
        *,
        whole_every: int | None = None,
        draws: int = 2,
    ) -> None:
        """Choose the layers."""
        super().__init__()
        check_integer("every", every, optional=True)
        check_integer("whole_every", whole_every, optional=True)
        check_integer("draws", draws)
        if config is not None and not isinstance(config, RMMConfig):
            raise TypeError(f"config must be an RMMConfig or None, got {type(config).__name__}.")
        self.model, self.every, self.passes = model, every, 0
        self.whole_every, self.draws = whole_every, draws
        self._probed = 0
        self._config = (config or RMMConfig()).replace(overrides={} if config is None else config.overrides)
        self._modules = choose_layers(model, modules, self._config)
        is_converted = modules is None and config is None and bool(converted_modules(model))
        # A converted model saves the rows of linear layers that it leaves alone
        self._are_exact = is_converted and not any(isinstance(one, SketchedLayer) for one in self._modules.values())
        self._order = {name: place for place, name in enumerate(self._modules)}
        self._armed: int | None = None
        self._at_most: int | None = None
        self._arms_whole: bool | None = None
        self._step: int | None = None  # number of the probed pass
        self._warned = self._warned_whole = False
        self._is_entered = False
        self._root: RemovableHandle | None = None
        self._eager: Callable[[], object] = _nothing  # lets compiled code run compiled again
        self._handles: list[RemovableHandle] = []
        self._context: ModelContext | None = None  # for models without a context of their own
        self._calls: weakref.WeakSet[ProbeCall] = weakref.WeakSet()  # weak: calls belong to their graphs
        self._recomputed: list[ProbeCall] = []  # without X yet; reentrant checkpointing makes no graph to own them

    def __enter__(self) -> GradientProbe:
        """Start counting forward passes."""
        if self._is_entered:
            raise RuntimeError("A GradientProbe can be entered once at a time, and this one is. Make another one.")
        self._is_entered = True
        if self.every is not None:
            self._look()
        return self

    def _look(self) -> None:
        if self._root is None:
            self._root = self.model.register_forward_pre_hook(self._begin, with_kwargs=True)

    @property
    def has_layers(self) -> bool:
        """Whether there are linear layers to probe; otherwise the whole gradient alone is measured."""
        return bool(self._modules)

    def settle(self) -> None:
        """Remove all hooks after a step that was probed by :meth:`arm`, so that a compiled model is whole again."""
        self._unwatch()
        if self.every is None and self._armed is None and self._root is not None:
            self._root.remove()
            self._root = None
        self._eager()

    def __exit__(self, *exception: object) -> None:
        """Remove all hooks, and release calls that still wait for a backward pass."""
        was_asked, self._armed = self.every is not None or self._armed is not None, None
        self.settle()
        if self._root is not None:
            self._root.remove()
            self._root = None
        for call in list(self._calls):
            call.close()
        self._step, self._is_entered = None, False
        if exception[:1] == (None,) and not self.passes and was_asked:
            logger.warning(
                "GradientProbe saw no forward pass of %s in training mode with gradients. It must be given the module "
                "that is called, the outermost one.",
                type(self.model).__name__,
            )

    def arm(self, step: int, *, whole: bool | None = None, at_most: int | None = None) -> None:
        """Probe the next forward pass, for training loops that count their own steps.

        From then on compiled code runs as it is written, until :meth:`settle`, or the beginning of the pass behind it.

        Args:
            step: Number of the step, as written into the rows.
            whole: Whether to measure the whole gradient; None goes by ``whole_every``.
            at_most: Probe so many of the trained layers at most, evenly spread; None probes all.
        """
        self._armed, self._arms_whole, self._at_most = step, whole, at_most
        if self._is_entered:
            self._look()
        if "torch._dynamo" in sys.modules:  # a compiled model would be compiled with all hooks
            self._eager()
            _eagerly(1)
            self._eager = weakref.finalize(self, _eagerly, -1)  # which runs once

    def _begin(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or in_backward() or is_measuring():
            return
        self._step = None
        for call in self._recomputed:  # left over from an interrupted backward pass
            call.x = call.y = None
        if not self._recomputed:
            self._unwatch()
        if not (model.training and torch.is_grad_enabled()):
            return
        self.passes += 1
        if self.every is None and self._armed is None:  # the pass behind one that was armed
            (self._eager if self._recomputed else self.settle)()
            return
        whole = None
        if self._armed is not None:
            self._step, self._armed, whole = self._armed, None, self._arms_whole
        elif self.every is not None and self.passes % self.every == 0:
            self._step = self.passes
        if self._step is not None:
            self._unwatch()
            self._probed += 1
            is_due = self.whole_every is not None and self._probed % self.whole_every == 0
            if is_due if whole is None else whole:
                self._measure_whole(self._step, args, kwargs)
            self._watch(args, kwargs)

    def _measure_whole(self, step: int, args: Any, kwargs: Any) -> None:
        try:
            self.whole[step] = measure_whole(self.model, args, kwargs, self._config, self.draws)
        except Exception as error:  # whatever it is, training goes on
            if not self._warned_whole:
                self._warned_whole = True
                logger.warning("Step %d: the variance ratio of the whole gradient is not measured: %s", step, error)

    def _watch(self, args: Any, kwargs: Any) -> None:
        chosen = [(name, module) for name, module in self._modules.items() if is_trained(module)]
        for name, module in chosen[:: 1 if self._at_most is None else -(-len(chosen) // self._at_most) or 1]:
            before, after = functools.partial(self._before, name), functools.partial(self._after, name)
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            self._handles.append(module.register_forward_hook(after, with_kwargs=True, prepend=True))
        if any(not isinstance(module, SketchedLayer) for module in self._modules.values()):
            self._context = ModelContext()
            self._context.attach_inside(self.model, args, kwargs)

    def _unwatch(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        missed = next((call.module for call in self._recomputed if call.missed), None)
        self._recomputed.clear()
        if missed is not None and not self._warned:
            self._warned = True
            logger.warning(
                "%s: activation checkpointing ran it again with another input, so it is not probed. With dropout, "
                "preserve_rng_state must be True.",
                missed,
            )
        if self._context is not None:
            self._context.detach()
            self._context = None

    def _before(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Store the X of a recomputation whose output gets no gradient, or that stops inside this layer's call."""
        if (
            in_backward()
            and not is_measuring()
            and not runs_again()
            and (call := self._find(name, _input(args, kwargs), hooked=True)) is not None
        ):
            call.see(_input(args, kwargs))
            self._complete(call)

    def _after(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
        x = _input(args, kwargs)
        if is_measuring() or runs_again():
            return
        if in_backward():
            call = self._find(name, x, hooked=False)
            if call is not None and output.requires_grad:
                call.see(x)
                call.handle = output.register_hook(functools.partial(self._receive_gradient, call))
            return
        if self._step is None or not is_trained(module):
            return
        call = self._describe(name, module, x)
        self._calls.add(call)
        if torch.is_grad_enabled() and not in_checkpoint():
            call.see(x)
        else:
            call.sample = sample(x)
            self._recomputed.append(call)
        if output.requires_grad:
            call.handle = output.register_hook(functools.partial(self._receive_gradient, call))

    def _describe(self, name: str, module: nn.Module, x: Tensor) -> ProbeCall:
        if isinstance(module, SketchedLayer):
            config, context = module.rmm_config, module.rmm_context
        else:
            config, context = self._config.for_module(name), self._context
        mask = None if context is None else context.known_mask(x.shape[:-1])
        return ProbeCall.of(self._step or 0, name, module, x, mask, config, is_exact=self._are_exact)

    def _find(self, name: str, x: Tensor, *, hooked: bool) -> ProbeCall | None:
        """Return the call that is recomputed; if several are pending, the one with the same input."""
        pending = [
            call
            for call in self._recomputed
            if call.module == name and call.x is None and (call.handle is not None) == hooked
        ]
        found = [call.relative_distance(x) for call in pending]
        if found and min(found) < _SAME_INPUT:
            return pending[found.index(min(found))]
        for call, distance in zip(pending, found, strict=True):
            call.missed |= distance < math.inf
        return None

    def _receive_gradient(self, call: ProbeCall, y: Tensor) -> None:
        call.y = y.detach()
        self._complete(call)

    def _complete(self, call: ProbeCall) -> None:
        if call.x is None or call.y is None:
            return
        if call.is_overwritten():
            logger.warning("%s: its input was overwritten after its call, so it is not probed.", call.module)
        else:
            insort_left(self.rows, call.measure(call.x, call.y), key=self._place)
        call.close()  # so that a second backward pass through this graph adds no row
        if call in self._recomputed:
            self._recomputed.remove(call)

    def _place(self, row: ProbeRow) -> tuple[int, int]:
        return row.step, self._order.get(row.module, -1)


def _input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return next(iter((*args, *kwargs.values())))
