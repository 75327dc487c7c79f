"""SketchStateCallback: a run of the plain Trainer that is killed while it saves goes on as if it had not been."""

import signal
from types import SimpleNamespace

import pytest
import torch
from cases import WTA
from fault_helpers import at_write, in_a_child, kill
from helpers import tiny_model
from state_helpers import content, learned
from trainer_helpers import Sentences, make_trainer, weights
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from rmm_linear import RMMConfig, convert
from rmm_linear.integrations.transformers import RMMCallback, SketchStateCallback

LEARNING = RMMConfig(norm_estimator="position", **WTA)
STRATEGIES = {
    "steps": {"save_strategy": "steps", "save_steps": 2},
    "epoch": {"save_strategy": "epoch", "per_device_train_batch_size": 12},
    "best": {
        "save_strategy": "best",
        "eval_strategy": "steps",
        "eval_steps": 2,
        "metric_for_best_model": "steps",
        "greater_is_better": True,
    },
}


def trained(folder, callback, strategy="steps", resume=None, trainer_class=None):
    """Eight steps, the last checkpoint alone is kept; save after every second step."""
    model = tiny_model("roberta")
    convert(model, LEARNING)
    args = TrainingArguments(
        output_dir=str(folder),
        max_steps=8,
        learning_rate=1e-2,
        save_total_limit=1,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        use_cpu=True,
        **{"per_device_train_batch_size": 4, **STRATEGIES[strategy]},
    )
    trainer = (trainer_class or Trainer)(model, args, train_dataset=Sentences(), eval_dataset=Sentences())
    trainer.compute_metrics = lambda output: {"steps": trainer.state.global_step}  # always the best so far
    trainer.add_callback(callback(trainer) if callback is RMMCallback else callback())
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.fixture(
    scope="module", params=[pytest.param(one, marks=[pytest.mark.thorough] * (one != "steps")) for one in STRATEGIES]
)
def whole(request, tmp_path_factory):
    """An uninterrupted run, and how it saves."""
    return trained(tmp_path_factory.mktemp("whole"), SketchStateCallback, request.param), request.param


class KilledInTheTrainer(Trainer):
    def _save_checkpoint(self, *args):
        if self.state.global_step == 4:
            kill()
        super()._save_checkpoint(*args)


class KilledAfterTheTrainer(SketchStateCallback):
    def on_save(self, args, state, control, **kwargs):
        if state.global_step == 4:
            kill()
        super().on_save(args, state, control, **kwargs)


def checkpoints(folder):
    return sorted(path.name for path in folder.glob("checkpoint-*"))


def goes_on(folder, whole, strategy):
    resumed = trained(folder, SketchStateCallback, strategy, resume=True)
    assert all(torch.equal(a, b) for a, b in zip(weights(whole), weights(resumed), strict=True))
    assert sorted(path.name for path in folder.iterdir() if "sketch" in path.name) == []  # tidied up
    return resumed


@pytest.mark.diagonal
@pytest.mark.parametrize("callback", [SketchStateCallback, RMMCallback])
def test_killed_before_the_trainer_saves(tmp_path, whole, callback):
    """What was written early is of no use then, and of no harm."""
    whole, strategy = whole
    run = lambda: bool(trained(tmp_path, callback, strategy, trainer_class=KilledInTheTrainer))  # noqa: E731
    assert in_a_child(run) == -signal.SIGKILL
    assert checkpoints(tmp_path) == ["checkpoint-2"]
    assert (tmp_path / "sketch_state-4.json").is_file()
    goes_on(tmp_path, whole, strategy)


def test_killed_between_the_trainers_checkpoint_and_ours(tmp_path, whole):
    """The Trainer has removed the earlier checkpoint already."""
    whole, strategy = whole
    assert in_a_child(lambda: bool(trained(tmp_path, KilledAfterTheTrainer, strategy))) == -signal.SIGKILL
    assert checkpoints(tmp_path) == ["checkpoint-4"]
    assert not (tmp_path / "checkpoint-4" / "sketch_state.json").exists()
    goes_on(tmp_path, whole, strategy)


def test_killed_at_any_moment_while_the_state_goes_into_the_checkpoint(tmp_path, monkeypatch):
    """The state is found, and what is left of the early one goes with the next checkpoint."""
    model, callback, control = learned(), SketchStateCallback(), TrainerControl(should_save=True)
    number, status = 0, 1
    while status:
        folder = tmp_path / str(number)
        args = SimpleNamespace(output_dir=str(folder), resume_from_checkpoint=None)
        state = TrainerState(global_step=4)
        (folder / "checkpoint-4").mkdir(parents=True)
        callback.on_train_begin(args, TrainerState(), control, model=model)
        callback.on_step_end(args, state, control, model=model)

        def save(args=args, state=state, number=number):
            at_write(monkeypatch, number, kill)
            callback.on_save(args, state, control, model=model)
            return 0

        status = in_a_child(save)
        assert status in (0, -signal.SIGKILL)
        twin = learned(8)
        callback.on_train_begin(args, state, control, model=twin)
        assert content(twin) == content(model)
        later = TrainerState(global_step=6)
        callback.on_step_end(args, later, control, model=twin)
        (folder / "checkpoint-4").rename(folder / "checkpoint-6")  # the Trainer makes one and removes the other
        callback.on_save(args, later, control, model=twin)
        assert [path.name for path in folder.iterdir()] == ["checkpoint-6"]
        number += 1
    assert number > 6


def test_a_state_is_kept_as_long_as_its_checkpoint_lacks_it(tmp_path):
    """Both checkpoints stay, and the first of them was never completed."""
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "save_total_limit": 2}
    made, _, _ = make_trainer(tmp_path, config=LEARNING, **options)

    class Forgets(SketchStateCallback):
        def on_save(self, args, state, control, **kwargs):
            if state.global_step == 4:
                super().on_save(args, state, control, **kwargs)

    made.add_callback(Forgets())
    made.train()
    assert (tmp_path / "sketch_state-2.json").is_file()
    assert not (tmp_path / "sketch_state-4.json").exists()
    again, _, _ = make_trainer(tmp_path, config=LEARNING, **options)
    again.add_callback(SketchStateCallback())
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert all(torch.equal(a, b) for a, b in zip(weights(made), weights(again), strict=True))


def test_a_checkpoint_that_was_not_announced_has_its_state_too(tmp_path):
    """Asked for by a callback that was added later, which this one cannot see."""

    class Asks(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_save = state.global_step == 3

    made, _, _ = make_trainer(tmp_path, config=LEARNING, max_steps=4)
    made.add_callback(SketchStateCallback())
    made.add_callback(Asks())
    made.train()
    assert (tmp_path / "checkpoint-3" / "sketch_state.json").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-3"]
