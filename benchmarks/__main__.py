"""Measure: ``python -m benchmarks``; ``--help`` lists the commands, and each of them has its own."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

from benchmarks import chains, compiled, fit, gpu, graphs
from benchmarks.fit_models import MODELS
from benchmarks.fit_paper import LARGE
from benchmarks.fit_paper_models import PLACES
from benchmarks.frontier import command as frontier
from benchmarks.pages import fill
from benchmarks.pages import gpu as bounds
from benchmarks.plots import plot_all
from benchmarks.records import RESULTS, show
from benchmarks.runner import run_suite
from benchmarks.suites import SUITES


def main(argv: list[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: Its arguments; None takes those of the process.

    Returns:
        The exit status: 1 if a provider failed or a page is out of date, 2 if the command cannot run.
    """
    parser = _parser()
    arguments = parser.parse_args(argv)
    if getattr(arguments, "threads", 1) < 1:
        parser.error(f"--threads must be at least 1, got {arguments.threads}")
    if getattr(arguments, "device", "cpu") == "cuda" and not torch.cuda.is_available():
        print("--device cuda needs a CUDA device, and there is none. Use --device cpu.", file=sys.stderr)
        return 2
    try:
        return arguments.command(arguments)
    except (ImportError, ValueError) as error:  # packages and files that are not there or not as they should be
        print(error, file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Layers, models and kernels, all providers side by side in one run."
    )
    commands = parser.add_subparsers(required=True)

    run = commands.add_parser("run", help="measure suites; a run replaces each suite's csv file")
    run.set_defaults(command=_run)
    run.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    run.add_argument("--suite", choices=tuple(SUITES), nargs="+", default=list(SUITES), help="all by default")
    run.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads of the CPU")
    run.add_argument("--seed", type=int, default=0, help="seed of the sketches in the timed runs")
    run.add_argument("--ratios", type=float, nargs="+", help="only cases of these ratios; all by default")

    plot = commands.add_parser("plot", help="plot the csv files")
    plot.set_defaults(command=_plot)
    plot.add_argument("--out", type=Path, default=RESULTS, help="folder of the csv files")

    tables = commands.add_parser("table", help="write the tables of docs/ from the csv files")
    tables.set_defaults(command=_table)
    tables.add_argument("--check", action="store_true", help="write nothing; fail if a page is out of date")

    all_of_it = commands.add_parser("gpu", help="all that a CUDA machine must show, not installed")
    all_of_it.set_defaults(command=_gpu)
    all_of_it.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="cpu: Triton's interpreter")
    all_of_it.add_argument(
        "--sections", choices=tuple(gpu.SHARES), nargs="+", default=list(gpu.SHARES), help="all by default"
    )
    all_of_it.add_argument("--seconds", type=float, default=gpu.SECONDS, help="time for all of it")

    compiling = commands.add_parser("compile", help="what compilers say of the Triton kernels; needs no accelerator")
    compiling.set_defaults(command=_compile)
    compiling.add_argument("--out", type=Path, default=RESULTS, help="folder of the csv file")
    compiling.add_argument("--commit", default="", help="commit to write into the csv where there is no git")

    bounds = commands.add_parser("roofline", help="bytes, FLOPs and the least times of blocks, from data sheets")
    bounds.set_defaults(command=_roofline)

    planned = commands.add_parser("chains", help="chains of steps in little memory: steps, bytes, pictures")
    planned.set_defaults(command=_chains)
    planned.add_argument(
        "--parts", choices=tuple(chains.PARTS), nargs="+", default=list(chains.PARTS), help="all by default"
    )

    whole = commands.add_parser("graphs", help="plans for whole networks: peaks, predicted and measured, operations")
    whole.set_defaults(command=_graphs)
    whole.add_argument(
        "--parts", choices=tuple(graphs.PARTS), nargs="+", default=list(graphs.PARTS), help="all by default"
    )

    fitting = commands.add_parser("fit", help="one plan within a budget, beside single methods and PyTorch's")
    fitting.set_defaults(command=_fit)
    fitting.add_argument("--parts", choices=fit.PARTS, nargs="+", default=list(fit.PARTS), help="all by default")
    fitting.add_argument(
        "--models", choices=(*MODELS, *LARGE), nargs="+", default=[*MODELS, *LARGE], help="all by default"
    )
    fitting.add_argument("--device", choices=tuple(PLACES), nargs="+", default=list(PLACES), help="of part paper")

    training = commands.add_parser("frontier", help="accuracy, bytes and time of methods that train; resumes")
    training.set_defaults(command=_frontier)
    frontier.add_arguments(training)

    into_results = (run, planned, whole, fitting, training)
    for command, out in (*((one, RESULTS) for one in into_results), (all_of_it, None)):
        command.add_argument("--out", type=Path, default=out, required=out is None, help="folder of the csv files")
        command.add_argument("--tiny", action="store_true", help="small sizes, to try the command")
        command.add_argument("--commit", default="", help="commit to write into the csv where there is no git")
    return parser


def _run(arguments: argparse.Namespace) -> int:
    torch.set_num_threads(arguments.threads)
    failed = False
    chosen = {suite: SUITES[suite].cases(arguments.device, tiny=arguments.tiny) for suite in arguments.suite}
    for suite, cases in chosen.items():
        begin, count, path = time.monotonic(), 0, arguments.out / f"{suite}-{arguments.device}.csv"
        cases = [case for case in cases if not arguments.ratios or case.ratio in arguments.ratios]
        for rows in run_suite(path, cases, commit=arguments.commit, seed=arguments.seed):
            count += len(rows)
            failed = failed or any(row.status != "ok" for row in rows)
            print(show(rows), flush=True)
        print(f"{suite}: {count} rows in {time.monotonic() - begin:.0f} s, {path}", flush=True)
    return 1 if failed else 0


def _plot(arguments: argparse.Namespace) -> int:
    for path in plot_all(arguments.out):
        print(path)
    return 0


def _table(arguments: argparse.Namespace) -> int:
    if fill.update(check=arguments.check):
        return 0
    print("A page is out of date. Run: python -m benchmarks table", file=sys.stderr)
    return 1


def _compile(arguments: argparse.Namespace) -> int:
    print(compiled.summary(compiled.compile_all(arguments.out, commit=arguments.commit)))
    return 0


def _roofline(arguments: argparse.Namespace) -> int:
    for name, make in bounds.TABLES.items():
        if name.startswith("roofline"):
            print(make(RESULTS), end="\n\n")
    return 0


def _chains(arguments: argparse.Namespace) -> int:
    for text in chains.run(arguments.out, arguments.parts, commit=arguments.commit, tiny=arguments.tiny):
        print(text, end="\n\n", flush=True)
    if arguments.out == RESULTS:
        fill.update()
    return 0


def _graphs(arguments: argparse.Namespace) -> int:
    for text in graphs.run(arguments.out, arguments.parts, commit=arguments.commit, tiny=arguments.tiny):
        print(text, end="\n\n", flush=True)
    if arguments.out == RESULTS:
        fill.update()
    return 0


def _fit(arguments: argparse.Namespace) -> int:
    options = {"commit": arguments.commit, "tiny": arguments.tiny}
    for text in fit.run(arguments.out, arguments.parts, arguments.models, arguments.device, **options):
        print(text, end="\n\n", flush=True)
    if arguments.out == RESULTS:
        fill.update()
    return 0


def _frontier(arguments: argparse.Namespace) -> int:
    for text in frontier.run(arguments):
        print(text, flush=True)
    if arguments.out == RESULTS:
        fill.update()
    return 0


def _gpu(arguments: argparse.Namespace) -> int:
    options = {"device": arguments.device, "tiny": arguments.tiny, "seconds": arguments.seconds}
    return gpu.gpu(arguments.out, arguments.sections, commit=arguments.commit, **options)


if __name__ == "__main__":
    sys.exit(main())
