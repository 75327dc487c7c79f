"""Each command runs on small sizes, writes what it says, and refuses what makes no sense."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import COMMANDS, main
from benchmarks.noise.blocks import BlockRow
from benchmarks.noise.shapes import CHECKPOINT, OFFLOADED, Shape
from benchmarks.planning.chains import Cost, Run, Subset, revolve
from benchmarks.planning.fit import Solved
from benchmarks.planning.fit_frontier import Fitted
from benchmarks.planning.fit_images import LEAST, ImagePlan
from benchmarks.planning.fit_steps import EXACT, FIT
from benchmarks.planning.graphs import Planned
from benchmarks.planning.sweep import Waits
from benchmarks.records import RESULTS, Row, Surveyed, read_rows
from benchmarks.suites.host import per_layer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::FutureWarning:transformers")


@pytest.fixture(autouse=True)
def _fresh():
    yield
    torch._dynamo.reset()


def run(out: Path, *arguments: str) -> None:
    assert main([*arguments, "--tiny", "--out", str(out), "--commit", "abc"]) == 0


@pytest.fixture
def glue(cola: Path, model: Path) -> list[str]:
    """Arguments that name a short task and a small model."""
    return ["--data_dir", str(cola), "--model_name_or_path", str(model)]


def test_commands_start_without_the_extras_and_know_one_another() -> None:
    """Nothing of the extras is imported at the start, and their absence is none of an error."""
    code = (
        "import sys\n"
        "for name in ('transformers', 'pandas', 'matplotlib', 'scipy', 'datasets'): sys.modules[name] = None\n"
        "import benchmarks.__main__ as m\n"
        "for name in ('run', 'gpu', 'compile', 'roofline', 'blocks'):\n"
        "    m._parser([name])\n"
        "sys.exit(m.main(['--help']))\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", code]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in COMMANDS)


def test_what_makes_no_sense_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--threads", "0"])
    assert "must be at least 1, got 0" in capsys.readouterr().err
    assert main(["plot", "--out", str(tmp_path)]) == 2
    assert "Run python -m benchmarks run first" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert main(["gpu", "--out", str(tmp_path)]) == main(["run", "--device", "cuda", "--out", str(tmp_path)]) == 2
        assert capsys.readouterr().err.count("needs a CUDA device, and there is none. Use --device cpu.") == 2


def test_suites_measure_and_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, set_to = torch.get_num_threads(), []
    set_threads = torch.set_num_threads
    monkeypatch.setattr(torch, "set_num_threads", lambda count: (set_to.append(count), set_threads(count)))
    try:
        run(tmp_path, "run", "--suite", "linear", "host", "--threads", "2")
    finally:
        set_threads(threads)
    assert 1 in set_to  # for host
    rows = read_rows(tmp_path / "host-cpu.csv", Row)
    assert ({row.threads for row in rows}, {row.status for row in rows}) == ({1}, {"ok"})
    assert len({row.case for row in rows}) == 9
    assert per_layer(rows[0]) == pytest.approx((rows[0].median or 0) / 2 * 1e6)
    assert main(["plot", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "linear-cpu.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.thorough
def test_chains(tmp_path: Path) -> None:
    run(tmp_path, "chains")
    for folder in (tmp_path, RESULTS):
        for row in read_rows(folder / "chains-bptt.csv", Run):
            assert row.counted_steps == row.planned_steps
            # A GRU's parts of a gradient add up in another order.
            assert row.gradients == "equal" or (row.cell == "GRU" and float(row.gradients) < 1e-5)
        costs = {(row.steps, row.policy, row.share): row for row in read_rows(folder / "chains-costs.csv", Cost)}
        for (steps, policy, share), row in costs.items():
            assert row.least <= row.forward_steps <= 1.03 * row.least
            if policy == "states":
                assert row.forward_steps == revolve(steps, row.slots) == costs[steps, "Revolve", share].forward_steps
        measured = [row for row in read_rows(folder / "chains-subsets.csv", Subset) if row.measured is not None]
        assert len(measured) == 2
        for row in measured:
            assert row.is_equal == "equal"
            # On top come what a module makes before its result, and a number per element of the loss.
            assert 0 < (row.measured or 0) - row.peak <= 1.2 * 256 * 1024 * 4
    (row,) = read_rows(tmp_path / "chains-sweep-waits.csv", Waits)
    assert row.forward_steps >= 2 * row.steps - 1
    assert row.share == pytest.approx((row.waited_forward + row.waited_backward) / row.seconds)


@pytest.mark.thorough
def test_graphs(tmp_path: Path) -> None:
    run(tmp_path, "graphs", "--parts", "real", "paper")
    rows = read_rows(tmp_path / "graphs-real.csv", Planned)
    assert [row.method for row in rows] == ["plain", "cuts", "chen", "kusumoto"]
    for row in rows:
        assert row.predicted == row.live
        assert row.is_equal in ("", "equal")
        assert row.with_workspace == pytest.approx(row.allocated, rel=0.03)
    (plain, cuts, *_) = read_rows(tmp_path / "graphs-paper.csv", Planned)
    assert cuts.predicted < 0.6 * plain.predicted  # without the workspace, which is the processor's


def test_solvers(tmp_path: Path) -> None:
    run(tmp_path, "fit", "--parts", "solvers")
    rows = read_rows(tmp_path / "fit-solvers.csv", Solved)
    assert [row.solver for row in rows] == ["milp", "rounded"] * 2
    assert all(row.cost is None or row.cost >= 1 for row in rows)


def test_noise_on_glue(glue: list[str], tmp_path: Path) -> None:
    some = ["--tasks", "cola", "--batch", "16", "--steps", "1", "--max_seq_length", "16", "--memory", "0.2"]
    some += ["--plot", str(tmp_path), "--seeds", "0", "1", "--csv", str(tmp_path / "noise.csv")]
    assert main(["noise", *glue, *some]) == 0
    assert (tmp_path / "noise-cola-1.png").read_bytes().startswith(b"\x89PNG")
    rows = read_rows(tmp_path / "noise.csv", Surveyed)
    assert {(row.seeds, row.seed, row.layers, row.memory) for row in rows} == {(2, "0 1", 12, 0.2)}
    assert all(row.least <= row.noise <= row.most for row in rows)


def test_the_bias_of_attention_and_the_price_of_a_probe(glue: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    some = ["--tasks", "cola", "--batch", "8", "--steps", "1", "--max_seq_length", "16", "--draws", "20"]
    assert main(["attention", *glue, *some, "--whole", "10"]) == 0
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    noises = [float(cells[3]) for cells in lines if len(cells) == 7 and cells[0] == "0"]
    assert noises[0] > noises[1] > noises[2] > 0  # 4 bits, 8 of queries and keys, 8 of all
    assert float(next(cells for cells in lines if cells[:1] == ["whole gradient"])[1]) > 0
    assert main(["probe", *glue, "--batch", "8", "--rounds", "3", "--every", "4"]) == 0
    assert re.search(r"a probe every 4 steps of batch 8: -?[\d.]+ % of training time", capsys.readouterr().out)


def test_what_blocks_save(tmp_path: Path) -> None:
    run(tmp_path, "blocks", "bytes")
    rows = read_rows(tmp_path / "blocks-bytes.csv", BlockRow)
    for case in {(row.case, row.dtype) for row in rows}:
        exact, *first, others = [row.value for row in rows if (row.case, row.dtype) == case]
        assert first == sorted(first, reverse=True)
        assert 0 < first[-1] < min(exact, others)


@pytest.mark.thorough
def test_plans_within_a_budget_and_what_they_are_compared_with(tmp_path: Path) -> None:
    run(tmp_path, "fit", "--parts", "frontier", "--models", "roberta")
    rows = {(row.method, row.share): row for row in read_rows(tmp_path / "fit-frontier.csv", Fitted)}
    exact, met = rows["exact", None], rows[FIT, 0.5]
    assert len(rows) == 1 + 14 + 1 + 2
    assert met.memory == met.floor + int(0.5 * ((exact.measured or 0) - met.floor))
    assert met.floor < (met.measured or 0) <= (met.memory or 0)
    assert rows[met.rival, None].time == met.rival_time
    for method in ("recompute", "pack", "convert narrow"):
        half, every = (rows[f"{method} {part}", None].measured or 0 for part in ("half", "all"))
        assert every < half < (exact.measured or 0)


@pytest.mark.thorough
def test_steps_of_shapes_keep_less_by_every_method_and_have_their_checkpoints_in_files(tmp_path: Path) -> None:
    run(tmp_path, "shapes", "--dtypes", "float32")
    rows = read_rows(tmp_path / "shapes.csv", Shape)
    assert {row.status for row in rows} == {"ok"}
    kept = {(row.case, row.method): row.kept or 0 for row in rows}
    for case in {row.case for row in rows}:
        exact, checkpoints, offloaded = (kept[case, method] for method in ("exact", CHECKPOINT, OFFLOADED))
        assert 0 < offloaded < checkpoints < exact == max(value for (one, _), value in kept.items() if one == case)
    assert {row.method for row in rows if row.host} == {OFFLOADED}


@pytest.mark.thorough
def test_plans_of_networks_of_images_with_codes_need_less_memory(tmp_path: Path) -> None:
    run(tmp_path, "fit", "--parts", "images")
    rows = {(row.method, row.budget): row for row in read_rows(tmp_path / "fit-images.csv", ImagePlan)}
    exact, *least = (rows[one].measured or 0 for one in ((EXACT, ""), ("recomputation", LEAST), ("codes", LEAST)))
    assert exact > least[0] > least[1] > rows[EXACT, ""].floor
    assert all(row.measured == row.simulated for row in rows.values() if row.plan)
    assert all((row.measured or 0) <= row.memory for row in rows.values() if row.memory)


@pytest.mark.thorough
@pytest.mark.parametrize("what", ["left", "noise", "images"])
def test_other_measurements_of_blocks(what: str, tmp_path: Path) -> None:
    run(tmp_path, "blocks", what, "--rounds", "1", "--draws", "2")
    assert (tmp_path / f"blocks-{what}.csv").stat().st_size > 300
