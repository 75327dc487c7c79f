"""Measure: ``python -m benchmarks COMMAND``; ``--help`` lists the commands, and each of them has its own.

A command is a module with ``add_arguments(parser)`` and ``run(arguments)``, which prints nothing but returns an exit
status or yields what is printed. Only the module of the command that is asked for is imported: others may need packages
that are not there.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

import torch

from benchmarks.records import RESULTS

COMMANDS = {
    "run": ("suites.runner", "suites: layers, blocks, kernels and the host, all providers side by side in one run"),
    "plot": ("suites.plots", "suites: plot their csv files"),
    "gpu": ("gpu.command", "gpu: all that a CUDA machine must show, not installed"),
    "compile": ("gpu.compiled", "gpu: what compilers say of the Triton kernels; needs no accelerator"),
    "roofline": ("pages.gpu", "gpu: bytes, FLOPs and the least times of blocks, from data sheets"),
    "chains": ("planning.chains", "planning: chains of steps in little memory: steps, bytes, pictures"),
    "graphs": ("planning.graphs", "planning: plans for whole networks: peaks, predicted and measured, operations"),
    "fit": ("planning.fit", "planning: one plan within a budget, compared with single methods"),
    "long": ("planning.long", "planning: long sequences: what waits in files, tiles, the least memory, random models"),
    "noise": ("noise.survey", "noise: sketches compared with the minibatch, on GLUE"),
    "sampling": ("noise.sampling", "noise: row sampling with every norm estimator, on GLUE"),
    "attention": ("noise.attention", "noise: the bias of packed attention, on GLUE"),
    "probe": ("noise.probe", "noise: the time that a probe costs"),
    "blocks": ("noise.blocks", "noise: what whole blocks save, the noise of it, and the times of images' steps"),
    "shapes": ("noise.shapes", "noise: steps of real models' shapes, compared with what PyTorch has for little memory"),
    "frontier": ("frontier.command", "frontier: accuracy, bytes and time of methods that train; resumes"),
    "peft": ("peft.small", "peft: PEFT's suite MetaMathQA on a tiny model, from a checkout of PEFT"),
    "zoo": ("suites.zoo", "suites: every type of model of transformers, small: bytes left, outputs, gradients"),
    "table": ("pages.fill", "pages: write the tables of README and docs/ from the csv files"),
}


def main(argv: list[str] | None = None) -> int:
    """Run the command.

    The exit status is 1 if a provider failed or a page is out of date, 2 if the command cannot run. A command that
    writes into benchmarks/results fills the pages, too.
    """
    argv = sys.argv[1:] if argv is None else argv
    arguments = _parser(argv).parse_args(argv)
    if getattr(arguments, "device", "cpu") == "cuda" and not torch.cuda.is_available():
        print("--device cuda needs a CUDA device, and there is none. Use --device cpu.", file=sys.stderr)
        return 2
    try:
        found = arguments.run(arguments)
        status = found if isinstance(found, int) else 0
        for text in () if isinstance(found, int) else found:
            print(text, flush=True)
        if RESULTS in (getattr(arguments, "out", None), getattr(arguments, "csv", Path()).parent):
            importlib.import_module("benchmarks.pages.fill").update()
    except (ImportError, ValueError) as error:  # packages and files that are not there or not as they should be
        print(error, file=sys.stderr)
        return 2
    return status


def _parser(argv: list[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure, and write csv files and pages.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", title="commands, by room")
    for name, (module, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text)
        if name in argv[:1]:
            found = importlib.import_module(f"benchmarks.{module}")
            command.description = " ".join((found.__doc__ or "").split("\n\n")[-1].split())
            found.add_arguments(command)
            command.set_defaults(run=found.run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
