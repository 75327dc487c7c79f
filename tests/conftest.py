"""Settings of the tests, and what several test files of the GLUE script start from and never change."""

from __future__ import annotations

import collections
import gc
import itertools
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# Read when Triton is first imported, by transformers if not here: without a GPU, the kernels run in its interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from glue_helpers import save_tiny, write_cola
from hypothesis import settings

from rmm_linear.activations.lazy_logits import LazyLogits
from rmm_linear.fitting import times
from rmm_linear.norm_estimators import registry

# Files that take 15 seconds or more begin first, so that no process works alone at the end.
LONGEST = (
    "tests/contracts/test_operations.py",
    "tests/contracts/test_modules.py",
    "tests/integrations/test_transformers.py",
    "tests/planning/graphs/test_plan_graph.py",
    "kernels/tests/test_parity.py",
    "kernels/tests/test_compile.py",
    "tests/fitting/test_fit.py",
    "tests/fitting/test_fit_random.py",
    "tests/fitting/test_longest.py",
    "tests/contracts/test_replay.py",
    "tests/contracts/test_untouched.py",
    "tests/glue/test_training.py",
    "tests/glue/test_cli.py",
    "tests/glue/test_checkpoints.py",
    "tests/fitting/test_callback.py",
    "tests/integration/test_compile.py",
    "tests/integration/test_whole_distributed.py",
    "tests/integrations/test_converting_callback.py",
    "tests/glue/test_probe.py",
    "tests/docs/test_pages.py",
)

# Runs are compared to the bit, in processes of their own too: forked ones have one thread, and wait forever for others.
torch.set_num_threads(1)

settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")

# A shell starts background jobs with SIGINT ignored, and a run whose SIGINT is ignored rightly goes on: the tests of
# interruption need it as it is in the foreground.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _own_norm_estimators(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it."""
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))


@pytest.fixture(autouse=True)
def _few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of tests take microseconds, whose ratios say little however often fit times them."""
    monkeypatch.setattr(times, "ROUNDS", 1)
    monkeypatch.setattr(times, "MORE_ROUNDS", 0)
    monkeypatch.setattr(times, "REPEATS", 1)


@pytest.fixture(autouse=True, scope="module")
def _only_new_objects_are_looked_at() -> Iterator[None]:
    """Leave what earlier files left, compiled code and caches, out of every later search for cycles."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[LazyLogits]:
    """Logits that were computed, once for each time."""
    found, read = [], LazyLogits.read
    monkeypatch.setattr(LazyLogits, "read", lambda self: found.append(self) or read(self))
    return found


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny RoBERTa."""
    return save_tiny(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def cola(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small CoLA in the official layout."""
    return write_cola(tmp_path_factory.mktemp("cola"))


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    """A process group of one process."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def no_graphs_left() -> Iterator[None]:
    """Forget after a test what torch.compile has compiled, of which it compiles but a few."""
    yield
    torch._dynamo.reset()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first, and leave for later what tests marked pairs, one_of or diagonal repeat."""
    places = {file: place for place, file in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(places)))
    seen: dict[str, set[object]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("pairs"):
            settings_of = sorted((name, repr(value)) for name, value in item.callspec.params.items())
            pairs = {*itertools.combinations(settings_of, 2), *settings_of}
            if len(settings_of) == 1:  # a title: what is tested, and its settings
                first, *others = enumerate(str(settings_of[0][1]).split())
                pairs = {(first, other) for other in others} or {first}
            known = seen.setdefault(item.nodeid.partition("[")[0], set())
            if pairs <= known:
                item.add_marker(pytest.mark.thorough)
            known |= pairs
    counts = collections.Counter[str]()
    for item in items:
        left = any(map(item.get_closest_marker, ("thorough", "montecarlo", "skip")))
        if (mark := item.get_closest_marker("one_of")) and not left:
            test = item.nodeid.partition("[")[0]
            if counts[test] % mark.args[0]:
                item.add_marker(pytest.mark.thorough)
            counts[test] += 1
    marked = [item for item in items if isinstance(item, pytest.Function) and item.get_closest_marker("diagonal")]
    for _, group in itertools.groupby(marked, key=lambda item: item.nodeid.partition("[")[0]):
        _leave_all_but_the_diagonal(list(group))


def _leave_all_but_the_diagonal(items: list[pytest.Function]) -> None:
    """Take tests with the most settings that no other had, of those the rarest, until there is no such setting."""
    used, left = collections.Counter[tuple[str, ...]](), {item: _settings(item) for item in items}
    rank = lambda item: (sum(not used[one] for one in left[item]), -sum(used[one] for one in left[item]))  # noqa: E731
    while left and rank(item := max(left, key=rank))[0]:
        used.update(left.pop(item))
    for item in left:
        item.add_marker(pytest.mark.thorough)


def _settings(item: pytest.Function) -> list[tuple[str, ...]]:
    """What a test is given: parameters that are listed together are one setting."""
    together = [tuple(re.findall(r"\w+", str(mark.args[0]))) for mark in item.iter_markers("parametrize")]
    alone = [(name,) for name in item.callspec.params if not any(name in names for names in together)]
    return [tuple(f"{name}={item.callspec.params[name]!r}" for name in names) for names in (*together, *alone)]


def pytest_collection_finish() -> None:
    """Leave what was imported out of every later search for cycles: it would take most of the time of many tests."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let all of it be found again, by those who count what is left at the end."""
    gc.unfreeze()
