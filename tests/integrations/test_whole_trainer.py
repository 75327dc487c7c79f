"""The Trainer with the default conversion: a causal language model and a classifier."""

import pytest
import torch
from helpers import tiny_model
from trainer_helpers import Sentences
from transformers import Trainer, TrainingArguments

from rmm_linear import convert


class Texts(Sentences):
    """Sentences whose labels are their tokens; padding has none."""

    def __getitem__(self, index):
        item = super().__getitem__(index)
        item["labels"] = item["input_ids"].masked_fill(item["attention_mask"] == 0, -100)
        return item


class Losses(Trainer):
    """Remembers the loss of every microbatch."""

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self.losses = [*getattr(self, "losses", []), loss.item()]
        return loss


def trainer(architecture, folder, *, whole, **options):
    model = tiny_model(architecture, dropout=0.0)
    if whole:
        convert(model)
        if architecture == "llama":
            model.lm_head.rmm_chunk = 7
    settings = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "max_steps": 4,
        "learning_rate": 1e-3,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "use_cpu": True,
        **options,
    }
    data = Texts() if architecture == "llama" else Sentences()
    return Losses(model, TrainingArguments(**settings), train_dataset=data)


OPTIONS = {
    "plain": {},
    "accumulated": {"gradient_accumulation_steps": 3, "max_steps": 2},
    "checkpointed": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "reentrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "smoothed": {"label_smoothing_factor": 0.1},
    "bf16": {"bf16": True},
}


SHORT = [("llama", "accumulated"), ("roberta", "reentrant")]


@pytest.mark.parametrize(
    ("architecture", "how"),
    [
        pytest.param(name, how, marks=[] if (name, how) in SHORT else pytest.mark.stack)
        for name in ("llama", "roberta")
        for how in OPTIONS
    ],
)
def test_the_first_losses_are_the_exact_models_and_the_last_ones_near(architecture, how, tmp_path, reads):
    """Before the first step, weights are the same. Smoothed labels need the logits, and all else does without."""
    made = [trainer(architecture, tmp_path / str(whole), whole=whole, **OPTIONS[how]) for whole in (False, True)]
    for one in made:
        one.train()
    exact, found = (one.losses for one in made)
    assert len(found) == len(exact) == (6 if how == "accumulated" else 4)
    before = 3 if how == "accumulated" else 1
    error = 2**-7 if how == "bf16" else 1e-6  # of a loss that is summed in another order
    assert found[:before] == pytest.approx(exact[:before], rel=error)
    # Adam's steps of 1e-3 move the loss by some per cent, and the noise of gradients by a part of it.
    assert found[-1] == pytest.approx(exact[-1], rel=0.05)
    moved = [not torch.equal(a, b) for a, b in zip(*(one.model.parameters() for one in made), strict=True)]
    assert any(moved)
    assert bool(reads) == (architecture == "llama" and how == "smoothed")
