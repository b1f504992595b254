"""Which files of a folder hold its weights: whole or in shards, under plain names or as a variant such as `fp16`.

Diffusers and transformers name them alike, by a stem: `diffusion_pytorch_model` or `model`. A variant stands before the
number of a shard (`model.fp16-00001-of-00002.safetensors`) or, from old releases, behind it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

MAX_INDEX_BYTES = 8 << 20
"""Of an index of shards; SDXL's UNet has one of 150 KB."""

PREFERRED_VARIANT = "fp16"
_VARIANT = r"[A-Za-z0-9_]+"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsFiles:
    """The files that hold a network's weights."""

    variant: str
    """The variant, such as `fp16`; empty for plain names."""
    names: tuple[str, ...]
    """File names in their order: one, or every shard."""


@dataclass(slots=True, kw_only=True)
class _Candidate:
    """The files of one variant."""

    whole: str = ""
    index: str = ""
    shards: dict[int, dict[int, str]] = field(default_factory=dict)
    """Names by number, by how many there are."""


def select_weights(names: Collection[str], stem: str, *, read: Callable[[str], bytes]) -> WeightsFiles:
    """Return the files that stock loads: plain names before a variant, `fp16` before other variants.

    Args:
        names: Of all files in the folder.
        stem: Such as `diffusion_pytorch_model`.
        read: Returns the content of an index of shards.

    Raises:
        ValueError: With what is missing and what to do.
    """
    candidates = _candidates(names, stem)
    if not candidates:
        raise ValueError(_without_weights(names, stem))
    variant = _chosen(candidates)
    return WeightsFiles(variant=variant, names=_files(candidates[variant], names, read))


def _candidates(names: Collection[str], stem: str) -> dict[str, _Candidate]:
    stem, ending = re.escape(stem), r"\.safetensors"
    whole = re.compile(rf"{stem}(?:\.({_VARIANT}))?{ending}")
    shard = re.compile(rf"{stem}(?:\.({_VARIANT}))?-(\d+)-of-(\d+)(?:\.({_VARIANT}))?{ending}")
    index = re.compile(rf"{stem}{ending}\.index(?:\.({_VARIANT}))?\.json")
    found: dict[str, _Candidate] = {}
    for name in sorted(names):
        if match := whole.fullmatch(name):
            found.setdefault(match[1] or "", _Candidate()).whole = name
        elif match := index.fullmatch(name):
            found.setdefault(match[1] or "", _Candidate()).index = name
        elif match := shard.fullmatch(name):
            shards = found.setdefault(match[1] or match[4] or "", _Candidate()).shards
            shards.setdefault(int(match[3]), {})[int(match[2])] = name
    return found


def _chosen(candidates: Mapping[str, _Candidate]) -> str:
    for variant in ("", PREFERRED_VARIANT):
        if variant in candidates:
            return variant
    if len(candidates) > 1:
        listed = ", ".join(sorted(candidates))
        raise ValueError(f"its weights come as {listed}; keep the files of one variant")
    return next(iter(candidates))


def _files(candidate: _Candidate, names: Collection[str], read: Callable[[str], bytes]) -> tuple[str, ...]:
    if candidate.index:
        return _indexed(candidate.index, names, read(candidate.index))
    if candidate.whole:
        return (candidate.whole,)
    count, shards = max(candidate.shards.items(), key=lambda item: len(item[1]))
    missing = sorted(set(range(1, count + 1)) - shards.keys())
    if missing:
        listed = ", ".join(map(str, missing[:3]))
        raise ValueError(f"of the {count} shards of its weights number {listed} is missing; download it again")
    return tuple(shards[number] for number in range(1, count + 1))


def _indexed(index: str, names: Collection[str], text: bytes) -> tuple[str, ...]:
    try:
        if len(text) > MAX_INDEX_BYTES:
            raise ValueError
        files = sorted(set(json.loads(text)["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise ValueError(f"{index} is no index of shards; download it again") from None
    missing = [name for name in files if name not in names]
    if missing or not files:
        shown = repr(missing[0])[:80] if missing else "every shard"
        raise ValueError(f"{index} names {shown}, which is missing; download it again")
    return tuple(files)


def _without_weights(names: Collection[str], stem: str) -> str:
    if any(name.startswith(stem) and name.endswith((".bin", ".pth", ".ckpt")) for name in names):
        return f"it has pickled weights only; convert them to {stem}.safetensors, as only safetensors are opened"
    return f"it has no {stem}.safetensors; download it again with its weights as safetensors"
