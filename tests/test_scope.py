"""Seeds of a converted model: fresh everywhere, reproducible, unseen by dropout, right under checkpoints and ranks."""

import json
import math
import subprocess
import sys
import textwrap
import warnings

import pytest
import torch
from helpers import Mlp, gradients, seeds_of, tiny_model, token_ids
from torch import nn
from torch.utils.checkpoint import checkpoint

from rmm_linear import RMMConfig, RMMLinear, convert
from rmm_linear.seeds import draw_seed, mix, peek_seed

ROUGH = {"kind": "countsketch", "ratio": 0.25, "min_rows": 1}
EXACT = {"ratio": 1.0, "min_rows": 1}


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


def made(**kwargs):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Checkpointed(**kwargs)


def batch(tokens=40):
    return torch.randn(tokens, 6, generator=torch.Generator().manual_seed(1)).requires_grad_()


checkpoints = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
preserve = pytest.mark.parametrize("preserve", [True, False], ids=["preserve", "no-preserve"])


# Fresh


def test_every_layer_and_step_has_its_own_seed():
    """A generator made anew for each layer would start from one seed, and all would share one S."""
    model = Mlp()
    convert(model, **ROUGH)
    seeds = seeds_of(lambda: [model(torch.randn(40, 12)) for _ in range(5)])
    assert len(set(seeds)) == len(seeds) == 10


def test_a_layer_that_is_used_twice_in_a_step_has_two_seeds():
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU())
    model.append(model[0])
    convert(model, **ROUGH)
    seeds = seeds_of(lambda: model(batch()))
    assert len(set(seeds)) == len(seeds) == 2


def test_two_models_have_different_seeds():
    models = [Mlp(), Mlp()]
    for model in models:
        convert(model, **ROUGH)
    seeds = seeds_of(lambda: [model(torch.ones(40, 12)) for model in models])
    assert len(set(seeds)) == 4


def test_microbatches_between_optimizer_steps_have_different_seeds():
    model = made(dropout=0.0)
    convert(model, **ROUGH)
    seeds = seeds_of(lambda: [model(batch()).sum().backward() for _ in range(3)])
    assert len(set(seeds)) == len(seeds) == 9


def test_mix_depends_on_every_part_and_their_order():
    parts = [(1, 2), (2, 1), (1, 3), (1,), (1, 2, 0), (-1, 2), (1 << 62, 2)]
    mixed = [mix(*p) for p in parts]
    assert len(set(mixed)) == len(parts)
    assert all(-(1 << 63) <= m < 1 << 63 for m in mixed)


def test_peek_is_the_next_draw_and_moves_nothing():
    torch.manual_seed(8)
    state = torch.get_rng_state()
    peeked = peek_seed()
    assert torch.equal(torch.get_rng_state(), state)
    assert draw_seed() == peeked
    assert draw_seed() != peeked


# Reproducible


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_same_seed_same_run_to_the_bit(dropout):
    """Also for the second run of one process, on the same model object."""

    def run(seed):
        model.load_state_dict(start)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        torch.manual_seed(seed)
        losses = []
        for _ in range(4):
            loss = model(batch()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, [p.detach().clone() for p in model.parameters()]

    model = made(dropout=dropout)
    convert(model, **ROUGH)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    (losses, first), (again, second), (_, other) = run(1), run(1), run(2)
    assert losses == again
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0], other[0])


def test_a_restored_generator_state_continues_the_run():
    """As a Trainer does that resumes from a checkpoint."""
    model = made()
    convert(model, **ROUGH)
    torch.manual_seed(1)
    model(batch()).sum().backward()
    state = torch.get_rng_state()
    expected = seeds_of(lambda: model(batch()))
    twin = made()
    convert(twin, **ROUGH)
    torch.set_rng_state(state)
    assert seeds_of(lambda: twin(batch())) == expected


def test_reseeding_reproduces_a_submodule_that_is_called_by_itself():
    model = made(dropout=0.0)
    convert(model, **ROUGH)
    runs = []
    for _ in range(2):
        model(batch())
        torch.manual_seed(3)
        runs.append(seeds_of(lambda: [model.block(batch()) for _ in range(2)]))
    assert runs[0] == runs[1]
    assert len(set(runs[0])) == 4


# Invisible to everything else that is random


def states_after_forward(model):
    x, states = batch(), []
    for grad in (True, False):
        torch.manual_seed(2)
        with torch.set_grad_enabled(grad), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # reentrant checkpoints warn when no input needs a gradient
            model(x)
        states.append(torch.get_rng_state())
    return states


@preserve
@pytest.mark.parametrize("reentrant", [None, True, False])
def test_generator_moves_alike_with_and_without_gradients(reentrant, preserve):
    model = made(use_reentrant=reentrant, preserve_rng_state=preserve)
    convert(model, **ROUGH)
    with_grad, without = states_after_forward(model)
    assert torch.equal(with_grad, without)
    plain = made()
    convert(plain, **ROUGH)
    assert torch.equal(states_after_forward(plain)[0], with_grad)


@checkpoints
@preserve
def test_dropout_after_and_inside_a_checkpoint_is_that_of_the_exact_model(reentrant, preserve):
    outputs = []
    for conversion in (None, ROUGH):
        model = made(use_reentrant=reentrant, preserve_rng_state=preserve)
        if conversion:
            convert(model, **conversion)
        torch.manual_seed(2)
        outputs.append(model(batch()))
    assert torch.equal(*outputs)


def dropout_masks(model, run):
    """The zero patterns of the dropout inside the checkpoint, of the forward pass and of the recomputation."""
    masks = []
    handle = model.block[1].register_forward_hook(lambda module, args, output: masks.append(output == 0))
    run()
    handle.remove()
    return masks


@checkpoints
def test_recomputation_repeats_the_dropout_masks(reentrant):
    """Drawing seeds only when grad mode is on would shift the masks of the recomputation."""
    model = made(use_reentrant=reentrant)
    convert(model, **ROUGH)
    torch.manual_seed(2)
    masks = dropout_masks(model, lambda: model(batch()).sum().backward())
    assert len(masks) == 2
    assert torch.equal(*masks)


@checkpoints
def test_recomputation_after_an_eval_pass_repeats_the_dropout_masks(reentrant):
    """As in self-distillation: a forward pass in eval mode lies between forward and backward."""
    model = made(use_reentrant=reentrant)
    convert(model, **ROUGH)

    def run():
        loss = model(batch()).sum()
        model.eval()
        with torch.no_grad():
            model(batch())
        model.train()
        loss.backward()

    torch.manual_seed(2)
    masks = [mask for mask in dropout_masks(model, run) if mask.any()]  # eval mode drops nothing
    assert len(masks) == 2
    assert torch.equal(*masks)


@checkpoints
def test_recomputation_repeats_the_dropout_masks_of_layers_by_themselves(reentrant):
    model = made(use_reentrant=reentrant)
    for index in (0, 2):
        model.block[index] = RMMLinear.from_linear(model.block[index], RMMConfig(**ROUGH))
    torch.manual_seed(2)
    masks = dropout_masks(model, lambda: model(batch()).sum().backward())
    assert torch.equal(*masks)


def test_the_generator_is_left_after_backward_where_forward_left_it():
    model = made(use_reentrant=False)
    convert(model, **ROUGH)
    loss = model(batch()).sum()
    state = torch.get_rng_state()
    loss.backward()
    assert torch.equal(torch.get_rng_state(), state)


def test_an_error_in_the_forward_pass_closes_the_step():
    model = made()
    convert(model, **ROUGH)
    with pytest.raises(RuntimeError):
        model(torch.ones(3, 5))
    torch.manual_seed(2)
    first = seeds_of(lambda: [model(batch()) for _ in range(2)])
    torch.manual_seed(2)
    assert seeds_of(lambda: [model(batch()) for _ in range(2)]) == first
    assert len(set(first)) == 6


# Unbiased under checkpointing


def projections(model, runs=150):
    """Gradient of the first checkpointed weight on its exact one, once per run; dropout is off."""
    x = batch()

    def gradient():
        model.zero_grad()
        model(x).square().sum().backward()
        return model.block[0].weight.grad

    exact = gradient().clone()
    convert(model, **ROUGH)
    return torch.stack([(gradient() * exact).sum() / exact.square().sum() for _ in range(runs)])


@checkpoints
@preserve
def test_gradients_are_unbiased_under_checkpointing(reentrant, preserve):
    """Z of one S with Y of another is noise of mean 0: the projection must be 1 at z = 4, and 0 is 10 errors away."""
    torch.manual_seed(4)
    values = projections(made(use_reentrant=reentrant, preserve_rng_state=preserve, dropout=0.0))
    error = values.std() / math.sqrt(len(values))
    assert abs(values.mean() - 1) < 4 * error
    assert error < 0.1


@preserve
@checkpoints
def test_layers_by_themselves_are_unbiased_under_checkpointing(reentrant, preserve):
    model = made(use_reentrant=reentrant, preserve_rng_state=preserve, dropout=0.0)
    x = batch()
    model(x).square().sum().backward()
    exact = model.block[0].weight.grad.clone()
    model.block[0] = RMMLinear.from_linear(model.block[0], RMMConfig(**ROUGH))
    torch.manual_seed(4)
    values = []
    for _ in range(150):
        model.zero_grad()
        model(x).square().sum().backward()
        values.append((model.block[0].weight.grad * exact).sum() / exact.square().sum())
    values = torch.stack(values)
    error = values.std() / math.sqrt(len(values))
    assert abs(values.mean() - 1) < 4 * error
    assert error < 0.1


@checkpoints
@pytest.mark.parametrize("name", ["gradient_checkpointing_enable", "activation_checkpointing_enable"])
def test_both_names_of_transformers_checkpointing(name, reentrant):
    """Same loss and same gradients as without it, where they are exact: sketched layers at ratio 1, dropout on."""
    ids, results = token_ids(), []
    for enable in (False, True):
        model = tiny_model("roberta").train()
        convert(model, **EXACT)
        if enable:
            if not hasattr(model, name):
                pytest.fail(f"transformers has no {name}: remove it here")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # the older name
                getattr(model, name)({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        torch.manual_seed(5)
        loss = model(input_ids=ids, labels=ids[:, 0] % 2).loss
        loss.backward()
        results.append((loss.detach(), gradients(model)))
    (loss, plain), (checkpointed_loss, checkpointed) = results
    assert torch.equal(loss, checkpointed_loss)
    for key in plain:
        assert torch.allclose(plain[key], checkpointed[key], rtol=1e-4, atol=1e-7), key


@checkpoints
def test_transformers_checkpointing_leaves_the_exact_gradients_exact(reentrant):
    """Sketched and checkpointed against sketched: all but the sketched weights, with dropout."""
    ids, results = token_ids(), []
    for enable in (False, True):
        model = tiny_model("roberta").train()
        report = convert(model, **ROUGH)
        if enable:
            model.activation_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        torch.manual_seed(5)
        model(input_ids=ids, labels=ids[:, 0] % 2).loss.backward()
        results.append(gradients(model))
    sketched = {f"{name}.weight" for name in report.converted}
    for key in results[0].keys() - sketched:
        assert torch.allclose(results[0][key], results[1][key], rtol=1e-4, atol=1e-7), key


# Ranks

RANK = """
    import json, sys, torch
    import torch.distributed as dist
    from torch import nn
    from rmm_linear import RMMConfig, RMMLinear, convert

    rank, path = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    alone = RMMLinear(4, 4, config=RMMConfig(ratio=0.25, min_rows=1))
    convert(model, ratio=0.25, min_rows=1)
    seeds = []

    def pack(tensor):
        if tensor.dtype == torch.int64 and tensor.shape == (1,):
            seeds.append(tensor.item())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        kept = [alone(torch.ones(40, 4)), model(torch.ones(40, 4))]
    print(json.dumps({"seeds": seeds, "weight": model[0].weight.sum().item()}))
    dist.destroy_process_group()
"""


def test_ranks_that_are_seeded_alike_draw_different_sketches(tmp_path):
    """Two real processes; averaging one S over the ranks would not lower its noise."""
    command = [sys.executable, "-c", textwrap.dedent(RANK)]
    processes = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    first, second = (json.loads(output.splitlines()[-1]) for output in outputs)
    assert first["weight"] == second["weight"]  # they were seeded alike
    assert len(first["seeds"]) == len(second["seeds"]) == 3
    assert len({*first["seeds"], *second["seeds"]}) == 6
