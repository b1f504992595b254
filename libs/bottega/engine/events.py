"""The events that an engine reports about its jobs, and the records of what happened to them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from bottega.engine.spans import EngineTrace
from bottega.errors import BottegaError

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
class ControlUse:
    """How a job used a ControlNet."""

    name: str
    image_digest: str
    """SHA-256 of the control image, hex."""
    begin_step: int
    """First step in which it was active."""
    end_step: int
    """Step after the last one in which it was active."""
    scale: float = 1.0
    digest: str = ""
    """Digest of its version, hex; "" if unknown."""
    waited_s: float = 0.0
    """Seconds for which the job waited for its residuals."""
    stale_steps: int = 0
    """Number of steps that used residuals of the step before."""
    pipelined: bool = False
    """Whether its residuals arrived while the UNet's encoder ran."""
    servers: tuple[str, ...] = ()
    similarity: float | None = None
    """Measured similarity of its residuals from step to step; None if not measured."""
    control_mode: int | None = None
    """What the control image shows, if the ControlNet is a union; None otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraRecord:
    """How a job used a LoRA."""

    name: str
    digest: str
    scale: float
    from_step: int
    """First step in which the UNet used it."""
    token: str = ""
    """The token in prompts, if it is a textual inversion embedding."""
    load_s: float
    """Seconds until its data had arrived."""
    wait_s: float
    """Seconds of waiting for all of the job's LoRAs; `patch_s` and `similarities` are of all of them, too."""
    patch_s: float
    """Seconds for patching weights; 0 if the weights were patched already, or were never patched."""
    mixed_alphas: bool = False
    """Whether `has_mixed_alphas` is true of any component."""
    rounded_otherwise: bool = False
    """Whether it was merged into half-precision weights, which rounds differently from stock Diffusers."""
    stock_may_leave_out: tuple[str, ...] = ()
    """The keys that `left_out_by_stock` returns, of all components."""
    similarities: tuple[float, ...] = ()
    """Similarity of latents after each step, see `LatentMeter`; empty if not measured."""
    ignored_layers: int = 0
    """Number of layers of its file that match nothing in the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRecord:
    """The share of a job that the other worker of a pair computed."""

    worker: str
    """Name of the other worker."""
    steps: int
    """Number of steps, over all images, in which it computed rows."""
    taken_back_steps: int
    """Number of steps whose offloaded rows did not come back."""
    waited_s: float
    """Seconds of waiting for its rows after all other rows were done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedStart:
    """A cached latent from which an image started."""

    image: int
    """Index of the image in its job."""
    name: str
    """Name of the latent, by which requests can pin it."""
    from_step: int
    """First step that the image makes after the start."""
    skipped_steps: int
    """Steps that the start saved: `from_step` minus the steps that the image had made when the latent arrived."""
    similarity: float
    """Cosine similarity of the two prompts' embeddings."""
    without_loras: bool = False
    """Whether the entry was recorded without the LoRAs of the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EditRecord:
    """How an edit job used recorded activations."""

    blocks_reused: int = 0
    """Number of transformer blocks that reused recorded activations, over all steps, rows and images."""
    blocks_total: int = 0
    """Number of all transformer blocks in those steps, rows and images."""
    computed_share: float = 0.0
    """Largest fraction of tokens that a step computed, at the finest level of attention; 0 if all were computed."""
    recording: str = ""
    """Id of the recording whose noise was used, see `MaskUse`; "" for none."""
    computed_all_because: str = ""
    """Why no block was reused, as a clause; "" if any was."""
    recorded: bool = False
    """Whether this job recorded activations that later edits can use."""
    dilated_share: float = 0.0
    """Fraction of tokens under the mask and its margin, at the same level, whether or not all were computed."""
    restored: bool = False
    """Whether recorded latents restored the part outside the mask."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutText:
    """The end of a plain prompt, which had no effect because the prompt was too long for its tokenizer."""

    field: str
    """Name of the prompt's field."""
    text: str
    encoders: tuple[str, ...]
    """Parts of the text encoders that did not read it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRecord:
    """The record of what happened to a job, for its history and its pictures' metadata."""

    begin_step: int
    truncations: Sequence[CutText]
    seconds: Mapping[str, float]
    """Seconds by stage (encode, controlnets, loras, denoise, batch, decode); shared batches count in full."""
    mean_group_requests: float
    """Mean number of images in the batches of its steps."""
    controlnets: tuple[ControlUse, ...] = ()
    encoder_s: float = 0.0
    """Seconds of denoising steps with ControlNets before the first residual was needed."""
    loras: tuple[LoraRecord, ...] = ()
    exact: bool = True
    """Whether no add-on approximated anything."""
    pair: PairRecord | None = None
    """What the other worker of a pair computed; None if no rows were offloaded."""
    cached_starts: tuple[CachedStart, ...] = ()
    """Cached latents from which its images started."""
    edit: EditRecord | None = None
    """How an edit used recorded activations; None for a job that may not use any."""
    vae_dtype: str = ""
    """Data type in which its images were decoded."""
    vae_tiled: bool = False
    """Whether any of its images was decoded in tiles."""
    decoded_as_stock: bool = True
    """Whether the VAE decoded as stock Diffusers does: in one piece and in the same element type."""
    shared_in_half_precision: bool = False
    """Whether a step ran together with other rows in half precision, which rounds differently from stock Diffusers."""
    device_s: float = 0.0
    """Seconds of the device that the job used: its share of batches, encoding and decoding."""


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
