"""Templates of edits as the SDK describes them: recorded activations, services that have them, and block profiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from bottega import kinds
from bottega.client.types.messages import value_from
from bottega.errors import BottegaError
from bottega.v1 import activations_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateHolder:
    """A service that has templates, with their size and its budgets. Workers have templates only in memory."""

    name: str
    kind: str
    """Kind of service: activations or worker."""
    templates: int
    """Number of templates that the service has."""
    memory_bytes: int
    """Bytes that the templates take in memory."""
    memory_budget_bytes: int
    disk_bytes: int = 0
    """Bytes that the templates take on disk; 0 for workers."""
    disk_budget_bytes: int = 0
    template_budget_bytes: int = 0
    """Bytes that one template may take; 0 for no limit."""
    trouble: str = ""
    """Why the service cannot record now; empty if it can."""
    objects_bytes: int = 0
    """Bytes of the recordings that stores share in the object storage."""
    objects_budget_bytes: int = 0
    """Upper bound on them; 0 if the service shares none."""
    objects_trouble: str = ""
    """Why the service cannot use the object storage now; empty if it can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetTemplate:
    """A template, described by its store, else by the worker that used it last."""

    id: str
    """ID of the template: 32 hex digits."""
    digest: str
    """SHA-256 of the image's pixels at the size at which it was drawn, or of the latents that drew it, hex."""
    model: str
    """Name of the model."""
    model_hash: str
    """Hash of the model, hex."""
    width: int
    """Width in pixels of the part of the image that was drawn."""
    height: int
    size_bytes: int
    """Bytes of the recorded activations."""
    memory_bytes: int
    """Bytes of the activations that are in memory."""
    steps: int
    """Number of denoising steps with activations."""
    uses: int
    """Number of edits that used the template."""
    idle_s: float
    """Seconds since any service last used the template."""
    in_use: bool
    """Whether an edit uses the template now."""
    recording: bool
    """Whether the template is still being recorded."""
    valid_share: float
    """Share of the image that the activations cover, 0 to 1."""
    pinned: bool
    """Whether the template is pinned, and so never evicted from its store."""
    store: str = ""
    """Name of the store that has the template; empty if none has it."""
    workers: tuple[str, ...] = ()
    """Names of the workers that have the template, or a part of it, in memory."""
    only_objects: bool = False
    """Whether no store has the template on its disk, but the object storage that stores share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SilentService:
    """A service that did not answer, so that its templates are not listed."""

    name: str
    kind: str
    error: BottegaError


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateOverview:
    """The templates of a fleet."""

    templates: tuple[FleetTemplate, ...]
    """All templates, the most recently used first."""
    holders: tuple[TemplateHolder, ...]
    silent: tuple[SilentService, ...]

    @property
    def has_store(self) -> bool:
        """Whether a store has joined, even one that does not answer."""
        return kinds.ACTIVATIONS in {
            *(holder.kind for holder in self.holders),
            *(silent.kind for silent in self.silent),
        }

    @property
    def records(self) -> bool:
        """Whether any of the workers records edits."""
        workers = [holder for holder in self.holders if holder.kind == kinds.WORKER]
        return not workers or any(worker.memory_budget_bytes for worker in workers)

    def matching(self, id: str) -> list[FleetTemplate]:
        """Return the templates whose IDs begin so."""
        return [template for template in self.templates if template.id.startswith(id)]

    def holders_of(self, ids: Sequence[str], *, workers: bool = True) -> str:
        """Return the names of the stores that have these templates and, if `workers` is True, of the workers."""
        found = [template for id in ids for template in self.matching(id)]
        names = {
            name for template in found for name in (template.store, *(template.workers if workers else ())) if name
        }
        return ", ".join(sorted(names))


@dataclass(frozen=True, slots=True, kw_only=True)
class DroppedTemplates:
    """Result of `drop_templates`: how many templates were dropped."""

    stored: int
    """Number of templates dropped from stores."""
    copies: int
    """Number of templates dropped from the memory of workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmedTemplates:
    """Result of `warm_templates`: the templates that stores load into memory."""

    templates: int
    """Number of templates that are in memory, or being loaded."""
    loading_bytes: int
    """Bytes that remain to be loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledBlock:
    """The measured costs of one block of a model, for one row of a forward pass."""

    name: str
    """Path of the block in the model."""
    size_bytes: int
    """Bytes of the block's recorded activations."""
    full_s: float
    """Seconds to compute all tokens of the block."""
    masked_s: tuple[float, ...]
    """Seconds to compute each share of the tokens, in the order of `BlockProfile.shares`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockProfile:
    """The measured costs of a model's blocks, by which stores and engines choose which blocks of a template to keep."""

    model_hash: str
    """Hash of the model, hex."""
    dtype: str
    """Element type of the model."""
    width: int
    """Width of the measured picture in pixels."""
    height: int
    shares: tuple[float, ...] = ()
    """Shares of the tokens for which blocks were measured, ascending; at most 8."""
    blocks: tuple[ProfiledBlock, ...] = field(default=(), metadata={"kind": ProfiledBlock})
    """The blocks in the order in which they run. Setting a profile without blocks deletes that of its model."""
    forward_s: float = 0.0
    """Seconds of a complete forward pass of one row."""
    about: str = ""
    """How the profile was measured, for people; at most 1,000 characters."""


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
    """Convert the descriptions of one template to a FleetTemplate.

    Args:
        records: Descriptions by one or more services. The first one counts, except for values that are merged from all.
        store: Name of the store that has the template; empty if none has it.
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
        only_objects=first.tier == activations_pb2.TEMPLATE_TIER_OBJECTS,
    )


def profile_from(message: activations_pb2.BlockProfile) -> BlockProfile:
    """Convert a message to a BlockProfile."""
    return value_from(message, BlockProfile)


def profile_to_wire(profile: BlockProfile) -> activations_pb2.BlockProfile:
    """Convert a profile to a message."""
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
