"""Norms over channels and pools for inputs (…, tokens, columns), and what they save of 3 × 20 × 96 numbers."""

from __future__ import annotations

import functools
import math

from torch import nn


class Channels(nn.Module):
    """A norm whose channels are the columns, of sequences or of images whose channels lie side by side."""

    def __init__(self, norm, is_last=False):
        super().__init__()
        self.norm, self.is_last = norm, is_last

    def forward(self, x):
        rows = x[None, None] if x.dim() == 1 else x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])
        if self.is_last:
            return self.norm(rows.unsqueeze(1).movedim(-1, 1)).movedim(1, -1).reshape(x.shape)
        return self.norm(rows.movedim(-1, 1).contiguous()).movedim(1, -1).reshape(x.shape)


class Planes(nn.Module):
    """A pool over the columns of every row, as a plane of some dimensions."""

    def __init__(self, pool, *lengths):
        super().__init__()
        self.pool, self.lengths = pool, lengths

    def forward(self, x):
        rows = math.prod(x.shape[:-1])
        plane = *self.lengths, x.shape[-1] // math.prod(self.lengths)
        return self.pool(x.reshape(rows, 1, *plane)).reshape(*x.shape[:-1], -1 if rows else 1)


_instance = functools.partial(nn.InstanceNorm2d, affine=True, track_running_stats=True)
# How each is made for a width; sets with statistics of their own, rows and columns of the matrix that is packed.
CHANNEL_NORMS = {
    "batch": (lambda width: Channels(nn.BatchNorm1d(width)), 96, 3, 1920),
    "batch of images": (lambda width: Channels(nn.BatchNorm2d(width), True), 96, 60, 96),
    "group": (lambda width: Channels(nn.GroupNorm(4, width)), 12, 3, 1920),
    "instance of images": (lambda width: Channels(_instance(width), True), 288, 60, 96),
}
# And of pools: bits of a position, and outputs of a row; those of averages save nothing.
POOLS = {
    "1d": (lambda width: Planes(nn.MaxPool1d(2)), 1, 48),
    "2d": (lambda width: Planes(nn.MaxPool2d(3, 2, 1), 4), 4, 24),
    "3d": (lambda width: Planes(nn.MaxPool3d(2), 2, 2), 3, 12),
    "average": (lambda width: Planes(nn.AvgPool2d(3, 2, 1), 4), 0, 24),
}
