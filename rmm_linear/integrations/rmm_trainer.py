"""RMMTrainer: any Trainer class with an RMMCallback added, by a subscript. ``rmm_linear.RMMTrainer`` imports it."""

from __future__ import annotations

import copyreg
import operator
from collections.abc import Callable, Mapping
from typing import Any

from rmm_linear._support.installing import not_usable
from rmm_linear.config import QUALITIES, RMMConfig, suggested

try:
    from transformers import Trainer
except ImportError as missing:
    raise not_usable(__name__, "transformers", missing) from missing

from rmm_linear.integrations.transformers import RMMCallback

_CLASSES: dict[type[Trainer], type[Trainer]] = {}  # by the class of the subscript


class TrainerSubscript(type(Trainer)):
    """The class of RMMTrainer, which answers ``RMMTrainer[SFTTrainer]``."""

    def __getitem__(cls, base: Any) -> Any:
        """Return the subclass of RMMTrainer and of another Trainer class; always the same one."""
        got = f"the class {base.__name__}" if isinstance(base, type) else f"{type(base).__name__} {base!r:.60}"
        if cls is not RMMTrainer:
            raise TypeError(f"RMMTrainer takes one Trainer class, and {cls!r} has one, got a second: {got}.")
        if not (isinstance(base, type) and issubclass(base, Trainer)):
            raise TypeError(
                f"RMMTrainer[...] takes a subclass of transformers.Trainer, got {got}. "
                "Write RMMTrainer[SFTTrainer](model, ..., rmm=RMMConfig())."
            )
        if issubclass(RMMTrainer, base) or issubclass(base, RMMTrainer):
            return RMMTrainer if issubclass(RMMTrainer, base) else base
        if base not in _CLASSES:
            body = {"__module__": __name__, "__doc__": base.__doc__, "__qualname__": f"RMMTrainer[{base.__qualname__}]"}
            _CLASSES[base] = TrainerSubscript(f"RMMTrainer[{base.__name__}]", (RMMTrainer, base), body)
        return _CLASSES[base]

    def __repr__(cls) -> str:
        return cls.__qualname__


def _reduce(cls: TrainerSubscript) -> str | tuple[Callable[..., Any], tuple[Any, ...]]:
    """Pickle the class of a subscript by its parts: it is in no module."""
    base = next((one for one, made in _CLASSES.items() if made is cls), None)
    return cls.__qualname__ if base is None else (operator.getitem, (RMMTrainer, base))


copyreg.pickle(TrainerSubscript, _reduce)  # pyright: ignore[reportArgumentType]


class RMMTrainer(Trainer, metaclass=TrainerSubscript):
    """A Trainer that compresses what its model saves; ``RMMTrainer[SFTTrainer]`` is one of any other Trainer class.

    It adds an :class:`RMMCallback <rmm_linear.integrations.transformers.RMMCallback>` and changes nothing else. Where
    that callback's other options are needed, add one to the ``callbacks`` of the class itself.

    Args:
        *args: As for the Trainer class.
        rmm: An RMMConfig converts the model when training begins; a budget such as "8GB", or a mapping of arguments of
            :func:`rmm_linear.fit`, plans the training of the model instead, in its first step.
        **kwargs: As for the Trainer class.

    Attributes:
        rmm: The callback: ``trainer.rmm.report`` is of the conversion, ``trainer.rmm.fit_report`` of the plan.

    Raises:
        TypeError: If ``rmm`` is none of these, or the subscript is no Trainer class.
        ValueError: If the budget is invalid, or ``callbacks`` has an RMMCallback too.

    Example:
        >>> from transformers import Seq2SeqTrainer
        >>> from rmm_linear import RMMTrainer
        >>> RMMTrainer[Seq2SeqTrainer], RMMTrainer[Seq2SeqTrainer] is RMMTrainer[Seq2SeqTrainer]
        (RMMTrainer[Seq2SeqTrainer], True)
    """

    def __init__(
        self,
        *args: Any,
        rmm: RMMConfig | str | float | Mapping[str, Any] = RMMConfig(),  # noqa: B008  which is immutable
        **kwargs: Any,
    ) -> None:
        """Make the Trainer and add the callback."""
        is_quality = isinstance(rmm, str) and rmm in QUALITIES
        if isinstance(rmm, bool) or is_quality or not isinstance(rmm, RMMConfig | str | int | float | Mapping):
            raise TypeError(
                f'rmm must be an RMMConfig, a budget such as "8GB", or a mapping such as {{"memory": "8GB"}}, '
                f"got {rmm!r}. Use rmm={suggested(rmm)} to convert."
            )
        self.rmm = RMMCallback(convert=rmm) if isinstance(rmm, RMMConfig) else RMMCallback(fit=rmm)
        super().__init__(*args, **kwargs)
        if any(isinstance(one, RMMCallback) for one in self.callback_handler.callbacks):
            raise ValueError("RMMTrainer adds an RMMCallback, got one among the callbacks too. Leave one of them out.")
        self.add_callback(self.rmm)
