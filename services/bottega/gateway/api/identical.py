"""Identical requests: finds the job whose stored pictures are just those that a request asks for.

Only for requests that give their seed: without one a caller wants another picture each time. And only where it is
certain what would be drawn with; else the request is drawn. What cannot be read is drawn as well.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bottega.errors import DataLoss, StorageUnavailable
from bottega.gateway.addons.addon import AddOn
from bottega.gateway.jobs.job import Job
from bottega.gateway.jobs.repository import JobRepository
from bottega.gateway.jobs.specs import without_images
from bottega.gateway.jobs.storage import Storage, digest
from bottega.gateway.jobs.store.result_keys import result_key
from bottega.gateway.metrics import GatewayMetrics
from bottega.v1.generation_pb2 import GenerationSpec
from bottega.v1.image_pb2 import Model

_log = logging.getLogger(__name__)


async def outline_of(spec: GenerationSpec) -> GenerationSpec:
    """A copy of `spec` with the SHA-256 of each input image, hex, in the image's place."""
    outline = without_images(spec)
    for name in ("image", "mask_image"):
        if spec.HasField(name):
            setattr(outline, name, (await digest(getattr(spec, name))).encode())
    for net, given in zip(outline.controlnets, spec.controlnets, strict=True):
        net.image = (await digest(given.image)).encode()
    return outline


@dataclass(frozen=True, slots=True, kw_only=True)
class IdenticalResult:
    """What answers a request. spec: of the request, complete, without input images. source: the job that has the
    pictures, to be read only.
    """

    spec: GenerationSpec
    source: Job


class IdenticalResults:
    """Looks for them. default: what counts for a request that does not say whether it may be answered so."""

    def __init__(
        self,
        *,
        default: bool,
        jobs: JobRepository,
        storage: Storage,
        addons: Sequence[AddOn],
        metrics: GatewayMetrics,
    ) -> None:
        self._default = default
        self._jobs = jobs
        self._storage = storage
        self._addons = addons
        self._metrics = metrics

    async def find(
        self,
        spec: GenerationSpec,
        model: Model,
        complete: Callable[[GenerationSpec], GenerationSpec],
        *,
        tenant: str,
    ) -> IdenticalResult | None:
        """What answers a request; its pictures are on the disk, and stay as long as new ones. None: draw it.

        tenant: whose request it is, and whose pictures they are. spec: as it came, without faults. complete: fills in
        what a spec leaves open.
        """
        if not self._may_answer(spec):
            return None
        outline = complete(await outline_of(spec))
        source = await self._source(self._key(outline, model, tenant), kept=outline.keep_for_editing)
        return None if source is None else IdenticalResult(spec=without_images(outline), source=source)

    def _may_answer(self, spec: GenerationSpec) -> bool:
        if not spec.HasField("seed"):
            return False
        asked = spec.techniques
        return asked.identical_results if asked.HasField("identical_results") else self._default

    async def _source(self, key: str, *, kept: bool) -> Job | None:
        """The job with that key whose pictures are still there, to be read only. kept: with latents of every one."""
        outcome = "none"
        try:
            for job in await self._jobs.with_result(key) if key else ():
                if kept and not all(image.latents for image in job.images):
                    continue
                if await self._storage.renew_images(job.images):
                    outcome = "answered"
                    return job
                outcome = "gone"
        except (StorageUnavailable, DataLoss) as error:
            outcome = "failed"
            _log.info("a stored result could not be looked for", extra={"text": error.message})
        finally:
            self._metrics.identical_results.labels(outcome).inc()
        return None

    def _key(self, outline: GenerationSpec, model: Model, tenant: str) -> str:
        found: list[str] = []
        for addon in self._addons:
            versions = addon.versions(outline, model)
            if versions is None:
                return ""
            found += versions
        return result_key(outline, model_hash=model.model_hash, dtype=model.dtype, versions=found, tenant=tenant)
