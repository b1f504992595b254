"""Where the training computes. Random numbers are drawn on the processor, so that they are the same everywhere."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from bottega.errors import ConfigError

# What a processor calls its bfloat16. On one without it, torch computes in float32 with conversions around every
# operator: many times slower.
_BFLOAT16 = ("avx512_bf16", "amx_bf16", "bf16")


def pick_device(name: str) -> torch.device:
    """name: auto, cpu or cuda. ConfigError for a device that is not there."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: PyTorch finds no CUDA device here; cpu or auto trains on the processor")
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def half_precision(device: torch.device) -> AbstractContextManager[object]:
    """Computes in bfloat16 where that loses nothing, if the device knows how."""
    if not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    if device.type == "cpu" and not any(torch.cpu.get_capabilities().get(name) for name in _BFLOAT16):
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16)
