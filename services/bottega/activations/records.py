"""Templates and sections, and how they are on the disk: rows of a database, and files named by their SHA-256.

Layouts and maps, which several sections may have in common, are stored once.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from google.protobuf.message import DecodeError

from bottega.addons.edits.wire import DrawnTensors, SectionLayout
from bottega.blobstore.records import (
    NewRows,
    RecordSchema,
    RecordTable,
    SharedValues,
    StoredRecord,
    StoredRow,
    Values,
    shared_by_digest,
    shared_digest,
)
from bottega.blobstore.writer import BlobDisk, Completion
from bottega.v1 import activations_pb2
from bottega.v1.activations_pb2 import RecordingHeader, TemplateAnswer


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionKey:
    """Identifies a section: one forward pass of a template."""

    timestep: float
    noise_level: float
    """Noise level of the step, above 0. One timestep may have several noise levels."""
    half: int
    """0 is the unconditional half of guidance, 1 the conditional one."""
    controls: tuple[int, ...] = ()
    """Indices of the ControlNets that are active in it."""

    @property
    def order(self) -> tuple[float, float, int, tuple[int, ...]]:
        """A sort key for the order of use: falling noise levels."""
        return -self.noise_level, -self.timestep, self.half, self.controls

    def to_wire(self) -> activations_pb2.SectionKey:
        """Return the key as a message."""
        return activations_pb2.SectionKey(
            timestep=self.timestep, noise_level=self.noise_level, half=self.half, controls=self.controls
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SectionRecord:
    """A section whose file is on disk."""

    key: SectionKey
    digest: str
    """SHA-256 of the file."""
    layout: SectionLayout
    map: bytes
    """Bitmap of the tokens that are valid for edits; see `TemplateAnswer.maps`."""
    prompt: str
    """Digest of the prompt in hex; "" if parts of it were computed with different prompts."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the file."""
        return self.layout.size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateUse:
    """The properties of a template that change while it exists."""

    pinned: bool = False
    uses: int = 0
    used_s: float = 0.0
    """Time of the last use, on the store's steady clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnFile:
    """A file with image latent and noise, one after the other."""

    digest: str
    """SHA-256 of the file."""
    shape: tuple[int, ...]
    """Shape of the latent and of the noise."""
    size_bytes: int


class TemplateRecord:
    """A recorded template. `number` is its integer ID, unique in the store."""

    def __init__(
        self,
        number: int,
        header: RecordingHeader,
        *,
        drawn: DrawnFile | None,
        sections: Mapping[SectionKey, SectionRecord],
        use: TemplateUse,
    ) -> None:
        self.number = number
        self.header = header
        self.drawn = drawn
        self.use = use
        self.sections: Mapping[SectionKey, SectionRecord] = {}
        """The sections by key. This mapping is replaced, never changed, so that any thread may read it."""
        self.size_bytes = self.sections_bytes = 0
        self.set_sections(sections)

    def set_sections(self, sections: Mapping[SectionKey, SectionRecord]) -> None:
        """Replace all sections."""
        self.sections = MappingProxyType(dict(sections))
        self.sections_bytes = sum(section.size_bytes for section in self.sections.values())
        self.size_bytes = self.sections_bytes + (self.drawn.size_bytes if self.drawn is not None else 0)

    @property
    def key(self) -> str:
        """The key by which edits find the template."""
        return self.header.key

    @property
    def recording(self) -> str:
        """ID of the recording, 32 hex digits."""
        return self.header.recording

    @property
    def is_idle(self) -> bool:
        """Whether the template may be evicted. Always True, because running edits keep their activations."""
        return True

    @property
    def in_order(self) -> list[SectionRecord]:
        """The sections in the order in which edits use them."""
        return sorted(self.sections.values(), key=lambda section: section.key.order)

    @property
    def files(self) -> list[str]:
        """Digests of the template's files, once for each use."""
        drawn = [self.drawn.digest] if self.drawn is not None else []
        return drawn + [section.digest for section in self.sections.values()]

    @property
    def step_count(self) -> int:
        """Number of sampler steps that have sections."""
        return len({(key.timestep, key.noise_level) for key in self.sections})

    @property
    def valid_share(self) -> float:
        """Share of the image that edits can reuse, in the section with the smallest share."""
        area = max(1, self.header.latent_height * self.header.latent_width)
        maps = {section.map for section in self.sections.values()}
        return min((int.from_bytes(each).bit_count() / area for each in maps), default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TemplateReply:
    """The answer to a worker's question."""

    header: TemplateAnswer
    drawn: DrawnTensors | None = None
    """Image latent and noise, if `header` says that they follow."""


def key_from_wire(key: activations_pb2.SectionKey) -> SectionKey:
    """Convert a section key from its message."""
    return SectionKey(timestep=key.timestep, noise_level=key.noise_level, half=key.half, controls=tuple(key.controls))


def map_bytes(height: int, width: int) -> int:
    """Return the bytes of a bitmap for a latent of this size."""
    return -(-height * width // 8)


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


def load_templates(disk: BlobDisk, *, shared: bool = False) -> list[TemplateRecord]:
    """Read all templates, with those sections whose files exist.

    Args:
        shared: Whether missing files of sections may be in the object store, so that all sections are kept.
    """
    found: list[TemplateRecord] = []

    def complete(stored: StoredRecord, names: set[str]) -> Completion:
        template = _read_template(stored)
        sound = {
            key: section
            for key, section in template.sections.items()
            if shared or (section.digest in names and disk.files.size(section.digest) == section.size_bytes)
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
