"""What the tests of torch.compile share: a backend that counts operators, a batch with padding, and its step."""

import torch
from functorch.compile import make_boxed_func
from helpers import gradients, token_ids
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

SEED = 7


class Graphs:
    """A backend that remembers how often every operator of ours is in the graphs it is given."""

    def __init__(self):
        self.counts = []
        self.backend = aot_autograd(
            fw_compiler=self._count, bw_compiler=self._count, partition_fn=min_cut_rematerialization_partition
        )

    def _count(self, module, inputs):
        names = [str(node.target) for node in module.graph.nodes if "rmm_linear" in str(node.target)]
        self.counts.append({name: names.count(name) for name in set(names)})
        return make_boxed_func(module.forward)

    def compile(self, module):
        return torch.compile(module, fullgraph=True, backend=self.backend)


def batch(length, sequences=4):
    ids = token_ids(sequences, length)
    mask = torch.ones_like(ids)
    mask[1, 12:] = mask[3, 5:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def step(model, inputs):
    model.zero_grad()
    logits = model(**inputs).logits
    if logits.dim() == 3:  # of every token; padding has no part in a loss
        logits = logits * inputs["attention_mask"].unsqueeze(-1)
    loss = logits.square().mean()
    loss.backward()
    return loss.detach(), gradients(model)
