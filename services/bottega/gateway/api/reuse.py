"""Reuse of earlier jobs: the images of an identical job, and the kept latents of an image that is edited.

Only requests with a seed are answered with stored images, because callers that give no seed expect a new image each
time. If the gateway cannot be certain which weights would be used, the request is drawn. An edit finds the kept latents
of its input image by the digest of the image's bytes, so the caller need not name the job that drew it. Stored data
that cannot be read is ignored.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bottega.addons.interface.gateway_addon import AddOn
from bottega.addons.interface.views import JobRequest
from bottega.codec import ImageSize
from bottega.errors import DataLoss, StorageUnavailable
from bottega.gateway.api.validation import SeenImages
from bottega.gateway.jobs.job import Job
from bottega.gateway.jobs.specs import has_images, result_key, without_images
from bottega.gateway.jobs.storage import Storage, digest
from bottega.gateway.jobs.stored_jobs import StoredJobs
from bottega.gateway.metrics import GatewayMetrics
from bottega.rules import computes_part, keeps_data
from bottega.v1.generation_pb2 import GenerationSpec, MaskUse
from bottega.v1.image_pb2 import Model

_log = logging.getLogger(__name__)


async def outline_of(spec: GenerationSpec) -> GenerationSpec:
    """Return a copy of `spec` in which the SHA-256 of each input image, in hex, replaces the image."""
    outline = without_images(spec)
    for name in ("image", "mask_image"):
        if spec.HasField(name):
            setattr(outline, name, (await digest(getattr(spec, name))).encode())
    for net, given in zip(outline.controlnets, spec.controlnets, strict=True):
        net.image = (await digest(given.image)).encode()
    return outline


@dataclass(frozen=True, slots=True, kw_only=True)
class IdenticalResult:
    """The stored result of an earlier, identical job."""

    spec: GenerationSpec
    """The complete spec of the request, without input images."""
    source: Job
    """The earlier job whose stored images are the result; read-only."""


class IdenticalResults:
    """Finds earlier jobs whose stored images answer a new, identical request.

    Args:
        default: Whether stored images may answer a request that does not set `identical_results`.
    """

    def __init__(
        self,
        *,
        default: bool,
        jobs: StoredJobs,
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
        """Return the stored result that answers a request, or None if the request has to be drawn.

        Args:
            spec: A valid spec as the caller sent it.
            model: The model that draws it.
            complete: Fills in the defaults of a spec.
            tenant: The tenant that sent the request. Only its own pictures are used.
        """
        if not self._may_answer(spec):
            return None
        outline = complete(await outline_of(spec))
        source = await self._source(self._key(outline, model, tenant), kept=keeps_data(outline))
        return None if source is None else IdenticalResult(spec=without_images(outline), source=source)

    def _may_answer(self, spec: GenerationSpec) -> bool:
        if not spec.HasField("seed"):
            return False
        techniques = spec.techniques
        return techniques.identical_results if techniques.HasField("identical_results") else self._default

    async def _source(self, key: str, *, kept: bool) -> Job | None:
        """Return a read-only job with that result key whose images still exist, and extend their lifetime; else None.

        Args:
            key: The result key.
            kept: Whether kept latents of every image must exist, too.
        """
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
            _log.info("the search for a stored result failed; the request is drawn", extra={"text": error.message})
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


class ImageSources:
    """Collects what the gateway knows about the input images of a request: digests, sizes and kept latents."""

    def __init__(self, jobs: StoredJobs, storage: Storage) -> None:
        self._jobs = jobs
        self._storage = storage

    async def describe(self, request: JobRequest, spec: GenerationSpec, model: Model, seen: SeenImages) -> JobRequest:
        """Return the request with facts about its images, and extend the lifetime of kept latents that it will use.

        Args:
            request: The request.
            spec: Its complete spec.
            model: The model that draws it.
            seen: The sizes and the mask found by decoding its images.
        """
        if not spec.HasField("image"):
            return request
        image_digest = await digest(spec.image)
        if not spec.HasField("mask_image"):
            return dataclasses.replace(request, image_digest=image_digest)
        partly = computes_part(spec)
        # Kept latents are of the whole image, not of a crop.
        may_use_kept = partly and not spec.HasField("padding_mask_crop")
        kept = await self._find_kept(spec, image_digest, request.tenant) if may_use_kept else ""
        source = _edit_source(spec, model, kept or image_digest, mask=seen.mask, tenant=request.tenant)
        return dataclasses.replace(
            request,
            image_digest=image_digest,
            mask_digest=await digest(spec.mask_image),
            kept_digest=kept,
            result_size=_result_size(spec, seen.size),
            edit_source=source if partly else "",
            computed_share=(seen.mask.computed_share or 1.0) if partly else 1.0,
        )

    async def _find_kept(self, spec: GenerationSpec, image_digest: str, tenant: str) -> str:
        """Return the digest of latents of this image that a job of the tenant keeps and that fit the edit, or ""."""
        try:
            for job in await self._jobs.with_kept_picture(image_digest, tenant=tenant):
                if not _may_fit(job.bare, spec):
                    continue
                kept = next(image.latents for image in job.images if image.digest == image_digest and image.latents)
                if await self._storage.renew_kept(kept):
                    _log.info("an edit uses the kept latents of its image", extra={"drawn_by": job.job_id})
                    return kept
        except (StorageUnavailable, DataLoss) as error:
            _log.info("the search for kept latents failed; the edit goes on", extra={"text": error.message})
        return ""


def _may_fit(drawn: GenerationSpec, edit: GenerationSpec) -> bool:
    """Return whether the kept latents of a job have every timestep that an edit computes. Both specs are complete.

    They do if the edit's step count divides the job's step count.
    """
    same = (drawn.model, drawn.width, drawn.height) == (edit.model, edit.width, edit.height)
    drawn_strength = drawn.strength if drawn.HasField("strength") else 1.0
    return same and drawn.num_inference_steps % edit.num_inference_steps == 0 and drawn_strength >= edit.strength


def _edit_source(spec: GenerationSpec, model: Model, image_digest: str, *, mask: MaskUse, tenant: str) -> str:
    """Return a hash that identifies the source of an edit: the image or its kept latents, its size and crop.

    Two tenants have different hashes for the same source. See ActivationsOrder.source.
    """
    part = [mask.crop_x, mask.crop_y, mask.crop_width, mask.crop_height]
    facts = [tenant, model.model_hash, image_digest, spec.width, spec.height, part]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _result_size(spec: GenerationSpec, image_size: ImageSize | None) -> tuple[int, int]:
    """Return the size of the input image if the edit is pasted back into it (padding_mask_crop), else (0, 0)."""
    if image_size is None or not spec.HasField("padding_mask_crop"):
        return 0, 0
    return image_size.width, image_size.height


async def fingerprinted(spec: GenerationSpec, request: JobRequest) -> JobRequest:
    """Return a request with the size and the hash of its spec. Equal specs have equal hashes."""
    if has_images(spec):
        packed = await asyncio.to_thread(spec.SerializeToString, deterministic=True)
    else:
        packed = spec.SerializeToString(deterministic=True)
    return dataclasses.replace(request, fingerprint=await digest(packed), size_bytes=len(packed))
