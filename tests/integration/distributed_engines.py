"""Tensor, pipeline and context parallelism and DeepSpeed's ZeRO in two processes; see distributed_worker.py.

An engine gets a case and the settings to convert with, None for the exact model. It returns a function that makes a
step: the loss on this rank, and the gradients of all parameters, as one process would have them for the whole batch.
"""

import functools
import logging
import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from cases import ROUGH_BODY, WHOLE_BODY
from distributed_helpers import apart, projection
from helpers import seeds_of, tiny_model
from torch import nn
from torch.distributed import pipelining as pp
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

from rmm_linear import convert

ALL = {**WHOLE_BODY, "operations": ("linear", "activation", "norm", "attention", "dropout", "experts", "logits")}
CASES = {  # model, attention, settings
    "linear": ("llama", "sdpa", ROUGH_BODY),
    "whole": ("llama", "sdpa", ALL),
    "own code": ("llama", "eager", ALL),
    "experts": ("mixtral", "sdpa", ALL),
    "deep": ("llama", "sdpa", ALL),
}
IDS = torch.randint(3, 64, (4, 20), generator=torch.Generator().manual_seed(5))


def made(case):
    architecture, attention, _ = CASES[case]
    model = tiny_model(architecture, dropout=0.0, layers=4 if case == "deep" else 2).train()
    model.config.use_cache = False
    model.set_attn_implementation(attention)
    return model


CONTEXTS = []  # of the models that were converted last


def converted(model, settings, **more):
    if settings is not None:
        CONTEXTS.append(convert(model, **settings, **more).context)


def own_step(model, inputs, whole):
    """A step in which ``whole`` makes of a parameter its gradient for the whole batch."""
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return float(loss), {name: whole(one.grad).clone() for name, one in model.named_parameters()}


def one_process(case, settings):
    assert settings is None
    return functools.partial(own_step, made(case), {"input_ids": IDS, "labels": IDS}, torch.Tensor.clone)


def full(gradient):
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


# Tensor parallelism: of torch, converted before and after; with sequences divided between; of transformers.
ATTENTION = {f"self_attn.{name}_proj": ColwiseParallel for name in "qkv"}
MLP = {f"mlp.{name}_proj": ColwiseParallel for name in ("gate", "up")}


def mesh():
    return dist.device_mesh.init_device_mesh("cpu", (2,))


def divided(model):
    rows = {name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
    for block in model.model.layers:
        parallelize_module(block, mesh(), {**{name: kind() for name, kind in {**ATTENTION, **MLP}.items()}, **rows})
    return model


def divided_sequences(model):
    """As torchtitan does: rows of norms are divided, and gathered for attention and the MLP."""
    whole, part = Replicate(), Shard(1)
    gathered = {"input_kwarg_layouts": {"hidden_states": part}, "desired_input_kwarg_layouts": {"hidden_states": whole}}
    plan = {name: kind() for name, kind in {**ATTENTION, **MLP}.items()}
    plan |= {name: RowwiseParallel(output_layouts=part) for name in ("self_attn.o_proj", "mlp.down_proj")}
    plan |= {name: SequenceParallel(use_local_output=True) for name in ("input_layernorm", "post_attention_layernorm")}
    plan |= {
        "self_attn": PrepareModuleInput(**gathered, use_local_output=True),
        "mlp": PrepareModuleInput(input_layouts=part, desired_input_layouts=whole, use_local_output=True),
    }
    for block in model.model.layers:
        parallelize_module(block, mesh(), plan)
    embedding = RowwiseParallel(input_layouts=whole, output_layouts=part)
    head = ColwiseParallel(input_layouts=part, output_layouts=whole)
    norm = SequenceParallel(use_local_output=True)
    return parallelize_module(model, mesh(), {"model.embed_tokens": embedding, "model.norm": norm, "lm_head": head})


def of_transformers(model):
    return type(model).from_pretrained(
        os.environ["ENGINE_MODELS"] + model.config.model_type,
        tp_plan="auto", device_mesh=mesh(), attn_implementation=model.config._attn_implementation,
    ).train()  # fmt: skip


def tensor_parallel(case, settings, divide: Callable, first=False):
    model = made(case)
    if first:
        converted(model, settings)
    model = divide(model)
    model.config.use_cache = False
    if not first:
        converted(model, settings)
    inputs = {"input_ids": IDS, "labels": IDS}
    if divide is divided_sequences:  # the model would count the part of the embeddings
        inputs["position_ids"] = torch.arange(20).unsqueeze(0)
    return functools.partial(own_step, model, inputs, full)


# Pipeline parallelism: stages of blocks; microbatches of one sequence.
class Stage(nn.Module):
    """Some of a model's blocks, with its embedding before and its head behind them."""

    def __init__(self, model, blocks, is_first, is_last):
        super().__init__()
        own = model.model
        self.model = nn.Module()
        self.model.layers = nn.ModuleDict({str(i): own.layers[i] for i in blocks})
        self.rotary = own.rotary_emb
        if is_first:
            self.model.embed_tokens = own.embed_tokens
        if is_last:
            self.model.norm, self.lm_head = own.norm, model.lm_head

    def forward(self, x):
        x = self.model.embed_tokens(x) if hasattr(self.model, "embed_tokens") else x
        places = torch.arange(20).unsqueeze(0)
        for block in self.model.layers.values():
            x = block(x, position_embeddings=self.rotary(x, places), attention_mask=causal(), position_ids=places)
        return self.lm_head(self.model.norm(x)) if hasattr(self, "lm_head") else x


def causal():
    return torch.full((20, 20), -torch.inf).triu(1)[None, None]


def next_token(logits, labels):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def pipelined(case, settings, schedule, places=((0,), (1,)), carved=False):
    """``places``: Stages of each rank. carved: The whole model is converted, and then divided."""
    model, rank, count = made(case), dist.get_rank(), sum(map(len, places))
    if carved:
        converted(model, settings)
    blocks = torch.arange(len(model.model.layers)).tensor_split(count)
    own = [Stage(model, blocks[i].tolist(), i == 0, i == count - 1) for i in places[rank]]
    for one in own:
        if not carved:  # a stage does not say which its output layer is
            converted(one, settings, exclude_modules=["lm_head"])
    stages = [pp.PipelineStage(one, i, count, torch.device("cpu")) for i, one in zip(places[rank], own, strict=True)]
    is_single = issubclass(schedule, pp.schedules.PipelineScheduleSingle)
    run = schedule(stages[0] if is_single else stages, 4, loss_fn=next_token)
    is_first, is_last = 0 in places[rank], count - 1 in places[rank]

    def step():
        losses, merged = [], {}
        for one in own:
            one.zero_grad()
        run.step(*((IDS,) if is_first else ()), **({"target": IDS, "losses": losses} if is_last else {}))
        everywhere = [None, None]
        found = {name: one.grad for stage in own for name, one in stage.named_parameters()}
        dist.all_gather_object(everywhere, (found, [float(one) for one in losses]))
        for gradients, _ in everywhere:
            merged |= gradients
        return sum(sum(one) for _, one in everywhere) / 4, merged

    return step


# Context parallelism: the place in which torch puts a ring, which has no kernel for CPUs, gets one that gathers.
class Gathered(torch.autograd.Function):
    """The tokens of all ranks; their gradients are summed."""

    @staticmethod
    def forward(ctx, x):
        found = [torch.empty_like(x) for _ in range(2)]
        dist.all_gather(found, x.contiguous())
        return torch.cat(found, 2)

    @staticmethod
    def backward(ctx, y):
        y = y.contiguous()
        dist.all_reduce(y)
        return y.chunk(2, 2)[dist.get_rank()]


def context_parallel(case, settings):
    model, rank, attend = made(case), dist.get_rank(), F.scaled_dot_product_attention
    converted(model, settings)
    labels = F.pad(IDS, (0, 1), value=-100)[:, 1:]
    own = {"input_ids": IDS, "labels": labels, "shift_labels": labels, "position_ids": torch.arange(20).expand(4, -1)}
    own = {name: one.chunk(2, 1)[rank].contiguous() for name, one in own.items()}
    inputs = {**own, "num_items_in_batch": 4 * 19}

    def attended(query, key, value, attn_mask=None, **named):
        key, value = Gathered.apply(key), Gathered.apply(value)
        mask = torch.ones(10, 20, dtype=torch.bool).tril(10 * rank)
        return attend(query, key, value, attn_mask=mask, **{**named, "is_causal": False})

    def step():
        F.scaled_dot_product_attention = attended
        try:
            loss, found = own_step(model, inputs, torch.Tensor.clone)
        finally:
            F.scaled_dot_product_attention = attend
        for one in found.values():
            dist.all_reduce(one)
        both = torch.tensor(loss)
        dist.all_reduce(both)
        return float(both), found

    return step


def zero(case, settings, stage, first=True):
    """DeepSpeed's ZeRO: each rank has half of the batch, and its optimizer's states, gradients and weights a part."""
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    model, rank = made(case), dist.get_rank()
    if first:
        converted(model, settings)
    sizes = {f"stage3_{name}": 0 for name in ("param_persistence_threshold", "prefetch_bucket_size")}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 1000, "stage3_max_live_parameters": 0, **sizes},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    if not first:
        converted(model, settings)
    ids = IDS.chunk(2)[rank]

    def step():
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        found = {name: safe_get_full_grad(one).clone() for name, one in model.named_parameters()}
        engine.step()
        both = torch.tensor(float(loss))
        dist.all_reduce(both)
        return float(both) / 2, found

    return step


# Replicas of a tensor parallel group: a mesh of two by two.
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)

    def forward(self, x):
        return self.down(F.gelu(self.up(self.norm(x))))


def replicas():
    """Gradients of a norm's weight on this rank, of one batch: (case, replica's generator) to them."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    whole, data, found = Replicate(), mesh.get_coordinate()[0], {}
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    for case, operations, passes in (("at once", ("linear", "norm"), 0), ("later", ("norm",), 5)):
        torch.manual_seed(0)
        model = Block()
        convert(model, **{**ROUGH_BODY, "operations": operations}, norm_bits=2)
        for _ in range(passes):
            model(x).sum().backward()
        model.zero_grad()
        for module, place in ((model.norm, whole), (model.up, Shard(0)), (model.down, Shard(1))):
            for name, one in module.named_parameters():
                divided = distribute_tensor(one.detach(), mesh, [whole, place])
                module.register_parameter(name, nn.Parameter(divided))
        rows = DTensor.from_local(x, mesh, [Shard(0), whole], run_check=False)
        for generator, seed in (("one", 3), ("own", 3 + data)):
            torch.manual_seed(seed)
            model.zero_grad()
            output = model(rows).redistribute(placements=[Shard(0), whole]).to_local()
            output.square().sum().backward()
            found[f"{case}, {generator}"] = model.norm.weight.grad.to_local().tolist()
    return found


SECOND = ((0, 2), (1, 3)), ((0, 3), (1, 2))
ENGINES = {
    "tensor, converted first": functools.partial(tensor_parallel, divide=divided, first=True),
    "tensor, converted then": functools.partial(tensor_parallel, divide=divided),
    "tensor, sequences": functools.partial(tensor_parallel, divide=divided_sequences),
    "tensor, transformers": functools.partial(tensor_parallel, divide=of_transformers),
    "pipeline, GPipe": functools.partial(pipelined, schedule=pp.ScheduleGPipe),
    "pipeline, 1F1B": functools.partial(pipelined, schedule=pp.Schedule1F1B),
    "pipeline, converted whole": functools.partial(pipelined, schedule=pp.Schedule1F1B, carved=True),
    "pipeline, zero bubble": functools.partial(pipelined, schedule=pp.ScheduleInterleavedZeroBubble, places=SECOND[0]),
    "pipeline, ZBV": functools.partial(pipelined, schedule=pp.ScheduleZBVZeroBubble, places=SECOND[1]),
    "context": context_parallel,
    **{f"ZeRO-{stage}": functools.partial(zero, stage=stage) for stage in (1, 2, 3)},
    "ZeRO-3, converted then": functools.partial(zero, stage=3, first=False),
}


def found_by(engine, case, draws):
    """What an engine's exact and converted models give, beside one process."""
    said, settings = [], CASES[case][2]
    CONTEXTS.clear()
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("rmm_linear").addHandler(handler)
    want_loss, want = one_process(case, None)()
    exact_loss, exact = ENGINES[engine](case, None)()
    step = ENGINES[engine](case, settings)
    torch.manual_seed(3)  # as set_seed does, on every rank alike
    seeds = seeds_of(step)
    steps = [step() for _ in range(draws)]
    logging.getLogger("rmm_linear").removeHandler(handler)
    left = exact.keys() - {f"{name}.weight" for name in convert(made(case), dry_run=True, **settings).converted}
    scale = max(float(one.abs().max()) for one in want.values())
    return {
        "engine": apart(exact, want) / scale,
        "engine's loss": abs(exact_loss - want_loss),
        "loss": abs(steps[0][0] - exact_loss),
        "exact parts": apart(steps[0][1], exact, left) / scale,
        "seeds": seeds,
        "shared": sorted({len(group) for context in CONTEXTS for group in context.sketch_cache.groups}),
        "apart": sorted(name for name, one in steps[-1][1].items() if differs(one)),
        "said": sorted(set(said)),
        **projection([found for _, found in steps], want),
    }


def differs(tensor):
    """Say whether ranks have different values."""
    found = [torch.empty_like(tensor) for _ in range(2)]
    dist.all_gather(found, tensor.contiguous())
    return not torch.equal(*found)


def message_of(run):
    try:
        run()
    except (RuntimeError, ValueError) as error:
        return f"{error} {error.__cause__ or ''}"
    return ""


def refusals():
    """What is said where gradients would be wrong, or nothing would be coded."""
    model = divided(made("linear"))
    convert(model, **ROUGH_BODY)
    torch.manual_seed(dist.get_rank())
    blocks = lambda: nn.Sequential(*(nn.Linear(8, 8) for _ in range(2)))  # noqa: E731
    divide = lambda model: pp.pipeline(model, (torch.randn(40, 8),), split_spec={"1": pp.SplitPoint.BEGINNING})  # noqa: E731
    whole = blocks()
    convert(whole, **ROUGH_BODY)
    stage = divide(blocks()).build_stage(dist.get_rank(), torch.device("cpu"))
    return {
        "states": message_of(lambda: model(input_ids=IDS)),
        "traced": message_of(lambda: divide(whole)),
        "stage": message_of(lambda: convert(stage.submod, **ROUGH_BODY)),
    }
