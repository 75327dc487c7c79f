"""TRL's trainers on tiny models and data, with TRL's own defaults wherever a test does not ask for something else."""

import functools
import logging
import warnings

import torch
from helpers import tiny_model

from rmm_linear import RMMTrainer

WORDS = 50


@functools.cache
def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<bos>", "<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(WORDS))]
    tokens = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokens, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", bos_token="<bos>"
    )


def text(row, length):
    return " ".join(f"w{(7 * row + place) % WORDS}" for place in range(length))


def columns(kind, seed):
    """A data set of 16 rows; the lengths of its texts, and so the batches, follow from the seed."""
    lengths = torch.randint(8, 24, (16,), generator=torch.Generator().manual_seed(seed)).tolist()
    texts = [text(row, length) for row, length in enumerate(lengths)]
    if kind == "sft":
        return {"text": texts}
    prompts = {"prompt": [text(row, 4) for row in range(16)]}
    if kind == "grpo":
        return prompts
    pairs = {"chosen": texts, "rejected": [text(row + 3, length) for row, length in enumerate(lengths)]}
    return pairs if kind == "reward" else prompts | pairs


def preference(completions, **kwargs):
    """A reward of GRPO: words that are few."""
    return [-float(len({*one.split()})) for one in completions]


def trl_trainer(kind, folder, *, seed=1, lora=True, model=None, callbacks=(), rmm=None, **settings):
    """A trainer of TRL: "sft", "dpo", "reward" or "grpo"; with ``rmm``, the RMMTrainer of its class."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import trl
        import trl.trainer.utils
        from datasets import Dataset, disable_progress_bars
        from peft import LoraConfig

        disable_progress_bars()
        trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE = (
            64  # columns of the vocabulary, of which TRL takes 32,768 at once
        )
        logging.getLogger("transformers").setLevel(logging.ERROR)
        name = {"sft": "SFT", "dpo": "DPO", "reward": "Reward", "grpo": "GRPO"}[kind]
        own = {"max_steps": 2, "per_device_train_batch_size": 4, "report_to": "none", "use_cpu": True, "bf16": False}
        own |= {"output_dir": str(folder), "disable_tqdm": True, "logging_steps": 1, "save_strategy": "no"}
        own |= {"max_completion_length": 8, "num_generations": 2} if kind == "grpo" else {"max_length": 32}
        config = getattr(trl, f"{name}Config")(**(own | settings))
        task = "SEQ_CLS" if kind == "reward" else "CAUSAL_LM"
        model = model or (classifier() if kind == "reward" else tiny_model("llama"))
        adapters = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type=task) if lora else None
        given = {"reward_funcs": preference} if kind == "grpo" else {}
        make = getattr(trl, f"{name}Trainer")
        if rmm is not None:
            make, given = RMMTrainer[make], {**given, "rmm": rmm}
        return make(
            model,
            args=config,
            train_dataset=Dataset.from_dict(columns(kind, seed)),
            processing_class=tokenizer(),
            peft_config=adapters,
            callbacks=[*callbacks],
            **given,
        )


def classifier():
    import transformers

    config = tiny_model("llama").config
    config.num_labels = 1
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.LlamaForSequenceClassification(config)
