"""Train a language model on preferences by TRL's DPOTrainer, its activations compressed.

python examples/dpo.py                                                         a small model on Python's manual
python examples/dpo.py --model Qwen/Qwen3-0.6B --data trl-lib/ultrafeedback_binarized     real ones, from the hub
"""

import argparse

import small
import torch
from datasets import load_dataset
from peft import LoraConfig
from trl import DPOConfig, DPOTrainer

from rmm_linear import RMMConfig
from rmm_linear.integrations.transformers import RMMCallback

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="a folder or a name of the hub; default: a small model that is made here")
parser.add_argument("--data", help="a data set of the hub with prompts, chosen and rejected; default: Python's manual")
parser.add_argument("--output_dir", default="out/examples/dpo")
parser.add_argument("--max_steps", type=int, default=15)
args = parser.parse_args()

config = DPOConfig(
    args.output_dir,
    max_length=192,
    learning_rate=1e-5 if args.model else 1e-2,
    per_device_train_batch_size=4,
    max_steps=args.max_steps,
    logging_steps=5,
    report_to="none",
    use_cpu=not torch.cuda.is_available(),
)
trainer = DPOTrainer(
    args.model or small.language_model(),
    args=config,
    train_dataset=load_dataset(args.data, split="train") if args.data else small.preferences(),
    peft_config=LoraConfig(target_modules="all-linear"),
    callbacks=[RMMCallback(convert=RMMConfig())],
)
trainer.train()
trainer.save_model()
print(f"Adapters: {args.output_dir}")
