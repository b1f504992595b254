"""The files of a ControlNet's folder in Diffusers' layout: found, bounded, opened, read. A stranger may have written
them, and may change them at any time.

root: where there is one, no file is read that lies outside of it, links followed. Raises OSError, and
ValueError saying what is wrong with a file.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

import torch
from torch import Tensor

from bottega import rules
from bottega.diffusion.controlnets.configuration import FILE, MAX_CONFIG_BYTES
from bottega.diffusion.model.model import files_digest
from bottega.errors import BadLora
from bottega.lora.safetensors_header import LENGTH_BYTES, Header, TensorEntry, header_bytes, read_header
from bottega.storage.contained_paths import listed, open_below

_WEIGHTS = "diffusion_pytorch_model"
_SUFFIX = ".safetensors"
# Of each file; those of SDXL's have a hundred thousand, all of which become objects.
_MAX_HEADER_BYTES = 2 << 20
_MOST_PARTS = 64
# Of all files that are hashed, which takes a minute; SDXL's ControlNets have 5 GB.
_MAX_BYTES = 32 << 30
_PIECE_BYTES = 4 << 20
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsFile:
    """An open file of weights, and what its header says, all of which has been checked."""

    file: BufferedReader
    header: Header

    def tensor(self, entry: TensorEntry) -> Tensor:
        """One of its tensors, in memory of its own: what is mapped would change, or end the process, with the file."""
        raw = torch.empty(entry.end - entry.begin, dtype=torch.uint8)
        self.file.seek(self.header.size_bytes + entry.begin)
        if self.file.readinto(raw.numpy().data) < raw.numel():
            raise ValueError("a file of weights has become shorter while it was read")
        return raw.view(_DTYPES[entry.dtype]).reshape(entry.shape)


def read_config(folder: Path, root: Path | None) -> bytes:
    """The text of its configuration, no more of it than may be there and a byte."""
    with open_below(folder / FILE, root) as file:
        return file.read(MAX_CONFIG_BYTES + 1)


@contextmanager
def opened_weights(folder: Path, root: Path | None) -> Iterator[Sequence[WeightsFile]]:
    """Its weights for the block: one file, or all of the parts that a large one was split into."""
    with ExitStack() as stack:
        yield [_opened(path, stack.enter_context(open_below(path, root))) for path in _weights(folder)]


def weights_bytes(files: Sequence[WeightsFile], dtype: torch.dtype) -> int:
    """Of all tensors in the element type that they are loaded in."""
    entries = (entry for each in files for entry in each.header.tensors)
    return sum(math.prod(entry.shape) * dtype.itemsize for entry in entries)


def controlnet_digest(folder: Path, root: Path | None = None) -> str:
    """SHA-256 over the names and contents of a ControlNet's files, hex."""
    files = [folder / FILE, *listed(folder, _SUFFIX, most=rules.MAX_CONTROLNET_FILES, deep=True)]
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
    """Of so many bytes: a file that grows while it is read would have no end."""
    total = hashlib.sha256()
    while size_bytes > 0 and (piece := file.read(min(size_bytes, _PIECE_BYTES))):
        total.update(piece)
        size_bytes -= len(piece)
    return total.hexdigest()


def _opened(path: Path, file: BufferedReader) -> WeightsFile:
    try:
        if (size_bytes := header_bytes(file.read(LENGTH_BYTES))) > _MAX_HEADER_BYTES:
            raise ValueError(f"{path.name}: its header has {size_bytes} bytes; {_MAX_HEADER_BYTES} may be read")
        header = read_header(file)
    except BadLora as error:
        raise ValueError(f"{path.name}: {error.message}") from None
    for entry in header.tensors:
        if entry.dtype not in _DTYPES:
            raise ValueError(f"{path.name}: {entry.name[:80]} has elements of {entry.dtype}, no floating point numbers")
    return WeightsFile(file=file, header=header)


def _weights(folder: Path) -> list[Path]:
    whole = folder / f"{_WEIGHTS}{_SUFFIX}"
    if whole.is_file():
        return [whole]
    there = listed(folder, _SUFFIX, most=rules.MAX_CONTROLNET_FILES, deep=False)
    parts = sorted(path for path in there if path.match(f"{_WEIGHTS}-*-of-*{_SUFFIX}"))
    if not parts:
        raise ValueError(f"its folder has no {whole.name}; weights are read as safetensors only")
    if len(parts) > _MOST_PARTS:
        raise ValueError(f"its weights are in {len(parts)} parts; at most {_MOST_PARTS} are accepted")
    return parts
