"""Find the longest sequence that trains within a budget, plan for it, and train on a text of that length.

python examples/long_context.py                                                   a small model on Python's manual
python examples/long_context.py --model Qwen/Qwen3-0.6B --memory 24GB --text book.txt    a real one, from the hub
"""

import argparse
from pathlib import Path

import small
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import rmm_linear
from rmm_linear.memory import peak

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="a folder or a name of the hub; default: a small model that is made here")
parser.add_argument("--memory", default="50MB", help="the budget of a training step")
parser.add_argument("--text", type=Path, help="a long text; default: Python's manual")
parser.add_argument("--max_steps", type=int, default=3)
args = parser.parse_args()

name = args.model or small.language_model(hidden_size=64, num_hidden_layers=3, max_position_embeddings=100_000)
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name)
model = model.to("cuda" if torch.cuda.is_available() else "cpu").train()
model.config.use_cache = False
text = args.text.read_text(encoding="utf-8") if args.text else "\n".join(small.paragraphs())
ids = tokenizer(text, return_tensors="pt").input_ids.to(model.device)

exact = ("keep", "recompute", "tile")  # gradients stay exact; leave allow out for all options
first = {"input_ids": ids[:, :512], "labels": ids[:, :512]}
found = rmm_linear.max_length(model, first, args.memory, optimizer=torch.optim.AdamW, allow=exact)
print(found)
found.plan.apply(model)

length = min(found.length, ids.shape[1])
batch = {"input_ids": ids[:, :length], "labels": ids[:, :length]}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(args.max_steps):
    with peak(model.device) as highest:
        loss = model(**batch).loss
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(
        f"step {step + 1}: loss {loss.item():.3f}, {length} tokens, peak {highest.bytes / 1e6:.0f} MB over the weights"
    )
