"""The events that an engine reports about its jobs, and the records of what happened to them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from bottega.engine.spans import EngineTrace
from bottega.errors import BottegaError
from bottega.v1.generation_pb2 import Provenance

Decisions = Mapping[str, bytes]
"""Decisions of attempts at a job: messages of add-ons, by kind of add-on (`JobAddOn.decision`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStarted:
    """Denoising of a job begins. Steps are counted over all of its images."""

    key: Hashable
    steps_total: int
    steps_resumed: int
    """Steps that are already done, because they were made before the checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDecided:
    """The decisions of this attempt so far, reported before the steps that they change.

    A later attempt needs them (`EngineOrder.decisions`) to draw the same picture.
    """

    key: Hashable
    decisions: Decisions


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JobAdvanced:
    """Progress of a job."""

    key: Hashable
    steps_done: int
    """Number of finished steps over all images, including those before a checkpoint."""
    device_s: float = 0.0
    """Seconds of the device that the job has used, without forward passes whose time is not known yet."""
    preview_index: int = 0
    """Index of the image that the preview shows."""
    preview: Tensor | None = None
    """uint8 [latent height, latent width, 3]; None without previews."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCheckpointed:
    """A checkpoint, from which another engine can continue the job. It replaces earlier ones."""

    key: Hashable
    steps_done: int
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ImageDrawn:
    """A finished image."""

    key: Hashable
    index: int
    pixels: Tensor
    """uint8 [height, width, 3]."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JobKept:
    """Data of add-ons about one image, for later jobs that edit it. Reported before JobFinished."""

    key: Hashable
    index: int
    by_kind: Mapping[str, bytes]
    """Data by kind of add-on, for `EngineOrder.kept`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutText:
    """The end of a plain prompt, which had no effect because the prompt was too long for its tokenizer."""

    field: str
    """Name of the prompt's field."""
    text: str
    encoders: tuple[str, ...]
    """Parts of the text encoders that did not read it."""


@dataclass(slots=True, kw_only=True)
class EngineRecord:
    """The record of what happened to a job, for its history and its pictures' metadata."""

    provenance: Provenance
    """What the engine and its add-ons know, but for `times`, `exact` and `shared_in_half_precision`."""
    seconds: dict[str, float]
    """Seconds by stage (encode, denoise, batch, decode, those of add-ons); shared batches count in full."""
    exact: bool = True
    """Whether neither the engine nor an add-on approximated anything."""
    decoded_as_stock: bool = True
    """Whether the VAE decoded as stock Diffusers does: in one piece and in the same element type."""
    denoised_as_stock: bool = True
    """Whether no step was computed with rounded weights."""
    shared_in_half_precision: bool = False
    """Whether a step ran together with other rows in half precision, which rounds differently from stock Diffusers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFinished:
    """A job ended, and all of its images have been reported."""

    key: Hashable
    record: EngineRecord
    trace: EngineTrace = field(default_factory=EngineTrace)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFailed:
    """A job ended with an error."""

    key: Hashable
    error: BottegaError
    trace: EngineTrace = field(default_factory=EngineTrace)


Event = JobStarted | JobDecided | JobAdvanced | JobCheckpointed | ImageDrawn | JobKept | JobFinished | JobFailed
