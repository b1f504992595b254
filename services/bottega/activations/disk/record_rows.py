"""Database rows of templates and sections, with checksums, so that damaged rows are never served.

Layouts and maps, which sections share, are stored once, by SHA-256. Uses and pinning are not in the checksum, because
they change; a flipped bit there only makes a template stay too long or go too early.
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
    # "BtAc": PRAGMA application_id of this store's files.
    application_id=0x42744163,
    version=2,
    tables=_TABLES,
    remedy="edits record their templates again",
)

Part = Callable[[str], bytes | None]
"""Returns the bytes of a layout or map by digest; None if they are missing or damaged."""


def template_row(template: TemplateRecord) -> tuple[Value, ...]:
    """Return the values of TEMPLATE_COLUMNS."""
    drawn = template.drawn
    drawn_json = "" if drawn is None else json.dumps([drawn.digest, drawn.shape, drawn.size_bytes])
    values = (template.number, template.header.SerializeToString(deterministic=True), drawn_json)
    use = template.use
    return (*values, checksum(values), int(use.pinned), use.uses, use.used_s)


def section_row(number: int, section: SectionRecord) -> tuple[Value, ...]:
    """Return the values of SECTION_COLUMNS, for a section of template `number`."""
    values = (
        *section_place(number, section.key),
        section.digest,
        part_digest(layout_part(section.layout)),
        part_digest(section.map),
        section.prompt,
    )
    return (*values, checksum(values))


def section_place(number: int, key: SectionKey) -> tuple[int, float, float, int, str]:
    """Return the primary key of a section's row."""
    return number, key.timestep, key.noise_level, key.half, json.dumps(key.controls)


@functools.lru_cache(maxsize=256)
def layout_part(layout: SectionLayout) -> bytes:
    """Serialize a layout."""
    return layout.to_wire().SerializeToString(deterministic=True)


@functools.lru_cache(maxsize=256)
def read_layout(part: bytes) -> SectionLayout:
    """Parse the result of `layout_part`; equal bytes give the same object. Raise ValueError if it is malformed."""
    try:
        return SectionLayout.from_wire(activations_pb2.SectionLayout.FromString(part))
    except DecodeError as error:
        raise ValueError("the layout is not a SectionLayout") from error


def part_digest(part: bytes) -> str:
    """Return the digest of a layout or map."""
    return hashlib.sha256(part).hexdigest()


def read_template(row: Sequence[Any], sections: Callable[[int], Iterable[SectionRecord]]) -> TemplateRecord | None:
    """Return the template of a row, with the sections of its number; None if the row is damaged."""
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
    """Return the section of a row; None if the row, its layout or its map is damaged."""
    *values, expected = row
    if checksum(values) != expected:
        return None
    _, timestep, noise_level, half, controls, digest, layout_digest, map_digest, prompt = values
    layout, valid = part(layout_digest), part(map_digest)
    if layout is None or valid is None:
        return None
    key = SectionKey(timestep=timestep, noise_level=noise_level, half=half, controls=tuple(json.loads(controls)))
    return SectionRecord(key=key, digest=digest, layout=read_layout(layout), map=valid, prompt=prompt)


def _drawn(drawn_json: str) -> DrawnFile | None:
    if not drawn_json:
        return None
    digest, shape, size_bytes = json.loads(drawn_json)
    return DrawnFile(digest=digest, shape=tuple(shape), size_bytes=size_bytes)
