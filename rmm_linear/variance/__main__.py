"""Measure the gradient variance that sketches add, on your own data: ``python -m rmm_linear.variance MODEL BATCH``.

MODEL is a folder written by save_pretrained, or a model of the hub. BATCH is a text file (one example per line: text,
tab, label, or two texts and a label) for a sequence classifier, or a .pt file with the keyword arguments of one
training batch, or a list of such, for any model that returns its loss. The model is trained exactly for a few steps (on
all but the last batch of a .pt file), and their variance relative to the
minibatch's is measured on the next batch. --size, --steps and --max_seq_length apply to text files.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from rmm_linear._support.files import replacing
from rmm_linear._support.progress import reporting, stage
from rmm_linear.sketches import KINDS
from rmm_linear.variance.plots import plot_noise_against_memory
from rmm_linear.variance.survey.batches import load_tensors, load_texts
from rmm_linear.variance.survey.recommendation import describe_layers
from rmm_linear.variance.survey.survey import (
    MEMORIES,
    MemoryNoise,
    describe,
    describe_batch,
    noise_at_memory,
    train_and_record,
)
from rmm_linear.variance.whole_model import gradient_noise

_DEFAULT = " (default: %(default)s)"


def main(argv: list[str] | None = None, prog: str = "python -m rmm_linear.variance") -> int:
    """Run the command on some arguments, or those of the process. Return the exit status: 0, or 2 for bad input."""
    arguments = _parser(prog).parse_args(argv)
    fail = functools.partial(_fail, prog)
    if not arguments.plot.absolute().parent.is_dir():
        return fail(f"--plot must be a file in a folder that is there, got {arguments.plot}. Make the folder first.")
    torch.manual_seed(arguments.seed)
    try:
        with reporting("variance", arguments.progress):
            _survey(arguments)
    except IndexError as error:
        return fail(f"a token or label is out of the model's range: {error}")
    except (OSError, ValueError, TypeError, ImportError, RuntimeError) as error:
        return fail(str(error))
    return 0


def _survey(arguments: argparse.Namespace) -> None:
    stage("loading the model and the batches")
    if arguments.batch.suffix == ".pt":
        model, batches = load_tensors(arguments.model, arguments.batch)
    else:
        model, batches = load_texts(
            arguments.model,
            arguments.batch,
            batch=arguments.size,
            steps=arguments.steps,
            max_length=arguments.max_seq_length,
        )
    source = f"{Path(arguments.model).name}, {arguments.batch.name}"
    print_survey(model, batches, arguments, arguments.plot, source=source)


def _fail(prog: str, message: str) -> int:
    print(f"{prog.removeprefix('python -m ')}: error: {' '.join(message.split())}", file=sys.stderr)
    return 2


def add_arguments(parser: argparse.ArgumentParser, kinds: Sequence[str] = KINDS) -> None:
    """Add what a survey can be told, whatever its model and data."""

    def fraction(text: str) -> float:
        value = float(text)
        if not 0 < value <= 1:
            raise argparse.ArgumentTypeError(f"must be in (0, 1], got {text}")
        return value

    parser.add_argument(
        "--kinds", nargs="+", default=list(kinds), choices=KINDS, help=_listed("kinds of sketches", kinds)
    )
    parser.add_argument(
        "--layers",
        action="store_true",
        help="also print the kind and width with the lowest variance ratio for every layer",
    )
    memory = {"nargs": "+", "type": fraction, "default": list(MEMORIES)}
    parser.add_argument("--memory", **memory, help=_listed("fractions of the input's bytes", MEMORIES))
    help = f"regular expression for the layers' whole names{_DEFAULT}"
    parser.add_argument("--modules", default="all-linear", help=help)
    help = f"bytes per element of the input{_DEFAULT}"
    parser.add_argument("--itemsize", type=int, default=2, choices=(2, 4), help=help)
    parser.add_argument("--steps", type=count(0), default=25, help=f"exact training steps before{_DEFAULT}")
    parser.add_argument("--max_seq_length", type=count(1), default=128, help=f"tokens per text at most{_DEFAULT}")
    parser.add_argument("--learning_rate", type=float, default=1e-4, help=f"of the training steps{_DEFAULT}")
    help = "gradients of the converted model from which the variance ratio of all parameters is estimated; 0 skips it"
    parser.add_argument("--draws", type=count(0), default=2, help=f"{help}{_DEFAULT}")


def _listed(help: str, default: Sequence[object]) -> str:
    """Return a help text with a default of several words, as they are typed."""
    return f"{help} (default: {' '.join(map(str, default))})"


def count(least: int) -> Callable[[str], int]:
    """Return the type of an argument that is an integer of at least ``least``."""

    def integer(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {text}")
        return value

    return integer


def print_survey(
    model: nn.Module,
    batches: Sequence[Mapping[str, Any]],
    arguments: argparse.Namespace,
    picture: Path,
    *,
    source: str,
    title: str = "",
) -> list[MemoryNoise]:
    """Train on all batches but the last one, and print and plot the noise on that."""
    shape = {"memories": arguments.memory, "itemsize": arguments.itemsize}
    records = train_and_record(model, batches, modules=arguments.modules, learning_rate=arguments.learning_rate)
    noises = noise_at_memory(records, kinds=arguments.kinds, **shape)
    print(f"{title}{describe(records, noises, arguments.itemsize)}")
    if arguments.layers:
        print(f"\n{describe_layers(noises)}")
    if arguments.draws:
        print(f"\n{title}whole gradient, converted as by default; variance ratio D2 / D2_SGD by block and operation")
        try:
            print(gradient_noise(model, batches[-1], draws=arguments.draws))
        except ValueError as error:  # one sequence
            print(f"not measured: {error}")
    axes = plot_noise_against_memory(noises)
    axes.set_title(f"{source}: median of {len(records)} layers, {describe_batch(records)}")
    with replacing(picture) as file:
        cast(Any, axes.figure).savefig(file, dpi=150)
    print(f"\n{title}picture of the variance ratio against memory: {picture}", flush=True)
    return noises


def _parser(prog: str) -> argparse.ArgumentParser:
    usage = (__doc__ or "").split("\n\n", 1)[1]
    parser = argparse.ArgumentParser(prog=prog, description=usage)
    parser.add_argument("model", metavar="MODEL", help="model folder, or model of the hub")
    parser.add_argument("batch", metavar="BATCH", type=Path, help="text file, or .pt file")
    file = "where to write the picture of the variance ratio against memory (default: %(default)s)"
    parser.add_argument("--plot", type=Path, default=Path("noise.png"), metavar="FILE", help=file)
    parser.add_argument("--size", type=count(1), default=64, help=f"examples per batch of a text file{_DEFAULT}")
    parser.add_argument("--seed", type=int, default=0, help=f"seed of everything{_DEFAULT}")
    parser.add_argument(
        "--progress", action=argparse.BooleanOptionalAction, help="say on stderr how far it is (default: on a terminal)"
    )
    add_arguments(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
