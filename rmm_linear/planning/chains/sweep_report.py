"""What a sweep did: an object that the user hands in, filled in as it runs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass
class SweepReport:
    """What one :func:`sweep` did; complete when its backward pass has ended, and begun anew by the next sweep.

    Attributes:
        steps: Steps of the chain.
        forward_steps: Times that ``step`` ran, those of the backward pass included.
        interval: Every how many steps a state went to the store; None if none had to, or for ``levels``.
        stored: States that went to the store.
        stored_bytes: Their bytes.
        read: States that came back from the store.
        step_seconds: Time of one step, where it was measured to choose the interval.
        transfer_seconds: Time in which one state goes to the store or comes back, whichever takes longer, likewise.
        waited_forward: Seconds that the forward pass waited for the store.
        waited_backward: Seconds that the backward pass waited for the store.

    Example:
        >>> report = SweepReport(steps=1000, forward_steps=4280, interval=50, stored=20, read=18)
        >>> print(report)
        sweep: steps=1000 forward_steps=4280 (4.28 per step) interval=50 stored=20 read=18 waited=0.000s
    """

    steps: int = 0
    forward_steps: int = 0
    interval: int | None = None
    stored: int = 0
    stored_bytes: int = 0
    read: int = 0
    step_seconds: float | None = None
    transfer_seconds: float | None = None
    waited_forward: float = 0.0
    waited_backward: float = 0.0

    @property
    def waited(self) -> float:
        """Seconds that both passes waited for the store."""
        return self.waited_forward + self.waited_backward

    def reset(self) -> None:
        """Forget what was filled in, as every sweep does when it begins."""
        for field in dataclasses.fields(self):
            setattr(self, field.name, field.default)

    def __str__(self) -> str:
        per_step = self.forward_steps / max(self.steps, 1)
        return (
            f"sweep: steps={self.steps} forward_steps={self.forward_steps} ({per_step:.2f} per step) "
            f"interval={self.interval} stored={self.stored} read={self.read} waited={self.waited:.3f}s"
        )
