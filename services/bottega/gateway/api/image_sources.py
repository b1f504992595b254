"""What the gateway knows of the images that a request draws from: their digests, and what was kept of them for edits.

An edit of a picture that a job of this gateway has drawn and kept finds the latents of its steps by the picture's
digest: the bytes are enough, nobody has to name the job. What cannot be read is an edit like any other.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass, field

from bottega.codec import ImageSize
from bottega.errors import DataLoss, StorageUnavailable
from bottega.gateway.jobs.repository import JobRepository
from bottega.gateway.jobs.storage import Storage, digest
from bottega.gateway.jobs.values import JobRequest
from bottega.masked_blocks import may_mask_blocks
from bottega.v1.generation_pb2 import GenerationSpec, MaskUse
from bottega.v1.image_pb2 import Model

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenImages:
    """What was seen of the images of a request. size: of `image`; None without one. mask: what it redraws."""

    size: ImageSize | None = None
    mask: MaskUse = field(default_factory=MaskUse)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSource:
    """The image of a request, and the mask of an edit of it; see JobRequest."""

    image_digest: str = ""
    mask_digest: str = ""
    kept_latents: str = ""
    result_size: tuple[int, int] = (0, 0)
    template: str = ""
    computed_share: float = 1.0

    @classmethod
    def of(cls, request: JobRequest) -> ImageSource:
        """That of an identical request, which is not drawn."""
        return cls(image_digest=request.image_digest, mask_digest=request.mask_digest, result_size=request.result_size)


class ImageSources:
    """Finds them."""

    def __init__(self, jobs: JobRepository, storage: Storage) -> None:
        self._jobs = jobs
        self._storage = storage

    async def find(self, spec: GenerationSpec, model: Model, seen: SeenImages, *, tenant: str = "") -> ImageSource:
        """Of a complete spec for that model. What its tenant keeps of the image stays as if stored now."""
        if not spec.HasField("image"):
            return ImageSource()
        image_digest = await digest(spec.image)
        if not spec.HasField("mask_image"):
            return ImageSource(image_digest=image_digest)
        kept = await self._kept_latents(spec, image_digest, tenant) if _may_use_kept(spec) else ""
        masked = may_mask_blocks(spec)
        return ImageSource(
            image_digest=image_digest,
            mask_digest=await digest(spec.mask_image),
            kept_latents=kept,
            result_size=_result_size(spec, seen.size),
            template=_template(spec, model, kept or image_digest, mask=seen.mask, tenant=tenant) if masked else "",
            computed_share=(seen.mask.computed_share or 1.0) if masked else 1.0,
        )

    async def _kept_latents(self, spec: GenerationSpec, image_digest: str, tenant: str) -> str:
        """Digest of what a job of that tenant keeps of a picture, fits its edit and is still there; empty where nothing
        does.
        """
        try:
            for job in await self._jobs.with_kept_picture(image_digest, tenant=tenant):
                if not _may_fit(job.bare, spec):
                    continue
                kept = next(image.latents for image in job.images if image.digest == image_digest and image.latents)
                if await self._storage.images.renew(kept):
                    _log.info("an edit uses what is kept of its image", extra={"drawn_by": job.job_id})
                    return kept
        except (StorageUnavailable, DataLoss) as error:
            _log.info("what is kept of an image could not be looked for", extra={"text": error.message})
        return ""


def _may_use_kept(spec: GenerationSpec) -> bool:
    """Whether an edit may put the latents back that drew its image: they are of the whole of it, and no exact ones."""
    return may_mask_blocks(spec) and not spec.HasField("padding_mask_crop")


def _may_fit(drawn: GenerationSpec, edit: GenerationSpec) -> bool:
    """Whether latents of a picture may be those of an edit's steps; both specs are complete.

    An edit with a half, a third and so on of the steps may have only timesteps that the picture had.
    """
    same = (drawn.model, drawn.width, drawn.height) == (edit.model, edit.width, edit.height)
    drawn_strength = drawn.strength if drawn.HasField("strength") else 1.0
    return same and drawn.num_inference_steps % edit.num_inference_steps == 0 and drawn_strength >= edit.strength


def _template(spec: GenerationSpec, model: Model, image_digest: str, *, mask: MaskUse, tenant: str) -> str:
    """Names what the spec draws from: an image, or what is kept of it, at a size, or a part of it.

    Two tenants have two names for it. See ActivationsOrder.source.
    """
    part = [mask.crop_x, mask.crop_y, mask.crop_width, mask.crop_height]
    said = [tenant, model.model_hash, image_digest, spec.width, spec.height, part]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def _result_size(spec: GenerationSpec, image_size: ImageSize | None) -> tuple[int, int]:
    """With padding_mask_crop a picture is put back into the image, and has its size."""
    if image_size is None or not spec.HasField("padding_mask_crop"):
        return 0, 0
    return image_size.width, image_size.height
