"""The SDK: draw pictures with a Bottega suite from Python.

    from bottega.client import Client

    with Client() as client:
        client.generate("a big red star on a blue background", seed=7).save("star.png")

AsyncClient is the same for asyncio. What goes wrong is raised as a class of bottega.errors.
"""

from bottega.client.aio import AsyncClient
from bottega.client.events import Completed, Event, Interrupted, Preview, Progress, Queued
from bottega.client.jobs import Job, JobPage, JobState
from bottega.client.options import GenerationOptions
from bottega.client.picture import Picture
from bottega.client.png import parameters_of
from bottega.client.retry import RetryPolicy
from bottega.client.sync import Client

__all__ = [
    "AsyncClient",
    "Client",
    "Completed",
    "Event",
    "GenerationOptions",
    "Interrupted",
    "Job",
    "JobPage",
    "JobState",
    "Picture",
    "Preview",
    "Progress",
    "Queued",
    "RetryPolicy",
    "parameters_of",
]
