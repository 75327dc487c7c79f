"""A callback for transformers' Trainer that probes steps with a GradientProbe.

Import it from ``rmm_linear.integrations.transformers``, whose error says what to install if transformers is missing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from rmm_linear._support.validation import check_integer
from rmm_linear.config import RMMConfig
from rmm_linear.variance import GradientNoise, GradientProbe, ProbeResults, ProbeRow

_ROWS, _WHOLE = "rmm_rows", "rmm_whole"


class ProbeCallback(TrainerCallback):
    """Probes every n-th optimizer step with a :class:`~rmm_linear.variance.GradientProbe` and collects the rows.

    Steps are the Trainer's: with gradient accumulation, the first forward pass of the step is probed. The rows are also
    stored in ``state.log_history``, which is part of checkpoints, so a resumed run has the earlier rows. The Trainer
    does not call its callbacks when training fails; the probe's hook then stays on the model until the next training.

    Args:
        every: Probe the steps n, 2n, 3n, …
        modules: As for GradientProbe.
        config: As for GradientProbe.
        whole_every: Measure the whole gradient on every n-th probed step; None never does.
        draws: As for GradientProbe.

    Attributes:
        results: The rows of the whole run; ``results.to_csv(path)`` writes them.
    """

    def __init__(
        self,
        *,
        every: int = 50,
        modules: str | Sequence[str] | None = None,
        config: RMMConfig | None = None,
        whole_every: int | None = None,
        draws: int = 2,
    ) -> None:
        """Store the options; the probe is made when training begins."""
        check_integer("every", every)
        check_integer("whole_every", whole_every, optional=True)
        check_integer("draws", draws)
        self.every, self.modules, self.config = every, modules, config
        self.whole_every, self.draws = whole_every, draws
        self.results = ProbeResults()
        self._probe: GradientProbe | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Attach the probe to the model, and restore the rows of a resumed run."""
        self._detach()
        if (model := kwargs.get("model")) is None:
            return
        self._probe = GradientProbe(model, self.modules, every=None, config=self.config, draws=self.draws).__enter__()
        history: list[dict[str, Any]] = state.log_history
        self._probe.whole = {
            entry["step"]: GradientNoise(**{**entry[_WHOLE], "weights": tuple(entry[_WHOLE]["weights"])})
            for entry in history
            if _WHOLE in entry
        }
        self._probe.rows = [ProbeRow(**row) for entry in history for row in entry.get(_ROWS, [])]
        self.results = self._probe

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Arm the probe if this step is due."""
        step = state.global_step + 1
        if self._probe is not None and step % self.every == 0:
            is_due = self.whole_every is not None and step % (self.every * self.whole_every) == 0
            self._probe.arm(step, whole=is_due)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Store the rows of this step in the Trainer's log history."""
        if self._probe is not None:
            self._probe.settle()
        rows, whole = self._rows_of(state.global_step), self.results.whole.get(state.global_step)
        if rows or whole:
            found: Any = {_ROWS: [dataclasses.asdict(row) for row in rows], "step": state.global_step}
            if whole:
                found[_WHOLE] = dataclasses.asdict(whole)
            state.log_history.append(found)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Detach the probe from the model."""
        self._detach()

    def _rows_of(self, step: int) -> list[ProbeRow]:
        return self.results.of_step(step)  # by bisection: called after every step

    def _detach(self) -> None:
        if self._probe is not None:
            self._probe.__exit__(None, None, None)
            self._probe = None
