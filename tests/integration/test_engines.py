"""Distributed engines in two processes, on CPU with gloo: the same step as in one process, but for the noise of codes.

Tensor, pipeline and context parallelism, and ZeRO, by what is converted. One row of each engine runs always; the others
take a minute. Pipelines keep the outputs of several microbatches, and zero-bubble ones take the backward pass apart.
"""

import importlib.util

import pytest
from distributed_helpers import check_unbiased, run_ranks

QUICK = [
    ("tensor, converted then", "whole"),
    ("tensor, transformers", "whole"),
    ("pipeline, 1F1B", "whole"),
    ("context", "whole"),
]
TENSOR = ["tensor, converted first", "tensor, converted then", "tensor, sequences", "tensor, transformers"]
PIPELINE = ["GPipe", "1F1B", "converted whole"]
ZERO = [f"ZeRO-{stage}" for stage in (1, 2, 3)] + ["ZeRO-3, converted then"]
LONG = [
    *((engine, case) for engine in TENSOR for case in ("linear", "whole", "own code") if "sequences" not in engine),
    *(("tensor, sequences", case) for case in ("linear", "whole")),
    ("tensor, transformers", "experts"),
    *((f"pipeline, {schedule}", case) for schedule in PIPELINE for case in ("linear", "whole", "own code")),
    ("pipeline, zero bubble", "deep"),
    ("pipeline, ZBV", "deep"),
    *(("context", case) for case in ("linear", "experts")),
]
WITH_ZERO = [(engine, case) for engine in ZERO for case in ("linear", "whole", "own code", "experts")]


def rows(cases):
    return ";".join(map("/".join, cases))


PARTS = {
    "quick": (rows(QUICK), 8),
    "long": (rows(c for c in LONG if c not in QUICK), 20),
    "ZeRO": (rows(WITH_ZERO), 20),
}
NAMES = [
    *QUICK,
    *(pytest.param(*case, marks=pytest.mark.stack) for case in LONG if case not in QUICK),
    *(pytest.param(*case, marks=pytest.mark.stack) for case in WITH_ZERO),
]
every = pytest.mark.parametrize(("engine", "case"), NAMES)


REFUSED = {
    "states": "The ranks of a tensor parallel group must draw the same random numbers",
    "traced": "make the stages by hand",
    "stage": "got one that torch.export has made",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return what both ranks found of an engine and a case."""
    done = {}

    def found(engine, case):
        part = (
            "quick"
            if (engine, case) in [*QUICK, ("refused", "")]
            else "ZeRO"
            if (engine, case) in WITH_ZERO
            else "long"
        )
        if part == "ZeRO" and importlib.util.find_spec("deepspeed") is None:
            pytest.skip("DeepSpeed is not installed")
        if part not in done:
            done[part] = None  # once, if it fails
            done[part] = run_ranks("engines", tmp_path_factory.mktemp("ranks"), *PARTS[part])
        return [rank["refused" if engine == "refused" else f"{engine}/{case}"] for rank in done[part]]

    return found


@every
def test_the_exact_model_has_the_gradients_of_one_process(run, engine, case):
    """Of the engine itself, without which the other tests would say nothing: sums in another order."""
    for rank in run(engine, case):
        assert rank["engine"] < 1e-5
        assert rank["engine's loss"] < 1e-5


@every
def test_the_loss_is_that_of_the_exact_model(run, engine, case):
    """But for a loss over a vocabulary in chunks, and sums that ranks make in another order."""
    for rank in run(engine, case):
        assert rank["loss"] < 1e-6


@every
def test_gradients_are_unbiased(run, engine, case):
    check_unbiased(run(engine, case)[0], 0.05)


@pytest.mark.parametrize(("engine", "case"), [one for one in NAMES if "linear" in getattr(one, "values", one)])
def test_what_is_not_converted_has_exact_gradients(run, engine, case):
    for rank in run(engine, case):
        assert rank["exact parts"] < 1e-5


@every
def test_every_rank_draws_numbers_of_its_own(run, engine, case):
    """Layers that read the same input draw one number; of a tensor parallel group, others may share it too."""
    first, second = (rank["seeds"] for rank in run(engine, case))
    assert len(set(first)) > 1
    assert set(first) != set(second)
    if not engine.startswith("tensor"):
        assert not set(first) & set(second)


@every
def test_layers_share_the_sketch_of_their_input(run, engine, case):
    """Queries, keys and values; gate and up. Engines may hand each of them a view of its own."""
    for rank in run(engine, case):
        assert 3 in rank["shared"] or engine == "pipeline, converted whole"  # outside of a forward pass, none do


@every
def test_copies_of_a_parameter_get_the_same_gradient(run, engine, case):
    """To the bit: else they would drift apart."""
    for rank in run(engine, case):
        assert rank["apart"] == []


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_be_wrong_in_silence_is_refused(run, what):
    for rank in run("refused", ""):
        assert REFUSED[what] in rank[what]


@pytest.mark.stack
def test_replicas_of_a_tensor_parallel_group_draw_other_numbers(tmp_path):
    """Two by two: a norm's gradient is the same within a group, and has other noise in its replica."""
    first, second, *replica = run_ranks("mesh", tmp_path, count=4)
    for case, gradient in first.items():
        assert gradient == second[case]
        assert replica[0][case] == replica[1][case] != gradient
