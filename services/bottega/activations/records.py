"""Templates and sections on the disk: rows of a database, and files named by the SHA-256 of their content.

Layouts and maps, which several sections may have in common, are stored once.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterable
from pathlib import Path

from google.protobuf.message import DecodeError

from bottega.activations.template import DrawnFile, SectionKey, SectionRecord, TemplateRecord, TemplateUse
from bottega.addons.edits.wire.section import SectionLayout
from bottega.blobstore import BlobDisk, Completion, NewRows, RecordSchema, RecordTable, StoredRecord, StoredRow
from bottega.blobstore.records import SharedValues, Values, shared_by_digest, shared_digest
from bottega.v1 import activations_pb2
from bottega.v1.activations_pb2 import RecordingHeader

SCHEMA = RecordSchema(
    what="the records of templates",
    # "BtAc".
    application_id=0x42744163,
    version=3,
    remedy="edits record their templates again",
    records=RecordTable(
        name="templates",
        fixed=("number INTEGER", "header BLOB", "drawn TEXT"),
        changing=("pinned INTEGER", "uses INTEGER", "used_s REAL"),
    ),
    parts=RecordTable(
        name="sections",
        fixed=(
            "number INTEGER",
            "timestep REAL",
            "noise_level REAL",
            "half INTEGER",
            "controls TEXT",
            "digest TEXT",
            "layout TEXT",
            "map TEXT",
            "prompt TEXT",
        ),
        key_columns=5,
    ),
    shared=("layout", "map"),
)

_FILE_NAMES = re.compile(r"[0-9a-f]{64}")


def activation_disk(folder: Path, *, min_free_bytes: int) -> BlobDisk:
    """Return the disk of an activation store."""
    return BlobDisk(folder, files="sections", names=_FILE_NAMES, schema=SCHEMA, min_free_bytes=min_free_bytes)


def load_templates(disk: BlobDisk) -> list[TemplateRecord]:
    """Read all templates, with those sections whose files exist."""
    found: list[TemplateRecord] = []

    def complete(stored: StoredRecord, names: set[str]) -> Completion:
        template = _read_template(stored)
        sound = {
            key: section
            for key, section in template.sections.items()
            if section.digest in names and disk.files.size(section.digest) == section.size_bytes
        }
        drawn = template.drawn
        if not sound or (drawn is not None and disk.files.size(drawn.digest) != drawn.size_bytes):
            return Completion()
        intact = {part.key for part in stored.parts}
        template.set_sections(sound)
        found.append(template)
        return Completion(files=template.files, missing=intact - {section_place(template.number, key) for key in sound})

    disk.load(complete)
    return found


def new_rows(templates: Iterable[TemplateRecord] = (), sections: Iterable[tuple[int, SectionRecord]] = ()) -> NewRows:
    """Return the database rows of new templates with their sections, and of new sections of stored templates."""
    added = tuple(templates)
    parts = [(template.number, section) for template in added for section in template.sections.values()]
    parts += sections
    return NewRows(
        records=tuple((_template_values(template), use_values(template.use)) for template in added),
        parts=tuple((_section_values(number, section), ()) for number, section in parts),
        shared=shared_by_digest(part for _, section in parts for part in (layout_part(section.layout), section.map)),
    )


def use_values(use: TemplateUse) -> Values:
    """Return the changeable columns of a template's row."""
    return int(use.pinned), use.uses, use.used_s


def section_place(number: int, key: SectionKey) -> Values:
    """Return the key columns of a section's row."""
    return number, key.timestep, key.noise_level, key.half, json.dumps(key.controls)


@functools.lru_cache(maxsize=256)
def layout_part(layout: SectionLayout) -> bytes:
    """Serialize a layout."""
    return layout.to_wire().SerializeToString(deterministic=True)


@functools.lru_cache(maxsize=256)
def read_layout(part: bytes) -> SectionLayout:
    """Parse the result of `layout_part`. Equal bytes give the same object. Raise ValueError if it is malformed."""
    try:
        return SectionLayout.from_wire(activations_pb2.SectionLayout.FromString(part))
    except DecodeError as error:
        raise ValueError("the layout is not a SectionLayout") from error


def _template_values(template: TemplateRecord) -> Values:
    drawn = template.drawn
    drawn_json = "" if drawn is None else json.dumps([drawn.digest, drawn.shape, drawn.size_bytes])
    return template.number, template.header.SerializeToString(deterministic=True), drawn_json


def _section_values(number: int, section: SectionRecord) -> Values:
    shared = shared_digest(layout_part(section.layout)), shared_digest(section.map)
    return (*section_place(number, section.key), section.digest, *shared, section.prompt)


def _read_template(stored: StoredRecord) -> TemplateRecord:
    number, header, drawn = stored.row.values
    pinned, uses, used_s = stored.row.use
    sections = (_read_section(part, stored.shared) for part in stored.parts)
    return TemplateRecord(
        number,
        RecordingHeader.FromString(header),
        drawn=_drawn(drawn),
        sections={section.key: section for section in sections if section is not None},
        use=TemplateUse(pinned=bool(pinned), uses=max(0, uses), used_s=used_s if math.isfinite(used_s) else 0.0),
    )


def _read_section(row: StoredRow, shared: SharedValues) -> SectionRecord | None:
    """Return the section of a row, or None if its layout or map is damaged."""
    _, timestep, noise_level, half, controls, digest, layout_digest, map_digest, prompt = row.values
    layout, valid = shared(layout_digest), shared(map_digest)
    if layout is None or valid is None:
        return None
    key = SectionKey(timestep=timestep, noise_level=noise_level, half=half, controls=tuple(json.loads(controls)))
    return SectionRecord(key=key, digest=digest, layout=read_layout(layout), map=valid, prompt=prompt)


def _drawn(drawn_json: str) -> DrawnFile | None:
    if not drawn_json:
        return None
    digest, shape, size_bytes = json.loads(drawn_json)
    return DrawnFile(digest=digest, shape=tuple(shape), size_bytes=size_bytes)
