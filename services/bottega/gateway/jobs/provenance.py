"""Provenances: what the gateway adds to those of workers, and those of jobs that were not drawn."""

from __future__ import annotations

import functools
import importlib.metadata

from bottega.gateway.jobs.job import Job
from bottega.v1.generation_pb2 import Provenance, StageTime


@functools.cache
def version() -> str:
    """Return the version of the suite that runs here."""
    return importlib.metadata.version("bottega-services")


def completed_provenance(job: Job, reported: Provenance) -> Provenance:
    """Return a worker's provenance with what only the gateway knows: parameters, attempts, its own times."""
    full = Provenance()
    full.CopyFrom(reported)
    full.parameters.CopyFrom(job.bare)
    full.image_digest = job.request.image_digest
    if job.request.mask_digest:
        full.mask.digest = job.request.mask_digest
    full.worker = reported.worker or job.worker
    full.bottega_version = reported.bottega_version or version()
    full.attempts = job.attempts
    full.repeated_steps = job.steps.repeated
    full.times.extend(
        StageTime(stage=stage, seconds=seconds)
        for stage, seconds in (
            ("validate", job.times.validate_s),
            ("acknowledge", job.times.acknowledge_s),
            ("queue", job.times.queue_s),
            ("route", job.times.route_s),
        )
    )
    return full


def answered_provenance(job: Job, source: Job) -> Provenance:
    """Return the provenance of a job that the stored result of `source` answers, so that nothing was drawn.

    It says how the pictures of `source` were made, which may have been answered itself. Attempts and times are the
    job's own.
    """
    assert source.provenance is not None
    full = Provenance()
    full.CopyFrom(source.provenance)
    full.identical_job = source.provenance.identical_job or source.job_id
    full.attempts = full.repeated_steps = 0
    del full.times[:]
    full.times.add(stage="validate", seconds=job.times.validate_s)
    return full
