"""The SDK: draw pictures with a Bottega suite from Python.

    from bottega.client import Box, Client

    with Client() as client:
        client.generate("a big red star on a blue background", seed=7).save("star.png")
        client.edit("star.png", Box(4, 12, 34, 40), "a big green star on a blue background").save("green.png")
        job = client.submit("a small green circle")  # outlives this process: client.job(job.id) finds it again
        job.result()[0].save("circle.png")

AsyncClient is the same for asyncio. What goes wrong is raised as a class of bottega.errors.
"""

from bottega.client.addons.cache.client import CacheFigures
from bottega.client.addons.cache.profiling import CacheMeasurement, MeasuredCache
from bottega.client.addons.cache.samples import PromptPair
from bottega.client.addons.controlnets.types import (
    AddedControlNet,
    ControlNetHost,
    MeasuredProfile,
    ProfileCase,
    Readiness,
    ResidualProfile,
    ServedControlNet,
)
from bottega.client.addons.loras.client import LoraBoundMeasured
from bottega.client.addons.templates.client import DroppedTemplates, MeasuredBlocks, WarmedTemplates
from bottega.client.addons.templates.overview import FleetTemplate, SilentService, TemplateHolder, TemplateOverview
from bottega.client.sdk.aio_job import AsyncJob
from bottega.client.sdk.clients import AsyncClient, Client
from bottega.client.sdk.sync import Job
from bottega.client.transport.credentials import Tls
from bottega.client.transport.retry import RetryPolicy
from bottega.client.types.control import ControlNet
from bottega.client.types.events import Completed, Event, Interrupted, Preview, Progress, Queued
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
    "Adapter",
    "AddedControlNet",
    "AsyncClient",
    "AsyncJob",
    "Box",
    "CacheFigures",
    "CacheMeasurement",
    "CacheUse",
    "Client",
    "Completed",
    "ControlNet",
    "ControlNetHost",
    "ControlNetUse",
    "DroppedTemplates",
    "EditOptions",
    "Ellipse",
    "Event",
    "FleetTemplate",
    "GenerationOptions",
    "Interrupted",
    "Job",
    "JobPage",
    "JobState",
    "JobStatus",
    "JobTrace",
    "Lora",
    "LoraBoundMeasured",
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
    "Progress",
    "PromptPair",
    "Provenance",
    "Queued",
    "Readiness",
    "ResidualProfile",
    "RetryPolicy",
    "ServedControlNet",
    "ServedModel",
    "ServedSampler",
    "SilentService",
    "SourceUse",
    "StageTime",
    "TemplateHolder",
    "TemplateOverview",
    "Tls",
    "TraceSpan",
    "Truncation",
    "WarmedTemplates",
    "parameters_of",
]
