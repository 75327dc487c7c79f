"""Bytes a whole model keeps for the backward pass: ``python -m benchmarks.kept``.

RoBERTa-base's shape with random weights, float32, scaled-dot-product attention, no dropout, no padding. One forward
pass each: exact, with all linear layers sketched in a tenth of their bytes, and with those that ``example=`` leaves.
"""

from __future__ import annotations

import argparse
import sys

import torch
from transformers import RobertaConfig, RobertaForSequenceClassification

from rmm_linear import convert, revert
from rmm_linear._support.tables import table
from rmm_linear.memory import track_saved


def main(argv: list[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: Its arguments; None takes those of the process.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kept", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--batch", type=int, default=8, help="sequences")
    parser.add_argument("--length", type=int, default=128, help="tokens per sequence")
    parser.add_argument("--memory", type=float, default=0.1, help="fraction of every input's bytes")
    arguments = parser.parse_args(argv)
    torch.manual_seed(0)
    config = RobertaConfig(
        vocab_size=50265,
        max_position_embeddings=514,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = RobertaForSequenceClassification(config).train()
    model.set_attn_implementation("sdpa")
    batch = {
        "input_ids": torch.randint(3, 50000, (arguments.batch, arguments.length)),
        "labels": torch.zeros(arguments.batch, dtype=torch.int64),
    }

    def kept() -> int:
        with track_saved(model) as ledger:
            model(**batch)
        return ledger.total

    exact = kept()
    rows = [("exact", 0, exact)]
    rows.append(("all linear layers", len(convert(model, memory=arguments.memory).converted), kept()))
    revert(model)
    rows.append(("with example=", len(convert(model, memory=arguments.memory, example=batch).converted), kept()))
    print(
        table(
            ("", "sketched layers", "bytes kept", "of exact"),
            [(title, str(count), f"{total:,}", f"{total / exact:.4f}") for title, count, total in rows],
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
