"""Many bytes onto a device, once, beside what it computes: whoever wants tensors of them takes views."""

from __future__ import annotations

import torch
from torch import Tensor

from bottega.diffusion.device.device import Device

# Through pinned memory in pieces: all at once would pin as much memory as the largest section ever was.
_PIECE_BYTES = 16 << 20
_STREAM = "load"


def load_bytes(device: Device, section: Tensor) -> Tensor:
    """The section on the device, uint8 [bytes]; itself where it is there. The calling thread waits until it is."""
    if section.device == device.torch_device:
        return section
    # In the stream that will use it, and give its memory back; the copies wait for what that stream still does there.
    there = torch.empty(section.shape, dtype=section.dtype, device=device.torch_device)
    with device.stream(_STREAM):
        for first in range(0, len(section), _PIECE_BYTES):
            piece = section[first : first + _PIECE_BYTES]
            there[first : first + len(piece)].copy_(device.to_device(piece), non_blocking=True)
        done = device.record()
    done.wait()
    return there
