"""Converts an untrusted LoRA to canonical modules: every tensor is matched with the base model, or the whole is
refused.

Source of the definition: W' = W + alpha / rank * up @ down, with each module's own alpha (kohya, PEFT).
Where nothing says an alpha it is the rank, as for everybody; not so in PEFT's own files, which never say it themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import BinaryIO, NoReturn

from bottega.errors import BadLora
from bottega.lora.canonical import ModuleWeights
from bottega.lora.safetensors_header import Header, TensorEntry, read_header
from bottega.loras.importing.alphas import AdapterConfig, from_metadata
from bottega.loras.importing.arrays import MAX_F32, check_product, fitted, folded, read_number, read_weights
from bottega.loras.importing.base import Base, BaseModule
from bottega.loras.importing.naming import Format, Name, Part, format_of, module_of, refuse_other_methods, taken_apart
from bottega.loras.importing.source import LoraSourceFile
from bottega.storage.contained_paths import open_below

# Of the names in a refusal, which travels in a status.
_LISTED = 8
_TRIGGERS = ("modelspec.trigger_phrase", "trigger_phrase")
_MAX_TRIGGER_CHARACTERS = 200


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ConvertedLora:
    """A LoRA in canonical modules. trigger_phrase: that its trainer wrote into the file; empty is none."""

    modules: tuple[ModuleWeights, ...]
    format: Format
    trigger_phrase: str


@dataclass(slots=True, kw_only=True, eq=False)
class _ModuleParts:
    """The parts of one module of the base."""

    module: BaseModule
    config: AdapterConfig | None
    format: Format
    name: str
    parts: dict[Part, tuple[BinaryIO, Header, TensorEntry]] = field(default_factory=dict)


def convert(sources: Iterable[LoraSourceFile], *, base: Base) -> ConvertedLora:
    """The LoRA that some files are, for the base. Raises BadLora naming what is wrong with it, OSError."""
    with ExitStack() as stack:
        found: dict[str, _ModuleParts] = {}
        headers = []
        for source in sources:
            file = stack.enter_context(open_below(source.path, source.root))
            headers.append(read_header(file))
            _collect(file, headers[-1], source, base=base, found=found)
        if not found:
            raise BadLora("nothing in the file matches the base model: it has no tensors")
        return ConvertedLora(
            modules=tuple(_module(each) for each in found.values()),
            format=next(each.format for each in found.values()),
            trigger_phrase=_trigger(headers),
        )


def _collect(
    file: BinaryIO, header: Header, source: LoraSourceFile, *, base: Base, found: dict[str, _ModuleParts]
) -> None:
    """Finds the module of each tensor of a file. Raises BadLora with the list of those that have none."""
    refuse_other_methods([entry.name for entry in header.tensors])
    configs = from_metadata(header.metadata)
    lacking = []
    for entry in header.tensors:
        name = taken_apart(entry.name)
        module = module_of(name, base, source.component) if name is not None else None
        if name is None or module is None:
            lacking.append(entry.name)
            continue
        config = source.config or configs.get(module.component)
        each = found.setdefault(
            module.name, _ModuleParts(module=module, config=config, format=format_of(name), name=_path(name))
        )
        if name.part in each.parts:
            raise BadLora(f"{entry.name} and {each.parts[name.part][2].name} are the same part of {module.name}")
        each.parts[name.part] = (file, header, entry)
    if lacking:
        _refuse_unmatched(lacking, len(header.tensors))


def _module(found: _ModuleParts) -> ModuleWeights:
    missing = [part.value for part in (Part.DOWN, Part.UP) if part not in found.parts]
    if missing:
        raise BadLora(f"{found.module.name} lacks {' and '.join(missing)}")
    down, up = read_weights(*found.parts[Part.DOWN]), read_weights(*found.parts[Part.UP])
    if not down.shape or 0 in down.shape:
        raise BadLora(f"{found.module.name}: down is {list(down.shape)}, which has no rank")
    rank = down.shape[0]
    if Part.MID in found.parts:
        down = folded(found.module, down, read_weights(*found.parts[Part.MID]))
    down, up = fitted(found.module, down, up)
    scale = _scale(found, rank)
    check_product(found.module, down, up, scale)
    return ModuleWeights(component=found.module.component, path=found.module.path, scale=scale, down=down, up=up)


def _scale(found: _ModuleParts, rank: int) -> float:
    """Alpha over rank. Raises BadLora naming the module where F32, which it is kept in, cannot hold it."""
    scale = _stated_scale(found, rank)
    if not abs(scale) <= MAX_F32:
        raise BadLora(f"{found.module.name}: its alpha over its rank is {scale:.3g}, beyond what F32 holds")
    return scale


def _stated_scale(found: _ModuleParts, rank: int) -> float:
    if Part.ALPHA in found.parts:
        return read_number(*found.parts[Part.ALPHA]) / rank
    if found.config is not None:
        return found.config.scale(found.name, rank)
    if found.format is Format.PEFT:
        raise BadLora("the file is PEFT's, whose alpha is in adapter_config.json: bring the folder that has both")
    return 1.0


def _path(name: Name) -> str:
    """As the trainer's own patterns know the module."""
    return name.module.replace(".processor.", ".")


def _trigger(headers: Iterable[Header]) -> str:
    for header in headers:
        metadata: Mapping[str, str] = header.metadata
        for key in _TRIGGERS:
            text = metadata.get(key, "").strip()
            if text and text.isprintable() and len(text) <= _MAX_TRIGGER_CHARACTERS:
                return text
    return ""


def _refuse_unmatched(names: list[str], tensors: int) -> NoReturn:
    listed = ", ".join(name[:120] for name in names[:_LISTED])
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    if len(names) == tensors:
        raise BadLora(f"nothing in the file matches the base model; it has {listed}{more}")
    raise BadLora(f"{len(names)} of {tensors} tensors match nothing in the base model: {listed}{more}")
