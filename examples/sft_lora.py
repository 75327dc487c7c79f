"""Fine-tune a language model with LoRA by TRL's SFTTrainer, its activations compressed.

python examples/sft_lora.py                                          a small model on Python's manual
python examples/sft_lora.py --model Qwen/Qwen3-0.6B --data trl-lib/Capybara    real ones, from the hub
python examples/sft_lora.py --model my_model --data my_texts.jsonl    your own
"""

import argparse
from pathlib import Path

import torch
from datasets import Dataset, load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

from rmm_linear import RMMConfig
from rmm_linear.integrations.transformers import RMMCallback

FORMATS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="a folder or a name of the hub; default: a small model that is made here")
parser.add_argument("--data", help="a file, a folder or a set of the hub, with texts or messages; default: a manual")
parser.add_argument("--output_dir", default="out/examples/sft_lora")
parser.add_argument("--max_steps", type=int, default=15)
args = parser.parse_args()

if not (args.data and args.model):
    import small  # of this folder
if args.data and (kind := FORMATS.get(Path(args.data).suffix)):
    dataset = load_dataset(kind, data_files=args.data, split="train")
elif args.data:
    dataset = load_dataset(args.data, split="train")  # of the hub, or of a folder with such files
else:
    dataset = Dataset.from_dict({"text": small.paragraphs()})
if not {"text", "messages", "prompt"} & {*dataset.column_names}:
    parser.error(f"--data must have a column text, messages or prompt, got {', '.join(dataset.column_names)}")
rate, model = (1e-4, args.model) if args.model else (1e-2, small.language_model())
config = SFTConfig(
    args.output_dir,
    max_length=256,
    packing=True,  # no padding: rows are filled with whole texts
    learning_rate=rate,
    per_device_train_batch_size=4,
    max_steps=args.max_steps,
    logging_steps=5,
    report_to="none",
    use_cpu=not torch.cuda.is_available(),
)
trainer = SFTTrainer(
    model,
    args=config,
    train_dataset=dataset,
    peft_config=LoraConfig(target_modules="all-linear"),
    callbacks=[RMMCallback(convert=RMMConfig())],  # this line is all that it takes
)
trainer.train()
trainer.save_model()  # adapters of the exact model
print(f"Adapters: {args.output_dir}")
