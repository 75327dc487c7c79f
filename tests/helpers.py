"""Data, models and measurements that the tests share."""

import functools

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from rmm_linear import RMMConfig
from rmm_linear.layers.converted import joined_class
from rmm_linear.memory import track_saved
from rmm_linear.sketches import SAMPLERS, probabilities, row_norms, sketch

SEED_BYTES = 8


def heavy_tailed(tokens, inputs, outputs, dtype=torch.float64):
    """X and Y as in training: a few tokens are much longer than the rest, and Y depends on X."""
    generator = torch.Generator().manual_seed(20)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    length = torch.exp(0.7 * randn(tokens, 1))
    x = randn(tokens, inputs)
    y = 0.5 * x @ randn(inputs, outputs) + randn(tokens, outputs)
    return (x * length).to(dtype), (y * length).to(dtype)


def chances(kind, x, mask=None):
    """What a kind samples the rows of x by; None for kinds whose S follows from the seed alone."""
    return probabilities(row_norms(x), mask=mask) if kind in SAMPLERS else None


def sketch_matrix(kind, tokens, rows, seed, block=None, p=None):
    """Sᵀ (K, N) in float64: the sketch of the identity. Without p, kinds that sample by one have a heavy-tailed one."""
    if p is None:
        p = chances(kind, heavy_tailed(tokens, 5, 1)[0])
    eye = torch.eye(tokens, dtype=torch.float64)
    return sketch(eye, kind=kind, seed=torch.tensor(seed), rows=rows, block=block, p=p)


def seeds_of(run):
    """The seeds that the layers keep during ``run()``: its int64 scalars kept for the backward pass."""
    seeds = []

    def pack(tensor):
        if tensor.dtype == torch.int64 and tensor.shape == (1,):
            seeds.append(tensor.item())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return seeds


def bytes_kept(module, *inputs):
    """Bytes kept for the backward pass of ``module(*inputs)``, the inputs' own memory not counted twice."""
    with track_saved(module) as kept:
        output = module(*inputs)
    assert output is not None
    return kept.total


def packed(module, kind, config=None, **named):
    """The same module as one of a class of packed modules, outside of a converted model."""
    module.__class__ = joined_class(kind, type(module))
    module._set_up(config or RMMConfig(checkpointed="packed"), **named)
    return module.train()


def product_error(a, b):
    """How far apart two products a @ b may be whose sums were made in different orders.

    Each of the n additions is off by eps/2 of a partial sum at most, which is no larger than the sum of sizes, and the
    signs are at random: √n · eps · |a| @ |b| for the difference of the two.
    """
    sizes = a.abs().double() @ b.abs().double()
    return float(torch.finfo(a.dtype).eps * a.shape[1] ** 0.5 * sizes.max())


def assert_packed_alike(found, expected, bits):
    """Codes and scales of one matrix whose groups were turned in another order of summation.

    Float32 sums of 64 differ by 1e-6 of a step or so: an element on the edge of one can fall to either side. A group
    whose largest element is on the edge of a scale can take the next one, which moves the codes of the group.
    """
    (codes, scales), (expected_codes, expected_scales) = found, expected
    same = scales == expected_scales
    assert (~same).sum() <= max(1, 0.002 * same.numel())
    of_group = same[:, torch.arange(codes.shape[1]) // (8 * bits)]  # the bytes of 64 elements
    assert ((codes != expected_codes) & of_group).sum() <= max(1, 0.002 * codes.numel())


def gradients(module):
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def converted_names(model):
    return {name for name, module in model.named_modules() if hasattr(module, "rmm_config")}


class Mlp(nn.Module):
    """Two linear layers with dropout between them, and an attribute name for each."""

    def __init__(self, features=12, hidden=16, outputs=3, dropout=0.0):
        super().__init__()
        self.first = nn.Linear(features, hidden)
        self.dropout = nn.Dropout(dropout)
        self.second = nn.Linear(hidden, outputs)

    def forward(self, x):
        return self.second(self.dropout(torch.relu(self.first(x))))


class Shapes(nn.Module):
    """Linears whose inputs are saved by no other, by a sibling, and by an activation."""

    def __init__(self):
        super().__init__()
        self.inner, self.left, self.right, self.after = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        hidden = self.inner(x)
        return self.after(torch.tanh(self.left(hidden) * self.right(hidden)))


def tiny_model(architecture, dropout=0.1, layers=2, width=16):
    """A Hugging Face model small enough for a test, with fresh weights that follow from a fixed seed."""
    import transformers as hf

    sizes = {
        "vocab_size": 64,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "intermediate_size": 2 * width,
        "max_position_embeddings": 40,
        "pad_token_id": 1,
        "bos_token_id": 0,
        "eos_token_id": 2,
    }
    encoder = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    gpt2 = {"vocab_size": 64, "n_embd": width, "n_layer": layers, "n_head": 2, "n_positions": 40, "bos_token_id": 0}
    gpt2 |= {"eos_token_id": 2, "resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    vit = {key: sizes[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")}
    vit |= {"image_size": 16, "patch_size": 4}
    t5 = {
        "vocab_size": 64,
        "d_model": width,
        "d_kv": width // 2,
        "d_ff": 2 * width,
        "num_layers": layers,
        "num_heads": 2,
    }
    t5 |= {"dropout_rate": dropout, "decoder_start_token_id": 0}
    resnet = {"embedding_size": width, "hidden_sizes": [width, 2 * width], "depths": [layers] * 2, "num_labels": 2}
    resnet |= {"layer_type": "basic"}
    makers = {
        "roberta": lambda: hf.RobertaForSequenceClassification(hf.RobertaConfig(**sizes, **encoder)),
        "bert": lambda: hf.BertForSequenceClassification(hf.BertConfig(**sizes, **encoder)),
        "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**gpt2)),
        "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, attention_dropout=dropout)),
        "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**sizes, num_key_value_heads=2, num_local_experts=4)),
        "vit": lambda: hf.ViTForImageClassification(hf.ViTConfig(**vit, **encoder)),
        "t5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(**t5)),
        "resnet": lambda: hf.ResNetForImageClassification(hf.ResNetConfig(**resnet)),
    }
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return makers[architecture]()


ARCHITECTURES = ["roberta", "bert", "gpt2", "llama"]
ALL_ARCHITECTURES = [*ARCHITECTURES, "vit", "t5"]


def token_ids(batch=4, length=20):
    return torch.randint(3, 64, (batch, length), generator=torch.Generator().manual_seed(5))


def batch_of(architecture, length=20):
    """What the model is called with; some of the tokens are padding, except for GPT-2, which has none."""
    if architecture in ("vit", "resnet"):
        side = 16 if architecture == "vit" else 32
        return {"pixel_values": torch.randn(4, 3, side, side, generator=torch.Generator().manual_seed(1))}
    ids = token_ids(4, length)
    mask = torch.ones_like(ids)
    mask[1, 12:] = 0
    masks = {"attention_mask": mask} if architecture != "gpt2" else {}
    return {"input_ids": ids, **masks, **({"labels": ids} if architecture == "t5" else {})}


def labelled(architecture, dtype=torch.float32):
    """A batch that a model returns the loss of; padding has no label."""
    batch = {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch_of(architecture).items()}
    if architecture in ("gpt2", "llama", "t5"):
        mask = batch.get("attention_mask", torch.ones(1, 1))
        return {**batch, "labels": batch["input_ids"].masked_fill(mask == 0, -100)}
    return {**batch, "labels": torch.tensor([0, 1, 1, 0])}


def loss_of(model, architecture, batch=None):
    """A loss that padding has no part in."""
    output = model(**(batch or batch_of(architecture)))
    return output.loss if architecture == "t5" else output.logits[:, :5].square().mean()


def step(model, architecture="roberta", seed=None, batch=None):
    """Loss and gradients of a step."""
    model.zero_grad()
    if seed is not None:
        torch.manual_seed(seed)
    loss = loss_of(model, architecture, batch)
    loss.backward()
    return loss.detach(), gradients(model)


def enable_checkpointing(model, reentrant, preserve=True, **options):
    """Under the name that the installed transformers has: 5.0 has the older one alone, which warns later."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant, "preserve_rng_state": preserve, **options})
    if reentrant and hasattr(model.get_input_embeddings(), "weight"):
        model.enable_input_require_grads()


def selective(choose):
    """A policy of checkpoints that saves what the chosen operators return, and runs the others again."""

    def policy(context, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if choose(op) else CheckpointPolicy.PREFER_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, policy)


class Checkpointed(nn.Module):
    """linear, dropout, linear in a checkpoint, then dropout and a linear outside of it."""

    def __init__(self, use_reentrant=None, preserve_rng_state=True, dropout=0.5):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(6, 8), nn.Dropout(dropout), nn.Linear(8, 6))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(6, 2)
        self.use_reentrant, self.preserve_rng_state = use_reentrant, preserve_rng_state

    def forward(self, x):
        if self.use_reentrant is None:
            x = self.block(x)
        else:
            x = checkpoint(self.block, x, use_reentrant=self.use_reentrant, preserve_rng_state=self.preserve_rng_state)
        return self.head(self.dropout(x))


def checkpointed(**kwargs):
    """The same weights every time, whatever the global generator is at."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Checkpointed(**kwargs)


def six_features(tokens=40):
    return torch.randn(tokens, 6, generator=torch.Generator().manual_seed(1)).requires_grad_()


def snapshot(model):
    """Everything a failed or dry conversion must leave alone."""
    return [
        (n, type(m), set(vars(m)), len(m._forward_hooks), len(m._forward_pre_hooks)) for n, m in model.named_modules()
    ]
