"""Reads facts about a ControlNet from its folder, without torch: hash, fitting models, and size."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bottega.model_files.controlnet_folder import WeightsFile, naming, opened_weights, read_checked_config
from bottega.model_files.controlnet_layout import controlnet_layout
from bottega.model_files.digest import controlnet_digest

# Bytes of an element, by the configured name of its type.
_ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlNetFacts:
    """Facts about a ControlNet."""

    digest: str
    """Hash of its files, in hexadecimal."""
    base: str
    """Name of the layout that a fitting model must have; see ControlLayout."""
    size_bytes: int
    """Bytes of its loaded weights."""
    modes: int = 0
    """Number of its control modes; 0 if it is not a union."""


def read_controlnet_facts(name: str, folder: Path, *, dtype: str) -> ControlNetFacts:
    """Read an operator's ControlNet: its configuration, its headers, and all files for their hash.

    Args:
        name: Name of the ControlNet, for errors.
        folder: Folder in Diffusers' layout.
        dtype: Element type in which it is loaded; "auto" is that of its files.

    Raises:
        InvalidRequest: Its configuration has values out of bounds.
        ControlNetUnusable: It cannot be served.
    """
    with naming(name, "used"):
        config = read_checked_config(name, folder)
        with opened_weights(folder, None) as files:
            elements = sum(math.prod(entry.shape) for weights in files for entry in weights.header.tensors)
            size_bytes = elements * (_ITEM_BYTES.get(dtype) or _item_bytes(files))
    with naming(name, "read"):
        digest = controlnet_digest(folder)
    return ControlNetFacts(
        digest=digest, base=controlnet_layout(config).base, size_bytes=size_bytes, modes=config.modes
    )


def _item_bytes(files: Sequence[WeightsFile]) -> int:
    """Return the bytes of an element in the type of most tensors."""
    common = Counter(entry.dtype for weights in files for entry in weights.header.tensors).most_common(1)
    return 2 if common and common[0][0] in ("F16", "BF16") else 4
