"""The paper's settings are the defaults, and any flag overrides them."""

import dataclasses

import pytest

from glue_finetune.arguments import make_parser, parse
from glue_finetune.errors import UserError
from glue_finetune.tasks import TASKS, get_task
from rmm_linear import RMMConfig

# Bershatsky et al. 2022: task, batch, learning rate, reported metric.
PAPER = [
    ("cola", 16, 1e-5, "matthews_correlation"),
    ("mnli", 16, 1e-5, "matched_accuracy"),
    ("mrpc", 16, 1e-5, "accuracy"),
    ("qnli", 16, 1e-5, "accuracy"),
    ("qqp", 32, 1e-5, "accuracy"),
    ("rte", 16, 2e-5, "accuracy"),
    ("sst2", 32, 2e-5, "accuracy"),
    ("stsb", 16, 1e-5, "pearson"),
    ("wnli", 32, 1e-5, "accuracy"),
]


@pytest.mark.parametrize(("task", "batch", "lr", "metric"), PAPER)
def test_the_papers_settings_are_the_defaults(task, batch, lr, metric):
    arguments = parse(["--task_name", task, "--output_dir", "run"])
    training = arguments.training
    assert (training.per_device_train_batch_size, training.learning_rate) == (batch, lr)
    assert (training.adam_beta1, training.adam_beta2, training.adam_epsilon) == (0.9, 0.98, 1e-6)
    assert (training.weight_decay, training.num_train_epochs, training.lr_scheduler_type) == (0.1, 10, "polynomial")
    assert training.get_warmup_steps(1000) == 60
    assert "adamw" in training.optim.value
    assert arguments.glue.max_seq_length == 512
    assert get_task(task).main_metric == metric


def test_every_task_of_glue_is_there():
    assert sorted(TASKS) == sorted(task for task, *_ in PAPER)
    assert {task.folder for task in TASKS.values()} >= {"CoLA", "SST-2", "STS-B", "MNLI", "MRPC", "QNLI", "QQP"}


def test_a_flag_overrides_the_paper_even_with_the_value_transformers_has_as_its_default():
    argv = "--task_name cola --output_dir run --weight_decay 0.0 --learning_rate 5e-05 --lr_scheduler_type linear"
    training = parse([*argv.split(), "--adam-beta2=0.999", "--warmup_steps", "7", "--num_train_epochs", "3"]).training
    assert (training.weight_decay, training.learning_rate, training.lr_scheduler_type) == (0.0, 5e-5, "linear")
    assert (training.adam_beta2, training.num_train_epochs) == (0.999, 3)
    assert training.get_warmup_steps(1000) == 7
    assert training.adam_epsilon == 1e-6


def test_names_may_be_spelled_as_the_folders_are():
    assert get_task("SST-2") is TASKS["sst2"]
    assert get_task("STS-B") is TASKS["stsb"]
    with pytest.raises(UserError, match=r"task_name must be one of cola, .*, got 'imdb'"):
        get_task("imdb")


def test_every_scalar_field_of_the_configuration_has_a_flag_with_a_help_line():
    options = {action.dest: action for action in make_parser()._actions}
    for field in dataclasses.fields(RMMConfig):
        if field.name != "overrides":
            assert field.name in options
    assert all(action.help for action in options.values())


def test_sketch_flags_reach_the_configuration():
    start = ["--task_name", "cola", "--output_dir", "run"]
    config = parse([*start, "--kind", "gaussian", "--ratio", "0.25", "--block", "32", "--min_rows", "8"]).config
    assert config is not None
    assert (config.kind, config.ratio, config.block, config.min_rows) == ("gaussian", 0.25, 32, 8)
    assert parse(start).config == RMMConfig()
    assert parse([*start, "--kind", "exact"]).config is None


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["all-linear"], "all-linear"),
        (["query"], ("query",)),
        (["query", "attention.output.dense"], ("query", "attention.output.dense")),
        ([r".*\.(query|key)"], r".*\.(query|key)"),
    ],
)
def test_target_modules_are_names_or_one_regular_expression(words, expected):
    config = parse(["--task_name", "cola", "--output_dir", "run", "--target_modules", *words]).config
    assert config is not None
    assert config.target_modules == expected


def test_flags_override_a_saved_configuration_and_leave_the_rest_of_it(tmp_path):
    path = tmp_path / "sketch.json"
    RMMConfig(kind="rows", ratio=0.3, min_rows=5, overrides={"query": {"ratio": 0.5}}).save(path)
    start = ["--task_name", "cola", "--output_dir", "run", "--rmm_config", str(path)]
    assert parse(start).config == RMMConfig.load(path)
    changed = parse([*start, "--ratio", "0.2"]).config
    assert changed is not None
    assert (changed.kind, changed.ratio, changed.min_rows) == ("rows", 0.2, 5)
    assert changed.overrides == {"query": {"ratio": 0.5}}
    assert parse([*start, "--kind", "exact"]).config is None
