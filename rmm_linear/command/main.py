"""The command line of ``rmm-linear``. What a command needs is imported when it runs, so that help comes at once."""

from __future__ import annotations

import argparse
import importlib
import io
import re
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress

from rmm_linear._support.validation import did_you_mean
from rmm_linear.command import PROGRAM
from rmm_linear.command.known_models import KNOWN

_EXPLAIN = """Run a model forward before and after a trial conversion. Print the bytes that it saves for the backward
pass: in total, by operation, what remains uncompressed and why, and by linear layer. Nothing is trained or written.
The model has random weights, which do not change the bytes."""
_FIT = """Choose for every block of a model whether it saves, compresses, recomputes or offloads its activations, so
that a training process fits a budget. Print the plan with its bytes, time and variance ratio. Nothing is trained. The
model has random weights, or none if it is large: bytes do not depend on them, variances do."""
_LONGEST = """Find the longest sequence with which a training step fits into memory by a plan, exactly, and with every
block recomputed. Steps are simulated on a model without weights, in bfloat16, which takes some minutes at any length.
"""
_DOCTOR = """Say on one page how a model trains: the peak of a step by parts, as it is and converted, what stays and
why, and what to type. Nothing is trained. The model has random weights, or none if it is large."""
_SIMULATE = """Simulate a training step of a model without weights: its peak by pass, module, operation and kind of
tensor. With --memory, also the cheapest ways to fit; the exit status is 1 if the step does not fit as it is."""
_OTHERS = {  # commands with a parser, and a --help, of their own
    "variance": (
        "rmm_linear.variance.__main__",
        "gradient variance of compression relative to the minibatch's, on your own data",
    ),
    "glue": ("glue_finetune.__main__", "fine-tune on a GLUE task, compare settings, or run the demo"),
}
_MODEL = (
    f"{', '.join(KNOWN)}, whose sizes are known; or a folder written by save_pretrained; or a model of the hub, of "
    "which the configuration is read"
)
_RUNS = ("doctor", "explain", "fit", "longest", "simulate")  # modules with a function of their arguments
_COMMANDS = (*_RUNS, *_OTHERS, "version")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command on some arguments, or those of the process. Return the exit status: 0, or 2 for bad input."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in _OTHERS:
        return _run_other(words[0], words[1:])
    if words[:1] == ["--help-all"]:
        return _help_all()
    parser = _parser()
    if words and not words[0].startswith("-") and words[0] not in _COMMANDS:
        parser.error(
            f"COMMAND must be one of {', '.join(_COMMANDS)}, got {words[0]!r}.{did_you_mean(words[0], _COMMANDS)}"
        )
    arguments, unknown = parser.parse_known_args(words)
    if unknown:
        flags = re.findall(r"--[a-z][\w-]*", _help(words[0]))
        word = unknown[0].split("=")[0]
        if word in ("--lora", "--qlora") and "--method" in flags:
            parser.error(f"unrecognized arguments: {word}. Did you mean '--method {word[2:]}'?")
        parser.error(f"unrecognized arguments: {' '.join(unknown)}.{did_you_mean(word, flags)}")
    if arguments.command == "version":
        from rmm_linear.command.version import version

        print(version())
        return 0
    if arguments.command in _RUNS:
        return _run(arguments)
    parser.print_help()
    return 2


def _run(arguments: argparse.Namespace) -> int:
    from rmm_linear.command.models import ERRORS

    try:
        return importlib.import_module(f"rmm_linear.command.{arguments.command}").run(arguments)
    except ERRORS as error:
        print(f"{PROGRAM} {arguments.command}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _run_other(name: str, words: list[str]) -> int:
    named = {"prog": f"{PROGRAM} {name}"} if name == "variance" else {}  # the script of GLUE is a program of its own
    return importlib.import_module(_OTHERS[name][0]).main(words, **named)


def _help(command: str) -> str:
    with redirect_stdout(io.StringIO()) as text, suppress(SystemExit):
        _parser().parse_args([command, "--help"])
    return text.getvalue()


def _help_all() -> int:
    """Print the help of the command, and of those below it that have flags."""
    for words in ([], *([name] for name in (*_RUNS, *_OTHERS))):
        with suppress(SystemExit):
            main([*words, "--help"])
        print()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Fine-tune transformers in less memory: blocks of LLaMA-1B in 40 % of the peak for 20 % more time.",
        epilog=f"{PROGRAM} COMMAND --help has a command's flags, {PROGRAM} --help-all those of all commands, and "
        f"{PROGRAM} glue --help-all those that transformers adds to the script of GLUE.",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    doctor = commands.add_parser("doctor", help="how a model trains, and what to type", description=_DOCTOR)
    _add_model(doctor)
    _add_method(doctor, "full")
    _add_optimizer(doctor)
    _add_progress(doctor)
    explain = commands.add_parser("explain", help="what a conversion saves of a model", description=_EXPLAIN)
    _add_model(explain)
    explain.add_argument(
        "--rmm_config", "--rmm-config", metavar="FILE", help="a configuration that RMMConfig.save wrote (default: ours)"
    )
    explain.add_argument("--operations", nargs="+", metavar="NAME", help="operations to convert (default: all)")
    fit = commands.add_parser("fit", help="how a model trains within a memory budget", description=_FIT)
    _add_model(fit)
    _add_method(fit, "full")
    fit.add_argument("--memory", metavar="SIZE", help="such as 8GB, or a share of the exact model's peak, such as 0.5")
    fit.add_argument(
        "--time",
        type=float,
        metavar="X",
        help="the longest step, relative to the exact one; without --memory: find the least memory",
    )
    _add_optimizer(fit)
    fit.add_argument(
        "--max-noise", "--max_noise", type=float, metavar="X", help="largest variance ratio of a layer (default: 1)"
    )
    fit.add_argument(
        "--allow",
        nargs="+",
        metavar="NAME",
        help="what blocks may do: keep, sketch, pack, recompute, offload, tile (default: all)",
    )
    fit.add_argument("--folder", metavar="DIR", help="where blocks on a CPU write what they offload")
    _add_host(fit)
    _add_progress(fit)
    fit.add_argument("--save", metavar="FILE", help="write the plan, which rmm_linear.planning.load_plan reads")
    longest = commands.add_parser("longest", help="the longest sequence that fits into memory", description=_LONGEST)
    _add_longest(longest)
    simulate = commands.add_parser("simulate", help="the peak of a step, by module", description=_SIMULATE)
    _add_model(simulate)
    _add_method(simulate, "full")
    _add_adapters(simulate)
    _add_optimizer(simulate)
    simulate.add_argument("--memory", metavar="SIZE", help="of the device, such as 80GB or 80GiB: adds ways to fit")
    _add_progress(simulate)
    simulate.add_argument("--json", action="store_true", help="print JSON")
    for name, (_, text) in _OTHERS.items():
        commands.add_parser(name, help=text, add_help=False)
    commands.add_parser("version", help="versions and backends of this machine, for a bug report")
    return parser


def _add_longest(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "model",
        metavar="MODEL",
        help=_MODEL,
    )
    command.add_argument("--memory", required=True, metavar="SIZE", help="of the device, such as 80GB or 80GiB")
    _add_method(command, "lora")
    _add_adapters(command)
    command.add_argument(
        "--batch-size", "--batch_size", type=int, default=1, help="sequences of a batch (default: %(default)s)"
    )
    command.add_argument("--multiple", type=int, default=64, help="lengths are multiples of it (default: %(default)s)")
    command.add_argument(
        "--optimizer",
        choices=("adamw", "sgd", "none"),
        default="adamw",
        help="whose state is counted; adamw is fused (default: %(default)s)",
    )
    command.add_argument(
        "--offload-state",
        "--offload_state",
        action="store_true",
        help="keep parameters, gradients and the optimizer's state on the host, and a layer at a time on the device",
    )
    command.add_argument("--ranks", type=int, help="devices that share parameters, by fully_shard (default: none)")
    command.add_argument("--context", type=int, default=1, help="devices that share a sequence (default: %(default)s)")
    command.add_argument("--tensor", type=int, default=1, help="devices that share linear layers, in addition")
    command.add_argument(
        "--allow",
        nargs="+",
        metavar="NAME",
        help="what blocks may do: keep, sketch, pack, recompute, offload, tile (default: all); without sketch and "
        "pack, gradients are exact",
    )
    _add_host(command)
    _add_progress(command)
    command.add_argument("--json", action="store_true", help="print JSON")
    command.add_argument("--save", metavar="FILE", help="write the plan, which rmm_linear.planning.load_plan reads")


def _add_adapters(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--adapters",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="their dtype (default: %(default)s); PEFT's own default is float32",
    )


def _add_host(command: argparse.ArgumentParser) -> None:
    command.add_argument("--host-memory", "--host_memory", metavar="SIZE", help="for what waits on the host")
    command.add_argument("--bandwidth", metavar="RATE", help="of copies to the host, such as 25GB/s")


def _add_optimizer(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--optimizer",
        choices=("adamw", "sgd", "none"),
        default="adamw",
        help="whose state is counted (default: %(default)s)",
    )


def _add_method(command: argparse.ArgumentParser, default: str) -> None:
    command.add_argument(
        "--method",
        choices=("lora", "qlora", "full"),
        default=default,
        help="what is trained: adapters on all linear layers but the head, on weights as they are or in 4 bits; or all "
        "(default: %(default)s)",
    )
    command.add_argument("--rank", type=int, default=16, help="of the adapters (default: %(default)s)")


def _add_progress(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--progress", action=argparse.BooleanOptionalAction, help="say on stderr how far it is (default: on a terminal)"
    )


def _add_model(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "model",
        metavar="MODEL",
        help=_MODEL,
    )
    command.add_argument(
        "--batch", metavar="FILE", help="a .pt file with a training batch, or a list of such (default: random tokens)"
    )
    command.add_argument("--size", type=int, default=8, help="sequences of the random batch (default: %(default)s)")
    command.add_argument("--length", type=int, default=128, help="tokens of each of them (default: %(default)s)")
