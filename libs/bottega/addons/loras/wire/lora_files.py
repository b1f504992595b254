"""The files of a LoRA: a safetensors file or a folder of PEFT's or Diffusers', and its model card."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bottega.addons.loras.wire.module_parts import COMPONENTS
from bottega.errors import BadLora

PEFT_WEIGHTS = "adapter_model.safetensors"
PEFT_CONFIG = "adapter_config.json"
DIFFUSERS_WEIGHTS = "pytorch_lora_weights.safetensors"

MODEL_CARD = "README.md"
MAX_CARD_BYTES = 64 << 10
_BASE_MODEL = re.compile(r"^base_model:[ \t]*(?:#.*)?(?:\n[ \t]*-[ \t]*)?([^\s#].*)$", re.MULTILINE)
_COMMENT = re.compile(r"\s#.*")
_MAX_BASE_MODEL_CHARACTERS = 200


def card_base_model(card: bytes, *, file: str = "") -> str:
    """Return the base model that a model card's front matter names; "" if it names none.

    Args:
        card: The content of the card, or its first MAX_CARD_BYTES.
        file: Name of a LoRA's file in a folder that may be of other things, so that a card counts only if it has the
            name; "" for a LoRA's own folder.
    """
    text = card[:MAX_CARD_BYTES].decode("utf-8-sig", errors="replace").replace("\r\n", "\n")
    if file and not re.search(rf"(?<![\w.-]){re.escape(file)}(?![\w.-]*\w)", text):
        return ""
    front = text.partition("\n---")[0] if text.startswith("---\n") else ""
    found = _BASE_MODEL.search(front)
    return _COMMENT.sub("", found[1]).strip().strip("'\"[]")[:_MAX_BASE_MODEL_CHARACTERS] if found else ""


def model_card(path: Path) -> Path:
    """Return where the model card of the LoRA at a path would be: in its folder."""
    return (path if path.is_dir() else path.parent) / MODEL_CARD


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraFile:
    """A safetensors file of a LoRA."""

    path: Path
    component: str | None = None
    """The only component that the file is for, if its folder is named after one; else None."""
    config: Path | None = None
    """PEFT's configuration in the same folder; None without one."""


def find_weights(path: Path) -> list[LoraFile]:
    """Return the files of the LoRA at a path, which is a safetensors file or a folder. Files are not opened.

    Raises BadLora for a folder that has no LoRA, or more than one.
    """
    if not path.is_dir():
        config = path.with_name(PEFT_CONFIG)
        return [LoraFile(path=path, config=config if path.name == PEFT_WEIGHTS and config.is_file() else None)]
    files, parts = sorted(path.glob("*.safetensors")), list(_parts(path))
    if files and parts:
        folders = ", ".join(f"{part.component}/" for part in parts)
        raise BadLora(f"{path.name} holds {files[0].name} beside {folders}: add the two separately")
    return parts or [_whole(path, files)]


def _whole(folder: Path, files: Sequence[Path]) -> LoraFile:
    """Return the single file of the LoRA in a folder."""
    named = [file for file in files if file.name in {PEFT_WEIGHTS, DIFFUSERS_WEIGHTS}]
    if not files:
        raise BadLora(
            f"{folder.name} holds none of {PEFT_WEIGHTS}, {DIFFUSERS_WEIGHTS}, nor one .safetensors file alone, nor a "
            f"folder of PEFT's for a component ({', '.join(COMPONENTS)}); pickled weights are never opened"
        )
    if len(named or files) > 1:
        listed = ", ".join(file.name for file in (named or files)[:4])
        raise BadLora(f"{folder.name} holds several LoRAs ({listed}): name the file that you mean")
    file, config = (named or files)[0], folder / PEFT_CONFIG
    if file.name == PEFT_WEIGHTS and not config.is_file():
        raise BadLora(f"{PEFT_WEIGHTS} has no {PEFT_CONFIG} beside it, which says its alpha")
    return LoraFile(path=file, config=config if config.is_file() else None)


def _parts(folder: Path) -> Iterator[LoraFile]:
    """Yield PEFT's files of single components, if there are any."""
    named = [component for component in COMPONENTS if (folder / component).is_dir()]
    if not any((folder / component / name).exists() for component in named for name in (PEFT_WEIGHTS, PEFT_CONFIG)):
        return
    for component in named:
        weights, config = folder / component / PEFT_WEIGHTS, folder / component / PEFT_CONFIG
        if not weights.is_file():
            raise BadLora(f"{component} holds no {PEFT_WEIGHTS}; pickled weights are never opened")
        if not config.is_file():
            raise BadLora(f"{component}/{PEFT_WEIGHTS} has no {PEFT_CONFIG} beside it, which says its alpha")
        yield LoraFile(path=weights, component=component, config=config)
