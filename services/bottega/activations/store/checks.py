"""Checks of workers' messages. They raise ValueError if a message breaks a rule of activations.proto."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

from bottega.activations.records import SectionKey, SectionRecord, key_from_wire, layout_part, map_bytes
from bottega.addons.edits.wire import DrawnTensors
from bottega.addons.edits.wire.messages import MAX_HEADER_BYTES, MAX_MAP_BYTES
from bottega.v1.activations_pb2 import RecordingHeader, SectionHeader, TemplateQuestion

MAX_SECTIONS = 1024
"""Upper bound on the sections of a template: 200 steps, two halves of guidance, and some sets of ControlNets."""

_MAX_LAYOUTS = 16
_MAX_MAPS = 64
# For layouts and maps together; the rest of an answer's header is for its sections and a profile.
_MAX_PARTS_BYTES = MAX_HEADER_BYTES // 2
_MAX_CONTROLS = 8
_MAX_SIDE = 1 << 14
_MAX_CHARACTERS = 200
_HEX_64 = re.compile("[0-9a-f]{64}")
_HEX_32 = re.compile("[0-9a-f]{32}")
_MODEL_HASH = re.compile("[0-9a-f]{1,128}")


def check_question(question: TemplateQuestion) -> None:
    """Raise ValueError if a question is malformed."""
    check_key(question.key)
    if question.recording:
        check_recording(question.recording)
    _check_source(question.source)


def check_key(key: str) -> None:
    """Raise ValueError if this is not the key of a template."""
    if not _HEX_64.fullmatch(key):
        raise ValueError("the key of a template must be 64 hex digits")


def check_recording(recording: str) -> None:
    """Raise ValueError if this is not the ID of a recording."""
    if not _HEX_32.fullmatch(recording):
        raise ValueError("the id of a recording must be 32 hex digits")


def checked_section_key(header: SectionHeader) -> SectionKey:
    """Return the key of a section. Raise ValueError if its header breaks a rule."""
    check_key(header.key)
    check_recording(header.recording)
    key = key_from_wire(header.section)
    if not math.isfinite(key.timestep) or key.half not in (0, 1):
        raise ValueError("a section must have a finite timestep, and half (of guidance) 0 or 1")
    if not 0.0 < key.noise_level < math.inf:
        raise ValueError("a section must have a noise level above 0; upgrade workers that send none")
    if len(key.controls) > _MAX_CONTROLS or not all(0 <= place < _MAX_CONTROLS for place in key.controls):
        raise ValueError(f"a section may have at most {_MAX_CONTROLS} ControlNets")
    if header.prompt and not _HEX_64.fullmatch(header.prompt):
        raise ValueError("the prompt of a section must be 64 hex digits, or empty")
    _check_map(header)
    return key


def check_header(header: RecordingHeader, drawn: DrawnTensors | None) -> None:
    """Raise ValueError if the header of a recording breaks a rule or does not match the tensors."""
    check_key(header.key)
    check_recording(header.recording)
    _check_source(header.source)
    if header.model_hash and not _MODEL_HASH.fullmatch(header.model_hash):
        raise ValueError("model_hash of a recording must be at most 128 hex digits")
    for name in ("tenant", "digest", "model", "dtype"):
        text = getattr(header, name)
        if len(text) > _MAX_CHARACTERS or not (text.isprintable()):
            raise ValueError(f"{name} of a recording must be at most {_MAX_CHARACTERS} printable characters")
    for name in ("width", "height", "latent_width", "latent_height"):
        if not 1 <= getattr(header, name) <= _MAX_SIDE:
            raise ValueError(f"{name} of a recording must be 1 to {_MAX_SIDE}")
    if header.has_drawn != (drawn is not None):
        raise ValueError("the tensors of a recording do not match has_drawn of its header")
    if drawn is not None and drawn.shape[2:] != (header.latent_height, header.latent_width):
        raise ValueError("image latent and noise of a recording must have the size of its latent")


def fits_answer(sections: Mapping[SectionKey, SectionRecord]) -> bool:
    """Return whether these sections fit into one answer."""
    # Most layouts are the same object, and comparing them is slow.
    layouts = set({id(section.layout): section.layout for section in sections.values()}.values())
    maps = {section.map for section in sections.values()}
    parts = sum(len(layout_part(layout)) for layout in layouts) + _sum(maps)
    few = len(sections) <= MAX_SECTIONS and len(layouts) <= _MAX_LAYOUTS and len(maps) <= _MAX_MAPS
    return few and parts <= _MAX_PARTS_BYTES


def _check_source(source: str) -> None:
    if source and not _HEX_64.fullmatch(source):
        raise ValueError("the source of a template must be 64 hex digits, or empty")


def _check_map(header: SectionHeader) -> None:
    height, width = header.latent_height, header.latent_width
    if not (1 <= height <= _MAX_SIDE and 1 <= width <= _MAX_SIDE) or map_bytes(height, width) > MAX_MAP_BYTES:
        raise ValueError("the latent of a section is empty or too large")
    if len(header.map) != map_bytes(height, width):
        raise ValueError("the map of a section does not fit the size of its latent")
    spare = 8 * len(header.map) - height * width
    if header.map[-1] & ((1 << spare) - 1):
        raise ValueError("the map of a section has bits set after its end")


def _sum(parts: Iterable[bytes]) -> int:
    return sum(len(part) for part in parts)
