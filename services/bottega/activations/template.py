"""Templates and their sections, as the store knows them. Plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from bottega.sections import DrawnTensors, SectionLayout
from bottega.v1 import activations_pb2
from bottega.v1.activations_pb2 import RecordingHeader, TemplateAnswer


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionKey:
    """One forward of a template. half: 0 is the unconditional one. controls: places of the ControlNets in it.

    noise_level: above 0; several levels may have one timestep.
    """

    timestep: float
    noise_level: float
    half: int
    controls: tuple[int, ...] = ()

    @property
    def order(self) -> tuple[float, float, int, tuple[int, ...]]:
        """The one used first is the least: noise goes down."""
        return -self.noise_level, -self.timestep, self.half, self.controls

    def to_wire(self) -> activations_pb2.SectionKey:
        """As answers carry it."""
        return activations_pb2.SectionKey(
            timestep=self.timestep, noise_level=self.noise_level, half=self.half, controls=self.controls
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SectionRecord:
    """A section whose file is there. digest: of the file. map: where the template stood, as in TemplateAnswer.maps.

    prompt: what it was computed with, hex; empty where that was more than one.
    """

    key: SectionKey
    digest: str
    layout: SectionLayout
    map: bytes
    prompt: str

    @property
    def size_bytes(self) -> int:
        """Of its file."""
        return self.layout.size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateUse:
    """What changes of a template while it is there. used_s: on the store's steady clock."""

    pinned: bool = False
    uses: int = 0
    used_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnFile:
    """Image latent and noise, one behind the other, in a file. shape: of each. digest: of the file."""

    digest: str
    shape: tuple[int, ...]
    size_bytes: int


class TemplateRecord:
    """A template that is recorded. number: unique for the life of the store. header: as its recorder has said.

    drawn: None where edits put back what a generation has kept. used_s: on the store's steady clock. sections: never
    changed in place, so that any thread may read them.
    """

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
        self.size_bytes = self.sections_bytes = 0
        self.set_sections(sections)

    def set_sections(self, sections: Mapping[SectionKey, SectionRecord]) -> None:
        """It has these from now on, and no others."""
        self.sections = MappingProxyType(dict(sections))
        self.sections_bytes = sum(section.size_bytes for section in self.sections.values())
        self.size_bytes = self.sections_bytes + (self.drawn.size_bytes if self.drawn is not None else 0)

    @property
    def key(self) -> str:
        """What it is found by."""
        return self.header.key

    @property
    def recording(self) -> str:
        """Its name, 32 hex digits."""
        return self.header.recording

    @property
    def is_idle(self) -> bool:
        """It can always go: edits under way keep what they have been given."""
        return True

    @property
    def in_order(self) -> list[SectionRecord]:
        """Its sections, as its steps use them."""
        return sorted(self.sections.values(), key=lambda section: section.key.order)

    @property
    def files(self) -> list[str]:
        """Digests, one for each use of a file."""
        drawn = [self.drawn.digest] if self.drawn is not None else []
        return drawn + [section.digest for section in self.sections.values()]

    @property
    def step_count(self) -> int:
        """How many steps of samplers it has."""
        return len({(key.timestep, key.noise_level) for key in self.sections})

    @property
    def valid_share(self) -> float:
        """Share of the image that edits can take from it, of the section that has least of it."""
        area = max(1, self.header.latent_height * self.header.latent_width)
        maps = {section.map for section in self.sections.values()}
        return min((int.from_bytes(each).bit_count() / area for each in maps), default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TemplateReply:
    """What a question is answered. drawn: where the header says so."""

    header: TemplateAnswer
    drawn: DrawnTensors | None = None


def key_from_wire(key: activations_pb2.SectionKey) -> SectionKey:
    """What answers and sections carry."""
    return SectionKey(timestep=key.timestep, noise_level=key.noise_level, half=key.half, controls=tuple(key.controls))


def map_bytes(height: int, width: int) -> int:
    """Of a map of a latent of this size."""
    return -(-height * width // 8)
