"""Opens untrusted files of model folders: regular files only, and JSON with limits on size and depth."""

from __future__ import annotations

import errno
from io import BufferedReader
from pathlib import Path

import pydantic_core

from bottega.plain_text import excerpt
from bottega.storage.folders import open_below

MAX_CONFIG_BYTES = 1 << 20
"""Limit of a configuration's size; real ones have some thousand bytes."""

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_SHOWN_CHARACTERS = 80

DOWNLOAD_AGAIN = "download the file again"


def is_lfs_pointer(beginning: bytes) -> bool:
    """Return whether a file with this beginning is a Git LFS pointer instead of the file itself."""
    return beginning.startswith(_LFS_POINTER)


def is_there(path: Path) -> bool:
    """Return whether a path exists, even as a broken link; False if it cannot be checked."""
    try:
        path.lstat()
    except (OSError, ValueError):
        return False
    return True


def open_model_file(path: Path, root: Path | None = None) -> BufferedReader:
    """Open a regular file that is no Git LFS pointer, following links.

    Args:
        root: Folder that must contain the file; None for no restriction.

    Raises:
        ValueError: It says what is wrong and what to do, without the file's name.
    """
    try:
        file = open_below(path, root)
    except OSError as error:
        raise ValueError(_unreadable(path, error)) from None
    try:
        if is_lfs_pointer(file.peek(len(_LFS_POINTER))):
            raise ValueError("it is a Git LFS pointer in place of the file; run `git lfs pull` in the model's folder")
    except (OSError, ValueError) as error:
        file.close()
        raise ValueError(_unreadable(path, error) if isinstance(error, OSError) else str(error)) from None
    return file


def read_model_file(path: Path, *, max_bytes: int = MAX_CONFIG_BYTES, root: Path | None = None) -> bytes:
    """Return the contents of a file of at most `max_bytes`. Raises ValueError like `open_model_file`."""
    with open_model_file(path, root) as file:
        try:
            content = file.read(max_bytes + 1)
        except OSError as error:
            raise ValueError(_unreadable(path, error)) from None
    if not content.strip():
        raise ValueError(f"it is empty; {DOWNLOAD_AGAIN}")
    if len(content) > max_bytes:
        raise ValueError(f"it has over {max_bytes} bytes, more than such a file can need; {DOWNLOAD_AGAIN}")
    return content


def read_json_object(
    path: Path, *, max_bytes: int = MAX_CONFIG_BYTES, allow_infinity: bool = False, root: Path | None = None
) -> dict[str, object]:
    """Return the object in a JSON file.

    Args:
        allow_infinity: Whether Infinity, -Infinity and NaN are allowed. They are not JSON, but Python writes them.
        root: Folder that must contain the file; None for no restriction.

    Raises:
        ValueError: It says what is wrong and what to do, without the file's name.
    """
    return parse_json_object(read_model_file(path, max_bytes=max_bytes, root=root), allow_infinity=allow_infinity)


def parse_json_object(content: bytes, *, allow_infinity: bool = False) -> dict[str, object]:
    """Return the object in the contents of a JSON file. Raises ValueError like `read_json_object`."""
    try:
        # from_json limits the depth of nesting.
        value = pydantic_core.from_json(content, allow_inf_nan=allow_infinity)
    except ValueError as error:
        raise ValueError(f"it is no JSON ({excerpt(str(error), _SHOWN_CHARACTERS)}); {DOWNLOAD_AGAIN}") from None
    if not isinstance(value, dict):
        raise ValueError(f"it is JSON, but no object; {DOWNLOAD_AGAIN}")
    return value


def _unreadable(path: Path, error: OSError) -> str:
    if error.errno in {errno.ENOENT, errno.ENOTDIR}:
        if path.is_symlink():
            return "it is a link to a file that is not there; download the model again"
        return "there is no such file; download the model again, with all of its files"
    if error.errno == errno.ELOOP:
        return "its links lead in circles; download the model again"
    if error.errno == errno.EACCES:
        return "this user may not read it; change its permissions or its owner"
    return f"it cannot be read ({error.strerror}); {DOWNLOAD_AGAIN}"
