"""Calls in processes of their own: memory counts start from nothing, and a crash or a hang costs one result only."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

# What a server imports before it is forked; modules that are not there are left out.
_PRELOAD = [
    "benchmarks.suites", "torch._dynamo", "transformers.models.llama.modeling_llama",
    "transformers.models.roberta.modeling_roberta",
]  # fmt: skip


class ProcessError(RuntimeError):
    """A call in a process of its own raised, crashed or took too long."""


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def last_line(error: BaseException) -> str:
    """Return what an error says in one line; of a process of its own, the traceback is in its text."""
    return next(iter(str(error).strip().splitlines()[::-1]), type(error).__name__)


def call(function: Callable[..., Any], *arguments: Any, timeout: float = 600.0) -> Any:
    # A server that has imported everything is forked: a process then takes no seconds. Not with CUDA: an import that so
    # much as counts the devices forbids their use in what is forked later.
    forked, fresh = multiprocessing.get_context("forkserver"), multiprocessing.get_context("spawn")
    forked.set_forkserver_preload(_PRELOAD)
    context = forked if torch.version.cuda is None else fresh
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(there, torch.get_num_threads(), function, arguments))
    process.start()
    there.close()
    try:
        if not here.poll(timeout):
            raise ProcessError(f"{function.__name__} took longer than {timeout:.0f} s")
        done, value = here.recv()
    except EOFError:
        process.join()
        raise ProcessError(f"{function.__name__} ended its process with status {process.exitcode}") from None
    finally:
        process.kill()
        process.join()
        here.close()
    if not done:
        raise ProcessError(value)
    return value


def _answer(connection: Connection, threads: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(threads)
    try:
        answer = (True, function(*arguments))
    except Exception:
        answer = (False, traceback.format_exc())
    connection.send(answer)
    connection.close()
