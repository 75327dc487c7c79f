"""The rows that the benchmark of fit writes."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.fit_models import SEED
from benchmarks.records import Origin

EXACT, FIT, CHEN = "exact", "fit", "Chen et al., √n"


@dataclass(frozen=True, kw_only=True)
class Fitted(Origin):
    """One model with one method. Peaks are bytes of a training process without an optimizer.

    Attributes:
        model: Title, with the batch.
        method: "exact", "fit", or a single method.
        share: For "fit": the budget, as a share of what the exact peak has above the floor.
        memory: The budget in bytes.
        floor: Bytes of parameters, buffers and gradients.
        predicted: Peak by the sum that was solved.
        simulated: Peak of a simulated step.
        measured: Peak of a real step, live bytes.
        predicted_error: Of the predicted by the measured peak, %.
        simulated_error: Of the simulated by the measured peak, %.
        time: Median seconds of a step by those of the exact step in the same run.
        predicted_time: The same by the times of blocks.
        seconds: Median seconds of a step.
        noise: Variance that is added to the gradient, by the minibatch's own; empty if it is not known.
        within: Whether the noise of every layer is within the limit of the plans: "yes" or "no".
        status: For "fit": "fits", "exceeds", or "cannot fit" with the least; "ok" for others.
        rival: For "fit": the fastest single method whose measured peak is within the budget.
        rival_time: Its time by the exact step's.
        plan: How many blocks have each option.
        seed: Of the weights and the batch.
    """

    model: str
    method: str
    share: float | None = None
    memory: int | None = None
    floor: int = 0
    predicted: int | None = None
    simulated: int | None = None
    measured: int | None = None
    predicted_error: float | None = None
    simulated_error: float | None = None
    time: float | None = None
    predicted_time: float | None = None
    seconds: float | None = None
    noise: float | None = None
    within: str = "yes"
    status: str = "ok"
    rival: str = ""
    rival_time: float | None = None
    plan: str = ""
    seed: int = SEED


@dataclass(frozen=True, kw_only=True)
class Neighbour(Origin):
    """One model with one method. Peaks are bytes of a training process without an optimizer.

    Attributes:
        model: Title, with the batch.
        method: "exact", a method of PyTorch's, or "fit".
        beside: For "fit": the method whose peak is the budget.
        memory: For "fit": the budget in bytes.
        live: Live bytes at the peak; empty where the step is compiled, whose tensors are not followed.
        allocated: The allocator's peak.
        time: Median seconds of a step by those of the exact step.
        seconds: Median seconds of a step.
        noise: For "fit": variance that is added to the gradient, by the minibatch's own.
        status: "ok", or why there is no measurement.
        plan: For "fit": how many blocks have each option.
        seed: Of the weights and the batch.
    """

    model: str
    method: str
    beside: str = ""
    memory: int | None = None
    live: int | None = None
    allocated: int | None = None
    time: float | None = None
    seconds: float | None = None
    noise: float | None = None
    status: str = "ok"
    plan: str = ""
    seed: int = SEED


@dataclass(frozen=True, kw_only=True)
class Solved(Origin):
    """One solver on synthetic blocks with one budget.

    Attributes:
        blocks: Number of blocks.
        budget: As a share of the peak of keeping all.
        solver: "milp" or "rounded".
        seconds: Time to solve.
        cost: What the plan adds, by the least that any solver adds; empty if nothing fits.
        peak: Of the plan, by the budget.
        seed: Of the blocks.
    """

    blocks: int
    budget: float
    solver: str
    seconds: float = 0.0
    cost: float | None = None
    peak: float | None = None
    seed: int = SEED
