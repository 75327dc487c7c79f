"""The longest sequences of models too large for this machine, simulated: one command of the library per row."""

from __future__ import annotations

import contextlib
import io
import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import figures, library
from benchmarks.records import Origin
from rmm_linear.command.main import main

EXACT = "--allow keep recompute offload tile"
QLORA, FULL = "--method qlora --rank 32", "--method full --offload-state"
MEMORIES = ("8GiB", "16GiB", "24GiB", "48GiB", "80GiB")
# Tokens of QLoRA of rank 32 on Llama-3.1-8B, batch 1, by memory in GiB, as its authors' page has them.
UNSLOTH: dict[str, int] = dict(zip(MEMORIES, (2_972, 40_724, 78_475, 191_728, 342_733), strict=True))

# Longest sequences that others publish: system, model, what is trained, devices, tokens.
OTHERS = (
    ("Unsloth", "Llama-3.1-8B", "QLoRA of rank 32", "1 × 80 GiB", UNSLOTH[MEMORIES[-1]]),
    ("Unsloth, tiled MLP", "gpt-oss-20b", "QLoRA", "1 × 80 GB", 500_000),
    ("ALST", "Llama-3.1-8B", "all weights, state on the host", "1 × 80 GB", 500_000),
    ("ALST", "Llama-3.1-8B", "all weights", "8 × 80 GB", 3_700_000),
    ("TRL, offloaded checkpoints, sequences split over devices", "Qwen3-8B", "all weights", "8 × 80 GB", 1_048_576),
)
COMMANDS = (
    f"llama-3.1-8b --memory 80GB {QLORA} {EXACT}",
    f"llama-3.1-8b --memory 80GB {QLORA} {EXACT} --host-memory 128GB",
    f"llama-3.1-8b --memory 80GB {FULL} {EXACT}",
    *(f"llama-3.1-8b --memory {memory} {QLORA} {EXACT}" for memory in reversed(MEMORIES)),
    f"qwen3-8b --memory 80GB {QLORA} {EXACT}",
    f"llama-3.1-70b --memory 80GB {QLORA} {EXACT}",
    f"gpt-oss-20b --memory 80GB {QLORA} {EXACT}",
)
TINY = ("roberta-base --memory 2GB --method lora --rank 4 --allow keep recompute",)


@dataclass(frozen=True, kw_only=True)
class Longest(Origin):
    """What ``rmm-linear longest`` answers."""

    command: str  # its words
    model: str = ""
    method: str = ""
    memory: int = 0  # of the device, in bytes
    tokens: int = 0  # of the longest sequence, with the plan
    exact: int = 0  # of the exact model
    checkpointed: int = 0  # with every block recomputed
    bytes_per_token: float = 0.0  # that one more token adds to the peak
    peak: int = 0
    host_bytes: int = 0
    binds: str = ""
    plan: str = ""  # how many blocks have each choice
    seconds: float = 0.0  # of the command


def longest(about: Mapping[str, Any], known: Sequence[Longest], *, tiny: bool = False) -> Iterator[Longest]:
    """Answer what is not known, a command at a time."""
    there = {row.command for row in known}
    for command in TINY if tiny else COMMANDS:
        if command not in there:
            yield _answered(command, about)


def _answered(command: str, about: Mapping[str, Any]) -> Longest:
    begin, printed = time.perf_counter(), io.StringIO()
    with contextlib.redirect_stdout(printed), library.quiet():
        status = main(["longest", *command.split(), "--json"])
    if status == 2:
        raise ValueError(f"rmm-linear longest {command} failed.")
    found = json.loads(printed.getvalue())
    names = ("model", "method", "memory", "tokens", "exact", "checkpointed", "bytes_per_token", "peak", "host_bytes")
    choices = Counter(block["choice"] for block in found["plan"]["blocks"]) if found["plan"] else Counter[str]()
    return Longest(
        command=command,
        **{name: found[name] for name in (*names, "binds")},
        plan=", ".join(f"{count} {choice}" for choice, count in choices.most_common()),
        seconds=time.perf_counter() - begin,
        **about,
    )


def picture(rows: Sequence[Longest]) -> Any:
    """Draw tokens against memory, on logarithmic axes, beside what others say of themselves."""
    ours = {row.command.split()[2]: row for row in rows if row.model == "llama-3.1-8b" and row.method == "qlora"}
    points = [ours[memory] for memory in MEMORIES if memory in ours]
    figure, (axis,) = figures.figure_of(1, 1, 6.2, 4.2)
    lines = (
        ("fitted, exact gradients (simulated)", [row.tokens for row in points], figures.BLUE, "o-"),
        ("Unsloth (by its own account)", [UNSLOTH[row.command.split()[2]] for row in points], figures.RED, "s--"),
        ("every block recomputed (simulated)", [row.checkpointed for row in points], figures.GREEN, "^-"),
        ("exact (simulated)", [row.exact for row in points], "grey", "v-"),
    )
    for label, tokens, colour, style in lines:
        some = [(row.memory / 1e9, count) for row, count in zip(points, tokens, strict=True) if count]
        axis.plot(*zip(*some, strict=True), style, color=colour, label=label, markersize=5)
    figures.x_ticks(axis, [row.memory / 1e9 for row in points], [f"{row.memory / 2**30:.0f}" for row in points])
    axis.set_yscale("log")
    axis.set(xlabel="memory of the device, GiB", ylabel="tokens of the longest sequence")
    axis.grid(True, which="both", alpha=0.3)
    axis.legend(fontsize=8)
    return figures.headed(figure, "Llama-3.1-8B, QLoRA of rank 32, batch 1", points)
