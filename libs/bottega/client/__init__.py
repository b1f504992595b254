"""The SDK: draw pictures with a Bottega suite from Python.

    from bottega.client import Client

    with Client() as client:
        client.generate("a big red star on a blue background", seed=7).save("star.png")
        job = client.submit("a small green circle")  # outlives this process: client.job(job.id) finds it again
        job.result()[0].save("circle.png")

AsyncClient is the same for asyncio. What goes wrong is raised as a class of bottega.errors.
"""

from bottega.client.aio import AsyncClient
from bottega.client.aio_job import AsyncJob
from bottega.client.control import ControlNet
from bottega.client.events import Completed, Event, Interrupted, Preview, Progress, Queued
from bottega.client.hosting import AddedControlNet, ControlNetHost, Readiness, ResidualProfile, ServedControlNet
from bottega.client.jobs import JobPage, JobState, JobStatus
from bottega.client.lora import Lora, LoraLike
from bottega.client.lora_profiling import LoraBoundMeasured
from bottega.client.options import GenerationOptions
from bottega.client.picture import Picture
from bottega.client.png import parameters_of
from bottega.client.profiling import MeasuredProfile, ProfileCase
from bottega.client.retry import RetryPolicy
from bottega.client.sync import Client, Job

__all__ = [
    "AddedControlNet",
    "AsyncClient",
    "AsyncJob",
    "Client",
    "Completed",
    "ControlNet",
    "ControlNetHost",
    "Event",
    "GenerationOptions",
    "Interrupted",
    "Job",
    "JobPage",
    "JobState",
    "JobStatus",
    "Lora",
    "LoraBoundMeasured",
    "LoraLike",
    "MeasuredProfile",
    "Picture",
    "Preview",
    "ProfileCase",
    "Progress",
    "Queued",
    "Readiness",
    "ResidualProfile",
    "RetryPolicy",
    "ServedControlNet",
    "parameters_of",
]
