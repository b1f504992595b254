"""Layers out of a LoRA in canonical form: tensors that are views of its two sections, wherever those are.

Knows the canonical form; knows neither files nor links.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from bottega.diffusion.loras.lora import UNET, LoraLayer
from bottega.lora.canonical import CanonicalLora
from bottega.lora.safetensors_header import TensorEntry

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def read_layers(
    canonical: CanonicalLora, *, text: memoryview | None = None, unet: memoryview | None = None
) -> dict[str, dict[str, LoraLayer]]:
    """The layers of those sections that are given, by component and module path.

    text, unet: writable memory, as torch wants it; it must stay as it is while a layer is in use.
    """
    layers: dict[str, dict[str, LoraLayer]] = {}
    for module in canonical.modules:
        section = unet if module.component == UNET else text
        if section is not None:
            (scale,) = struct.unpack_from("<f", section, module.scale.begin)
            layers.setdefault(module.component, {})[module.path] = LoraLayer(
                down=_view(section, module.down), up=_view(section, module.up), scale=scale
            )
    return layers


def _view(section: memoryview, entry: TensorEntry) -> Tensor:
    raw = torch.frombuffer(section[entry.begin : entry.end], dtype=_DTYPES[entry.dtype])
    return raw.view(entry.shape)
