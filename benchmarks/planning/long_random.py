"""Random models and budgets: what fit predicts, and what a real step takes. And the least of a deep model."""

from __future__ import annotations

import dataclasses
import random
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn

from benchmarks import library
from benchmarks.planning import fit_steps
from benchmarks.planning.networks import transformer
from benchmarks.records import Origin
from benchmarks.suites.models import build

COUNT, SHARES = 20, (0.7, 0.4, 0.2, 0.1)
ACTIVATIONS = (nn.GELU, nn.SiLU, nn.ReLU, nn.Tanh)


@dataclass(frozen=True, kw_only=True)
class Drawn(Origin):
    """One random model with several budgets, each a share of what its exact peak has above the floor."""

    number: int
    model: str
    exact: int = 0  # peak of the exact step, with parameters
    least: int = 0  # the least that any plan was measured with
    budgets: int = 0
    met: int = 0  # by a plan
    over: int = 0  # plans whose step took more than their budget
    error: float = 0.0  # largest error of a simulated by the measured peak, %
    solved_error: float = 0.0  # largest error of the sum that was solved, %
    plans: str = ""  # how many blocks of all plans have each option
    seed: int = fit_steps.SEED


@dataclass(frozen=True, kw_only=True)
class Lowest(Origin):
    """The least memory of one model with some of the options."""

    model: str
    options: str  # "exact", "single words" or "compositions"
    simulated: int = 0  # peak of a step, gradients among it
    measured: int = 0  # the same of a real step
    share: float = 0.0  # measured, of the least of single words
    above: float = 0.0  # the same without the gradients of parameters
    moment: str = ""
    plan: str = ""
    seed: int = fit_steps.SEED


def drawn(about: Mapping[str, Any], *, tiny: bool = False) -> Iterator[Drawn]:
    few: Any = {"ROUNDS": 1, "MORE_ROUNDS": 0}  # of timing, which what a step takes does not depend on
    for number in range(2 if tiny else COUNT):
        title, (model, batch) = draw(number)
        with tempfile.TemporaryDirectory() as folder, mock.patch.multiple(library.times, **few):
            yield _tried(Drawn(number=number, model=title, **about), model, batch, folder)


def draw(number: int) -> tuple[str, tuple[nn.Module, Any]]:
    """Make a model with random sizes, and a batch."""
    some = random.Random(number)
    depth, heads, batch = some.randint(2, 6), some.choice((1, 2, 4)), some.randint(1, 4)
    width = heads * some.choice((16, 24, 32))
    length, inner = some.randrange(16, 400), width * some.choice((1, 2, 4))
    kind = some.choice(("llama", "llama", "roberta", "GPT2", "ViT", "MLP"))
    title = f"{kind.capitalize() if kind.islower() else kind} {depth} × {width}, {batch} × {length}"
    sizes: dict[str, Any] = {"hidden_size": width, "num_hidden_layers": depth, "num_attention_heads": heads}
    sizes |= {"intermediate_size": inner}
    torch.manual_seed(number)
    if kind in ("llama", "roberta"):
        sizes |= {"max_position_embeddings": 512} if kind == "roberta" else {}
        made = transformer(kind, batch, length, vocab_size=some.randrange(50, 1000), **sizes)
    elif kind == "GPT2":
        words = some.randrange(50, 1000)
        ids = torch.randint(words, (batch, length))
        model = build("GPT2", "LMHeadModel", vocab_size=words, n_embd=width, n_layer=depth, n_head=heads, n_inner=inner,
                      n_positions=512, use_cache=False)  # fmt: skip
        made = model.train(), {"input_ids": ids, "labels": ids}
    elif kind == "ViT":
        side = some.choice((32, 48, 64))
        title = f"ViT {depth} × {width}, {batch} × {side}²"
        images = {"pixel_values": torch.randn(batch, 3, side, side), "labels": torch.randint(10, (batch,))}
        model = build("ViT", "ForImageClassification", image_size=side, patch_size=4, num_labels=10, **sizes)
        made = model.train(), images
    else:
        kinds = [some.choice(ACTIVATIONS) for _ in range(depth)]
        parts = [
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, inner), one(), nn.Linear(inner, width)) for one in kinds
        ]
        model = nn.Sequential(nn.Linear(8, width), *parts, nn.Linear(width, 3))
        made = model.train(), torch.randn(batch * length, 8)
    return title, made


def _tried(row: Drawn, model: nn.Module, batch: Any, folder: str) -> Drawn:
    work = fit_steps.options_of(model, batch, folder)
    static = work.static
    floor = static.parameters + static.buffers + static.gradients
    budgets = [floor + int(share * (work.exact_peak - floor)) for share in SHARES]
    reports = [fit_steps.fitted(work, memory) for memory in budgets]
    made = [one for one in reports if isinstance(one, library.FitReport)]
    work.total = None
    with library.quiet():
        made.append(work.least())
    made[-1].plan.revert()
    peaks = [one.measured_peak or 0 for one in made]
    return dataclasses.replace(
        row, exact=work.exact_peak, least=min(peaks), budgets=len(budgets), met=len(made) - 1,
        over=sum(not one.fits for one in made),
        error=max(100 * abs(one.simulated_peak / (one.measured_peak or 1) - 1) for one in made),
        solved_error=max(100 * abs(one.predicted_peak / (one.measured_peak or 1) - 1) for one in made),
        plans=fit_steps.counts(block for one in made for block in one.plan.blocks),
    )  # fmt: skip


def lowest(about: Mapping[str, Any], *, tiny: bool = False) -> list[Lowest]:
    """Find the least memory of a deep model with single words, and by ``fit`` with their compositions."""
    layers, length = (4, 256) if tiny else (24, 4096)
    sizes = {"hidden_size": 128, "intermediate_size": 344, "num_attention_heads": 4, "vocab_size": 512}
    model, batch = transformer("llama", 1, length, num_hidden_layers=layers, **sizes)
    base = Lowest(model=f"LLaMA {layers} × 128, 1 × {length}", options=fit_steps.EXACT, **about)
    run = fit_steps.step_of(model, batch)

    def row(options: str, plan: library.BlockPlan | None = None) -> Lowest:
        simulated, measured = library.watch(model, batch)[0], fit_steps.live_peak(model, run)
        counts = "" if plan is None else fit_steps.counts(plan.blocks)
        return dataclasses.replace(
            base,
            options=options,
            simulated=simulated.bytes,
            measured=measured,
            moment=simulated.moment,
            plan=counts,
        )

    rows = [row(fit_steps.EXACT)]
    with tempfile.TemporaryDirectory() as folder:
        work = fit_steps.options_of(model, batch, folder)
        single = work.proposals.smallest()
        assert single is not None  # noqa: S101 without a limit
        with single.applied(model):
            rows.append(row("single words", single))
        with library.quiet():
            report = library.fit(model, batch, "least", folder=folder, progress=False)
        rows.append(row("compositions", report.plan))
        report.plan.revert()
        gradients = work.static.gradients
    one = rows[1].measured
    return [
        dataclasses.replace(row, share=row.measured / one, above=(row.measured - gradients) / (one - gradients))
        for row in rows
    ]
