"""An example on another device than the model's is refused, unless something may move it."""

import pytest
import torch
from torch import nn

from rmm_linear.memory.inputs import check_example


class ElsewhereTensor(torch.Tensor):
    """A tensor that says that it is on an accelerator."""

    @property
    def device(self):
        return torch.device("cuda", 0)


ELSEWHERE = torch.ones(4, 8).as_subclass(ElsewhereTensor)


def hooked(model):
    next(iter(model.children())).register_forward_pre_hook(lambda *_: None)


SIGNS = {
    "a hook, as of fully_shard and ZeRO-3": hooked,
    "accelerate": lambda model: setattr(model, "_hf_hook", object()),
    "FSDP that flattens weights": lambda model: setattr(model, "_is_fsdp_managed_module", True),
    "parts on two devices": lambda model: model.append(nn.Linear(4, 4, device="meta")),
}


@pytest.mark.parametrize("sign", [None, *SIGNS])
def test_an_example_on_another_device_is_refused_unless_it_may_be_moved(sign):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    if sign is not None:
        SIGNS[sign](model)
        check_example(model, ELSEWHERE)
    else:
        with pytest.raises(ValueError, match=r"must be on the model's device, cpu, got a tensor on cuda:0\. Move it"):
            check_example(model, ELSEWHERE)
