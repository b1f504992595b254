"""Recognises the kind of network in a single file, and its family, by the names and shapes of its tensors. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum

from bottega.model_files.family_names import (
    CLIP_PREFIXES,
    FAMILIES,
    FLUX,
    OPEN_CLIP,
    OPEN_CLIP_SDXL,
    SD3,
    SD15,
    SD21,
    SDXL,
    served_titles,
)
from bottega.model_files.json_files import DOWNLOAD_AGAIN
from bottega.plain_text import excerpt
from bottega.safetensors_header import TensorEntry

UNET = "model.diffusion_model."
"""Beginning of the names of denoising networks, and also of transformers."""
VAE_PREFIXES = ("first_stage_model.", "vae.")
CONTROLNET = "control_model."
FIRST = "input_blocks.0.0.weight"
"""A tensor that every UNet and ControlNet in the layout of the first authors has."""
DIFFUSERS_HINT = "controlnet_cond_embedding.conv_in.weight"
"""A tensor that every ControlNet in Diffusers' layout has. Published single files of SDXL have that layout."""

_REFINER = "conditioner.embedders.0.model."
_LABELS = "label_emb.0.0.weight"
# Names that only a file of Diffusers or transformers has.
_DIFFUSERS = ("down_blocks.", "encoder.down_blocks.", "mid_block.", "text_model.", "controlnet_cond_embedding.")
# Transformers by the beginning of a name that only they have. The last three have blocks as Flux.1 has.
_OTHER_FAMILIES = {
    "double_layers.": "AuraFlow",
    "cap_pad_token": "Z-Image",
    "cap_embedder.": "Lumina 2",
    "double_stream_modulation_img.": "FLUX.2",
    "distilled_guidance_layer.": "Chroma",
    "txt_in.individual_token_refiner.": "HunyuanVideo",
}
_TRANSFORMER_BLOCKS = {"joint_blocks.": SD3, "double_blocks.": FLUX}
_CONTROL_LORA = "lora_controlnet"
_EDM = "edm_"
# Textual inversion: tensors of a few vectors, named by their trainer or by their token.
_EMBEDDINGS = frozenset({"emb_params", "clip_l", "clip_g"})
_EMBEDDING_WIDTHS = frozenset({768, 1024, 1280})
_MAX_EMBEDDINGS = 4
_SHOWN_CHARACTERS = 80
_CONVERTED = f"only {served_titles(FAMILIES)} can be converted"
_GIVE = "give the file of a whole model, a VAE or a ControlNet, or a folder with model_index.json"


class FileKind(StrEnum):
    """The kind of network that a file holds; the value is for sentences."""

    MODEL = "a whole model"
    VAE = "a VAE"
    CONTROLNET = "a ControlNet"
    LORA = "a LoRA"
    EMBEDDING = "a textual inversion embedding"
    OTHER = "something else"


def kind_of(entries: Mapping[str, TensorEntry]) -> FileKind:
    """Return the kind of network that tensors are of."""
    if _CONTROL_LORA in entries:
        return FileKind.OTHER
    if any("lora_" in name or ".lora." in name for name in entries):
        return FileKind.LORA
    if any(name.startswith((UNET, *_TRANSFORMER_BLOCKS)) for name in entries):
        return FileKind.MODEL
    if (
        DIFFUSERS_HINT in entries
        or f"{CONTROLNET}{FIRST}" in entries
        or {"time_embed.0.weight", "zero_convs.0.0.weight"} <= entries.keys()
    ):
        return FileKind.CONTROLNET
    if any(name.removeprefix(prefix).startswith("decoder.up.") for name in entries for prefix in ("", *VAE_PREFIXES)):
        return FileKind.VAE
    if 0 < len(entries) <= _MAX_EMBEDDINGS and all(_is_embedding(entry) for entry in entries.values()):
        return FileKind.EMBEDDING
    return FileKind.OTHER


def _is_embedding(entry: TensorEntry) -> bool:
    named = entry.name in _EMBEDDINGS or (entry.name.startswith("<") and entry.name.endswith(">"))
    vectors = 1 <= len(entry.shape) <= 2 and entry.shape[-1] in _EMBEDDING_WIDTHS
    return entry.name in _EMBEDDINGS or (vectors and (named or "." not in entry.name))


def _lora(entries: Mapping[str, TensorEntry]) -> str:
    return "it is a LoRA; add it with `bottega loras add NAME FILE`"


def _embedding(entries: Mapping[str, TensorEntry]) -> str:
    count = max(entry.shape[0] if len(entry.shape) == 2 else 1 for entry in entries.values())
    tokens = f"{count} token{'s' if count != 1 else ''}"
    return f"it is a textual inversion embedding of {tokens}; add it with `bottega loras add NAME FILE`"


def _other(entries: Mapping[str, TensorEntry]) -> str:
    if not entries:
        return f"it has no tensors; {DOWNLOAD_AGAIN}"
    if _CONTROL_LORA in entries:
        return "it is a Control-LoRA, which is not served; give the file of a ControlNet"
    if other := _other_family(entries, ""):
        return f"it is a {other} model; {_CONVERTED}"
    if any(name.startswith(_DIFFUSERS) for name in entries):
        return "it is one part of a model in Diffusers' layout; give the folder that has model_index.json and all parts"
    if FIRST in entries:
        return "it has a denoising network alone, without text encoders and VAE; give the file of a whole model"
    first = excerpt(next(iter(entries)), _SHOWN_CHARACTERS)
    return f"its tensors, such as {first}, are those of no model that is known; {_GIVE}"


def _model_family(entries: Mapping[str, TensorEntry]) -> tuple[str, str]:
    """Return the family of a whole model, and a sentence on why it is not served."""
    if f"{UNET}{FIRST}" not in entries:
        prefix = prefix_of(entries)
        other = _other_family(entries, prefix)
        found = next((found for start, found in _TRANSFORMER_BLOCKS.items() if _has(entries, prefix + start)), "")
        if found and not other:
            return found, ""
        what = f"a {other} model" if other else "a model of a kind that is not known"
        return "", f"it is {what}; {_CONVERTED}"
    if _has(entries, _REFINER) and not _has(entries, OPEN_CLIP_SDXL):
        return "", (
            "it is SDXL's refiner, which has no first text encoder and takes an aesthetic score; give the file of an "
            "SDXL base model"
        )
    if _has(entries, _EDM):
        return "", (
            "it was trained with EDM's noise levels, as Playground 2.5 and CosXL were, which its file does not "
            "describe; download its folder instead"
        )
    if f"{UNET}label_emb.weight" in entries:
        return "", "it is an upscaler that takes a noise level; give the file of a model that draws from words"
    if f"{UNET}{_LABELS}" in entries and _has(entries, OPEN_CLIP):
        return "", "it is an unCLIP model, which draws from pictures; give the file of a model that draws from words"
    if f"{UNET}{_LABELS}" in entries:
        return SDXL, ""
    if _has(entries, OPEN_CLIP):
        return SD21, ""
    if _has(entries, CLIP_PREFIXES[0]):
        return SD15, ""
    return _family_by_context(entries, UNET), ""


def _other_family(entries: Mapping[str, TensorEntry], prefix: str) -> str:
    """Return the display name of a family whose transformers are not converted; empty if it is none of these."""
    return next((title for start, title in _OTHER_FAMILIES.items() if _has(entries, prefix + start)), "")


def prefix_of(entries: Mapping[str, TensorEntry]) -> str:
    """Return the beginning of the names of a denoising network's tensors. Files of one alone may have none."""
    return UNET if _has(entries, UNET) else ""


def _controlnet_family(entries: Mapping[str, TensorEntry]) -> tuple[str, str]:
    prefix = CONTROLNET if f"{CONTROLNET}{FIRST}" in entries else ""
    if f"{prefix}{_LABELS}" in entries or "add_embedding.linear_1.weight" in entries:
        return SDXL, ""
    return _family_by_context(entries, prefix), ""


def _family_by_context(entries: Mapping[str, TensorEntry], prefix: str) -> str:
    """Return the family by the projections of its transformers, which are linear since Stable Diffusion 2."""
    projections = (
        entry for name, entry in entries.items() if name.startswith(prefix) and name.endswith(".proj_in.weight")
    )
    first = next(projections, None)
    return "" if first is None else SD21 if len(first.shape) == 2 else SD15


def _vae_family(entries: Mapping[str, TensorEntry]) -> tuple[str, str]:
    return "", ""


def _has(entries: Mapping[str, TensorEntry], prefix: str) -> bool:
    return any(name.startswith(prefix) for name in entries)


_Sentence = Callable[[Mapping[str, TensorEntry]], str]
REFUSED: Mapping[FileKind, _Sentence] = {
    FileKind.LORA: _lora,
    FileKind.EMBEDDING: _embedding,
    FileKind.OTHER: _other,
}
FAMILY_OF: Mapping[FileKind, Callable[[Mapping[str, TensorEntry]], tuple[str, str]]] = {
    FileKind.MODEL: _model_family,
    FileKind.CONTROLNET: _controlnet_family,
    FileKind.VAE: _vae_family,
}
