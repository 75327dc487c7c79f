"""A small RoBERTa with random weights and a tokenizer trained on the spot, for want of a pretrained one."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast, RobertaConfig, RobertaModel, set_seed

_SPECIAL = {"cls_token": "<s>", "pad_token": "<pad>", "sep_token": "</s>", "unk_token": "<unk>", "mask_token": "<mask>"}


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
    """Write a small RoBERTa with random weights and its tokenizer, as ``--model_name_or_path`` takes them.

    Args:
        folder: Where to.
        corpus: Text file for the tokenizer.
        layers: Layers of the encoder.
        width: Hidden size; the feed-forward layer is four times as wide.
        heads: Attention heads.
        max_length: Tokens that the model can take.
        seed: Seed of the weights.

    Returns:
        The folder.
    """
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
