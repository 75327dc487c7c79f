"""Parts of a model, each with one thing that goes wrong if a repetition does not see what the first run saw."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

ROWS, WIDTH = 2100, 16  # 66 KB in half precision: smaller storages are not offloaded


class Part(nn.Module):
    """A layer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def arrange(self, parts):
        """Do what concerns all parts of a model; called for the first one."""

    def forward(self, x):
        return torch.tanh(self.linear(x))


class Dropping(Part):
    rate = 0.2

    def forward(self, x):
        return F.dropout(super().forward(x), self.rate, self.training)


class Reading(Dropping):
    """Reads a buffer, and then writes it in one way or another."""

    def __init__(self):
        super().__init__()
        self.register_buffer("k", torch.ones(1))
        self.register_buffer("other", torch.full((1,), 0.5))

    def read(self):
        return self.k + 0  # a copy for autograd to save, so that the buffer may change

    def write(self, y):
        pass

    def forward(self, x):
        y = super().forward(x) * self.read()
        self.write(y)
        return y


class InPlace(Reading):
    def write(self, y):
        self.k.mul_(1.1)


class ByData(Reading):
    def write(self, y):
        self.k.data.mul_(1.1)


class LaterByData(ByData):
    """Leaves its buffer as it is in the first runs."""

    def write(self, y):
        if self.other.sum() > 4:
            super().write(y)
        self.other.add_(1)


class Constant(Reading):
    """A buffer that nothing writes, of several megabytes."""

    def __init__(self):
        super().__init__()
        self.k = torch.ones(1_000_000)

    def read(self):
        return self.k[:1] * 1.5


class Saved(ByData):
    """Autograd saves the buffer itself, so the backward pass sees its last value."""

    def read(self):
        return self.k


class Replacing(Reading):
    def read(self):
        return self.k

    def write(self, y):
        self.k = self.k * 1.1


class Retyping(Replacing):
    def read(self):
        return self.k.float()

    def write(self, y):
        self.k = (self.k * 1.1).to(torch.float64)


class Swapping(Replacing):
    def write(self, y):
        self.k, self.other = self.other, self.k


class Returning(InPlace):
    """Every second step reads the same; no random number tells steps apart."""

    rate = 0.0

    def write(self, y):
        self.k.copy_(1.5 - self.k)


class Carrying(Replacing):
    """A buffer through which gradients go to the step before."""

    def write(self, y):
        self.k = y.mean(0, keepdim=True)[:, 0] + 1


class Growing(Replacing):
    def read(self):
        return self.k.sum()

    def write(self, y):
        self.k = torch.cat([self.k, self.other])


class Beginning(Reading):
    """Has no value in its buffer until its first run."""

    def __init__(self):
        super().__init__()
        self.k = None

    def read(self):
        return 1.0 if self.k is None else self.k

    def write(self, y):
        self.k = self.other * self.read()


class Sharing(InPlace):
    """All parts write into one buffer."""

    def arrange(self, parts):
        for part in parts:
            part.k = self.k


class Parting(Replacing):
    """All parts begin with one buffer, and each puts one of its own into its place."""

    arrange = Sharing.arrange


class SharingData(ByData):
    """All parts write into one buffer, of which autograd sees nothing."""

    arrange = Sharing.arrange


class Evaluating(InPlace):
    """Writes a buffer in eval mode."""

    def arrange(self, parts):
        for part in parts:
            part.eval()


class Norming(Part):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return self.norm(super().forward(x))


class Renorming(Norming):
    """All parts have one norm."""

    def arrange(self, parts):
        for part in parts:
            part.norm = self.norm


class Spectral(Part):
    def __init__(self):
        super().__init__()
        nn.utils.parametrizations.spectral_norm(self.linear)


class Switching(Part):
    """Switches autocast on, and off inside of that, and gradients off."""

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                scale = torch.tanh(x).abs().mean()
            x = F.dropout(self.linear(x), 0.2) * scale
            with torch.autocast("cpu", enabled=False):
                x = x.float() * 1.5
        return torch.tanh(x)


class Tied(Part):
    """All parts have one weight."""

    def arrange(self, parts):
        for part in parts:
            part.linear.weight = self.linear.weight


class Hooked(Dropping):
    """Parameters have hooks that change gradients and note what they see."""

    def arrange(self, parts):
        self.seen = [[] for _ in range(2 * len(parts))]  # for each by itself: which one is first is not promised
        for part, of_weight, of_bias in zip(parts, self.seen[::2], self.seen[1::2], strict=True):
            part.linear.weight.register_hook(lambda grad, seen=of_weight: seen.append(grad.clone()) or 3 * grad)
            part.linear.bias.register_post_accumulate_grad_hook(lambda p, seen=of_bias: seen.append(p.grad.clone()))


class Tapped(Dropping):
    """A result has a hook that changes its gradient."""

    def forward(self, x):
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda grad: 1.5 * grad)
        return y * 0.9


class Frozen(Dropping):
    """Biases are frozen, and every second weight."""

    def arrange(self, parts):
        for number, part in enumerate(parts):
            part.linear.bias.requires_grad_(False)
            part.linear.weight.requires_grad_(number % 2 == 0)


class Still(Dropping):
    """Everything is frozen."""

    def arrange(self, parts):
        for part in parts:
            part.requires_grad_(False)


class Branching(Dropping):
    """Independent branches, which draw random numbers."""

    rate = 0.3

    def __init__(self):
        super().__init__()
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return super().forward(x) + F.dropout(torch.tanh(self.other(x)), self.rate, self.training)


class Between(InPlace):
    """Writes a buffer between two uses, each of which sees another value."""

    def forward(self, x):
        x = super().forward(x)
        self.k.mul_(3)
        return x * self.read()


class Queueing(Dropping):
    """Writes into a part of a buffer between two uses of all of it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("queue", torch.ones(WIDTH))

    def forward(self, x):
        x = super().forward(x) * (self.queue * 2)
        self.queue[:4].copy_(x.detach().mean(0)[:4])
        return x * (self.queue * 2)


class Positional(Norming):
    """Functions that get ``inplace`` by position, and other ways to write."""

    def forward(self, x):
        for function in (nn.Hardswish(True), nn.ELU(1.0, True)):
            x = function(self.norm(self.linear(x)))
        x = self.linear(x)
        x += 1
        torch.mul(x.detach(), 2, out=torch.empty_like(x))
        return torch.tanh(x)


class Read(Part):
    """A tensor that many read, whose gradients add up in an order; and a branch whose result is dropped."""

    def forward(self, x):
        x = super().forward(x)
        torch.tanh(self.linear(x))
        return torch.tanh(x * 0.5) * torch.tanh(x) + torch.tanh(x * 2) + self.linear(x)


class Overwriting(Part):
    """Changes its argument in place."""

    def forward(self, x):
        return super().forward(x.add_(0.5)) * 1.5  # a product with a number saves neither: the next part may change it


class Decaying(Part):
    """Changes its parameter in place before it is used."""

    def forward(self, x):
        with torch.no_grad():
            self.linear.weight.mul_(0.9)
        return super().forward(x)


class Checkpointing(Dropping):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class Descending(InPlace):
    """Goes along a gradient, so its forward pass has a backward pass inside."""

    def forward(self, x):
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(super().forward(x).sum(), x, create_graph=True)
        return torch.tanh(x - 0.5 * slope)


class Lazy(Part):
    """Has no shapes before its first run."""

    def __init__(self):
        super().__init__()
        self.linear = nn.LazyLinear(WIDTH)


class Lent(Dropping):
    """Its weight is another tensor while it runs."""

    def forward(self, x):
        lent = {"weight": self.linear.weight * 0.5}
        return F.dropout(torch.tanh(torch.func.functional_call(self.linear, lent, (x,))), self.rate, self.training)


class Across(Dropping):
    """What it hands on lies in memory column by column."""

    def forward(self, x):
        return super().forward(x).T.contiguous().T


class Finishing(Dropping):
    """Changes what it returns in place, which the next part saves."""

    def forward(self, x):
        return super().forward(x).mul_(1.5).relu_()


class Deep(Part):
    """Eight parameters of two shapes."""

    def __init__(self):
        super().__init__()
        self.more = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)), nn.Tanh())

    def forward(self, x):
        return self.more(super().forward(x))


class Recurrent(Part):
    """An LSTM, for which PyTorch has another kernel where no gradient is needed."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x):
        return self.lstm(super().forward(x).view(21, -1, WIDTH))[0].reshape(ROWS, WIDTH)


class Block(nn.Module):
    """Two parts, which a nested plan recomputes one by one."""

    def __init__(self, part):
        super().__init__()
        self.first, self.second = part(), part()

    def forward(self, x):
        return self.second(self.first(x))


class Scaled(Block):
    """A block with a keyword argument."""

    def forward(self, x, *, scale):
        return super().forward(x * (scale + 0))


class Passing(nn.Module):
    """Blocks that get a buffer by keyword, which changes after each of them."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Scaled(Part) for _ in range(3))
        self.register_buffer("k", torch.ones(()))

    def forward(self, x):
        for block in self.blocks:
            x = block(x, scale=self.k)
            self.k.mul_(1.1)
        return x
