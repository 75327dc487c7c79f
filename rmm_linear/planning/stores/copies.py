"""Copies between an accelerator and the CPU, beside the computation: on a stream of their own, by pinned memory."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def to_host(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Any]]:
    """Begin to copy tensors to the CPU's memory.

    Returns:
        Contiguous tensors on the CPU, those that are there already themselves; and events to wait for before they are
        read.
    """
    copies, events = [], []
    for tensor in (one.detach().resolve_conj().resolve_neg() for one in tensors):
        if tensor.device.type != "cuda":
            copies.append(tensor.cpu().contiguous())
            continue
        stream = side_stream(tensor.device)
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            copy.copy_(tensor, non_blocking=True)
            tensor.record_stream(stream)
            events.append(stream.record_event())
        copies.append(copy)
    return copies, events


def to_device(tensors: Sequence[Tensor], devices: Sequence[torch.device]) -> list[Tensor]:
    """Copy tensors to devices, on a thread that may wait until they are there."""
    copies, streams = [], set()
    for tensor, device in zip(tensors, devices, strict=True):
        if device.type != "cuda":
            copies.append(tensor.to(device))
            continue
        stream = side_stream(device)
        with torch.cuda.stream(stream):
            pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
            copies.append(pinned.to(device, non_blocking=True))
        streams.add(stream)
    for stream in streams:
        stream.synchronize()
    return copies


def claim(tensors: Sequence[Tensor]) -> None:
    """Tell the allocator that the streams which compute use tensors that :func:`to_device` made for another."""
    for tensor in tensors:
        if tensor.device.type == "cuda":
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def wait_for_devices(devices: Sequence[torch.device]) -> None:
    """Wait until devices have done all that they were told, so that a clock says how long it took."""
    for device in devices:
        torch.get_device_module(device).synchronize(device)


@functools.cache
def side_stream(device: torch.device) -> Any:
    """The stream for copies; one for each device, since the allocator keeps memory for each stream."""
    return torch.cuda.Stream(device)
