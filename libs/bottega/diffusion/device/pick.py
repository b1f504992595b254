"""Which Device a torch.device is."""

from __future__ import annotations

from functools import lru_cache

import torch

from bottega.diffusion.device.cpu import CpuDevice
from bottega.diffusion.device.cuda import CudaDevice
from bottega.diffusion.device.device import Device


def open_device(torch_device: torch.device) -> Device:
    """The one that this process has for it. Raises ValueError for a kind that nothing here computes on."""
    kind = torch_device.type
    if kind == "cuda":
        # A device without an index is the current one, whatever that is: its type does not say that there may be none.
        index: int | None = torch_device.index
        return _open(kind, torch.cuda.current_device() if index is None else index)
    return _open(kind, 0)


def use_device(torch_device: torch.device) -> Device:
    """The same, and the current one of the calling thread: what is to compute on it calls this first.

    Most of torch computes where its tensors are; kernels are launched on whatever device is current.
    """
    device = open_device(torch_device)
    if device.torch_device.type == "cuda":
        torch.cuda.set_device(device.torch_device)
    return device


@lru_cache
def _open(kind: str, index: int) -> Device:
    """One for each: streams are by name, and belong together."""
    if kind == "cpu":
        return CpuDevice()
    if kind == "cuda":
        return CudaDevice(torch.device(kind, index))
    raise ValueError(f"device {kind} is not served: use cpu or cuda")
