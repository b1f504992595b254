"""The weights of a ControlNet: read into memory, measured, hashed. See bottega.model_files.controlnet_folder."""

from __future__ import annotations

import hashlib
import math
import os
from collections import Counter
from collections.abc import Sequence
from io import BufferedReader
from pathlib import Path

import torch
from torch import Tensor

from bottega import rules
from bottega.diffusion.model.model import files_digest
from bottega.model_files.controlnet_config import FILE
from bottega.model_files.controlnet_folder import SUFFIX, WeightsFile
from bottega.safetensors_header import TensorEntry
from bottega.storage.contained_paths import listed, open_below

# Of all files that are hashed, which takes a minute; SDXL's ControlNets have 5 GB.
_MAX_BYTES = 32 << 30
_CHUNK_BYTES = 4 << 20
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


def read_tensor(weights: WeightsFile, entry: TensorEntry) -> Tensor:
    """Return one of the file's tensors in memory of its own.

    A mapped file would change, or end the process, when somebody truncates it.
    """
    raw = torch.empty(entry.end - entry.begin, dtype=torch.uint8)
    weights.file.seek(weights.header.size_bytes + entry.begin)
    if weights.file.readinto(raw.numpy().data) < raw.numel():
        raise ValueError("a file of weights has become shorter while it was read")
    return raw.view(_DTYPES[entry.dtype]).reshape(entry.shape)


def weights_dtype(files: Sequence[WeightsFile]) -> torch.dtype:
    """Return the element type of most of the tensors, of those that are computed in: float32, float16 or bfloat16."""
    counts = Counter(entry.dtype for weights in files for entry in weights.header.tensors)
    common = counts.most_common(1)
    found = _DTYPES[common[0][0]] if common else torch.float32
    return found if found in {torch.float16, torch.bfloat16} else torch.float32


def weights_bytes(files: Sequence[WeightsFile], dtype: torch.dtype) -> int:
    """Return the bytes of all tensors in the element type that they are loaded in."""
    entries = (entry for weights in files for entry in weights.header.tensors)
    return sum(math.prod(entry.shape) * dtype.itemsize for entry in entries)


def controlnet_digest(folder: Path, root: Path | None = None) -> str:
    """Return SHA-256 over the names and contents of a ControlNet's files, hex.

    Raises:
        OSError: A file cannot be read, or lies outside of the root.
        ValueError: The files are too large.
    """
    files = [folder / FILE, *listed(folder, SUFFIX, most=rules.MAX_CONTROLNET_FILES, deep=True)]
    left = _MAX_BYTES

    def hashed(path: Path) -> str:
        nonlocal left
        with open_below(path, root) as file:
            left -= os.fstat(file.fileno()).st_size
            if left < 0:
                raise ValueError(f"its files have over {_MAX_BYTES} bytes")
            return _sha256(file, os.fstat(file.fileno()).st_size)

    return files_digest(folder, files, hashed=hashed)


def _sha256(file: BufferedReader, size_bytes: int) -> str:
    """Hash only so many bytes: a file that grows while it is read would have no end."""
    total = hashlib.sha256()
    while size_bytes > 0 and (chunk := file.read(min(size_bytes, _CHUNK_BYTES))):
        total.update(chunk)
        size_bytes -= len(chunk)
    return total.hexdigest()
