"""Copies large sections of bytes onto a device, in parallel with its computations.

Tensors are views of such a section.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bottega.device.device import Device

# Sections are copied in pieces, because torch keeps as much pinned memory as the largest copy needed.
_PIECE_BYTES = 16 << 20
_STREAM = "load"


def load_bytes(device: Device, section: Tensor) -> Tensor:
    """Copy a section, uint8 [bytes], to the device and return it; return the section itself if it is there already.

    The calling thread waits.
    """
    if section.device == device.torch_device:
        return section
    # Allocated in the stream that will use and free it. The copies wait for earlier uses of this memory in that stream.
    copied = torch.empty(section.shape, dtype=section.dtype, device=device.torch_device)
    with device.stream(_STREAM):
        for first in range(0, len(section), _PIECE_BYTES):
            piece = section[first : first + _PIECE_BYTES]
            copied[first : first + len(piece)].copy_(device.to_device(piece), non_blocking=True)
        done = device.record()
    done.wait()
    return copied
