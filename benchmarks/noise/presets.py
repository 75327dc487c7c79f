"""The noise of every quality through training: batches of one length and padded ones, float32 and autocast.

MiniLM is trained exactly on GLUE tasks, on batches grouped by length, and a random LLaMA on tokens of a Markov chain.
At some steps the model is converted with every quality, learns what it learns in its first steps from other batches,
and the gradient of a batch is computed a few times with new random numbers and the same dropout. Its variance is
divided by that of the minibatch, over sequences: of the whole gradient; of the median linear layer, with everything
converted and with linear layers alone; and of the median coordinate of the blocks, by the square of the gradient too,
as AdamW divides by it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.library import QUALITIES, measuring, set_aside
from benchmarks.records import PresetRow
from rmm_linear import RMMConfig, convert, revert
from rmm_linear.memory import track_saved

TASKS, STEPS = ("sst2", "cola", "stsb"), (25, 1000, 2000)
ONE_LENGTH, PADDED = "one length", "padded"
DTYPES = ("float32", "bfloat16")
_BATCH, _TRAINED, _RATE, _EVERY = 32, 16, 1e-5, 37  # _EVERY: coordinates are sampled
_LEARNED = 6  # steps from which a converted model learns


def measure_presets(data: Path | None, draws: int, tiny: bool) -> Iterator[PresetRow]:
    """Measure all tasks and a LLaMA at all steps."""
    from benchmarks.noise.blocks import inputs, llama
    from benchmarks.noise.glue import load_glue, train

    moments = (2,) if tiny else STEPS
    for task in TASKS[: 1 if tiny else None]:
        if data is None:
            break
        model, batches = load_glue(
            task,
            data,
            batch=_TRAINED,
            steps=moments[-1] + 200,
            max_length=128,
            seed=0,  # pyright: ignore[reportArgumentType]
        )
        trained, measured = _grouped(batches)
        done = 0
        for step in moments:
            train(model, trained[done:step], _RATE)
            done = step
            for title, batch in measured.items():
                yield from _measure(task, step, title, model, batch, trained[step:], draws)
    torch.manual_seed(0)
    size = {"layers": 2, "width": 128} if tiny else {"layers": 6, "width": 384}  # as MiniLM: directions need the width
    model = llama(**size, vocabulary=1000)
    done = 0
    for step in moments[: 2 if not tiny else 1]:
        train(model, [inputs(model, 16, 64, seed) for seed in range(done, step)], 1e-4)
        done = step
        before = [inputs(model, 16, 64, seed) for seed in range(step, step + _LEARNED)]
        yield from _measure("llama", step, ONE_LENGTH, model, inputs(model, 16, 64, 10_000), before, draws)


def _grouped(batches: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """Return batches of like lengths, in random order, and one of each kind that is measured and not trained on."""
    rows = [
        ({key: value[place][: int(batch["attention_mask"][place].sum())] if value.dim() > 1 else value[place]
          for key, value in batch.items()})
        for batch in batches
        for place in range(len(batch["labels"]))
    ]  # fmt: skip
    held, rows = rows[: len(rows) // 10], rows[len(rows) // 10 :]
    lengths = [len(row["input_ids"]) for row in held]
    usual = statistics.mode(lengths)
    same = [row for row, length in zip(held, lengths, strict=True) if length == usual]
    order = sorted(range(len(rows)), key=lambda place: len(rows[place]["input_ids"]))
    groups = [order[begin : begin + _TRAINED] for begin in range(0, len(order) - _TRAINED + 1, _TRAINED)]
    shuffled = torch.randperm(len(groups), generator=torch.Generator().manual_seed(0)).tolist()
    trained = [_joined([rows[place] for place in groups[group]]) for group in shuffled]
    return trained, {ONE_LENGTH: _joined(same[:_BATCH]), PADDED: _joined(held[:_BATCH])}


def _joined(rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Make a batch of rows, padded to the longest (with 1, RoBERTa's padding)."""
    pad = partial(nn.utils.rnn.pad_sequence, batch_first=True)
    fill = {"input_ids": 1}
    return {
        key: pad([row[key] for row in rows], padding_value=fill.get(key, 0))
        if rows[0][key].dim()
        else torch.stack([row[key] for row in rows])
        for key in rows[0]
    }


def _measure(
    case: str,
    step: int,
    title: str,
    model: nn.Module,
    batch: dict[str, Any],
    before: Sequence[dict[str, Any]],
    draws: int,
) -> Iterator[PresetRow]:
    for dtype in DTYPES:
        autocast = partial(torch.autocast, "cpu", torch.bfloat16) if dtype != "float32" else nullcontext
        sgd, exact, size = _exact(model, batch, autocast)
        weights = [name for name in exact if name.endswith("weight") and exact[name].dim() > 1 and _in_block(name)]
        for quality in QUALITIES:
            config = RMMConfig.preset(quality)
            found, saved = _noise(model, batch, before, autocast, config, exact, draws)
            whole = [_ratio(draw, sgd, list(draw)) for draw in found]
            medians = [statistics.median(_ratio(draw, sgd, [name]) for name in weights) for draw in found]
            mean = {name: sum(draw[name] for draw in found) / draws for name in exact if _in_block(name)}
            by_coordinate = [
                (mean[name] / (sgd[name] + exact[name].square()).clamp_min(1e-30)).flatten()[::_EVERY] for name in mean
            ]
            alone, _ = _noise(model, batch, before, autocast, config.replace(operations=("linear",)), exact, draws)
            of_linears = {name: sum(draw[name] for draw in alone) / draws for name in weights}
            yield PresetRow(
                case=case, step=step, batch=title, dtype=dtype, quality=quality, draws=draws,
                saved=saved / size, linear_saved=_linear_share(config, 2 if dtype == "bfloat16" else 4),
                whole=statistics.mean(whole), whole_error=statistics.stdev(whole) / draws**0.5,
                median=statistics.mean(medians), median_error=statistics.stdev(medians) / draws**0.5,
                alone=statistics.median(_ratio(of_linears, sgd, [name]) for name in weights),
                coordinate=float(torch.cat(by_coordinate).median()),
            )  # fmt: skip


def _in_block(name: str) -> bool:
    return ".layer." in name or ".layers." in name


def _ratio(noise: Mapping[str, Any], sgd: Mapping[str, Tensor], names: Sequence[str]) -> float:
    return sum(float(noise[name].sum()) for name in names) / sum(float(sgd[name].sum()) for name in names)


def _exact(
    model: nn.Module, batch: dict[str, Any], autocast: Callable[[], AbstractContextManager[Any]]
) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    """D²_SGD over sequences and the gradient, by coordinate, and the bytes that the exact model saves."""
    with measuring(model), autocast():
        before = _saved(model, batch)
        exact = _gradient(model, batch)
        count, sums, squares = len(batch["labels"]), dict[str, Tensor](), dict[str, Tensor]()
        for place in range(count):
            part = _gradient(model, {key: value[place : place + 1] for key, value in batch.items()}, 1000 + place)
            for name, one in part.items():
                sums[name] = sums.get(name, 0) + one / count
                squares[name] = squares.get(name, 0) + one.square() / count**2
    sgd = {name: count / (count - 1) * (squares[name] - sums[name].square() / count).clamp_min(0) for name in sums}
    return sgd, exact, before


def _noise(
    model: nn.Module,
    batch: dict[str, Any],
    before: Sequence[dict[str, Any]],
    autocast: Callable[[], AbstractContextManager[Any]],
    config: RMMConfig,
    exact: dict[str, Tensor],
    draws: int,
) -> tuple[list[dict[str, Tensor]], int]:
    """The squared errors of every draw by coordinate, and the bytes that the converted model saves."""
    convert(model, config)
    try:
        with measuring(model), autocast():
            for other in before[:_LEARNED]:
                _gradient(model, other)
            saved = _saved(model, batch)
            with set_aside(model) as contexts:
                found = list[dict[str, Tensor]]()
                for draw in range(1, draws + 1):
                    for context in contexts:
                        context.salt = draw
                    found.append({name: (g - exact[name]).square() for name, g in _gradient(model, batch).items()})
        return found, saved
    finally:
        revert(model)


def _gradient(model: nn.Module, batch: dict[str, Any], seed: int = 77) -> dict[str, Tensor]:
    torch.manual_seed(seed)  # the same dropout every time
    names, parameters = zip(*model.named_parameters(), strict=True)
    loss = model(**batch).loss
    with torch.autocast("cpu", enabled=False):
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return {n: torch.zeros_like(p) if g is None else g for n, p, g in zip(names, parameters, found, strict=True)}


def _saved(model: nn.Module, batch: dict[str, Any]) -> int:
    torch.manual_seed(77)
    with track_saved(model) as ledger:
        loss = model(**batch).loss
    count = ledger.total
    del loss
    return count


def _linear_share(config: RMMConfig, itemsize: int, features: int = 384) -> float:
    """Bytes saved of a row of MiniLM's width by those of the row."""
    spec = config.spec(1024, features, itemsize)
    whole = 1024 * features * itemsize
    return 1.0 if spec is None else spec.bytes(1024, features, itemsize, config.directions) / whole
