"""Time that a probe costs: ``python -m benchmarks.probe --help``.

MiniLM as RoBERTa, converted as by default, is trained on the generated acceptability sentences (or on CoLA itself with
``--data_dir``). In every round, three steps run on the same batch in changing order: without a probe, with a probe that
is there and does not look, and with one that looks at every converted layer. Printed are the medians over the rounds,
and what a probe every n steps makes of them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from glue_finetune.acceptability import write_corpus
from glue_finetune.data import load_task
from glue_finetune.minilm import save_minilm
from glue_finetune.tasks import get_task
from rmm_linear import RMMConfig, convert
from rmm_linear._support.tables import table
from rmm_linear.variance import GradientProbe

PLAIN, IDLE, LOOKING = "no probe", "a probe that does not look", "a probe that looks"


def measure(data_dir: Path, model_dir: Path, config: RMMConfig, *, batch: int, rounds: int) -> dict[str, list[float]]:
    """Time training steps with and without a probe, side by side.

    Args:
        data_dir: Folder with CoLA.
        model_dir: Folder with the model.
        config: The conversion.
        batch: Sentences per batch.
        rounds: Rounds that are timed, after one that is not.

    Returns:
        Kind of step to its seconds, one entry per round.
    """
    torch.manual_seed(0)
    rows = load_task(get_task("cola"), str(data_dir)).train
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForSequenceClassification.from_pretrained(model_dir, num_labels=2).train()
    convert(model, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    order = torch.randperm(len(rows))
    seconds: dict[str, list[float]] = {PLAIN: [], IDLE: [], LOOKING: []}

    def step(index: int) -> float:
        places = (index * batch + torch.arange(batch)) % len(rows)
        chosen = rows.select(order[places].tolist())
        inputs = tokenizer(chosen["text"][:], padding=True, truncation=True, max_length=128, return_tensors="pt")
        inputs.pop("token_type_ids", None)
        began = time.perf_counter()
        model(**inputs, labels=torch.tensor(chosen["label"][:])).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - began

    def one(kind: str, index: int) -> float:
        if kind == PLAIN:
            return step(index)
        with GradientProbe(model, every=None) as probe:
            if kind == LOOKING:
                probe.arm(index)
            return step(index)

    for index in range(rounds + 1):
        kinds = list(seconds)
        for kind in kinds[index % 3 :] + kinds[: index % 3]:
            spent = one(kind, index)
            if index:
                seconds[kind].append(spent)
    return seconds


def main(argv: list[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: Its arguments; None takes those of the process.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.probe", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--data_dir", type=Path, help="folder with the official GLUE files; default: generated ones")
    parser.add_argument("--model_name_or_path", type=Path, help="folder with the model; default: MiniLM, made anew")
    parser.add_argument("--batch", type=int, default=64, help="sentences per batch")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of three steps")
    parser.add_argument("--every", type=int, default=50, help="steps per probe")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        data, model = arguments.data_dir, arguments.model_name_or_path
        if data is None:
            data = Path(folder) / "data"
            write_corpus(data)
        if model is None:
            model = Path(folder) / "minilm"
            save_minilm(model)
        seconds = measure(data, model, RMMConfig(), batch=arguments.batch, rounds=arguments.rounds)
    medians = {kind: statistics.median(values) for kind, values in seconds.items()}
    plain = medians[PLAIN]
    rows = [(kind, f"{1000 * median:.1f}", f"{median / plain:.3f}") for kind, median in medians.items()]
    print(table(("step with", "median, ms", "of no probe"), rows))
    cost = (medians[LOOKING] - plain) / plain / arguments.every
    print(f"a probe every {arguments.every} steps of batch {arguments.batch}: {100 * cost:.2f} % of training time")
    return 0


if __name__ == "__main__":
    sys.exit(main())
