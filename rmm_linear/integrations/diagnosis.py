"""The page that :func:`rmm_linear.doctor` prints: what fills the memory, what was found, and what to type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rmm_linear._support.reports import Report
from rmm_linear._support.sizes import show_bytes
from rmm_linear._support.tables import keyed, table, wrapped
from rmm_linear.fitting.step_memory import LABELS, StepMemory

_SHOWN = 6


@dataclass(frozen=True)
class Finding:
    """Something that decides what training saves.

    Attributes:
        topic: In a word: "conversion", "checkpointing", "attention", "rows", "what stays", "weights", "optimizer",
            "noise".
        text: What was found, and what it means.
        gain: Bytes by which the peak would fall; 0 where nothing is to be won, or not known.
        code: What to type, in Python, after the imports of :attr:`Diagnosis.code` and with its names; empty where there
            is nothing to do.
    """

    topic: str
    text: str
    gain: int = 0
    code: str = ""


@dataclass(frozen=True, repr=False)
class Diagnosis(Report):
    """The result of :func:`rmm_linear.doctor`.

    Attributes:
        model: Its class.
        weights: A sentence about its parameters: how many, which of them are trained, quantized.
        batch: A few words about the batch.
        now: Memory of a step as it is.
        options: Call to the memory of a step after it: ``convert(model)``, and with activation checkpointing on, one
            that keeps it.
        findings: The largest gain first.
        saved: Bytes that the whole model saves for the backward pass, exactly and converted, without activation
            checkpointing; None where they could not be measured.
        noise: The variance ratio of the whole gradient, converted by default; None where it was not measured.
        code: What to type, in Python, with the names ``model``, ``batch`` and ``trainer``.
    """

    model: str
    weights: str
    batch: str
    now: StepMemory
    options: Mapping[str, StepMemory] = field(default_factory=dict)
    findings: Sequence[Finding] = ()
    saved: tuple[int, int] | None = None
    noise: float | None = None
    code: str = ""

    def summary(self) -> str:
        """Return the report's first line.

        Returns:
            One line of ``key=value`` pairs.
        """
        best = min((one.peak for one in self.options.values()), default=self.now.peak)
        parts = [f"peak={_word(self.now.peak)}", f"peak_converted={_word(best)}"]
        if self.saved is not None:
            parts.append(f"saved={self.saved[1] / max(self.saved[0], 1):.0%}")
        if self.noise is not None:
            parts.append(f"variance_ratio={self.noise:.2g}")
        return keyed("rmm_linear doctor:", parts)

    def table(self) -> str:
        """Return all that was found.

        Returns:
            The report with all findings; ``print`` shows those that matter most.
        """
        return self._text(len(self.findings))

    def __str__(self) -> str:
        return self._text(_SHOWN)

    def _text(self, shown: int) -> str:
        parts = [
            self.summary(),
            f"{wrapped(f'{self.model}: {self.weights}')}\n{wrapped(self.batch)}",
            self._peaks(),
            "\n".join(
                wrapped(f"{number}. {one.topic}: {one.text}", 3) for number, one in enumerate(self.findings[:shown], 1)
            ),
        ]
        if len(self.findings) > shown:
            parts.append(f"And {len(self.findings) - shown} more, see .table().")
        parts.append(f"What to type:\n\n{self.code}")
        return "\n\n".join(filter(None, parts))

    def _peaks(self) -> str:
        columns = {"now": self.now, **self.options}
        rows = [
            (LABELS.get(name, name), *(show_bytes(one.parts()[name]) for one in columns.values()))
            for name in self.now.parts()
            if any(one.parts()[name] for one in columns.values())
        ]
        rows.append(("peak", *(show_bytes(one.peak) for one in columns.values())))
        if any(one.is_optimizer for one in columns.values()):
            rows.append(("of forward and backward", *(show_bytes(one.step) for one in columns.values())))
        return f"{table(('at the peak', *columns), rows)}\nNow, the peak is in the {self.now.moment}, by simulation."

    def _records(self) -> list[dict[str, Any]]:
        return [{"topic": one.topic, "gain": one.gain, "text": one.text, "code": one.code} for one in self.findings]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain JSON types.

        Returns:
            Its figures, its findings, and what to type.
        """
        return {
            "model": self.model,
            "peak": self.now.peak,
            "parts": self.now.parts(),
            "options": {name: {"peak": one.peak, **one.parts()} for name, one in self.options.items()},
            "saved": None if self.saved is None else list(self.saved),
            "noise": self.noise,
            "findings": self._records(),
            "code": self.code,
        }


def _word(size: int) -> str:
    return show_bytes(size).replace(" ", "")
