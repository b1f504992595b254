"""Recognises the model family of a LoRA by the shapes and names of its tensors, and by what its metadata says.

Shapes count for more: trainers and converters copy metadata from other files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from bottega.addons.loras.wire.canonical import BACKBONE
from bottega.loras.importing.naming import Name, Part
from bottega.model_files.families import family_of
from bottega.model_files.family_names import SD15, SD21, SDXL, TITLES
from bottega.model_files.json_files import read_json_object
from bottega.plain_text import excerpt
from bottega.safetensors_header import TensorEntry

_FLUX, _SD3 = "FLUX", "Stable Diffusion 3"
# Features of the prompt embeddings that cross-attention reads.
_WIDTHS = {768: TITLES[SD15], 1024: TITLES[SD21], 2048: TITLES[SDXL]}
_BLOCKS = (
    (re.compile(r"single_transformer_blocks|(^|[._])(double|single)_blocks[._]"), _FLUX),
    (re.compile(r"joint_(transformer_)?blocks"), _SD3),
)
_CROSS_ATTENTION = re.compile(r"attn2[._]to_[kv]$")
_KEYS = ("ss_base_model_version", "modelspec.architecture", "base_model", "ss_sd_model_name")
# What metadata call a family, without punctuation; the first that is found counts.
_CALLED = (
    (re.compile(r"sdxl|stablediffusionxl|ssd1b|segmindvega"), TITLES[SDXL]),
    (re.compile(r"flux"), _FLUX),
    (re.compile(r"sd3|stablediffusion(v)?3"), _SD3),
    (re.compile(r"sd(v)?2|stablediffusion(v)?2"), TITLES[SD21]),
    (re.compile(r"sd(v)?1|stablediffusion(v)?1"), TITLES[SD15]),
)
_PUNCTUATION = re.compile(r"[^a-z0-9]")


def base_family(folder: Path) -> str:
    """Return the display name of a base model's family; "" if its index cannot be read."""
    try:
        family, _ = family_of(folder, read_json_object(folder / "model_index.json"))
    except ValueError:
        return ""
    return TITLES.get(family, family)


def family_by_shapes(entries: Iterable[tuple[TensorEntry, Name | None]]) -> str:
    """Return the family that a LoRA's tensors fit; "" if they do not tell."""
    for entry, name in entries:
        for pattern, family in _BLOCKS:
            if pattern.search(entry.name):
                return family
        if name is None:
            continue
        if name.component == "text_encoder_2":
            return TITLES[SDXL]
        is_cross_attention = name.component in {BACKBONE, None} and _CROSS_ATTENTION.search(name.path)
        if is_cross_attention and name.part is Part.DOWN and len(entry.shape) > 1 and entry.shape[1] in _WIDTHS:
            return _WIDTHS[entry.shape[1]]
    return ""


def family_by_metadata(metadata: Mapping[str, str], base_model: str = "") -> tuple[str, str]:
    """Return the family that metadata names, and the value that names it; both are "" if none does.

    Args:
        metadata: Metadata of a LoRA's file.
        base_model: The base model in PEFT's configuration.
    """
    for value in (*(metadata.get(key, "") for key in _KEYS), base_model):
        plain = _PUNCTUATION.sub("", value[:1000].lower())
        for pattern, family in _CALLED:
            if pattern.search(plain):
                return family, excerpt(value, 80)
    return "", ""
