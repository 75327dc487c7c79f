"""Turn SIGINT and SIGTERM into a checkpoint from which a run goes on as if nothing had happened.

The first signal lets the current step finish, saves, and ends training. Where the step is the last of its epoch, the
epoch's evaluation and saving still take place, so that the resumed run finds the random generators where an
uninterrupted one has them. The second signal ends the process at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from typing_extensions import override

from glue_finetune.errors import Interrupted

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class InterruptCallback(TrainerCallback):
    """Saves a checkpoint and stops the Trainer after a signal.

    Attributes:
        signum: The signal that came; None before one does.
        started: Whether training has begun, so that there is something to save.
    """

    signum: int | None = None
    started: bool = False

    @contextmanager
    def installed(self) -> Iterator[InterruptCallback]:
        """Handle the signals inside the block; outside the main thread, where Python has no signals, do nothing.

        Yields:
            The callback itself.
        """
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        previous = {signum: signal.signal(signum, self._handle) for signum in _SIGNALS}
        try:
            yield self
        finally:
            for signum, handler in previous.items():
                signal.signal(signum, handler)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.signum is not None:
            os._exit(128 + signum)
        self.signum = signum
        if not self.started:
            raise Interrupted(signum)
        # os.write, as the signal may have come in the middle of a print.
        name = signal.Signals(signum).name
        text = f"\n{name}: finishing the step, then saving a checkpoint. Once more stops at once.\n"
        with contextlib.suppress(OSError):  # the terminal may be gone
            os.write(2, text.encode())

    @override
    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.started = True

    @override
    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.signum is not None and not _at_end(state):
            control.should_save = control.should_training_stop = True

    @override
    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.signum is not None:
            control.should_save = control.should_training_stop = True

    @override
    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.signum is None:
            return
        control.should_training_stop = True
        control.should_save = _at_end(state)
        if not _at_end(state):  # a loop left half way is saved already and not evaluated
            control.should_evaluate = control.should_log = False


def _at_end(state: TrainerState) -> bool:
    """Whether the step just made is the last of its epoch or of the run."""
    return state.global_step >= state.max_steps or (state.epoch is not None and float(state.epoch).is_integer())
