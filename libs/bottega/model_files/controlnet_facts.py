"""What a ControlNet's folder says of it without torch: its hash, which models it fits, and how large it is."""

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
    """A ControlNet, as its files describe it."""

    digest: str
    """Hash of its files, hex."""
    base: str
    """What a model must have to fit it, see ControlLayout."""
    size_bytes: int
    """Bytes of its weights once loaded."""


def read_controlnet_facts(name: str, folder: Path, *, dtype: str) -> ControlNetFacts:
    """Read a ControlNet that its operator put there: its configuration, headers, and all files for their hash.

    Args:
        name: Its name, for errors.
        folder: In Diffusers' layout.
        dtype: Name of the element type that it is loaded in; "auto" is that of its files.

    Raises:
        InvalidRequest: Names what of its configuration is out of bounds.
        ControlNetUnusable: Says why it cannot be served.
    """
    with naming(name, "used"):
        config = read_checked_config(name, folder)
        with opened_weights(folder, None) as files:
            elements = sum(math.prod(entry.shape) for weights in files for entry in weights.header.tensors)
            size_bytes = elements * (_ITEM_BYTES.get(dtype) or _item_bytes(files))
    with naming(name, "read"):
        digest = controlnet_digest(folder)
    return ControlNetFacts(digest=digest, base=controlnet_layout(config).base, size_bytes=size_bytes)


def _item_bytes(files: Sequence[WeightsFile]) -> int:
    """Return the bytes of an element in the type of most tensors, of the types that are computed in."""
    common = Counter(entry.dtype for weights in files for entry in weights.header.tensors).most_common(1)
    return 2 if common and common[0][0] in ("F16", "BF16") else 4
