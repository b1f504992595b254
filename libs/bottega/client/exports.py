"""The names of the SDK, which bottega.client exports."""

from bottega.addons.cache.client.profiling import CacheMeasurement, MeasuredCache
from bottega.addons.cache.client.samples import PromptPair
from bottega.addons.cache.client.types import CachedEntry, CachedModel, CacheProfile, CacheStats
from bottega.addons.cache.planning.skip_profile import LengthClass, SkipProfile
from bottega.addons.controlnets.client.types import (
    AddedControlNet,
    ControlNetHost,
    MeasuredProfile,
    ProfileCase,
    ServedControlNet,
)
from bottega.addons.edits.client.types import (
    BlockProfile,
    DroppedTemplates,
    FleetTemplate,
    MeasuredBlocks,
    ProfiledBlock,
    SilentService,
    TemplateHolder,
    TemplateOverview,
    WarmedTemplates,
)
from bottega.addons.loras.client.types import (
    LoraBound,
    LoraBoundMeasured,
    LoraInQuarantine,
    RestoreResult,
    StoredLora,
    StoreQuarantine,
)
from bottega.client.sdk.aio_job import AsyncJob
from bottega.client.sdk.clients import AsyncClient, Client
from bottega.client.sdk.sync import Job
from bottega.client.transport.credentials import Tls
from bottega.client.transport.retry import RetryPolicy
from bottega.client.types.control import ControlNet
from bottega.client.types.events import Completed, Event, Interrupted, Preview, Progress, Queued
from bottega.client.types.fleet import (
    AccelerationTrial,
    AttemptProgress,
    FleetMember,
    FleetStatus,
    HostedItem,
    LeftOutItem,
    Readiness,
    ResidualProfile,
    ServiceActivity,
    ServiceLoad,
    ServiceStart,
    StepTiming,
)
from bottega.client.types.jobs import JobPage, JobState, JobStatus, Priority
from bottega.client.types.lora import Lora, LoraLike
from bottega.client.types.mask import Box, Ellipse
from bottega.client.types.models import Adapter, ServedModel, ServedSampler
from bottega.client.types.options import EditOptions, GenerationOptions
from bottega.client.types.picture import Picture
from bottega.client.types.png_parameters import parameters_of
from bottega.client.types.provenance import (
    CacheUse,
    ControlNetUse,
    LoraUse,
    MaskUse,
    PairUse,
    Parameters,
    Provenance,
    SourceUse,
    StageTime,
    Truncation,
)
from bottega.client.types.trace import JobTrace, TraceSpan

__all__ = [
    "AccelerationTrial",
    "Adapter",
    "AddedControlNet",
    "AsyncClient",
    "AsyncJob",
    "AttemptProgress",
    "BlockProfile",
    "Box",
    "CacheMeasurement",
    "CacheProfile",
    "CacheStats",
    "CacheUse",
    "CachedEntry",
    "CachedModel",
    "Client",
    "Completed",
    "ControlNet",
    "ControlNetHost",
    "ControlNetUse",
    "DroppedTemplates",
    "EditOptions",
    "Ellipse",
    "Event",
    "FleetMember",
    "FleetStatus",
    "FleetTemplate",
    "GenerationOptions",
    "HostedItem",
    "Interrupted",
    "Job",
    "JobPage",
    "JobState",
    "JobStatus",
    "JobTrace",
    "LeftOutItem",
    "LengthClass",
    "Lora",
    "LoraBound",
    "LoraBoundMeasured",
    "LoraInQuarantine",
    "LoraLike",
    "LoraUse",
    "MaskUse",
    "MeasuredBlocks",
    "MeasuredCache",
    "MeasuredProfile",
    "PairUse",
    "Parameters",
    "Picture",
    "Preview",
    "Priority",
    "ProfileCase",
    "ProfiledBlock",
    "Progress",
    "PromptPair",
    "Provenance",
    "Queued",
    "Readiness",
    "ResidualProfile",
    "RestoreResult",
    "RetryPolicy",
    "ServedControlNet",
    "ServedModel",
    "ServedSampler",
    "ServiceActivity",
    "ServiceLoad",
    "ServiceStart",
    "SilentService",
    "SkipProfile",
    "SourceUse",
    "StageTime",
    "StepTiming",
    "StoreQuarantine",
    "StoredLora",
    "TemplateHolder",
    "TemplateOverview",
    "Tls",
    "TraceSpan",
    "Truncation",
    "WarmedTemplates",
    "parameters_of",
]
