"""The comparison of methods in training, on little data."""

from __future__ import annotations

from pathlib import Path

from glue_helpers import write_cola

from benchmarks.__main__ import main
from benchmarks.frontier.rows import Epoch, Noisy, Point
from glue_finetune.acceptability import make_corpus
from glue_finetune.minilm import save_scratch


def places_in(root: Path) -> list[str]:
    """Write a task and a model; return the arguments that name them."""
    texts = root / "texts.txt"
    texts.write_text("\n".join(example.text for example in make_corpus(100, 2)[0]), encoding="utf-8")
    save_scratch(root / "model", texts, width=32, heads=2)
    return ["--data_dir", str(write_cola(root, 96, 32)), "--model_dir", str(root / "model"), "--tasks", "cola"]


def run(places: list[str], out: Path, *arguments: str) -> None:
    """Run the command."""
    assert main(["frontier", *places, "--out", str(out), "--tiny", "--commit", "abc", *arguments]) == 0


def epoch(method: str, seed: int, score: float, task: str = "cola") -> Epoch:
    """Return the row of a last epoch."""
    return Epoch(
        task=task, method=method, seed=seed, epoch=2, epochs=2, metric="m", score=score, dev_loss=1.0, train_loss=1.0,
        steps=1, seconds=1.0, batch=32, learning_rate=1e-4, rows=9, settings="",
    )  # fmt: skip


def point(method: str, batch: int, loss: float, step: int = 100, epoch: float = 0.9) -> Point:
    """Return an evaluation of a model from scratch."""
    return Point(
        study="language", method=method, seed=0, batch=batch, step=step, steps=200, epoch=epoch, train_loss=loss,
        dev_loss=loss, metric="m", score=0.5, seconds=1.0, learning_rate=1e-3, settings="",
    )  # fmt: skip


def noisy(noise: float, step: int = 50, block: str = "layers.0") -> Noisy:
    """Return a measurement of noise."""
    here = {"study": "language", "method": "tenth", "seed": 0, "batch": 8, "step": step}
    return Noisy(**here, operation="all", block=block, noise=noise, sgd=2.0)
