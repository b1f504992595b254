"""Hashes of model folders, over the names and contents of their files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from io import BufferedReader
from pathlib import Path

from bottega import rules
from bottega.model_files.controlnet_config import FILE
from bottega.model_files.controlnet_folder import SUFFIX
from bottega.storage.folders import listed, open_below

_PIECE_BYTES = 4 << 20
# Bytes of a ControlNet's files, which take a minute to hash. ControlNets of SDXL have 5 GB.
_MAX_CONTROLNET_BYTES = 32 << 30


def files_digest(folder: Path, paths: Iterable[Path], *, hashed: Callable[[Path], str] | None = None) -> str:
    """Return the SHA-256 over the names and contents of files with weights or configurations, in hexadecimal.

    Args:
        folder: Folder that contains all paths.
        paths: Paths of files. Files of other types are ignored.
        hashed: Returns the SHA-256 of a file's contents in hexadecimal. By default the file is read, following links.
    """
    total = hashlib.sha256()
    for path in sorted(paths):
        if path.suffix in {".json", ".safetensors", ".txt"}:
            content = (hashed or file_digest)(path)
            total.update(f"{path.relative_to(folder).as_posix()}\0{content}\n".encode())
    return total.hexdigest()


def file_digest(path: Path, on_read: Callable[[int], None] = lambda _: None) -> str:
    """Return the SHA-256 of a file, in hexadecimal.

    Args:
        on_read: Called with the size of each piece that was read.
    """
    total = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            total.update(piece)
            on_read(len(piece))
    return total.hexdigest()


def controlnet_digest(folder: Path, root: Path | None = None) -> str:
    """Return the SHA-256 over the names and contents of a ControlNet's files, in hexadecimal.

    Args:
        folder: Folder of the ControlNet.
        root: Folder that must contain all files; None for no restriction.

    Raises:
        OSError: A file cannot be read, or is outside the root.
        ValueError: The files are too large.
    """
    files = [folder / FILE, *listed(folder, SUFFIX, most=rules.MAX_CONTROLNET_FILES, deep=True)]
    left = _MAX_CONTROLNET_BYTES

    def hashed(path: Path) -> str:
        nonlocal left
        with open_below(path, root) as file:
            left -= os.fstat(file.fileno()).st_size
            if left < 0:
                raise ValueError(f"its files have more than {_MAX_CONTROLNET_BYTES} bytes")
            return _sha256(file, os.fstat(file.fileno()).st_size)

    return files_digest(folder, files, hashed=hashed)


def _sha256(file: BufferedReader, size_bytes: int) -> str:
    """Return the hash of the first `size_bytes`, so that reading ends even if the file grows meanwhile."""
    total = hashlib.sha256()
    while size_bytes > 0 and (chunk := file.read(min(size_bytes, _PIECE_BYTES))):
        total.update(chunk)
        size_bytes -= len(chunk)
    return total.hexdigest()
