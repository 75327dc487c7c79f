"""The tables of the page about long sequences."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.library import table
from benchmarks.pages.render import Cell, Table, columns, from_csv, megabytes, of, pivot
from benchmarks.planning.long_longest import EXACT, FULL, MEMORIES, OTHERS, QLORA, UNSLOTH, Longest
from benchmarks.planning.long_random import Drawn, Lowest
from benchmarks.planning.long_sequence import LongStep
from benchmarks.planning.long_store import Stored
from benchmarks.planning.long_tiles import Working


def _gradients(row: Stored) -> str:
    if row.error is None:
        return ""
    return "equal to the bit" if row.error == 0 else f"{row.error:.1g}"


_STORED: dict[str, Cell] = {
    "blocks": of("method"),
    "between the passes, MB": of("between", ",.2f", 1e-6),
    "of exact": of("share", ".2%"),
    "peak, MB": megabytes("peak"),
    "in files, MB": megabytes("files"),
    "time": of("time", ".2f"),
    "error of gradients": _gradients,
}
_LONG_STEPS: dict[str, Cell] = {
    "blocks": lambda row: f"{row.method}, {row.dtype}" if row.method == "exact" else row.method,
    **{title: cell for title, cell in _STORED.items() if title not in ("blocks", "error of gradients")},
    "error of the gradient": lambda row: "" if row.method == "exact" else f"{row.error:.2g}",
    "plan": lambda row: row.plan if row.method.startswith("fit") else "",
}
_LOWEST: dict[str, Cell] = {
    "options": of("options"),
    "peak, MB": megabytes("measured"),
    "simulated": megabytes("simulated"),
    "of single words": of("share", ".3f"),
    "without gradients": of("above", ".3f"),
    "moment of the peak": of("moment"),
    "plan": of("plan"),
}

_LONGEST: dict[str, Cell] = {
    "`rmm-linear longest`": lambda row: f"`{row.command.replace(f' {EXACT}', '')}`",
    "tokens": of("tokens", ","),
    "kB per token": of("bytes_per_token", ",.1f", 1e-3),
    "on the host, GB": of("host_bytes", ",.0f", 1e-9),
    "every block recomputed": of("checkpointed", ","),
    "binds": lambda row: row.binds.partition(",")[0],
    "plan": of("plan"),
}
_MODELS = {"llama-3.1-8b": "Llama-3.1-8B", "llama-3.1-70b": "Llama-3.1-70B", "qwen3-8b": "Qwen3-8B"}
_TRAINED = {QLORA: "QLoRA of rank 32", FULL: "all weights, state on the host"}


def _systems(rows: Sequence[Longest]) -> str:
    """Lay out the rows on 80 GB beside what others say of themselves."""
    lines = list[tuple[str, ...]]()
    for row in rows:
        words = row.command.replace(f" {EXACT}", "").removeprefix(f"{row.model} --memory 80GB ")
        trained, _, host = words.partition(" --host-memory ")
        if trained in _TRAINED:
            system = f"`rmm-linear longest`{', 128 GB on the host' if host else ''}"
            model = _MODELS.get(row.model, row.model)
            lines.append((system, model, _TRAINED[trained], "1 × 80 GB", f"{row.tokens:,}"))
    lines += [(*known, f"{tokens:,}") for *known, tokens in OTHERS]
    return table(("system", "model", "trained", "devices", "tokens"), lines)


def _against(rows: Sequence[Longest]) -> str:
    """Lay out a line per memory of the model of which others give the same."""
    of_memory = {row.command.split()[2]: row for row in rows if (row.model, row.method) == ("llama-3.1-8b", "qlora")}
    spec: dict[str, Cell] = {
        "memory, GiB": lambda row: f"{row.memory / 2**30:.0f}",
        "exact": of("exact", ","),
        "every block recomputed": of("checkpointed", ","),
        "Unsloth": lambda row: f"{UNSLOTH[row.command.split()[2]]:,}",
        "fitted": of("tokens", ","),
        "by Unsloth's": lambda row: f"{row.tokens / UNSLOTH[row.command.split()[2]]:.1f}",
        "on the host, GB": of("host_bytes", ",.0f", 1e-9),
    }
    return columns((of_memory[memory] for memory in MEMORIES if memory in of_memory), spec)


def _tiles(rows: Sequence[Working]) -> str:
    def cell(row: Working) -> str:
        return f"{row.working / 1e6:,.2f} ({row.tensors:,.1f})"

    return pivot(rows, lambda row: f"{row.module}, {row.provider}", of("length", ","), cell, corner="tokens")


def _tile_times(rows: Sequence[Working]) -> str:
    whole = {(row.module, row.length): row.seconds for row in rows if row.provider == "whole"}

    def cell(row: Working) -> str:
        return f"{row.seconds / whole[row.module, row.length]:.2f}"

    return pivot(rows, lambda row: f"{row.module}, {row.provider}", of("length", ","), cell, corner="tokens")


def _claims(rows: Sequence[Drawn]) -> str:
    lines = {
        "models": str(len(rows)),
        "budgets, and those that a plan meets": f"{sum(row.budgets for row in rows)}, {sum(row.met for row in rows)}",
        "plans whose step took more than their budget": str(sum(row.over for row in rows)),
        "largest error of a simulated peak": f"{max(row.error for row in rows):.2f} %",
        "largest error of the sum that is solved": f"{max(row.solved_error for row in rows):.2f} %",
    }
    return table(("plans", "count"), list(lines.items()))


TABLES: dict[str, Table] = {
    "long-store": from_csv("long-store", Stored, lambda rows: columns(rows, _STORED)),
    "long-sequence": from_csv("long-sequence", LongStep, lambda rows: columns(rows, _LONG_STEPS)),
    "long-tiles": from_csv("long-tiles", Working, _tiles),
    "long-tile-times": from_csv("long-tiles", Working, _tile_times),
    "long-longest": from_csv("long-longest", Longest, lambda rows: columns(rows, _LONGEST)),
    "long-systems": from_csv("long-longest", Longest, _systems),
    "long-against": from_csv("long-longest", Longest, _against),
    "long-least": from_csv("long-least", Lowest, lambda rows: columns(rows, _LOWEST)),
    "long-claims": from_csv("long-random", Drawn, _claims),
}
