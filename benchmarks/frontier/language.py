"""A small LLaMA, trained from scratch on the glosses of WordNet, with a tokenizer trained on them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.frontier.study import Study

GLOSSES = "/usr/share/wordnet"  # where Debian's wordnet-base has them
_LENGTH, _HELD_OUT = 64, 0.01  # tokens of a row: a few glosses, so that all rows of a run are new ones
_END = "<end>"
_PARTS = ("data.noun", "data.verb", "data.adj", "data.adv")


def check_glosses(folder: Path) -> None:
    """Look for the files of WordNet.

    Args:
        folder: Where they should be.

    Raises:
        ValueError: If one is missing.
    """
    for part in _PARTS:
        if not (folder / part).is_file():
            raise ValueError(
                f"The language model is trained on WordNet's glosses, and there is no {folder / part}. On Debian and "
                "Ubuntu: apt-get install wordnet-base; or --wordnet FOLDER."
            )


def read_glosses(folder: Path) -> list[str]:
    """Read the definitions and examples of WordNet 3.

    Args:
        folder: With the files data.noun, data.verb, data.adj and data.adv.

    Returns:
        A text per meaning, in an order of their own that is always the same.

    Raises:
        ValueError: If a file is missing.
    """
    check_glosses(folder)
    texts = list[str]()
    for part in _PARTS:
        lines = (folder / part).read_text(encoding="utf-8").splitlines()
        texts += [line.partition(" | ")[2].strip() for line in lines if " | " in line]
    random.Random(0).shuffle(texts)
    return texts


def language(folder: str = GLOSSES, *, tiny: bool = False) -> Study:
    """Cut the glosses into tokens.

    Args:
        folder: Of WordNet.
        tiny: Whether all is small.

    Returns:
        The study.

    Raises:
        ValueError: If the glosses are missing.
    """
    words, width, layers, steps = (300, 32, 2, 12) if tiny else (4096, 256, 4, 3000)
    texts = read_glosses(Path(folder))
    count = int(_HELD_OUT * len(texts)) + 1
    ids = _tokens(texts, texts[count:], words)
    held_out, rest = ([token for text in part for token in text] for part in (ids[:count], ids[count:]))
    train, dev = ({"input_ids": rows, "labels": rows} for rows in map(_rows, (rest, held_out)))

    def model(seed: int) -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(seed)
        sizes: dict[str, Any] = {"hidden_size": width, "intermediate_size": 2 * width + width // 4 * 3}
        sizes |= {"num_hidden_layers": layers, "num_attention_heads": 4, "vocab_size": words}
        return LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=_LENGTH, use_cache=False))

    methods = ("exact", "dense-20", "dense-10", "wide", "tenth", "narrow")
    return Study(
        title="LLaMA on glosses", train=train, dev=dev, model=model, score=_accuracy, metric="next-token accuracy",
        batch=8, steps=steps, every=6 if tiny else 100, learning_rate=1e-3, methods=methods,
    )  # fmt: skip


def _tokens(texts: list[str], known: list[str], words: int) -> list[list[int]]:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer: Any = trainers.BpeTrainer(
        vocab_size=words, special_tokens=[_END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(known, trainer)
    end = tokenizer.token_to_id(_END)
    return [[*encoded.ids, end] for encoded in tokenizer.encode_batch(texts)]


def _rows(tokens: list[int]) -> Tensor:
    return torch.tensor(tokens[: len(tokens) // _LENGTH * _LENGTH]).view(-1, _LENGTH)


def _accuracy(logits: Tensor, labels: Tensor) -> float:
    return float((logits[:, :-1].argmax(-1) == labels[:, 1:]).double().mean())
