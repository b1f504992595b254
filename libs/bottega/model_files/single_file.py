"""Recognises what a single safetensors file holds, by the names and shapes of its tensors. No torch.

Trainers and programs such as A1111, ComfyUI and kohya's scripts keep a whole model in one file, in the layout of its
first authors: the UNet below `model.diffusion_model.`, the VAE below `first_stage_model.`, and text encoders below
`cond_stage_model.` or `conditioner.embedders.`. VAEs and ControlNets have files of their own in that layout.
`bottega models import` converts such a file into a folder in Diffusers' layout.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from bottega.model_files.family_names import (
    CLIP_PREFIXES,
    EPSILON,
    FAMILIES,
    FLOW,
    OPEN_CLIP,
    OPEN_CLIP_SDXL,
    PREDICTION_TYPES,
    SD3,
    SD15,
    SD21,
    SDXL,
    TITLES,
    V_PREDICTION,
    denoiser_part,
    served_titles,
)
from bottega.model_files.json_files import DOWNLOAD_AGAIN, open_model_file
from bottega.plain_text import excerpt
from bottega.safetensors_header import Header, HeaderError, TensorEntry, read_header

UNET = "model.diffusion_model."
VAE_PREFIXES = ("first_stage_model.", "vae.")
CONTROLNET = "control_model."
DIFFUSERS_HINT = "controlnet_cond_embedding.conv_in.weight"
"""A tensor that every ControlNet in Diffusers' layout has. Published single files of SDXL have that layout."""

OTHER_VERSION = "download another version of the file, or its folder in Diffusers' layout"
"""What to do about a file that cannot be converted."""

_SUFFIX = ".safetensors"
_FIRST = "input_blocks.0.0.weight"
_REFINER = "conditioner.embedders.0.model."
_LABELS = "label_emb.0.0.weight"
# Names that only a file of Diffusers or transformers has.
_DIFFUSERS = ("down_blocks.", "encoder.down_blocks.", "mid_block.", "text_model.", "controlnet_cond_embedding.")
_OTHER_FAMILIES = {
    "double_blocks.": "FLUX",
    "double_layers.": "AuraFlow",
    "cap_embedder.": "Lumina 2",
}
_CONTROL_LORA = "lora_controlnet"
_EDM = "edm_"
_CHOOSE, _FLOWS = "give --prediction-type", "it was trained with flow matching: leave out --prediction-type"
_INPAINTING_CHANNELS = 9
_PLAIN = frozenset({"F64", "F32", "F16", "BF16"})
_VAE_PARTS = ("encoder.", "decoder.", "quant_conv.", "post_quant_conv.")
# The numbers of positions, which are no weights.
_POSITION_IDS = ".position_ids"
# Textual inversion: tensors of a few vectors, named by their trainer or by their token.
_EMBEDDINGS = frozenset({"emb_params", "clip_l", "clip_g"})
_EMBEDDING_WIDTHS = frozenset({768, 1024, 1280})
_MAX_EMBEDDINGS = 4
_SHOWN_CHARACTERS = 80
_NO_VAE = "it has no VAE; give the file of one with --vae, in a worker's configuration as engine.vae.folder"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleFile:
    """The content of a single file, and the reason why it cannot be converted."""

    path: Path
    kind: FileKind
    header: Header
    family: str = ""
    """`sd15`, `sd21`, `sdxl` or `sd3`; empty if its tensors do not tell."""
    prediction_type: str = EPSILON
    """What its network predicts: `epsilon`, `v_prediction` or `flow`."""
    prediction_source: str = ""
    """What says so: a tensor, the file's metadata, or the default of the family."""
    prediction_is_guess: bool = False
    """Whether neither the operator nor the file says what it predicts."""
    zero_terminal_snr: bool = False
    """Whether its schedule ends in pure noise (`rescale_betas_zero_snr`)."""
    parts: Mapping[str, tuple[TensorEntry, ...]] = field(default_factory=dict)
    """Tensors of each part, by the part's name in Diffusers' layout."""
    vae: Path | None = None
    """File of the VAE that the model gets in place of its own; None if it has its own."""
    problem: str = ""
    """A sentence on why it cannot be converted; empty if it can be."""

    @property
    def title(self) -> str:
        """Display name of the family; empty if it is unknown."""
        return TITLES.get(self.family, "")

    def file_of(self, part: str) -> Path:
        """Return the file that has the tensors of a part."""
        return self.vae if part == "vae" and self.vae is not None else self.path

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensors of all parts."""
        return sum(entry.end - entry.begin for part in self.parts.values() for entry in part)

    @property
    def bytes_by_dtype(self) -> dict[str, int]:
        """Bytes of the tensors of all parts by element type."""
        total: Counter[str] = Counter()
        for part in self.parts.values():
            for entry in part:
                total[entry.dtype] += entry.end - entry.begin
        return dict(total)


def read_single_file(path: Path, family: str = "", prediction_type: str = "", vae: Path | None = None) -> SingleFile:
    """Return what a file holds. Only its header is read, and that of the VAE's file.

    Args:
        family: The operator's word for the family, for files whose tensors do not tell. "" asks the tensors alone.
        prediction_type: The operator's word for what the UNet predicts. "" asks the file alone.
        vae: File of a VAE that a whole model gets in place of its own. Other files ignore it.

    Raises:
        ValueError: It is no acceptable safetensors file. The text is a sentence without the file's name.
    """
    if path.suffix != _SUFFIX:
        raise ValueError("it is no .safetensors file, and other weights are never opened because they may run code")
    try:
        with open_model_file(path) as file:
            header = read_header(file)
    except HeaderError as error:
        raise ValueError(f"it is damaged or cut off ({error}); {DOWNLOAD_AGAIN}") from None
    except OSError as error:
        raise ValueError(f"it cannot be read ({error.strerror}); {DOWNLOAD_AGAIN}") from None
    found = _recognised(path, header, family, prediction_type)
    if found.kind is not FileKind.MODEL or not found.family or (found.problem and found.problem != _NO_VAE):
        return found
    return found if vae is None else _with_vae(found, vae)


def _with_vae(model: SingleFile, path: Path) -> SingleFile:
    """Return a whole model with the VAE of another file."""
    try:
        vae = read_single_file(path, model.family)
        if vae.kind is not FileKind.VAE:
            raise ValueError(f"it is {vae.kind.value}, and not a VAE")
        if vae.problem:
            raise ValueError(vae.problem)
    except ValueError as error:
        return replace(model, problem=f"the VAE {path} cannot be used: {error}")
    return replace(model, parts={**model.parts, **vae.parts}, vae=path, problem="")


def is_single_file(model: str) -> bool:
    """Return whether an operator's model is a single file of weights."""
    return model.endswith(_SUFFIX) and Path(model).is_file()


def _recognised(path: Path, header: Header, family: str, prediction_type: str) -> SingleFile:
    entries = {entry.name: entry for entry in header.tensors}
    kind = _kind(entries)
    refused = _REFUSED.get(kind)
    if refused is not None:
        return SingleFile(path=path, kind=kind, header=header, problem=refused(entries))
    found, problem = _FAMILY_OF[kind](entries)
    if family and found and family != found:
        problem = f"its tensors are those of {TITLES[found]} ({found}), not of {TITLES[family]} ({family})"
    found = found or family
    if not problem and not found and kind is FileKind.VAE:
        problem = f"VAEs of several families have the same tensors; say for which it is: --family {'|'.join(FAMILIES)}"
    parts = _parts(kind, found, entries)
    if found == SD3:
        prediction, said_by, is_guess, wrong = FLOW, "its family", False, prediction_type and _FLOWS
    else:
        prediction, said_by, wrong = _prediction(header, entries, prediction_type)
        if is_guess := not said_by:
            prediction, said_by = _default_prediction(found, entries)
    problem = problem or wrong
    return SingleFile(
        path=path,
        kind=kind,
        header=header,
        family=found,
        prediction_type=prediction,
        prediction_source=said_by,
        prediction_is_guess=is_guess,
        zero_terminal_snr="ztsnr" in entries,
        parts=parts,
        problem=problem or _lacking(kind, found, parts) or _quantized(parts),
    )


def _kind(entries: Mapping[str, TensorEntry]) -> FileKind:
    if _CONTROL_LORA in entries:
        return FileKind.OTHER
    if any("lora_" in name or ".lora." in name for name in entries):
        return FileKind.LORA
    if any(name.startswith(UNET) for name in entries):
        return FileKind.MODEL
    if (
        DIFFUSERS_HINT in entries
        or f"{CONTROLNET}{_FIRST}" in entries
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
    if other := next((title for start, title in _OTHER_FAMILIES.items() if _has(entries, start)), ""):
        return f"it is a {other} model; {_CONVERTED}"
    if any(name.startswith(_DIFFUSERS) for name in entries):
        return "it is one part of a model in Diffusers' layout; give the folder that has model_index.json and all parts"
    if _FIRST in entries or _has(entries, "joint_blocks."):
        return "it has a denoising network alone, without text encoders and VAE; give the file of a whole model"
    first = excerpt(next(iter(entries)), _SHOWN_CHARACTERS)
    return f"its tensors, such as {first}, are those of no model that is known; {_GIVE}"


def _model_family(entries: Mapping[str, TensorEntry]) -> tuple[str, str]:
    """Return the family of a whole model, and a sentence on why it is not served."""
    if f"{UNET}{_FIRST}" not in entries:
        if _has(entries, f"{UNET}joint_blocks."):
            return SD3, ""
        other = next((title for start, title in _OTHER_FAMILIES.items() if _has(entries, UNET + start)), "")
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


def _controlnet_family(entries: Mapping[str, TensorEntry]) -> tuple[str, str]:
    prefix = CONTROLNET if f"{CONTROLNET}{_FIRST}" in entries else ""
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


def _parts(kind: FileKind, family: str, entries: Mapping[str, TensorEntry]) -> dict[str, tuple[TensorEntry, ...]]:
    """Return the tensors of each part of a file."""
    if kind is FileKind.VAE:
        parts = tuple(prefix + part for prefix in ("", *VAE_PREFIXES) for part in _VAE_PARTS)
        return {"vae": _below(entries, *parts)}
    if kind is FileKind.CONTROLNET:
        prefix = CONTROLNET if f"{CONTROLNET}{_FIRST}" in entries else ""
        return {"controlnet": _below(entries, prefix)}
    prefixes = {"vae": tuple(prefix + part for prefix in VAE_PREFIXES for part in _VAE_PARTS)}
    prefixes |= {denoiser_part(family or SD15): (UNET,), **FAMILIES[family or SD15].text_prefixes}
    return {part: _below(entries, *starts) for part, starts in sorted(prefixes.items())}


def _below(entries: Mapping[str, TensorEntry], *prefixes: str) -> tuple[TensorEntry, ...]:
    return tuple(entry for name, entry in entries.items() if name.startswith(prefixes))


def _lacking(kind: FileKind, family: str, parts: Mapping[str, tuple[TensorEntry, ...]]) -> str:
    if kind is FileKind.MODEL and (lacking := [part for part, entries in parts.items() if not entries]):
        if lacking == ["vae"]:
            return _NO_VAE
        return f"it has no {' and no '.join(lacking)}; give the file of a whole model, with text encoders and VAE"
    return (
        "" if family else "its network has no transformers, by which its family is known; download its folder instead"
    )


def _quantized(parts: Mapping[str, tuple[TensorEntry, ...]]) -> str:
    for entries in parts.values():
        for entry in entries:
            if entry.dtype not in _PLAIN and not entry.name.endswith(_POSITION_IDS):
                return (
                    f"the tensor {excerpt(entry.name, _SHOWN_CHARACTERS)} has elements of {entry.dtype}; quantized "
                    "weights are not served, download float32, float16 or bfloat16 ones"
                )
    return ""


def _prediction(header: Header, entries: Mapping[str, TensorEntry], wanted: str) -> tuple[str, str, str]:
    """Return what the UNet predicts, what says so (empty if nothing does), and a sentence if that is not served.

    ComfyUI and kohya's scripts mark models with an empty tensor `v_pred`, others with ModelSpec's metadata
    (https://github.com/Stability-AI/ModelSpec).
    """
    if wanted:
        return wanted, "your choice", ""
    if "v_pred" in entries:
        return V_PREDICTION, "its tensor v_pred", ""
    if stated := header.metadata.get("modelspec.prediction_type", ""):
        known = V_PREDICTION if stated in ("v", V_PREDICTION) else stated
        if known in PREDICTION_TYPES:
            return known, "its metadata", ""
        shown = excerpt(stated, _SHOWN_CHARACTERS)
        return EPSILON, "its metadata", f"its metadata says that it predicts {shown}; {_CHOOSE}, if you know better"
    return EPSILON, "", ""


def _default_prediction(family: str, entries: Mapping[str, TensorEntry]) -> tuple[str, str]:
    """Return what UNets of a family predict, and a text that says so and how to choose."""
    default = f"the default of {TITLES.get(family, 'its family')}"
    predicts_v = family in FAMILIES and FAMILIES[family].prediction_type == V_PREDICTION
    if predicts_v and not _is_for_inpainting(entries):
        return V_PREDICTION, f"{default}; for a base model at 512 pixels {_CHOOSE} {EPSILON}"
    return EPSILON, f"{default}; for a model that predicts v {_CHOOSE} {V_PREDICTION}"


def _is_for_inpainting(entries: Mapping[str, TensorEntry]) -> bool:
    first = entries.get(f"{UNET}{_FIRST}")
    return first is not None and len(first.shape) > 1 and first.shape[1] == _INPAINTING_CHANNELS


_Sentence = Callable[[Mapping[str, TensorEntry]], str]
_REFUSED: Mapping[FileKind, _Sentence] = {
    FileKind.LORA: _lora,
    FileKind.EMBEDDING: _embedding,
    FileKind.OTHER: _other,
}
_FAMILY_OF: Mapping[FileKind, Callable[[Mapping[str, TensorEntry]], tuple[str, str]]] = {
    FileKind.MODEL: _model_family,
    FileKind.CONTROLNET: _controlnet_family,
    FileKind.VAE: _vae_family,
}
