"""Templates and their sections as rows, each with a checksum of itself, so that damage is seen and never served.

What sections of a template have in common, layouts and maps, stands once, by the SHA-256 of its bytes. How often a
template was used, and whether it is pinned, stands outside the checksum, as it changes: a bit that flips there makes it
stay too long, or go too early.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from google.protobuf.message import DecodeError

from bottega.activations.template import DrawnFile, SectionKey, SectionRecord, TemplateRecord, TemplateUse
from bottega.sections.section import SectionLayout
from bottega.storage import SqliteSchema
from bottega.storage.checksums import Value, checksum
from bottega.v1 import activations_pb2
from bottega.v1.activations_pb2 import RecordingHeader

TEMPLATE_COLUMNS = ("number", "header", "drawn", "checksum", "pinned", "uses", "used_s")
"""In the order of `template_row` and `read_template`."""

SECTION_COLUMNS = (
    "number",
    "timestep",
    "noise_level",
    "half",
    "controls",
    "digest",
    "layout",
    "map",
    "prompt",
    "checksum",
)
"""In the order of `section_row` and `read_section`."""

_TABLES = (
    """
    CREATE TABLE templates (
        number INTEGER PRIMARY KEY,
        header BLOB NOT NULL,
        drawn TEXT NOT NULL,
        checksum INTEGER NOT NULL,
        pinned INTEGER NOT NULL,
        uses INTEGER NOT NULL,
        used_s REAL NOT NULL
    ) STRICT
    """,
    """
    CREATE TABLE sections (
        number INTEGER NOT NULL,
        timestep REAL NOT NULL,
        noise_level REAL NOT NULL,
        half INTEGER NOT NULL,
        controls TEXT NOT NULL,
        digest TEXT NOT NULL,
        layout TEXT NOT NULL,
        map TEXT NOT NULL,
        prompt TEXT NOT NULL,
        checksum INTEGER NOT NULL,
        PRIMARY KEY (number, timestep, noise_level, half, controls)
    ) STRICT, WITHOUT ROWID
    """,
    "CREATE TABLE parts (digest TEXT PRIMARY KEY, data BLOB NOT NULL) STRICT, WITHOUT ROWID",
)

SCHEMA = SqliteSchema(
    what="the records of templates",
    # "BtAc": what PRAGMA application_id says of a file of ours.
    application_id=0x42744163,
    version=2,
    tables=_TABLES,
    remedy="edits record their templates again",
)

Part = Callable[[str], bytes | None]
"""The bytes of a layout or a map by digest; None where they are not there, or damaged."""


def template_row(template: TemplateRecord) -> tuple[Value, ...]:
    """The values of TEMPLATE_COLUMNS."""
    drawn = template.drawn
    said = "" if drawn is None else json.dumps([drawn.digest, drawn.shape, drawn.size_bytes])
    values = (template.number, template.header.SerializeToString(deterministic=True), said)
    use = template.use
    return (*values, checksum(values), int(use.pinned), use.uses, use.used_s)


def section_row(number: int, section: SectionRecord) -> tuple[Value, ...]:
    """The values of SECTION_COLUMNS. number: of its template."""
    values = (
        *section_place(number, section.key),
        section.digest,
        part_digest(layout_part(section.layout)),
        part_digest(section.map),
        section.prompt,
    )
    return (*values, checksum(values))


def section_place(number: int, key: SectionKey) -> tuple[int, float, float, int, str]:
    """What the row of a section is found by."""
    return number, key.timestep, key.noise_level, key.half, json.dumps(key.controls)


@functools.lru_cache(maxsize=256)
def layout_part(layout: SectionLayout) -> bytes:
    """A layout as bytes."""
    return layout.to_wire().SerializeToString(deterministic=True)


@functools.lru_cache(maxsize=256)
def read_layout(part: bytes) -> SectionLayout:
    """What `layout_part` was given: the same one for all who have it. Raises ValueError."""
    try:
        return SectionLayout.from_wire(activations_pb2.SectionLayout.FromString(part))
    except DecodeError as error:
        raise ValueError("a layout that is none") from error


def part_digest(part: bytes) -> str:
    """What a layout or a map is found by."""
    return hashlib.sha256(part).hexdigest()


def read_template(row: Sequence[Any], sections: Callable[[int], Iterable[SectionRecord]]) -> TemplateRecord | None:
    """The template of the values of TEMPLATE_COLUMNS; None where they are not what was written.

    sections: those of a template, by number.
    """
    *values, expected, pinned, uses, used_s = row
    if checksum(values) != expected:
        return None
    number, header, drawn = values
    return TemplateRecord(
        number,
        RecordingHeader.FromString(header),
        drawn=_drawn(drawn),
        sections={section.key: section for section in sections(number)},
        use=TemplateUse(pinned=bool(pinned), uses=max(0, uses), used_s=used_s if math.isfinite(used_s) else 0.0),
    )


def read_section(row: Sequence[Any], part: Part) -> SectionRecord | None:
    """The section of the values of SECTION_COLUMNS; None where they are not what was written."""
    *values, expected = row
    if checksum(values) != expected:
        return None
    _, timestep, noise_level, half, controls, digest, layout_digest, map_digest, prompt = values
    layout, valid = part(layout_digest), part(map_digest)
    if layout is None or valid is None:
        return None
    key = SectionKey(timestep=timestep, noise_level=noise_level, half=half, controls=tuple(json.loads(controls)))
    return SectionRecord(key=key, digest=digest, layout=read_layout(layout), map=valid, prompt=prompt)


def _drawn(said: str) -> DrawnFile | None:
    if not said:
        return None
    digest, shape, size_bytes = json.loads(said)
    return DrawnFile(digest=digest, shape=tuple(shape), size_bytes=size_bytes)
