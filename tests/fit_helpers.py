"""What the tests of fits in training share."""

from trainer_helpers import make_trainer

from rmm_linear.integrations.fit_training import ENTRY
from rmm_linear.integrations.transformers import RMMCallback

RECOMPUTED = {"memory": 0.8, "allow": ["keep", "recompute"]}


def fitting(folder, fit, *, every=50, **options):
    trainer, _, recorder = make_trainer(folder, config=None, **options)
    callback = RMMCallback(trainer, fit=fit, every=every)
    trainer.add_callback(callback)
    return trainer, callback, recorder


def entries(trainer):
    return [entry[ENTRY] for entry in trainer.state.log_history if ENTRY in entry]


def elements(trainer):
    return [entry["elements"] for entry in entries(trainer)]


def cut(trainer, lengths):
    """Give the batches of a run these lengths."""
    left, collate = iter(lengths), trainer.data_collator

    def collated(rows):
        length = next(left)
        return {key: value[:, :length] if value.dim() > 1 else value for key, value in collate(rows).items()}

    trainer.data_collator = collated
