"""Parses the tensor names of LoRA files: to which module a tensor belongs, and which of its factors it is.

Diffusers    unet.mid_block.attentions.0.(...).to_q.lora_A.weight, (...).to_q.lora.down.weight,
(...).attn1.processor.to_q_lora.down.weight; text_encoder.(...).q_proj.lora_linear_layer.down.weight
PEFT         base_model.model.(...).to_q.lora_A.weight
kohya        lora_unet_(path with underscores).lora_down.weight, lora_te1_(...), with one .alpha for each module
OneTrainer   as kohya, with lora_transformer_(...) for transformers
LyCORIS      kohya's or PEFT's names with .hada_w1_a, .lokr_w1, .diff, .w_norm and others in place of .lora_down.weight;
             some trainers write lycoris_(...) in place of lora_unet_(...)
ComfyUI      diffusion_model.(path in the authors' code).lora_up.weight; text_encoders.clip_l.transformer.(path)
fal          base_model.model.(path in Black Forest Labs' code).lora_A.weight, without PEFT's configuration
XLabs        double_blocks.0.processor.qkv_lora1.down.weight, with 2 for the text; (...).qkv_lora in single_blocks

Names without a component are allowed if all tensors of the file belong to one component.

The model family of a LoRA is recognised by the shapes and names of its tensors, and by its metadata. Shapes count for
more: trainers and converters copy metadata from other files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from bottega.addons.loras.wire.canonical import EMBEDDING_KIND, spellings
from bottega.addons.loras.wire.module_parts import CLIP_ENCODERS, COMPONENTS, DENOISERS
from bottega.errors import BadLora
from bottega.loras.importing.base import Base, BaseModule
from bottega.model_files.families import family_of
from bottega.model_files.family_names import (
    CLIP_G_SD3,
    CLIP_L_SD3,
    FLUX,
    SD3,
    SD15,
    SD21,
    SDXL,
    TITLES,
    TRANSFORMER,
    Z_IMAGE,
)
from bottega.model_files.json_files import read_json_object
from bottega.plain_text import excerpt
from bottega.safetensors_header import TensorEntry


class Part(StrEnum):
    """The role of a tensor in a module's LoRA: a factor, or the alpha."""

    DOWN = "down"
    UP = "up"
    MID = "mid"
    """The middle factor of a convolution in a Tucker decomposition."""
    ALPHA = "alpha"
    HADA_W1_A = "hada_w1_a"
    HADA_W1_B = "hada_w1_b"
    HADA_W2_A = "hada_w2_a"
    HADA_W2_B = "hada_w2_b"
    HADA_T1 = "hada_t1"
    HADA_T2 = "hada_t2"
    LOKR_W1 = "lokr_w1"
    LOKR_W1_A = "lokr_w1_a"
    LOKR_W1_B = "lokr_w1_b"
    LOKR_W2 = "lokr_w2"
    LOKR_W2_A = "lokr_w2_a"
    LOKR_W2_B = "lokr_w2_b"
    LOKR_T2 = "lokr_t2"
    DIFF = "diff"
    DIFF_B = "diff_b"
    """A full difference of the bias."""
    W_NORM = "w_norm"
    """A difference of a normalisation layer's weight."""
    B_NORM = "b_norm"
    """A difference of a normalisation layer's bias."""
    MAGNITUDE = "lora_magnitude_vector"
    """PEFT's magnitudes of DoRA."""
    DORA_SCALE = "dora_scale"
    """LyCORIS' magnitudes of DoRA."""


class Format(StrEnum):
    """A kind of file, by the names of its tensors."""

    DIFFUSERS = "Diffusers"
    PEFT = "PEFT"
    KOHYA = "kohya"
    EMBEDDING = EMBEDDING_KIND
    """Vectors of a token, which have no module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Name:
    """A parsed tensor name."""

    text: str
    part: Part
    format: Format
    component: str | None
    """The component in the name; None if the name has none.

    DENOISER means a UNet or a transformer, and T5 means the T5 text encoder, whose number depends on the base model.
    """
    path: str
    """Path of the module in its component. kohya's names have underscores in place of dots."""
    adapter: str = ""
    """PEFT's name of the adapter; "" if the tensor's name has none."""

    @property
    def is_flat(self) -> bool:
        """Whether the path has underscores in place of dots."""
        return self.format is Format.KOHYA


# Tensors that files have beside or instead of LoRA factors. LoCon is supported: it is LoRA on convolutions.
_UNSERVED = (
    ("blocks of OFT", re.compile(r"\.oft_|\.oft_blocks")),
    ("factors of GLoRA", re.compile(r"\.[ab][12]\.weight$")),
    ("diagonals of KaSA", re.compile(r"\.lora_diag\b")),
    ("scalars of LyCORIS", re.compile(r"\.scalar$")),
    ("full differences of weights", re.compile(r"\.(set_weight|reshape_weight)$")),
    ("factors of embeddings", re.compile(r"lora_embedding_[AB]")),
    ("embeddings of words", re.compile(r"^(emb_params|clip_[lg])$|trainable_tokens_|\bstring_to_")),
    ("whole modules", re.compile(r"\.modules_to_save\.|\.base_layer\.")),
    ("biases", re.compile(r"\.bias$")),
)
# How A1111's tools store embeddings beside a LoRA: bundle_emb.<token>.clip_l, or .string_to_param.*.
_BUNDLED = re.compile(r"^bundle_emb\.(?P<token>[^.]*)\.")
# Norms of queries and keys, which control LoRAs replace: names of Black Forest Labs, and of Diffusers.
_CONTROL = re.compile(r"\.(query|key)_norm\.scale$|\.norm_(added_)?[qk]\.weight$")
_PARTS: tuple[tuple[re.Pattern[str], dict[str, str]], ...] = (
    (re.compile(r"\.lora_(?P<part>down|up|mid)\.weight$"), {}),
    (re.compile(r"\.lora_(?P<part>[AB])(\.(?P<adapter>[A-Za-z0-9_]+))?\.weight$"), {"A": "down", "B": "up"}),
    (re.compile(r"(\.lora|\.lora_linear_layer|_lora)\.(?P<part>down|up)\.weight$"), {}),
    (re.compile(r"(?<=_lora[12])\.(?P<part>down|up)\.weight$"), {}),
    (re.compile(r"(\.lora|\.lora_linear_layer|_lora)?\.(?P<part>alpha)$"), {}),
    (re.compile(r"\.(?P<part>hada_(w[12]_[ab]|t[12])|lokr_(w[12](_[ab])?|t2)|diff(_b)?|[wb]_norm|dora_scale)$"), {}),
    (re.compile(r"\.(?P<part>lora_magnitude_vector)(\.(?!weight$)(?P<adapter>[A-Za-z0-9_]+))?(\.weight)?$"), {}),
)
# Components of names that mean the base model's denoising network, which may be a UNet or a transformer, and its T5.
DENOISER, T5 = "denoiser", "t5"
_KOHYA = (
    ("lora_unet_", DENOISER),
    ("lora_transformer_", TRANSFORMER),
    ("lycoris_", DENOISER),
    ("lora_te1_", "text_encoder"),
    ("lora_te2_", "text_encoder_2"),
    ("lora_te3_", T5),
    ("lora_te_", "text_encoder"),
)
_DOTTED = (
    *((f"{component}.", component) for component in COMPONENTS),
    ("diffusion_model.", DENOISER),
    (CLIP_L_SD3, "text_encoder"),
    (CLIP_G_SD3, "text_encoder_2"),
    ("text_encoders.t5xxl.transformer.", T5),
)
_PEFT = "base_model.model."
# Names of fal's files, which have no configuration. As Diffusers and fal's trainer do, use the rank as alpha.
_FAL = re.compile(
    r"^base_model\.model\.(double_blocks|single_blocks|final_layer|img_in|txt_in|time_in|vector_in|guidance_in)\b"
)
_PROCESSOR = ".processor."
_TEXT_MODEL = "text_model"
# Names of blocks in the authors' code, and names of blocks in Diffusers.
_ORIGINAL_BLOCKS = re.compile(r"input_blocks|middle_block|output_blocks|joint_blocks|^(double|single)_blocks")
_DIFFUSERS_BLOCKS = re.compile(r"down_blocks|mid_block|up_blocks|^(single_)?transformer_blocks")
_OF_DENOISERS = frozenset({DENOISER, *DENOISERS, None})
# The first versions of Diffusers named a text encoder's projections like the UNet's.
_OLD_TEXT = {"to_q": "q_proj", "to_k": "k_proj", "to_v": "v_proj", "to_out": "out_proj"}


def refuse_unserved(names: Sequence[str]) -> None:
    """Raise BadLora if a file has tensors of a known kind that is not supported."""
    bundled = dict.fromkeys(match["token"] for name in names if (match := _BUNDLED.match(name)))
    if bundled:
        tokens = ", ".join(excerpt(token, 40) for token in list(bundled)[:4])
        raise BadLora(
            f"the file bundles embeddings of the tokens {tokens} with a LoRA: save each in a file of its own, its "
            "tensors without the start bundle_emb.TOKEN., and add the LoRA without them"
        )
    control = next((name for name in names if _CONTROL.search(name)), None)
    if control is not None:
        raise BadLora(
            "the file is a control LoRA, such as those of FLUX.1 Canny and Depth, which make the model read a control "
            f"image and are not supported: use a ControlNet instead (it has {excerpt(control, 120)})"
        )
    for kind, pattern in _UNSERVED:
        found = next((name for name in names if pattern.search(name)), None)
        if found is not None:
            raise BadLora(f"the file has {kind}, which are not supported: {excerpt(found, 120)}")


def parse_name(text: str) -> Name | None:
    """Parse a tensor name. Return None if it is not the name of a LoRA tensor."""
    for pattern, parts in _PARTS:
        if (match := pattern.search(text)) is not None:
            part = Part(parts.get(match["part"], match["part"]))
            return _named(text, text[: match.start()], part, match.groupdict().get("adapter") or "")
    return None


def refuse_two_ways(names: Iterable[Name]) -> None:
    """Raise BadLora if a file names its modules in two ways, or has several adapters.

    Diffusers silently reads only a part of a file that names modules in two ways.
    """
    seen: dict[str, Name] = {}
    adapters = set()
    for name in names:
        if name.part is not Part.ALPHA:
            adapters.add(name.adapter)
        for way in _ways(name):
            seen.setdefault(way, name)
    if len(adapters) > 1:
        listed = ", ".join(excerpt(adapter or "one without a name", 40) for adapter in sorted(adapters)[:4])
        raise BadLora(f"the file has several adapters ({listed}): save each in a file of its own")
    for one, other in (("kohya", "path"), ("with a component", "without a component"), ("original", "diffusers")):
        if one in seen and other in seen:
            listed = " and ".join(excerpt(seen[way].text, 120) for way in (one, other))
            raise BadLora(f"the file names modules in two ways, {listed}: save it with one way of naming")


def module_of(name: Name, base: Base, component: str | None) -> BaseModule | None:
    """Return the base model's module to which a tensor belongs, or None.

    Args:
        name: The tensor's name.
        base: The base model.
        component: The only component to which the file's tensors belong; None if there are several.
    """
    chosen = {DENOISER: base.denoiser, T5: base.t5}.get(name.component or "", name.component) or component
    if chosen is None or component not in {None, chosen}:
        return None
    if name.is_flat:
        return base.find_flat(chosen, name.path)
    return base.find(chosen, name.path) or base.find(chosen, _modern(name.path))


def trained_path(name: Name, module: BaseModule) -> str:
    """Return the module's path in the trainer's network, which the patterns in PEFT's configuration match."""
    if module.component not in CLIP_ENCODERS:
        return module.path if name.is_flat else name.path
    prefixed = name.path.startswith((f"{_TEXT_MODEL}.", f"{_TEXT_MODEL}_"))
    return next(
        path for path in spellings(module.component, module.path) if path.startswith(f"{_TEXT_MODEL}.") == prefixed
    )


def _named(text: str, module: str, part: Part, adapter: str) -> Name:
    for prefix, component in _KOHYA:
        if module.startswith(prefix):
            path = module.removeprefix(prefix)
            return Name(text=text, part=part, format=Format.KOHYA, component=component, path=path)
    kind = Format.PEFT if module.startswith(_PEFT) and not _FAL.search(module) else Format.DIFFUSERS
    path = module.removeprefix(_PEFT).replace(_PROCESSOR, ".")
    for prefix, component in _DOTTED:
        if path.startswith(prefix):
            path = path.removeprefix(prefix)
            return Name(text=text, part=part, format=kind, component=component, path=path, adapter=adapter)
    return Name(text=text, part=part, format=kind, component=None, path=path, adapter=adapter)


def _ways(name: Name) -> Iterator[str]:
    if name.component in _OF_DENOISERS and _ORIGINAL_BLOCKS.search(name.path):
        yield "original"
    elif name.component in _OF_DENOISERS and _DIFFUSERS_BLOCKS.search(name.path):
        yield "diffusers"
    if name.is_flat:
        yield "kohya"
        return
    yield "path"
    yield "without a component" if name.component is None else "with a component"


def _modern(path: str) -> str:
    """Translate a projection's path from the names in the first versions of Diffusers to the current names."""
    before, _, last = path.rpartition(".")
    if before.endswith("self_attn"):
        return f"{before}.{_OLD_TEXT.get(last, last)}"
    return f"{path}.0" if last == "to_out" else path


# Features of the prompt embeddings that cross-attention reads.
FAMILY_OF_WIDTH = {768: TITLES[SD15], 1024: TITLES[SD21], 2048: TITLES[SDXL]}
_BLOCKS = (
    (re.compile(r"single_transformer_blocks|(^|[._])(double|single)_blocks[._]"), TITLES[FLUX]),
    (re.compile(r"joint_(transformer_)?blocks"), TITLES[SD3]),
    (
        re.compile(r"(^|[._])(layers|noise_refiner|context_refiner)[._]\d+[._](attention|feed_forward|adaLN_mod)"),
        TITLES[Z_IMAGE],
    ),
)
_CROSS_ATTENTION = re.compile(r"attn2[._]to_[kv]$")
# Joint attention of Stable Diffusion 3, and of wider transformers whose other blocks tell which family they are of.
_JOINT_ATTENTION = re.compile(
    r"^transformer_blocks[._]\d+[._]attn[._](to_[qkv]|to_out[._]0|add_[qkv]_proj|to_add_out)$"
)
_WIDEST_SD3 = 2432
_KEYS = ("ss_base_model_version", "modelspec.architecture", "base_model", "ss_sd_model_name")
# What metadata call a family, without punctuation; the first that is found counts.
_CALLED = (
    (re.compile(r"sdxl|stablediffusionxl|ssd1b|segmindvega"), TITLES[SDXL]),
    (re.compile(r"flux"), TITLES[FLUX]),
    (re.compile(r"zimage"), TITLES[Z_IMAGE]),
    (re.compile(r"sd3|stablediffusion(v)?3"), TITLES[SD3]),
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
    listed = list(entries)
    for pattern, family in _BLOCKS:
        if any(pattern.search(entry.name) for entry, _ in listed):
            return family
    known = [(entry, name) for entry, name in listed if name is not None]
    for entry, name in known:
        width = entry.shape[1] if name.part is Part.DOWN and len(entry.shape) > 1 else None
        if width is None or name.component not in _OF_DENOISERS:
            continue
        if _JOINT_ATTENTION.search(name.path) and width <= _WIDEST_SD3:
            return TITLES[SD3]
        if name.component != TRANSFORMER and _CROSS_ATTENTION.search(name.path) and width in FAMILY_OF_WIDTH:
            return FAMILY_OF_WIDTH[width]
    components = {name.component for _, name in known}
    if "text_encoder_2" in components and not components & {TRANSFORMER, "text_encoder_3", T5}:
        return TITLES[SDXL]
    return ""


def family_by_metadata(metadata: Mapping[str, str], base_model: str = "") -> tuple[str, str]:
    """Return the family that metadata names, and the value that names it; both are "" if none does.

    Args:
        metadata: Metadata of a LoRA's file.
        base_model: The base model that the LoRA's model card names.
    """
    for value in (*(metadata.get(key, "") for key in _KEYS), base_model):
        plain = _PUNCTUATION.sub("", value[:1000].lower())
        for pattern, family in _CALLED:
            if pattern.search(plain):
                return family, excerpt(value, 80)
    return "", ""
