"""What the gateway knows of the images that a request draws from: their digests, and what was kept of them for edits.

An edit of a picture that a job of this gateway has drawn and kept finds the latents of its steps by the picture's
digest: the bytes are enough, nobody has to name the job. What cannot be read is an edit like any other.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from bottega.codec import ImageSize
from bottega.errors import DataLoss, StorageUnavailable
from bottega.gateway.jobs.repository import JobRepository
from bottega.gateway.jobs.specs import may_mask_blocks
from bottega.gateway.jobs.storage import Storage, digest
from bottega.gateway.jobs.values import JobRequest
from bottega.v1.generation_pb2 import GenerationSpec

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSource:
    """The image of a request, and the mask of an edit of it; see JobRequest."""

    image_digest: str = ""
    mask_digest: str = ""
    kept_latents: str = ""
    result_size: tuple[int, int] = (0, 0)

    @classmethod
    def of(cls, request: JobRequest) -> ImageSource:
        """That of an identical request, which is not drawn."""
        return cls(image_digest=request.image_digest, mask_digest=request.mask_digest, result_size=request.result_size)


class ImageSources:
    """Finds them."""

    def __init__(self, jobs: JobRepository, storage: Storage) -> None:
        self._jobs = jobs
        self._storage = storage

    async def find(self, spec: GenerationSpec, image_size: ImageSize | None) -> ImageSource:
        """Of a complete spec. image_size: of its image; what is kept of it stays as long as if it were stored now."""
        if not spec.HasField("image"):
            return ImageSource()
        image_digest = await digest(spec.image)
        if not spec.HasField("mask_image"):
            return ImageSource(image_digest=image_digest)
        return ImageSource(
            image_digest=image_digest,
            mask_digest=await digest(spec.mask_image),
            kept_latents=await self._kept_latents(image_digest) if _may_use_kept(spec) else "",
            result_size=_result_size(spec, image_size),
        )

    async def _kept_latents(self, image_digest: str) -> str:
        """Digest of what is kept of a picture and is still there; empty where nothing is."""
        try:
            for job in await self._jobs.with_kept_picture(image_digest):
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


def _result_size(spec: GenerationSpec, image_size: ImageSize | None) -> tuple[int, int]:
    """With padding_mask_crop a picture is put back into the image, and has its size."""
    if image_size is None or not spec.HasField("padding_mask_crop"):
        return 0, 0
    return image_size.width, image_size.height
