"""Models that are trained from scratch: a ViT and a ResNet on scikit-learn's digits, and language models on WordNet.

A LLaMA and a mixture of experts are trained on its glosses, and so is their tokenizer. Another LLaMA, trained on those
of nouns and adverbs, is the base of adapters for those of verbs and adjectives.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from benchmarks.suites.models import build

Batch = dict[str, Tensor]
BASE = "base"  # the study whose model the adapters have
TITLES = {  # as tables and pictures show studies
    "language": "LLaMA on glosses", "images": "ViT on digits", "convolutions": "ResNet on digits",
    "experts": "mixture of experts on glosses", BASE: "LLaMA on nouns", "adapters": "adapters for verbs",
}  # fmt: skip
BATCHES = {"language": 8, "images": 64, "convolutions": 64, "experts": 8, BASE: 8, "adapters": 8}
DRAWN = ("language", "images", "convolutions")  # the studies of the picture of curves, and of its tables
LONG = "cola-long"  # the task of ten epochs


@dataclass(frozen=True)
class Study:
    title: str  # as pictures show it
    train: Batch  # arguments of the model, one row per example
    dev: Batch  # the same, held out
    model: Callable[[int], nn.Module]  # makes the model of a seed
    score: Callable[[Tensor, Tensor], float]  # of the logits and the labels of held-out rows, a mean over them
    metric: str  # its name
    batch: int  # rows per step
    steps: int  # of a run
    every: int  # steps between evaluations
    learning_rate: float  # at its highest
    methods: tuple[str, ...]  # what is compared

    @property
    def rows(self) -> int:
        return len(self.train["labels"])

    def batches(self, seed: int, size: int) -> Iterator[Batch]:
        """Draw batches for ever; every row comes once before one comes twice."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            order = torch.randperm(self.rows, generator=generator)
            for begin in range(0, self.rows - size + 1, size):
                yield {name: rows[order[begin : begin + size]] for name, rows in self.train.items()}

    def evaluate(self, model: Any) -> tuple[float, float]:
        was_training = model.training
        model.eval()
        loss, score, count = 0.0, 0.0, len(self.dev["labels"])
        with torch.no_grad():
            for begin in range(0, count, self.batch):
                part = {name: rows[begin : begin + self.batch] for name, rows in self.dev.items()}
                output, weight = model(**part), len(part["labels"]) / count
                loss += weight * float(output.loss)
                score += weight * self.score(output.logits, part["labels"])
        model.train(was_training)
        return loss, score


def images(*, tiny: bool = False) -> Study:
    width, layers = (32, 2) if tiny else (128, 4)
    sizes: dict[str, Any] = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": 4, "image_size": 8, "patch_size": 2}
    methods = ("exact", "dense-10", "few-bits", "gact", "careful", "tenth", "smallest")
    return _digits("images", "ViT", sizes, methods, steps=12 if tiny else 1500, every=6 if tiny else 100)


def convolutions(*, tiny: bool = False) -> Study:
    """Train a network of convolutions, BatchNorm, ReLU and pooling, on digits of 32 × 32."""
    sizes: dict[str, Any] = {"embedding_size": 16 if tiny else 32, "hidden_sizes": [16, 16] if tiny else [32, 64]}
    sizes |= {"depths": [1, 1] if tiny else [2, 2], "layer_type": "basic"}
    methods = ("exact", "careful", "tenth", "smallest")
    how = {"steps": 12 if tiny else 200, "every": 6 if tiny else 20, "larger": 4}
    return _digits("convolutions", "ResNet", sizes, methods, **how)


def _digits(
    name: str, kind: str, sizes: dict[str, Any], methods: tuple[str, ...], *, steps: int, every: int, larger: int = 1
) -> Study:
    from sklearn.datasets import load_digits

    digits: Any = load_digits()
    pixels = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
    pixels = pixels.repeat_interleave(larger, -1).repeat_interleave(larger, -2)
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    held_out, rest = (order[:40], order[360:520]) if steps < 100 else (order[:360], order[360:])  # of 1797
    train, dev = ({"pixel_values": pixels[rows], "labels": labels[rows]} for rows in (rest, held_out))

    def error(logits: Tensor, labels: Tensor) -> float:
        return float((logits.argmax(-1) != labels).double().mean())

    def model(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return build(kind, "ForImageClassification", **sizes, num_channels=1, num_labels=10)

    return Study(
        title=TITLES[name], train=train, dev=dev, model=model, score=error, metric="error rate", batch=BATCHES[name],
        steps=steps, every=every, learning_rate=1e-3, methods=methods,
    )  # fmt: skip


GLOSSES = "/usr/share/wordnet"  # where Debian's wordnet-base has them
_LENGTH, _HELD_OUT = 64, 0.01  # tokens of a row: a few glosses, so that all rows of a run are new ones
_WORDS, _WIDTH, _TINY_WORDS, _TINY_WIDTH = 4096, 256, 300, 64
_END = "<end>"
_PARTS = ("data.noun", "data.verb", "data.adj", "data.adv")
_KNOWN, _OTHERS = ("data.noun", "data.adv"), ("data.verb", "data.adj")  # what a base and its adapters are trained on
_OF_OTHERS = 20  # one in so many of the others is held out


def check_glosses(folder: Path) -> None:
    for part in _PARTS:
        if not (folder / part).is_file():
            raise ValueError(
                f"The language model is trained on WordNet's glosses, and there is no {folder / part}. On Debian and "
                "Ubuntu: apt-get install wordnet-base; or --wordnet FOLDER."
            )


def read_glosses(folder: Path, parts: Sequence[str] = _PARTS) -> list[str]:
    check_glosses(folder)
    texts = list[str]()
    for part in parts:
        lines = (folder / part).read_text(encoding="utf-8").splitlines()
        texts += [line.partition(" | ")[2].strip() for line in lines if " | " in line]
    random.Random(0).shuffle(texts)
    return texts


def language(folder: str = GLOSSES, *, tiny: bool = False) -> Study:
    texts = read_glosses(Path(folder))
    count = int(_HELD_OUT * len(texts)) + 1
    methods = ("exact", "nudged", "dense-20", "dense-10", "careful", "tenth", "smallest")
    return _glosses("language", texts[count:], texts[:count], methods, tiny=tiny)


def experts(folder: str = GLOSSES, *, tiny: bool = False) -> Study:
    """Train a mixture of experts on the same rows: 8 experts, two of which see a token."""
    study = dataclasses.replace(language(folder, tiny=tiny), title=TITLES["experts"])
    sizes: dict[str, Any] = {"num_local_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 2}
    words, width = (_TINY_WORDS, _TINY_WIDTH) if tiny else (_WORDS, _WIDTH)

    def model(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": width // 8 * 11}
        return _causal("Mixtral", words, width, **sizes, **heads)

    methods = ("exact", "nudged", "careful", "tenth", "smallest")
    return dataclasses.replace(study, model=model, methods=methods, steps=study.steps if tiny else 1000)


def base(folder: str = GLOSSES, *, tiny: bool = False) -> Study:
    """Train a LLaMA on the glosses of nouns and adverbs; held-out rows are those of the adapters."""
    known, others = (read_glosses(Path(folder), parts) for parts in (_KNOWN, _OTHERS))
    study = _glosses(BASE, known, others[: len(others) // _OF_OTHERS], ("exact",), tiny=tiny)
    return study if tiny else dataclasses.replace(study, steps=1500)


def adapters(folder: str, weights: Path, *, tiny: bool = False) -> Study:
    """Adapt that model, in bfloat16, to the glosses of verbs and adjectives; no row comes twice.

    Args:
        folder: Of the glosses.
        weights: State of the base, as the study "base" leaves it.
        tiny: Whether to make it small.
    """
    known, others = (read_glosses(Path(folder), parts) for parts in (_KNOWN, _OTHERS))
    count = len(others) // _OF_OTHERS
    methods = (
        "lora", "velora", "lora-sketched", "lora-careful", "lora-tenth", "lora-smallest", "qlora", "qlora-tenth"
    )  # fmt: skip
    study = _glosses("adapters", others[count:], others[:count], methods, tiny=tiny, known=known)

    def model(seed: int) -> nn.Module:
        made = study.model(0)
        made.load_state_dict(load_file(weights))
        torch.manual_seed(seed)
        return made.to(torch.bfloat16)

    return dataclasses.replace(study, model=model, steps=study.steps if tiny else 800)


def _glosses(
    name: str, texts: list[str], held_out: list[str], methods: tuple[str, ...], *, tiny: bool, known: Any = None
) -> Study:
    """Make a study of a LLaMA; the tokenizer is trained on ``known``, or on the texts."""
    words, width, layers, steps = (_TINY_WORDS, _TINY_WIDTH, 2, 12) if tiny else (_WORDS, _WIDTH, 4, 3000)
    ids = _tokens([*held_out, *texts], texts if known is None else known, words)

    def cut(texts: list[list[int]]) -> Batch:
        tokens = [token for text in texts for token in text]
        rows = torch.tensor(tokens[: len(tokens) // _LENGTH * _LENGTH]).view(-1, _LENGTH)
        return {"input_ids": rows, "labels": rows}

    def accuracy(logits: Tensor, labels: Tensor) -> float:
        return float((logits[:, :-1].argmax(-1) == labels[:, 1:]).double().mean())

    def model(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        sizes = {"intermediate_size": 2 * width + width // 4 * 3, "num_attention_heads": 4}
        return _causal("Llama", words, width, **sizes, num_hidden_layers=layers)

    return Study(
        title=TITLES[name], train=cut(ids[len(held_out) :]), dev=cut(ids[: len(held_out)]), model=model,
        score=accuracy, metric="next-token accuracy", batch=BATCHES[name], steps=steps, every=6 if tiny else 100,
        learning_rate=1e-3, methods=methods,
    )  # fmt: skip


def _causal(kind: str, words: int, width: int, **sizes: Any) -> nn.Module:
    sizes |= {"vocab_size": words, "hidden_size": width, "max_position_embeddings": _LENGTH, "use_cache": False}
    return build(kind, "ForCausalLM", **sizes)


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
