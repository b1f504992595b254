"""Recognises the kind of a path that is given as a model: a model that is served, another one, or something else."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from shlex import quote

from bottega.model_files.family_names import (
    FLUX,
    SD3,
    SD15,
    SD21,
    SDXL,
    TITLES,
    Z_IMAGE,
    served_titles,
    with_article,
)
from bottega.model_files.json_files import read_json_object
from bottega.model_files.single_file import read_single_file
from bottega.model_files.single_file_kind import FileKind
from bottega.plain_text import excerpt

_GIVE = "give the folder of a model in Diffusers' layout"
_GIVE_MODEL = "give the folder of a model"
_SAFETENSORS = ".safetensors"
_SHOWN_CHARACTERS = 80
# Entries that are read to recognise a folder; a home folder may have any number.
_MAX_NAMES = 4096
_STABLE_DIFFUSION = "Stable Diffusion"
# Families by the beginning of the pipeline's class name in Diffusers, longest first.
_FAMILIES = {
    "StableDiffusionXL": SDXL,
    "StableDiffusion3": SD3,
    "StableDiffusion": _STABLE_DIFFUSION,
    "Flux2": "FLUX.2",
    "Flux": FLUX,
    "Kandinsky": "Kandinsky",
    "PixArt": "PixArt",
    "StableCascade": "Stable Cascade",
    "Wuerstchen": "Würstchen",
    "HunyuanDiT": "Hunyuan-DiT",
    "AuraFlow": "AuraFlow",
    "Sana": "Sana",
    "QwenImage": "Qwen-Image",
    "ZImage": Z_IMAGE,
    "LatentConsistencyModel": _STABLE_DIFFUSION,
    "IF": "DeepFloyd IF",
}
# Pipelines of each family, which differ only in their inputs.
_SDXL_PIPELINES = ("StableDiffusionXLPipeline", "StableDiffusionXLImg2ImgPipeline", "StableDiffusionXLInpaintPipeline")
_SD_PIPELINES = ("StableDiffusionPipeline", "StableDiffusionImg2ImgPipeline", "StableDiffusionInpaintPipeline")
LCM_PIPELINE = "LatentConsistencyModelPipeline"
"""Pipeline of Stable Diffusion 1 for UNets that read the guidance scale; it draws as StableDiffusionPipeline does."""
_SD3_PIPELINES = ("StableDiffusion3Pipeline", "StableDiffusion3Img2ImgPipeline", "StableDiffusion3InpaintPipeline")
_FLUX_PIPELINES = ("FluxPipeline", "FluxImg2ImgPipeline", "FluxInpaintPipeline", "FluxFillPipeline")
_Z_IMAGE_PIPELINES = ("ZImagePipeline", "ZImageImg2ImgPipeline", "ZImageInpaintPipeline")
_PIPELINES = {
    SD15: (*_SD_PIPELINES, LCM_PIPELINE),
    SD21: _SD_PIPELINES,
    SDXL: _SDXL_PIPELINES,
    SD3: _SD3_PIPELINES,
    FLUX: _FLUX_PIPELINES,
    Z_IMAGE: _Z_IMAGE_PIPELINES,
}


def family_of(folder: Path, index: Mapping[str, object]) -> tuple[str, str]:
    """Return a model's family, and a sentence on why it is not served; the sentence is empty if it is.

    The family is a name in TITLES or, for others, a display name.

    Args:
        folder: Folder of the model.
        index: Contents of its model_index.json.
    """
    name = index.get("_class_name")
    if not isinstance(name, str):
        if isinstance(name, list):
            return "", (
                "_class_name names a pipeline of its own code, which is never run; give the folder of a model with a "
                "pipeline of Diffusers"
            )
        return "", "_class_name is missing, so that the kind of model is not known; download the file again"
    family = next((known for start, known in _FAMILIES.items() if name.startswith(start)), "")
    if family == _STABLE_DIFFUSION:
        family = _version(folder)
    shown = excerpt(name, _SHOWN_CHARACTERS)
    if name in _PIPELINES.get(family, ()):
        return family, _refiner(index) if family == SDXL else ""
    if family in _PIPELINES:
        title, served = TITLES[family], ", ".join(_PIPELINES[family])
        return family, (
            f"_class_name is {shown}, and only {served} are served: other pipelines draw other pictures; give the "
            f"folder of {with_article(title)} base model"
        )
    what = f"{with_article(TITLES.get(family, family))} model" if family else "a model of a kind that is not known"
    return family, f"_class_name is {shown}: this is {what}, and only {served_titles()} are served; {_GIVE}"


def describe_other(path: Path) -> str:
    """Describe in a sentence the content of a path that has no model_index.json."""
    try:
        if not stat.S_ISDIR(path.stat().st_mode):
            return _file(path)
        names = _names(path)
    except (FileNotFoundError, NotADirectoryError):
        return _missing(path)
    except (OSError, ValueError) as error:  # ValueError: a path with a null character
        return f"the folder cannot be read ({error}); change its permissions or its owner"
    config = _config(path) if "config.json" in names else {}
    class_name = str(config.get("_class_name", ""))
    if class_name.startswith("ControlNet"):
        return (
            "it is a ControlNet; give the folder of a model, and put the ControlNet into that folder's "
            "controlnets/ or name it in the ControlNet server's configuration"
        )
    if "adapter_config.json" in names or "pytorch_lora_weights.safetensors" in names:
        return "it is a LoRA; give the folder of a model, and add the LoRA with `bottega loras add`"
    if class_name or "architectures" in config:
        what = excerpt(class_name or str(config["architectures"]), _SHOWN_CHARACTERS)
        return f"it is one part of a model ({what}); give the folder that has model_index.json and all parts"
    if "snapshots" in names and (inner := _only_folder(path / "snapshots")):
        return f"it is a repository in the hub's cache; give its snapshot: {path / 'snapshots' / inner}"
    if single := sorted(name for name in names if name.endswith((".safetensors", ".ckpt"))):
        return f"it has no model_index.json, but {excerpt(single[0], _SHOWN_CHARACTERS)}: {_file(path / single[0])}"
    return f"it has no model_index.json; {_GIVE}"


def _missing(path: Path) -> str:
    if path.is_symlink():
        return "it is a link to a folder that is not there; download the model again"
    return (
        f"there is no such folder; {_GIVE} (nothing is downloaded from a hub: "
        "`hf download REPOSITORY --local-dir FOLDER` does that)"
    )


def _file(path: Path) -> str:
    """Return a sentence on a single file."""
    if path.suffix != _SAFETENSORS:
        return f"it is a single file; {_GIVE}, or a {_SAFETENSORS} file for `bottega models import`"
    try:
        found = read_single_file(path)
    except ValueError as error:
        return f"it is a single file, and {error}"
    if found.kind is FileKind.LORA:
        return f"it is a LoRA; {_GIVE_MODEL}, and add the LoRA with `bottega loras add`"
    if found.problem:
        return f"it is a single file, and {found.problem}"
    what = f"it is a single file, {found.kind.value}"
    return f"{what}; `bottega models import {quote(str(path))}` converts it to a folder"


def _refiner(index: Mapping[str, object]) -> str:
    if index.get("requires_aesthetics_score") is True or index.get("text_encoder") in ([None, None], None):
        return (
            "this is SDXL's refiner, which has no first text encoder and takes an aesthetic score; give the folder of "
            "an SDXL base model"
        )
    return ""


def _version(folder: Path) -> str:
    """Return SD15 or SD21. Only UNets of version 2 project with linear layers, whatever their widths."""
    try:
        linear = read_json_object(folder / "unet" / "config.json").get("use_linear_projection")
    except ValueError:
        return _STABLE_DIFFUSION
    return SD21 if linear else SD15


def _config(folder: Path) -> Mapping[str, object]:
    try:
        return read_json_object(folder / "config.json")
    except ValueError:
        return {}


def _names(folder: Path) -> frozenset[str]:
    with os.scandir(folder) as entries:
        return frozenset(entry.name for entry in islice(entries, _MAX_NAMES))


def _only_folder(folder: Path) -> str:
    try:
        names = sorted(_names(folder))
    except OSError:
        return ""
    return names[-1] if names else ""
