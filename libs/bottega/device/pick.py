"""Returns the Device for a torch.device."""

from __future__ import annotations

from functools import lru_cache

import torch

from bottega.device.cpu import CpuDevice
from bottega.device.cuda import CudaDevice
from bottega.device.device import Device


def open_device(torch_device: torch.device) -> Device:
    """Return the Device for a torch.device. There is one per process. Raise ValueError if its kind is not supported."""
    kind = torch_device.type
    if kind == "cuda":
        # A device without an index is the current one. Its type does not say that the index may be None.
        index: int | None = torch_device.index
        return _open(kind, torch.cuda.current_device() if index is None else index)
    return _open(kind, 0)


def use_device(torch_device: torch.device) -> Device:
    """Return the Device for a torch.device, and make it the current one of the calling thread.

    Call it first in a thread that computes: most of torch computes where its tensors are, but kernels are launched on
    the current device.
    """
    device = open_device(torch_device)
    if device.torch_device.type == "cuda":
        torch.cuda.set_device(device.torch_device)
    return device


@lru_cache
def _open(kind: str, index: int) -> Device:
    """Return the only Device for a device, because named streams are shared."""
    if kind == "cpu":
        return CpuDevice()
    if kind == "cuda":
        return CudaDevice(torch.device(kind, index))
    raise ValueError(f"device {kind} is not supported; use cpu or cuda")
