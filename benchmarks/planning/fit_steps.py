"""Models with random weights, and how all parts of fit measure them: in turns, peaks, one fit for many budgets."""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.library import ALLOW, FitReport, Fitting, PlannedBlock, copied, find_blocks, quiet, run_step
from benchmarks.planning.networks import transformer
from benchmarks.suites.models import build
from rmm_linear.memory import peak

Made = tuple[nn.Module, dict[str, Tensor]]
SEED = 0


def roberta(tiny: bool) -> Made:
    """Make RoBERTa-base with a head for sequences, and 8 texts of 128 tokens."""
    if tiny:
        sizes = {"vocab_size": 100, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
        return transformer("roberta", 8, 16, num_hidden_layers=3, **sizes)
    sizes = {"vocab_size": 50265, "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}
    return transformer("roberta", 8, 128, num_hidden_layers=12, **sizes)


def llama(tiny: bool) -> Made:
    """Make a small LLaMA, and 4 texts of 256 tokens."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    if tiny:
        sizes = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 64}
        return transformer("llama", 8, 16, num_hidden_layers=3, **sizes, **heads)
    sizes = {"vocab_size": 8000, "hidden_size": 512, "intermediate_size": 1376}
    return transformer("llama", 4, 256, num_hidden_layers=8, **sizes, **heads)


def llama_lora(tiny: bool) -> Made:
    """Make the same LLaMA with LoRA adapters of rank 8 on all linear layers, which alone are trained."""
    from peft import LoraConfig, get_peft_model

    model, batch = llama(tiny)
    config = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, config).train(), batch  # pyright: ignore[reportArgumentType]


def vit(tiny: bool) -> Made:
    """Make a vision transformer of 12 layers for 100 classes, and 8 images of 224 × 224."""
    layers, width, heads, side = (3, 32, 2, 32) if tiny else (12, 384, 6, 224)
    torch.manual_seed(SEED)
    sizes: dict[str, Any] = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    sizes |= {"intermediate_size": 4 * width, "image_size": side, "patch_size": 4 if tiny else 16, "num_labels": 100}
    batch = {"pixel_values": torch.randn(8, 3, side, side), "labels": torch.randint(0, 100, (8,))}
    return build("ViT", "ForImageClassification", **sizes).train(), batch


def t5(tiny: bool) -> Made:
    """Make T5 of the small size, and 4 texts of 128 tokens with answers of 64."""
    sizes: dict[str, Any] = {"use_cache": False, "decoder_start_token_id": 0}
    if tiny:
        sizes |= {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_heads": 2, "num_layers": 2}
    words = 100 if tiny else 32128
    torch.manual_seed(SEED)
    texts, length = (8, 16) if tiny else (4, 128)
    ids, labels = torch.randint(5, words, (texts, length)), torch.randint(5, words, (texts, length // 2))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    return build("T5", "ForConditionalGeneration", vocab_size=words, **sizes).train(), batch


# Name on the command line to title and maker.
MODELS: dict[str, tuple[str, Callable[[bool], Made]]] = {
    "roberta": ("RoBERTa-base, 8 × 128", roberta),
    "llama": ("LLaMA 8 × 512, 4 × 256", llama),
    "llama-lora": ("LLaMA 8 × 512 with LoRA, 4 × 256", llama_lora),
    "vit": ("ViT 12 × 384, 8 × 224²", vit),
    "t5": ("T5-small, 4 × 128 and 64", t5),
}


def lists_of_blocks(model: nn.Module) -> list[nn.ModuleList]:
    """Return the lists of like modules of a model, as a transformer's layers are."""
    parents = dict.fromkeys(name.rpartition(".")[0] for name in find_blocks(model))
    found = [model.get_submodule(name) for name in parents]
    return [each for each in found if isinstance(each, nn.ModuleList) and len(each) > 1]


class Segment(nn.Module):
    """Successive blocks that are recomputed as one: of what they make, only their input is kept."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the blocks one after the other under activation checkpointing."""
        return checkpoint(self._run, hidden, *args, use_reentrant=False, **kwargs)

    def _run(self, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        found: Any = hidden
        for block in self.blocks:
            found = block(hidden, *args, **kwargs)
            hidden = found
            if isinstance(found, tuple):  # T5's blocks hand on two position biases, their third and sixth argument
                hidden, own, cross = found
                args = (args[0], own, *args[2:4], cross, *args[5:])
        return found


def recompute_segments(model: nn.Module) -> None:
    """Recompute segments of √n of every n like blocks, as in Chen et al. 2016 (arXiv 1604.06174), section 4."""
    for blocks in lists_of_blocks(model):
        every, length = list(blocks), math.ceil(math.sqrt(len(blocks)))
        del blocks[:]
        blocks.extend(Segment(every[begin : begin + length]) for begin in range(0, len(every), length))


EXACT, FIT = "exact", "fit"  # the names of methods in csv files
ROUNDS = 5
MAX_NOISE = 1.0
Run = Callable[[], None]


def step_of(model: nn.Module, batch: Any) -> Run:
    there = copied(batch)
    return lambda: run_step(model, there)


def clear(model: nn.Module) -> None:
    model.zero_grad(set_to_none=True)


def live_peak(model: nn.Module, run: Run) -> int:
    """Return the live bytes that a step makes at its peak, gradients among them."""
    clear(model)
    with peak("cpu") as measured:
        run()
    clear(model)
    return measured.bytes


def medians(model: nn.Module, runs: Mapping[str, Run], rounds: int = ROUNDS) -> dict[str, float]:
    return {title: statistics.median(seconds) for title, seconds in timed(model, runs, rounds).items()}


def timed(
    model: nn.Module, runs: Mapping[str, Run], rounds: int = ROUNDS, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Time steps in turns, every second round in reverse order, after one step of each."""
    found: dict[str, list[float]] = {title: [] for title in runs}
    for number in range(-1, rounds):
        for title in list(runs)[:: -1 if number % 2 else 1]:
            clear(model)
            begin = clock()
            runs[title]()
            if number >= 0:
                found[title].append(clock() - begin)
    clear(model)
    return found


def with_times(rows: Mapping[str, Any], seconds: Mapping[str, float]) -> list[Any]:
    """Add to rows what was timed, also relative to the exact step."""
    times = {key: {"seconds": found, "time": found / seconds[EXACT]} for key, found in seconds.items()}
    return [replace(row, **times.get(key, {})) for key, row in rows.items()]


def options_of(model: nn.Module, batch: Any, folder: str | None = None, allow: Collection[str] = ALLOW) -> Fitting:
    """Measure all options of a model's blocks, once for all budgets."""
    with quiet():
        fitting = Fitting(model, batch, None, folder=folder, allow=allow)
        fitting.add_options(MAX_NOISE)
    return fitting


def budget_of(fitting: Fitting, share: float) -> int:
    """Return the budget that lies so far from the least peak of any plan to the exact step's."""
    smallest = fitting.proposals.smallest()
    assert smallest is not None  # noqa: S101 without a limit
    least = fitting.static.before_step + smallest.predicted
    return least + int(share * (fitting.exact_peak - least))


def fitted(fitting: Fitting, memory: int | None) -> FitReport | str:
    """Fit into a budget, or into the least; if nothing fits, say so."""
    fitting.total = memory
    fitting.proposals = replace(fitting.proposals, budget=(memory or 0) - fitting.static.before_step)
    with quiet():
        try:
            report = fitting.least() if memory is None else fitting.solved()
        except ValueError as error:
            _, is_budget, reason = str(error).partition("cannot be met: ")
            if not is_budget:
                raise
            return f"cannot fit: {reason.partition('. ')[0]}"
        report.plan.revert()
    return report


def counts(rows: Iterable[PlannedBlock]) -> str:
    found = Counter(row.option for row in rows)
    return ", ".join(f"{count} {option}" for option, count in found.most_common())
