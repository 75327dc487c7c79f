"""Run PEFT's suite MetaMathQA on a tiny model, without an accelerator and without a network.

The suite's own run.py is run, from a checkout of PEFT, with the experiment beside this file: it reads both of the
experiment's files, trains, generates and writes its result. Local are the model and its tokenizer, questions in the
format of both data sets, and the texts by which it measures what is forgotten. Memory is what the process holds.
"""

from __future__ import annotations

import argparse
import importlib
import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.noise.blocks import process_bytes
from benchmarks.suites.models import build

EXPERIMENT = Path(__file__).parent / "lora" / "llama-3.2-3B-rank32-sketch"
_NAMES, _THINGS = ("Tom", "Ann", "Sam", "Eve"), ("apples", "books", "coins", "pens")
_END = "<end>"
_TINY: dict[str, Any] = {"max_steps": 20, "eval_steps": 10, "batch_size_eval": 10, "max_seq_length": 64}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--suite", type=Path, required=True, help="folder method_comparison/MetaMathQA of a checkout")
    parser.add_argument("--experiment", type=Path, default=EXPERIMENT, help="folder with adapter_config.json")
    parser.add_argument("--out", type=Path, required=True, help="folder of the result")
    parser.add_argument("--steps", type=int, default=_TINY["max_steps"], help="of training, a multiple of ten")


def run(arguments: argparse.Namespace) -> Iterator[str]:
    for path in (arguments.suite / "run.py", arguments.experiment / "adapter_config.json"):
        if not path.is_file():
            raise ValueError(
                f"There is no {path}. --suite needs a checkout of github.com/huggingface/peft, see README."
            )
    arguments.out.mkdir(parents=True, exist_ok=True)
    before = {*arguments.out.glob("*.json")}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as patches:
        save_tiny(Path(folder))
        suite = _suite(arguments, folder, patches)
        name = "/".join(arguments.experiment.parts[-2:])
        suite.main(path_experiment=str(arguments.experiment), experiment_name=name, clean=True, bucket_name=None)
    yield from (str(path) for path in sorted({*arguments.out.glob("*.json")} - before))


def questions(count: int, seed: int) -> list[dict[str, str]]:
    """Make rows of MetaMathQA; GSM8K has the same with other names."""
    some, rows = random.Random(seed), list[dict[str, str]]()
    for _ in range(count):
        a, b, name, thing = some.randint(1, 9), some.randint(1, 9), some.choice(_NAMES), some.choice(_THINGS)
        query = f"{name} has {a} {thing} and buys {b}. How many are there?"
        response = f"{a} + {b} = {a + b} {thing}. The answer is: {a + b}"
        rows.append({"type": "GSM_Rephrased", "query": query, "original_question": query, "response": response})
    return rows


def load_local(path: str, *_: Any) -> Any:
    """Stand for ``datasets.load_dataset``, of the two data sets that the suite reads."""
    from datasets import Dataset, DatasetDict

    rows = {name: questions(count, seed) for seed, (name, count) in enumerate({"train": 400, "test": 20}.items())}
    if path != "meta-math/MetaMathQA":
        for name, part in rows.items():
            answers = [row["response"].replace("The answer is:", "####") for row in part]
            rows[name] = [{"question": r["query"], "answer": a} for r, a in zip(part, answers, strict=True)]
    return DatasetDict({name: Dataset.from_list(part) for name, part in rows.items()})


def _texts(count: int) -> list[str]:
    return [f"{row['query']} {row['response']}" for row in questions(count, 2)]


def save_tiny(folder: Path) -> None:
    """Save a tokenizer, and a LLaMA of 2 layers whose loss is as high as a language model's: 1 to 2 per token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw: Any = Tokenizer(models.BPE())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer: Any = trainers.BpeTrainer(
        vocab_size=320, special_tokens=[_END], initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator(_texts(200), trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=_END, pad_token=_END)
    tokenizer.save_pretrained(folder)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = build("Llama", "ForCausalLM", **sizes, vocab_size=len(tokenizer))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    texts: Any = tokenizer(_texts(64), padding=True, return_tensors="pt")
    ids, mask, loss = texts["input_ids"], texts["attention_mask"], torch.tensor(9.0)
    while float(loss.detach()) > 1.5:
        loss = model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)


def _suite(arguments: argparse.Namespace, folder: str, patches: ExitStack) -> Any:
    """Import the suite's run.py, and put into it what is local."""
    import peft
    import peft.utils

    from rmm_linear.integrations.peft import SketchedLoraConfig

    def put(owner: Any, **names: Any) -> None:
        for name, value in names.items():
            patches.enter_context(mock.patch.object(owner, name, value, create=True))

    def held(*_: Any) -> int:
        return process_bytes("VmRSS")

    patches.enter_context(mock.patch.dict(sys.modules))
    put(sys, path=[str(arguments.suite), *sys.path])
    put(peft.utils, infer_device=lambda: "cuda")  # else utils.py ends here
    suite, utils, data = (importlib.import_module(name) for name in ("run", "utils", "data"))
    known = utils.get_train_config

    def get_train_config(path: str) -> Any:
        generation = {"max_length": 80, "max_new_tokens": 20}
        return replace(
            known(path), **_TINY | {"max_steps": arguments.steps}, model_id=folder, generation_kwargs=generation
        )

    for one in (suite, utils):
        put(one, infer_device=lambda: "cpu", get_peft_branch=lambda: "none")
    put(suite, get_train_config=get_train_config, get_wiki_small=lambda: _texts(20), print_verbose=print)
    put(suite, get_base_model_info=lambda _: None, get_dataset_info=lambda _: None)
    put(utils, device="cpu", RESULT_PATH_TEST=str(arguments.out), get_peft_worktree_is_dirty=lambda: False)
    put(data, load_dataset=load_local)
    put(utils, ACCELERATOR_MEMORY_INIT_THRESHOLD=2**40)
    put(torch.cpu, memory_allocated=held, memory_reserved=held, max_memory_reserved=lambda: process_bytes("VmHWM"))
    put(torch.cpu, reset_peak_memory_stats=lambda: Path("/proc/self/clear_refs").write_text("5"))
    put(torch.cpu, manual_seed_all=torch.manual_seed, empty_cache=lambda: None, get_device_name=lambda _: "none")
    put(peft.mapping, PEFT_TYPE_TO_CONFIG_MAPPING={**peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING})
    peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType.LORA] = SketchedLoraConfig
    return suite
