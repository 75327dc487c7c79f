"""Fine-tune RoBERTa on a task of GLUE with transformers' Trainer, compressed, and save model and conversion.

python examples/roberta_glue.py                                    MiniLM on sentences of Python's manual
python examples/roberta_glue.py --model roberta-base --task cola   real ones, from the hub

``python -m glue_finetune`` has all tasks, and what the paper does.
"""

import argparse

import numpy as np
import small
from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer, TrainingArguments

from rmm_linear import RMMConfig
from rmm_linear.integrations.pretrained import save_conversion
from rmm_linear.integrations.transformers import RMMCallback

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="a folder or a name of the hub; default: MiniLM, in RoBERTa's classes")
parser.add_argument("--task", choices=["cola", "sst2"], help="a task of GLUE; default: are the words in their order?")
parser.add_argument("--output_dir", default="out/examples/roberta_glue")
parser.add_argument("--max_steps", type=int, default=25)
args = parser.parse_args()

name = args.model or small.minilm()
model = AutoModelForSequenceClassification.from_pretrained(name, num_labels=2)
tokenizer = AutoTokenizer.from_pretrained(name)
data = load_dataset("nyu-mll/glue", args.task) if args.task else small.sentences()
train, dev = (data[part].map(lambda row: tokenizer(row["sentence"])) for part in ("train", "validation"))

trainer = Trainer(
    model,
    TrainingArguments(
        args.output_dir,
        max_steps=args.max_steps,
        per_device_train_batch_size=32,
        learning_rate=2e-4,
        logging_steps=5,
        report_to="none",
    ),
    train_dataset=train,
    eval_dataset=dev,
    processing_class=tokenizer,
    compute_metrics=lambda found: {"accuracy": float(np.mean(found.predictions.argmax(-1) == found.label_ids))},
    callbacks=[RMMCallback(convert=RMMConfig())],
)
trainer.train()
print(f"Accuracy: {trainer.evaluate()['eval_accuracy']:.3f}")
trainer.save_model()  # of the exact model: from_pretrained needs no rmm_linear
save_conversion(trainer.model, args.output_dir)  # for convert_as_saved, to go on
print(f"Model and rmm_config.json: {args.output_dir}")
