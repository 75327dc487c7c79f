"""TRL's SFTTrainer, which puts adapters on a model itself: one callback converts it, and converting before is named."""

import pytest
import torch
from helpers import tiny_model

from rmm_linear import RMMConfig, convert
from rmm_linear.integrations.transformers import RMMCallback

pytestmark = pytest.mark.stack


def trainer(model, folder, **options):
    from datasets import Dataset
    from peft import LoraConfig
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(50))]
    tokens = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokens, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    texts = [" ".join(f"w{(7 * row + place) % 50}" for place in range(20)) for row in range(16)]
    settings = {"max_steps": 2, "per_device_train_batch_size": 4, "report_to": "none", "use_cpu": True, "bf16": False}
    settings |= {"output_dir": str(folder), "max_length": 32, "gradient_checkpointing": False, "disable_tqdm": True}
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    data = Dataset.from_dict({"text": texts})
    config = SFTConfig(**settings)
    return SFTTrainer(model, args=config, train_dataset=data, processing_class=tokenizer, peft_config=lora, **options)


@pytest.mark.filterwarnings("ignore")
def test_one_callback_is_all_that_it_takes(tmp_path, capsys):
    callback = RMMCallback(convert=RMMConfig(min_rows=4), every=1)
    run = trainer(tiny_model("llama"), tmp_path, callbacks=[callback])
    before = [p.detach().clone() for p in run.model.parameters() if p.requires_grad]
    run.train()
    assert sum("lora_A" in name for name in callback.report.converted) == 4
    assert any("rmm/noise" in entry for entry in run.state.log_history)
    assert "rmm_linear: saved for backward: " in capsys.readouterr().out
    after = [p for p in run.model.parameters() if p.requires_grad]
    assert any(not torch.equal(one, other) for one, other in zip(before, after, strict=True))


@pytest.mark.filterwarnings("ignore")
def test_adapters_that_come_after_convert_are_named(tmp_path, caplog):
    model = tiny_model("llama")
    convert(model, min_rows=4)
    trainer(model, tmp_path).train()
    (said,) = [one for one in caplog.messages if "came later, as adapters do" in one]
    assert "this one trains 8 that" in said
    assert "lora_A.default" in said
