"""Language models whose logits are chunked have the loss and the gradients of the exact model."""

import copy

import pytest
import torch
import transformers as hf
from helpers import tiny_model, token_ids
from torch import nn
from torch.nn import functional as F

from rmm_linear import RMMLinear, convert, losses, revert
from rmm_linear.activations.logits import ChunkedHead, LazyLogits
from rmm_linear.memory import peak

SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 40,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
GROUPED = {**SIZES, "num_key_value_heads": 1}
LAYERS = {f"{part}_{key}": 1 for part in ("encoder", "decoder") for key in ("layers", "attention_heads")}
FSMT = {**LAYERS, "d_model": 16, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 40}
FSMT |= {"langs": ["en", "de"], "src_vocab_size": 64, "tgt_vocab_size": 64, "decoder_start_token_id": 0}
MODELS = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**GROUPED)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**GROUPED)),
    "gemma2": lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**GROUPED, head_dim=8, final_logit_softcapping=0.1)),
    "cohere": lambda: hf.CohereForCausalLM(hf.CohereConfig(**GROUPED)),
    "granite": lambda: hf.GraniteForCausalLM(hf.GraniteConfig(**GROUPED, logits_scaling=3.0)),
    "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**SIZES)),
    "roberta": lambda: hf.RobertaForMaskedLM(hf.RobertaConfig(**SIZES)),
    "deberta": lambda: hf.DebertaV2ForMaskedLM(hf.DebertaV2Config(**SIZES)),
    "gpt2": lambda: tiny_model("gpt2"),
    "t5": lambda: tiny_model("t5"),
    "fsmt": lambda: hf.FSMTForConditionalGeneration(hf.FSMTConfig(**FSMT)),
    "tied fsmt": lambda: hf.FSMTForConditionalGeneration(hf.FSMTConfig(**FSMT, tie_word_embeddings=True)),
}


def made(name):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return MODELS[name]().train()


def batch():
    ids = token_ids()
    labels = ids.clone()
    labels[1, 12:] = -100
    return {"input_ids": ids, "labels": labels}


def chunked(name, chunk=7):
    return in_chunks(made(name), chunk)


def in_chunks(model, chunk):
    convert(model, operations="logits")
    (head,) = {module for module in model.modules() if isinstance(module, ChunkedHead)}
    head.rmm_chunk = chunk
    return model


def step(model, **more):
    model.zero_grad()
    torch.manual_seed(1)
    output = model(**batch(), **more)
    output.loss.backward()
    return output, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found, expected):
    assert found[0].loss.item() == pytest.approx(expected[0].loss.item(), rel=2**-24 * 64)
    assert found[1].keys() == expected[1].keys()
    whole = torch.stack([gradient.norm() for gradient in expected[1].values()]).norm()
    for name, gradient in expected[1].items():  # some are 0 but for rounding: of key biases, for example
        assert (found[1][name] - gradient).norm() < 1e-5 * whole, name


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_the_models_own_without_logits(name, reads):
    found = step(chunked(name))
    assert not reads
    assert_same(found, step(made(name)))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_items_of_a_batch_are_passed_on(name, reads):
    found, expected = (step(model, num_items_in_batch=torch.tensor(133)) for model in (chunked(name), made(name)))
    assert not reads
    assert_same(found, expected)
    assert found[0].loss.item() != pytest.approx(step(made(name))[0].loss.item(), rel=0.1)


@pytest.mark.parametrize("name", MODELS)
def test_logits_that_are_read_are_those_of_the_model(name):
    torch.manual_seed(1)
    logits = chunked(name)(**batch()).logits
    torch.manual_seed(1)
    expected = made(name)(**batch()).logits
    assert isinstance(logits, LazyLogits)
    assert (logits.shape, logits.dtype, logits.device) == (expected.shape, expected.dtype, expected.device)
    assert logits.requires_grad
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
    assert torch.equal(logits, expected)
    assert type(logits + 1) is torch.Tensor


def test_a_loss_of_ones_own_goes_through_the_logits():
    gradients = []
    for model in (chunked("llama"), made("llama")):
        logits = model(input_ids=token_ids()).logits
        F.cross_entropy(logits.view(-1, 64), token_ids().view(-1), label_smoothing=0.1).backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *gradients))


def test_rows_may_be_cut_off_before_the_loss(reads):
    gradients = []
    for model in (chunked("llama"), made("llama")):
        logits = model(input_ids=token_ids()).logits
        shifted = logits[..., :-1, :].contiguous().float()
        F.cross_entropy(shifted.view(-1, shifted.size(-1)), token_ids()[:, 1:].reshape(-1)).backward()
        gradients.append([p.grad for p in model.parameters()])
    assert not reads
    for found, expected in zip(*gradients, strict=True):
        assert (found - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_and_autocast(dtype, reads):
    for autocast in (False, True):
        results = []
        for model in (chunked("llama"), made("llama")):
            with torch.autocast("cpu", dtype=dtype, enabled=autocast):
                output, gradients = step(model if autocast else model.to(dtype))
            results.append((output.loss, gradients["lm_head.weight"].float()))
            assert output.logits.dtype == dtype
        assert results[0][0].dtype == results[1][0].dtype
        assert abs(results[0][0].item() - results[1][0].item()) < 2 * torch.finfo(dtype).eps * results[1][0].item()
        assert (results[0][1] - results[1][1]).norm() < 4 * torch.finfo(dtype).eps * results[1][1].norm()
    assert not reads


def test_a_weight_that_changed_is_noticed():
    model = chunked("llama")
    output = step(model)[0]
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    with pytest.raises(RuntimeError, match="has changed since the forward pass"):
        output.logits.sum()


def test_it_is_undone():
    model = chunked("llama")
    assert isinstance(model.lm_head, ChunkedHead)
    revert(model)
    assert type(model.lm_head) is nn.Linear
    assert not [name for name in vars(model.lm_head) if name.startswith("rmm_")]
    found, expected = step(model), step(made("llama"))
    assert torch.equal(found[0].loss, expected[0].loss)
    assert type(found[0].logits) is torch.Tensor


def test_eval_no_grad_compiled_code_and_few_rows_are_exact():
    model = chunked("llama", chunk=80)
    assert type(model(**batch()).logits) is torch.Tensor  # 4 · 20 rows
    model = chunked("llama")
    with torch.no_grad():
        assert type(model(**batch()).logits) is torch.Tensor
    assert type(model.eval()(**batch()).logits) is torch.Tensor
    head = torch.compile(model.train().lm_head, fullgraph=True, backend="aot_eager")
    hidden = torch.randn(3, 20, 16, requires_grad=True)
    assert torch.equal(head(hidden), F.linear(hidden, model.lm_head.weight))


def skipped(model, **options):
    return convert(model, dry_run=True, **options).skipped.get("lm_head")


def test_the_report_names_the_head_and_says_why_its_logits_stay(monkeypatch):
    model = made("llama")
    report = convert(model, dry_run=True)
    assert report.packed["lm_head"].operation == "logits"
    assert "lm_head" not in report.skipped
    assert "logits: no logits: the loss is computed in chunks" in str(report)
    assert skipped(model, operations="linear") == "the output head"
    assert skipped(model, exclude_modules=["lm_head"]) == "in exclude_modules"
    assert "its input is sketched" in skipped(model, target_modules=["lm_head"])
    model.lm_head = RMMLinear.from_linear(model.lm_head)
    revert(model)
    model.lm_head.forward = model.lm_head.forward
    assert "its forward method was replaced" in skipped(model)
    model.lm_head = nn.Sequential(nn.Linear(16, 64))
    assert "it is a Sequential, not nn.Linear itself" in skipped(model)
    assert not any(entry.operation == "logits" for entry in convert(tiny_model("roberta")).packed.values())

    def fused(self, *args, **kwargs):
        raise AssertionError

    fused.__module__ = "liger_kernel.transformers.model.llama"
    for target in (hf.LlamaForCausalLM, None):
        model = made("llama")
        if target is None:
            model.forward = fused.__get__(model)
        else:
            monkeypatch.setattr(target, "forward", fused)
        assert "Liger's fused loss is on" in skipped(model)
        assert type(model.lm_head) is nn.Linear
        monkeypatch.undo()


def test_the_peak_falls_by_the_logits(monkeypatch):
    # A dispatch mode sees what an operator returns; its Python function shows what is alive inside of it.
    monkeypatch.setattr(losses, "_loss_and_gradients", losses._loss_and_gradients.function)
    bytes_of = []
    for chunk in (None, 8):
        config = hf.LlamaConfig(**{**GROUPED, "vocab_size": 6000})
        model = hf.LlamaForCausalLM(config).train()
        if chunk is not None:
            in_chunks(model, chunk)
        with peak("cpu") as measured:
            model(**batch()).loss.backward()
        bytes_of.append(measured.bytes)
    rows = 4 * 80 * 6000
    # Exact: logits, their log-softmax and its gradient, at least; chunked: 8 rows of 80.
    assert bytes_of[0] - bytes_of[1] > 2 * rows * 0.9


def test_copies_are_chunked_and_saved_weights_are_the_same():
    model = copy.deepcopy(chunked("llama"))
    assert_same(step(model), step(made("llama")))
    assert model.state_dict().keys() == made("llama").state_dict().keys()


@pytest.mark.parametrize("name", ["fsmt", "tied fsmt"])
def test_a_head_that_the_model_names_by_its_embedding_is_not_sketched(name):
    model = made(name)
    converted = convert(model, operations="linear", min_rows=1).converted
    assert "model.decoder.layers.0.fc1" in converted
    assert type(model.model.decoder.output_projection) is nn.Linear
