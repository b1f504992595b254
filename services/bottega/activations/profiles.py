"""Measured profiles of models: the seconds that each block takes, computed in full or for the masked part only."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from bottega import rules
from bottega.blobstore.profiles import ProfileFolder
from bottega.errors import Violation
from bottega.v1.activations_pb2 import BlockCost, BlockProfile

MAX_ABOUT_CHARACTERS = 1000

_MODEL_HASH = re.compile(r"[0-9a-f]{1,128}")
_DTYPES = ("float32", "float16", "bfloat16")
_MAX_SHARES = 8
_MAX_BLOCKS = 4096
# Upper bound on the bytes of a module's path, the same as for tensor names in messages.
_MAX_NAME_BYTES = 200
_MAX_FILE_BYTES = 8 << 20

ProfileKey = tuple[str, str, int, int]
"""Model hash, dtype, width and height."""


def profile_key(profile: BlockProfile) -> ProfileKey:
    """Return the key of a profile."""
    return profile.model_hash, profile.dtype, profile.width, profile.height


def profile_folder(folder: Path) -> ProfileFolder[BlockProfile]:
    """Return the store of block profiles in a folder."""
    return ProfileFolder(
        folder,
        BlockProfile,
        key=profile_key,
        check=check_profile,
        is_empty=lambda profile: not profile.blocks,
        remedy="measure it again with `bottega templates profile`",
        max_file_bytes=_MAX_FILE_BYTES,
    )


def check_profile(profile: BlockProfile) -> Iterator[Violation]:
    """Yield the violations of a block profile. A profile without blocks is valid: it asks to delete the stored one."""
    if _MODEL_HASH.fullmatch(profile.model_hash) is None:
        yield Violation(field="profile.model_hash", description="must be 1 to 128 hex digits")
    if profile.dtype not in _DTYPES:
        yield Violation(field="profile.dtype", description=f"must be one of {', '.join(_DTYPES)}")
    for name in ("width", "height"):
        if not 1 <= getattr(profile, name) <= rules.MAX_SIDE:
            yield Violation(field=f"profile.{name}", description=f"must be from 1 to {rules.MAX_SIDE}")
    yield from _check_shares(profile.shares)
    if len(profile.blocks) > _MAX_BLOCKS:
        yield Violation(field="profile.blocks", description=f"must have at most {_MAX_BLOCKS} entries")
    else:
        for index, block in enumerate(profile.blocks):
            yield from _check_block(f"profile.blocks[{index}]", block, len(profile.shares))
        if len({block.name for block in profile.blocks}) < len(profile.blocks):
            yield Violation(field="profile.blocks", description="names must be unique")
    yield from _check_seconds("profile.forward_s", profile.forward_s)
    if len(profile.about) > MAX_ABOUT_CHARACTERS:
        yield Violation(field="profile.about", description=f"must be at most {MAX_ABOUT_CHARACTERS} characters")


def _check_shares(shares: Sequence[float]) -> Iterator[Violation]:
    # Written so that NaN breaks the rules.
    ascending = all(before < share for before, share in zip((0.0, *shares), shares, strict=False))
    if len(shares) > _MAX_SHARES or not (ascending and all(share <= 1 for share in shares)):
        rule = f"must be at most {_MAX_SHARES} ascending numbers above 0 and at most 1"
        yield Violation(field="profile.shares", description=rule)


def _check_block(path: str, block: BlockCost, shares: int) -> Iterator[Violation]:
    if not (0 < len(block.name.encode()) <= _MAX_NAME_BYTES and block.name.isprintable()):
        yield Violation(field=f"{path}.name", description=f"must be 1 to {_MAX_NAME_BYTES} printable bytes")
    if block.size_bytes < 0:
        yield Violation(field=f"{path}.size_bytes", description="must not be negative")
    yield from _check_seconds(f"{path}.full_s", block.full_s)
    if len(block.masked_s) != shares:
        yield Violation(field=f"{path}.masked_s", description="must have one number for each of profile.shares")
    else:
        for index, seconds in enumerate(block.masked_s):
            yield from _check_seconds(f"{path}.masked_s[{index}]", seconds)


def _check_seconds(path: str, seconds: float) -> Iterator[Violation]:
    if not (math.isfinite(seconds) and seconds >= 0):
        yield Violation(field=path, description="must be finite and not negative")
