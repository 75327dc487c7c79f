"""What the tests with the Trainer share: sentences, a Trainer of a tiny converted model, and its logs and weights."""

import math

import torch
from cases import CONFIG
from helpers import tiny_model
from transformers import Trainer, TrainerCallback, TrainingArguments

from rmm_linear import convert
from rmm_linear.integrations.transformers import RMMCallback


class Sentences(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        ids = torch.randint(3, 64, (20,), generator=torch.Generator().manual_seed(index))
        mask = (torch.arange(20) < 20 - index % 8).long()
        return {"input_ids": ids, "attention_mask": mask, "labels": ids[0] % 2}


class Recorder(TrainerCallback):
    """Stands before RMMCallback in the Trainer's list, as TensorBoard, W&B and the rest do."""

    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append({**logs, "step": state.global_step})


def make_trainer(folder, *, config=CONFIG, wrap=None, eval_dataset=None, **options):
    model = tiny_model("roberta") if wrap is None else wrap(tiny_model("roberta"))
    report = None if config is None else convert(model, config)
    settings = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "max_steps": 6,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "use_cpu": True,
        **options,
    }
    recorder = Recorder()
    arguments = TrainingArguments(**settings)
    data = {"train_dataset": Sentences(), "eval_dataset": eval_dataset}
    trainer = Trainer(model, arguments, **data, callbacks=[recorder])
    return trainer, report, recorder


def weights(trainer):
    return [p.detach().clone() for p in trainer.model.parameters()]


def probed(folder, *, every=2, limit=math.inf, whole_every=None, per_layer=True, **options):
    trainer, report, recorder = make_trainer(folder, **options)
    callback = RMMCallback(trainer, report, every=every, limit=limit, whole_every=whole_every, per_layer=per_layer)
    trainer.add_callback(callback)
    return trainer, callback, recorder
