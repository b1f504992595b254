"""Templates of edits as the SDK describes them: recorded images, the services that have them, and block profiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from bottega import kinds
from bottega.client.types.messages import value_from
from bottega.errors import BottegaError
from bottega.v1 import activations_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateHolder:
    """A service that has templates, with their sizes and its budgets. Workers have them only in memory."""

    name: str
    kind: str
    """activations or worker."""
    templates: int
    """Number of templates that it has."""
    memory_bytes: int
    """Bytes that they take in memory."""
    memory_budget_bytes: int
    disk_bytes: int = 0
    """Bytes that they take on the disk."""
    disk_budget_bytes: int = 0
    template_budget_bytes: int = 0
    """Bytes that one template may take; 0 for no limit."""
    trouble: str = ""
    """Why it can record nothing now; empty if recording works."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetTemplate:
    """A recorded image, as its store describes it, else the worker that used it last."""

    id: str
    """Its ID: 32 hex digits."""
    digest: str
    """SHA-256 of the image's pixels as they were drawn, or of the latents that it was drawn with, hex."""
    model: str
    """Name of the model."""
    model_hash: str
    """Hash of the model, hex."""
    width: int
    """Width in pixels of the part of the image that was drawn."""
    height: int
    size_bytes: int
    """Bytes of the recording."""
    memory_bytes: int
    """Bytes of it that are in memory."""
    steps: int
    """Denoising steps that it has."""
    uses: int
    """Edits that have used it."""
    idle_s: float
    """Seconds since it was last used, by any service."""
    in_use: bool
    """Whether an edit uses it now."""
    recording: bool
    """Whether the template is still being recorded."""
    valid_share: float
    """Share of the image for which edits can reuse the recording, 0 to 1."""
    pinned: bool
    """Whether the template is pinned, and so never evicted."""
    store: str = ""
    """Name of the store that has it; empty if none does."""
    workers: tuple[str, ...] = ()
    """Names of the workers that have it, or a part of it, in their own memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SilentService:
    """A service that did not answer, so its templates are not listed."""

    name: str
    kind: str
    error: BottegaError


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateOverview:
    """The templates of a fleet."""

    templates: tuple[FleetTemplate, ...]
    """The most recently used first."""
    holders: tuple[TemplateHolder, ...]
    silent: tuple[SilentService, ...]

    @property
    def has_store(self) -> bool:
        """Whether a store has joined, even one that does not answer."""
        return kinds.ACTIVATIONS in {
            *(holder.kind for holder in self.holders),
            *(silent.kind for silent in self.silent),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class DroppedTemplates:
    """Result of `drop_templates`: the numbers of dropped templates."""

    stored: int
    """Templates of stores."""
    copies: int
    """Templates in the memories of workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmedTemplates:
    """Result of `warm_templates`: the templates that stores load into memory."""

    templates: int
    """Templates that are in memory, or being loaded."""
    loading_bytes: int
    """Bytes that are still being loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledBlock:
    """The measured costs of one block of a model, for one row of a forward pass."""

    name: str
    """Path of its module."""
    size_bytes: int
    """Bytes of its recording."""
    full_s: float
    """Seconds to compute it whole."""
    masked_s: tuple[float, ...]
    """Seconds to compute a share of the tokens, in the order of `BlockProfile.shares`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockProfile:
    """The measured costs of a model's blocks, by which stores and engines choose what they keep of a template."""

    model_hash: str
    """Hash of the model, hex."""
    dtype: str
    """Element type of the model."""
    width: int
    """Width of the picture, in pixels."""
    height: int
    shares: tuple[float, ...] = ()
    """Shares of the tokens that were computed, ascending; at most 8."""
    blocks: tuple[ProfiledBlock, ...] = field(default=(), metadata={"kind": ProfiledBlock})
    """The blocks in the order in which they run. A profile without blocks deletes that of its model."""
    forward_s: float = 0.0
    """Seconds of a whole forward pass of one row."""
    about: str = ""
    """Description of how it was measured; at most 1,000 characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredBlocks:
    """A profile that a worker has measured."""

    profile: BlockProfile
    worker: str
    """Name of the worker."""
    model: str
    """Name of the model."""
    stores: tuple[str, ...] = ()
    """Names of the stores that keep the profile."""


def template_from(
    records: Sequence[activations_pb2.Template], *, store: str, workers: tuple[str, ...]
) -> FleetTemplate:
    """Return a template that one or more services have recorded.

    Args:
        records: Their descriptions of it. The first one counts, except for facts that are merged from all of them.
        store: Name of the store that has it; empty if none does.
        workers: Names of the workers that have it.
    """
    first = records[0]
    return FleetTemplate(
        id=first.id,
        digest=first.digest,
        model=first.model,
        model_hash=first.model_hash,
        width=first.width,
        height=first.height,
        size_bytes=first.size_bytes,
        memory_bytes=first.memory_bytes,
        steps=first.steps,
        uses=first.uses,
        idle_s=min(record.idle_s for record in records),
        in_use=any(record.in_use for record in records),
        recording=any(record.recording for record in records),
        valid_share=first.valid_share,
        pinned=first.pinned,
        store=store,
        workers=workers,
    )


def profile_from(message: activations_pb2.BlockProfile) -> BlockProfile:
    """Return the profile that the wire describes."""
    return value_from(message, BlockProfile)


def profile_to_wire(profile: BlockProfile) -> activations_pb2.BlockProfile:
    """Return the contract's message of a profile."""
    message = activations_pb2.BlockProfile(
        model_hash=profile.model_hash,
        dtype=profile.dtype,
        width=profile.width,
        height=profile.height,
        shares=profile.shares,
        forward_s=profile.forward_s,
        about=profile.about,
    )
    for block in profile.blocks:
        message.blocks.add(name=block.name, size_bytes=block.size_bytes, full_s=block.full_s, masked_s=block.masked_s)
    return message
