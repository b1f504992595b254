"""Validation of ActivationService's requests: yields all violations, with the names of the fields."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

from bottega import rules
from bottega.errors import Violation
from bottega.v1.activations_pb2 import BlockCost, BlockProfile

MAX_TEMPLATES = 1000
"""Upper bound on the length of a list."""

MAX_SOURCES = 64
"""Upper bound on the sources of one PrefetchTemplates."""

MAX_ABOUT_CHARACTERS = 1000
_ID = re.compile(r"[0-9a-f]{8,32}")
_HASH = re.compile(r"[0-9a-f]{1,128}")
_DTYPES = ("float32", "float16", "bfloat16")
_MAX_SHARES = 8
_MAX_BLOCKS = 4096
# For a module's path, as for tensor names on links.
_MAX_NAME_BYTES = 200


def check_id(template: str, *, may_be_empty: bool = True) -> Iterator[Violation]:
    """Check a template's id, or the prefix of one."""
    if (template or not may_be_empty) and _ID.fullmatch(template) is None:
        empty = "empty, or " if may_be_empty else ""
        yield Violation(field="id", description=f"must be {empty}the first 8 to 32 hex digits of an id")


def check_limit(limit: int) -> Iterator[Violation]:
    """Check the number of templates to list; 0 is the contract's default."""
    if not 0 <= limit <= MAX_TEMPLATES:
        yield Violation(field="limit", description=f"must be 0 to {MAX_TEMPLATES}")


def check_sources(sources: Sequence[str]) -> Iterator[Violation]:
    """Check the sources of templates to prefetch."""
    if len(sources) > MAX_SOURCES:
        yield Violation(field="sources", description=f"must be at most {MAX_SOURCES}")
    for index, source in enumerate(sources[:MAX_SOURCES]):
        if not rules.is_digest(source):
            yield Violation(field=f"sources[{index}]", description="must be 64 hex digits, in lower case")


def check_profile(profile: BlockProfile) -> Iterator[Violation]:
    """Check a block profile."""
    if _HASH.fullmatch(profile.model_hash) is None:
        yield Violation(field="profile.model_hash", description="must be 1 to 128 hex digits")
    if profile.dtype not in _DTYPES:
        yield Violation(field="profile.dtype", description=f"must be one of {', '.join(_DTYPES)}")
    for name in ("width", "height"):
        if not 1 <= getattr(profile, name) <= rules.MAX_SIDE:
            yield Violation(field=f"profile.{name}", description=f"must be 1 to {rules.MAX_SIDE}")
    yield from _check_shares(profile.shares)
    if len(profile.blocks) > _MAX_BLOCKS:
        yield Violation(field="profile.blocks", description=f"must be at most {_MAX_BLOCKS}")
    else:
        for index, block in enumerate(profile.blocks):
            yield from _check_block(f"profile.blocks[{index}]", block, len(profile.shares))
    yield from _check_seconds("profile.forward_s", profile.forward_s)
    if len(profile.about) > MAX_ABOUT_CHARACTERS:
        yield Violation(field="profile.about", description=f"must be at most {MAX_ABOUT_CHARACTERS} characters")


def _check_shares(shares: Sequence[float]) -> Iterator[Violation]:
    # Written so that NaN breaks the rules.
    ascending = all(before < share for before, share in zip((0.0, *shares), shares, strict=False))
    if len(shares) > _MAX_SHARES or not (ascending and all(share <= 1 for share in shares)):
        rule = f"must be at most {_MAX_SHARES}, ascending, above 0 and at most 1"
        yield Violation(field="profile.shares", description=rule)


def _check_block(path: str, block: BlockCost, shares: int) -> Iterator[Violation]:
    if not (0 < len(block.name.encode()) <= _MAX_NAME_BYTES and block.name.isprintable()):
        yield Violation(field=f"{path}.name", description=f"must be 1 to {_MAX_NAME_BYTES} printable bytes")
    if block.size_bytes < 0:
        yield Violation(field=f"{path}.size_bytes", description="must not be negative")
    yield from _check_seconds(f"{path}.full_s", block.full_s)
    if len(block.masked_s) != shares:
        yield Violation(field=f"{path}.masked_s", description="must be one for each of profile.shares")
    else:
        for index, seconds in enumerate(block.masked_s):
            yield from _check_seconds(f"{path}.masked_s[{index}]", seconds)


def _check_seconds(path: str, seconds: float) -> Iterator[Violation]:
    if not (math.isfinite(seconds) and seconds >= 0):
        yield Violation(field=path, description="must be finite, and not negative")
