"""Reads what a single safetensors file holds: the parts of a model, and why it cannot be converted. No torch.

Trainers and programs such as A1111, ComfyUI and kohya's scripts keep a whole model in one file, in the layout of its
first authors: the UNet below `model.diffusion_model.`, the VAE below `first_stage_model.`, and text encoders below
`cond_stage_model.` or `conditioner.embedders.`. VAEs, ControlNets and transformers have files of their own in that
layout. `bottega models import` converts such a file into a folder in Diffusers' layout.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from bottega.model_files.family_names import (
    EPSILON,
    FAMILIES,
    FLOW,
    OPTIONAL_PARTS,
    PARTS,
    PREDICTION_TYPES,
    SD15,
    TITLES,
    V_PREDICTION,
    denoiser_part,
    with_article,
)
from bottega.model_files.json_files import DOWNLOAD_AGAIN, open_model_file
from bottega.model_files.single_file_kind import (
    CONTROLNET,
    FAMILY_OF,
    FIRST,
    REFUSED,
    UNET,
    VAE_PREFIXES,
    FileKind,
    kind_of,
    prefix_of,
)
from bottega.plain_text import excerpt
from bottega.safetensors_header import Header, HeaderError, TensorEntry, read_header

OTHER_VERSION = "download another version of the file, or its folder in Diffusers' layout"
"""What to do about a file that cannot be converted."""

_SUFFIX = ".safetensors"
_CHOOSE, _FLOWS = "give --prediction-type", "it was trained with flow matching: leave out --prediction-type"
_INPAINTING_CHANNELS = 9
_PLAIN = frozenset({"F64", "F32", "F16", "BF16"})
_VAE_PARTS = ("encoder.", "decoder.", "quant_conv.", "post_quant_conv.")
# The numbers of positions, which are no weights.
_POSITION_IDS = ".position_ids"
_SHOWN_CHARACTERS = 80
_CLIP_TOKENIZER = "CLIPTokenizer"
_NO_FAMILY = "its network has no transformers, by which its family is known; download its folder instead"
_NO_VAE = "it has no VAE; give the file of one with --vae, in a worker's configuration as engine.vae.folder"


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleFile:
    """The content of a single file, and the reason why it cannot be converted."""

    path: Path
    kind: FileKind
    header: Header
    family: str = ""
    """`sd15`, `sd21`, `sdxl`, `sd3` or `flux`; empty if its tensors do not tell."""
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
    others: Mapping[str, Path] = field(default_factory=dict)
    """Folders of the parts that the model takes from another one."""
    lacking: tuple[str, ...] = ()
    """Parts that the model needs and does not have, if nothing else keeps it from being converted."""
    problem: str = ""
    """A sentence on why it cannot be converted; empty if it can be."""

    @property
    def title(self) -> str:
        """Display name of the family; empty if it is unknown."""
        return TITLES.get(self.family, "")

    @property
    def tokenizers(self) -> tuple[str, ...]:
        """CLIP's tokenizers that the model gets from the worker's package, as it has their text encoders."""
        return tuple(
            part
            for part, (_, kind) in PARTS.get(self.family, {}).items()
            if kind == _CLIP_TOKENIZER and self.parts.get(part.replace("tokenizer", "text_encoder"))
        )

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
    if found.kind is not FileKind.MODEL or found.problem:
        return found
    return completed(found if vae is None else _with_vae(found, vae))


def completed(model: SingleFile, others: Mapping[str, Path] = MappingProxyType({})) -> SingleFile:
    """Return a whole model with the parts that it lacks, or with a sentence on those that it still lacks.

    Args:
        others: Folders of parts, of which it takes those that its file has not.
    """
    if model.problem and not model.lacking:
        return model
    classes, optional = PARTS[model.family], OPTIONAL_PARTS.get(model.family, frozenset())
    own = {*model.tokenizers, *(part for part, entries in model.parts.items() if entries)}
    taken = {part: others[part] for part in classes if part in others and part not in own}
    lacking = tuple(sorted(classes.keys() - own - taken.keys() - optional))
    if not lacking:
        problem = ""
    elif lacking == ("vae",):
        problem = _NO_VAE
    else:
        problem = (
            f"it lacks {', '.join(lacking)}; name the folder of {with_article(model.title)} model that has them with "
            "--parts of `bottega up` or `bottega models import`"
        )
    parts = {part: entries for part, entries in model.parts.items() if part not in taken}
    return replace(model, parts=parts, others=taken, lacking=lacking, problem=problem)


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
    return replace(model, parts={**model.parts, **vae.parts}, vae=path)


def is_single_file(model: str) -> bool:
    """Return whether an operator's model is a single file of weights."""
    return model.endswith(_SUFFIX) and Path(model).is_file()


def _recognised(path: Path, header: Header, family: str, prediction_type: str) -> SingleFile:
    entries = {entry.name: entry for entry in header.tensors}
    kind = kind_of(entries)
    refused = REFUSED.get(kind)
    if refused is not None:
        return SingleFile(path=path, kind=kind, header=header, problem=refused(entries))
    found, problem = FAMILY_OF[kind](entries)
    if family and found and family != found:
        problem = f"its tensors are those of {TITLES[found]} ({found}), not of {TITLES[family]} ({family})"
    found = found or family
    if not problem and not found and kind is FileKind.VAE:
        problem = f"VAEs of several families have the same tensors; say for which it is: --family {'|'.join(FAMILIES)}"
    parts = _parts(kind, found, entries)
    if found and FAMILIES[found].prediction_type == FLOW:
        prediction, said_by, is_guess, wrong = FLOW, "its family", False, prediction_type and _FLOWS
    else:
        prediction, said_by, wrong = _prediction(header, entries, prediction_type)
        if is_guess := not said_by:
            prediction, said_by = _default_prediction(found, entries)
    if not found:
        problem = problem or _NO_FAMILY
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
        problem=problem or wrong or _quantized(parts),
    )


def _parts(kind: FileKind, family: str, entries: Mapping[str, TensorEntry]) -> dict[str, tuple[TensorEntry, ...]]:
    """Return the tensors of each part of a file."""
    if kind is FileKind.VAE:
        parts = tuple(prefix + part for prefix in ("", *VAE_PREFIXES) for part in _VAE_PARTS)
        return {"vae": _below(entries, *parts)}
    if kind is FileKind.CONTROLNET:
        prefix = CONTROLNET if f"{CONTROLNET}{FIRST}" in entries else ""
        return {"controlnet": _below(entries, prefix)}
    prefixes = {"vae": tuple(prefix + part for prefix in VAE_PREFIXES for part in _VAE_PARTS)}
    prefixes |= {denoiser_part(family or SD15): (prefix_of(entries),), **FAMILIES[family or SD15].text_prefixes}
    return {part: _below(entries, *starts) for part, starts in sorted(prefixes.items())}


def _below(entries: Mapping[str, TensorEntry], *prefixes: str) -> tuple[TensorEntry, ...]:
    return tuple(entry for name, entry in entries.items() if name.startswith(prefixes))


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
    first = entries.get(f"{UNET}{FIRST}")
    return first is not None and len(first.shape) > 1 and first.shape[1] == _INPAINTING_CHANNELS
