"""JSON files of model folders, which strangers wrote: bounded in size and depth, without NaN."""

from __future__ import annotations

from pathlib import Path

import pydantic_core

MAX_CONFIG_BYTES = 1 << 20
"""Of a configuration; real ones have some thousand bytes."""

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_SHOWN_CHARACTERS = 80


def is_lfs_pointer(beginning: bytes) -> bool:
    """Return whether a file that begins so is a pointer of Git LFS in place of the file itself."""
    return beginning.startswith(_LFS_POINTER)


def read_json_object(path: Path, *, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, object]:
    """Return the object in a JSON file.

    Raises:
        ValueError: With what is wrong and what to do, without the file's name.
    """
    try:
        with path.open("rb") as file:
            text = file.read(max_bytes + 1)
    except FileNotFoundError:
        raise ValueError("there is no such file; download the model's folder again, completely") from None
    except OSError as error:
        raise ValueError(f"it cannot be read ({error.strerror}); allow this user to read it") from None
    if is_lfs_pointer(text):
        raise ValueError("it is a Git LFS pointer in place of the file; run `git lfs pull` in the model's folder")
    if len(text) > max_bytes:
        raise ValueError(f"it has over {max_bytes} bytes; download the file again")
    try:
        value = pydantic_core.from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise ValueError(f"it is no JSON ({str(error)[:_SHOWN_CHARACTERS]}); download the file again") from None
    if not isinstance(value, dict):
        raise ValueError("it is JSON, but no object; download the file again")
    return value
