"""Value types of templates and their sections."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from bottega.addons.edits.wire import DrawnTensors, SectionLayout
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
