"""Sketch noise against minibatch noise on real batches: ``python -m benchmarks.noise --help``.

MiniLM as RoBERTa is fine-tuned for a few exact steps on a GLUE task; then, on one batch in random order, the inputs X
and output gradients Y of all encoder linears are recorded and D²_sketch / D²_SGD (samples are sequences) is computed
for every width at equal memory, and for the paper's dense Gaussian. Printed is the median over the layers. As in
training, ``bits="auto"`` chooses from the first steps' inputs and is then measured on the later batch.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from glue_finetune.data import load_task
from glue_finetune.minilm import save_minilm
from glue_finetune.tasks import get_task
from rmm_linear import RMMConfig
from rmm_linear.bits import STEPS, BitsChoice
from rmm_linear.sketches import TokenMask
from rmm_linear.tables import table
from rmm_linear.variance import sgd_variance, sketch_variance

Record = tuple[str, Tensor, Tensor]
Choices = dict[tuple[str, float], BitsChoice]  # layer and memory
WIDTHS: tuple[int | None, ...] = (None, 8, 4, 2)


def record_batch(
    task_name: str,
    data_dir: Path,
    *,
    batch: int,
    steps: int,
    max_length: int,
    seed: int,
    memories: Sequence[float],
    itemsize: int,
) -> tuple[list[Record], Tensor, tuple[int, int], Choices]:
    """Fine-tune for a few steps and record X and Y of every encoder linear on the next batch.

    Args:
        task_name: A GLUE task.
        data_dir: Folder with the official GLUE files.
        batch: Sentences per batch.
        steps: Exact training steps before; ``bits="auto"`` chooses on the first of them.
        max_length: Tokens per sentence at most.
        seed: Seed of everything.
        memories: Fractions of the input's bytes to choose bits for.
        itemsize: Bytes per element of the input: 4 for float32, 2 for half types.

    Returns:
        Per layer: name, X of shape (N, I) and Y of shape (N, O); the token mask, shape (N,); (batch, sequence); the
        choice of bits for every layer and memory.

    Raises:
        ValueError: If there are fewer steps than the choice of bits looks at.
    """
    if steps < STEPS:
        raise ValueError(f"steps must be at least {STEPS}, on which bits=auto chooses, got {steps}.")
    torch.manual_seed(seed)
    task = get_task(task_name)
    rows = load_task(task, str(data_dir)).train
    with tempfile.TemporaryDirectory() as folder:
        save_minilm(Path(folder))
        tokenizer = AutoTokenizer.from_pretrained(folder)
        labels = 1 if task.is_regression else len(task.labels)
        model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=labels)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    order = torch.randperm(len(rows))

    def loss_of(step: int) -> tuple[Tensor, Tensor]:
        chosen = rows.select(order[step * batch : (step + 1) * batch].tolist())
        texts = [chosen["text"][:], *([chosen["text_pair"][:]] if "text_pair" in chosen.column_names else [])]
        inputs = tokenizer(*texts, padding=True, truncation=True, max_length=max_length, return_tensors="pt")
        target = torch.tensor(chosen["label"][:], dtype=torch.float32 if task.is_regression else torch.int64)
        inputs.pop("token_type_ids", None)
        return model(**inputs, labels=target).loss, inputs["attention_mask"]

    linears = {
        name: module for name, module in model.named_modules() if type(module) is nn.Linear and ".encoder." in name
    }
    inputs: dict[str, Tensor] = {}
    choices: Choices = {(name, memory): BitsChoice() for name in linears for memory in memories}
    looking = [module.register_forward_pre_hook(_into(inputs, name)) for name, module in linears.items()]
    for step in range(steps):
        optimizer.zero_grad()
        loss, mask = loss_of(step)
        loss.backward()
        optimizer.step()
        if step < STEPS:
            ranks = TokenMask.of(mask.reshape(-1))
            for (name, memory), choice in choices.items():
                choice.observe(inputs[name], RMMConfig(memory=memory), itemsize, ranks)
                choice.settle()
        if step == STEPS - 1:
            for handle in looking:
                handle.remove()
    optimizer.zero_grad()
    gradients: dict[str, Tensor] = {}
    handles = []
    for name, module in linears.items():
        handles.append(module.register_forward_pre_hook(_into(inputs, name)))
        handles.append(module.register_full_backward_pre_hook(_into(gradients, name)))
    loss, mask = loss_of(steps)
    loss.backward()
    for handle in handles:
        handle.remove()
    records = [(name, inputs[name], gradients[name]) for name in linears]
    return records, mask.reshape(-1), (mask.shape[0], mask.shape[1]), choices


def _into(store: dict[str, Tensor], name: str) -> Callable[..., None]:
    def hook(_: nn.Module, given: tuple[Tensor, ...]) -> None:
        store[name] = given[0].detach().flatten(0, -2)

    return hook


def noise_table(
    records: Sequence[Record],
    mask: Tensor,
    samples: tuple[int, int],
    choices: Choices,
    *,
    memories: Sequence[float],
    itemsize: int,
    gaussian: bool = True,
) -> dict[str, dict[float, float]]:
    """Compute the median over layers of D²_sketch / D²_SGD.

    Args:
        records: See :func:`record_batch`.
        mask: Token mask, shape (N,).
        samples: (batch, sequence).
        choices: What ``bits="auto"`` chose for every layer and memory.
        memories: Fractions of the input's bytes.
        itemsize: Bytes per element of the input: 4 for float32, 2 for half types.
        gaussian: Whether to add the paper's dense Gaussian, with padding.

    Returns:
        Row title to memory to median.
    """
    result: dict[str, dict[float, list[float]]] = {}
    for name, x, y in records:
        sgd = sgd_variance(x, y, samples=samples)
        for memory in memories:
            ratios: dict[int | None, float] = {}
            for bits in WIDTHS:
                recipe = RMMConfig(memory=memory, bits=bits).recipe(x.shape[0], x.shape[1], itemsize)
                noise = torch.zeros(())
                if recipe is not None:
                    noise = sketch_variance(x, y, kind=recipe.kind, rows=recipe.rows, bits=bits, mask=mask, draws=1)
                ratios[bits] = float(noise / sgd)
                title = f"countsketch, {bits or 8 * itemsize} bits, no padding"
                result.setdefault(title, {}).setdefault(memory, []).append(ratios[bits])
            auto = ratios[choices[name, memory].bits]
            result.setdefault('bits="auto", no padding', {}).setdefault(memory, []).append(auto)
            best = min(ratios.values())
            result.setdefault("best width in hindsight", {}).setdefault(memory, []).append(best)
            if gaussian:
                rows = round(memory * x.shape[0])
                paper = sketch_variance(x, y, kind="gaussian", rows=rows) / sgd
                result.setdefault("gaussian (the paper)", {}).setdefault(memory, []).append(float(paper))
    return {
        title: {memory: statistics.median(values) for memory, values in row.items()} for title, row in result.items()
    }


def main(argv: list[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: Its arguments; None takes those of the process.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.noise", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--data_dir", type=Path, required=True, help="folder with the official GLUE files")
    parser.add_argument("--tasks", nargs="+", default=["sst2", "cola", "stsb"], help="GLUE tasks")
    parser.add_argument("--batch", type=int, default=64, help="sentences per batch")
    parser.add_argument("--steps", type=int, default=25, help="exact training steps before")
    parser.add_argument("--max_seq_length", type=int, default=128, help="tokens per sentence at most")
    parser.add_argument(
        "--memory", type=float, nargs="+", default=[0.05, 0.1, 0.2], help="fractions of the input's bytes"
    )
    parser.add_argument("--itemsize", type=int, default=2, choices=(2, 4), help="bytes per element of the input")
    parser.add_argument("--seed", type=int, default=0, help="seed of everything")
    arguments = parser.parse_args(argv)
    if arguments.steps < STEPS:
        parser.error(f"--steps must be at least {STEPS}, on which bits=auto chooses, got {arguments.steps}")
    for task in arguments.tasks:
        records, mask, samples, choices = record_batch(
            task,
            arguments.data_dir,
            batch=arguments.batch,
            steps=arguments.steps,
            max_length=arguments.max_seq_length,
            seed=arguments.seed,
            memories=arguments.memory,
            itemsize=arguments.itemsize,
        )
        found = noise_table(records, mask, samples, choices, memories=arguments.memory, itemsize=arguments.itemsize)
        padding = 100 * (1 - float(mask.float().mean()))
        print(
            f"{task}: {samples[0]} x {samples[1]} tokens, {padding:.0f} % padding, {len(records)} layers, "
            f"{8 * arguments.itemsize}-bit input; median of D2_sketch / D2_SGD"
        )
        header = ("kept", *(f"{100 * memory:g} %" for memory in arguments.memory))
        print(table(header, [(title, *(f"{row[m]:.3f}" for m in arguments.memory)) for title, row in found.items()]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
