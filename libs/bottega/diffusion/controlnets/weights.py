"""The weights of a ControlNet: reading and measuring them. See bottega.model_files.controlnet_folder."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from bottega.model_files.controlnet_folder import WeightsFile
from bottega.safetensors_header import TensorEntry

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


def read_tensor(weights: WeightsFile, entry: TensorEntry) -> Tensor:
    """Return a copy of one of the file's tensors.

    A mapped file could change, and end the process if it is truncated.
    """
    raw = torch.empty(entry.end - entry.begin, dtype=torch.uint8)
    weights.file.seek(weights.header.size_bytes + entry.begin)
    if weights.file.readinto(raw.numpy().data) < raw.numel():
        raise ValueError("a file of weights has become shorter while it was read")
    return raw.view(_DTYPES[entry.dtype]).reshape(entry.shape)


def weights_dtype(files: Sequence[WeightsFile]) -> torch.dtype:
    """Return the most common element type of the tensors if it is float16 or bfloat16, else float32."""
    counts = Counter(entry.dtype for weights in files for entry in weights.header.tensors)
    common = counts.most_common(1)
    found = _DTYPES[common[0][0]] if common else torch.float32
    return found if found in {torch.float16, torch.bfloat16} else torch.float32


def weights_bytes(files: Sequence[WeightsFile], dtype: torch.dtype) -> int:
    """Return the size of all tensors in the element type that they are loaded in."""
    entries = (entry for weights in files for entry in weights.header.tensors)
    return sum(math.prod(entry.shape) * dtype.itemsize for entry in entries)
