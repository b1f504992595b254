"""What a tensor of a LoRA's file is called: of which module it is a part, and which part. Knows names alone.

Diffusers    unet.mid_block.attentions.0.(...).to_q.lora_A.weight, (...).to_q.lora.down.weight,
             (...).attn1.processor.to_q_lora.down.weight; text_encoder.(...).q_proj.lora_linear_layer.down.weight
PEFT         base_model.model.(...).to_q.lora_A.weight
kohya        lora_unet_(path with underscores).lora_down.weight, lora_te1_(...), with one .alpha for each module
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from bottega.errors import BadLora
from bottega.lora.canonical import COMPONENTS
from bottega.loras.importing.base import Base, BaseModule


class Part(StrEnum):
    """Of what a module gets. MID: of a convolution in Tucker's decomposition."""

    DOWN = "down"
    UP = "up"
    MID = "mid"
    ALPHA = "alpha"


class Format(StrEnum):
    """Whose names they are."""

    DIFFUSERS = "Diffusers"
    PEFT = "PEFT"
    KOHYA = "kohya"


@dataclass(frozen=True, slots=True, kw_only=True)
class Name:
    """A tensor's name, taken apart. module: what comes before the part."""

    text: str
    module: str
    part: Part


# What other methods call their parts; LoCon is LoRA on convolutions.
_METHODS = (
    ("LoHa", re.compile(r"\.hada_")),
    ("LoKr", re.compile(r"\.lokr_")),
    ("DoRA", re.compile(r"\.dora_scale$|lora_magnitude_vector")),
    ("OFT", re.compile(r"\.oft_|\.oft_blocks")),
    ("GLoRA", re.compile(r"\.[ab][12]\.weight$")),
    ("full differences of weights", re.compile(r"\.diff(_b)?$")),
)
_PARTS: tuple[tuple[re.Pattern[str], dict[str, str]], ...] = (
    (re.compile(r"\.lora_(?P<part>down|up|mid)\.weight$"), {}),
    (re.compile(r"\.lora_(?P<part>[AB])(\.[A-Za-z0-9_]+)?\.weight$"), {"A": "down", "B": "up"}),
    (re.compile(r"(\.lora|\.lora_linear_layer|_lora)\.(?P<part>down|up)\.weight$"), {}),
    (re.compile(r"(\.lora|\.lora_linear_layer|_lora)?\.(?P<part>alpha)$"), {}),
)
_KOHYA = (
    ("lora_unet_", "unet"),
    ("lora_te1_", "text_encoder"),
    ("lora_te2_", "text_encoder_2"),
    ("lora_te_", "text_encoder"),
)
_PEFT = "base_model.model."
_PROCESSOR = ".processor."
# The first Diffusers called a text encoder's projections as the UNet's.
_OLD_TEXT = {"to_q": "q_proj", "to_k": "k_proj", "to_v": "v_proj", "to_out": "out_proj"}


def refuse_other_methods(names: list[str]) -> None:
    """Raises BadLora naming the method where the file is none of LoRA's."""
    for method, pattern in _METHODS:
        found = [name for name in names if pattern.search(name)]
        if found:
            raise BadLora(f"the file is {method}, which is not served: it has {found[0]}")


def taken_apart(text: str) -> Name | None:
    """The tensor's module and part; None where it has no name of a part."""
    for pattern, parts in _PARTS:
        if (match := pattern.search(text)) is not None:
            part = str(match["part"])
            return Name(text=text, module=text[: match.start()], part=Part(parts.get(part, part)))
    return None


def format_of(name: Name) -> Format:
    """Whose name it is."""
    if name.module.startswith(tuple(prefix for prefix, _ in _KOHYA)):
        return Format.KOHYA
    return Format.PEFT if name.module.startswith(_PEFT) else Format.DIFFUSERS


def module_of(name: Name, base: Base, component: str | None) -> BaseModule | None:
    """The base model's module that is meant; None where it has none of that name.

    component: of all the file, where the file is known to be of one.
    """
    for prefix, of in _KOHYA:
        if name.module.startswith(prefix):
            return base.find_flat(of, name.module.removeprefix(prefix))
    path = name.module.removeprefix(_PEFT).replace(_PROCESSOR, ".")
    head, _, rest = path.partition(".")
    if component is None and head in COMPONENTS:
        return _found(base, head, rest)
    if component is not None:
        return _found(base, component, path)
    everywhere = base.anywhere(path)
    return everywhere[0] if len(everywhere) == 1 else None


def _found(base: Base, component: str, path: str) -> BaseModule | None:
    return base.find(component, path) or base.find(component, _modern(path))


def _modern(path: str) -> str:
    """The path that a projection has today, given the one that the first Diffusers wrote."""
    before, _, last = path.rpartition(".")
    if before.endswith("self_attn"):
        return f"{before}.{_OLD_TEXT.get(last, last)}"
    return f"{path}.0" if last == "to_out" else path
