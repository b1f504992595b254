"""What the engine says about its jobs."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from bottega.diffusion.engine.spans import EngineTrace
from bottega.errors import BottegaError

Decisions = Mapping[str, bytes]
"""What attempts at a job have decided: by kind of add-on, a message of the add-on's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStarted:
    """Denoising of a job has begun. Steps are counted over all images; steps_resumed came with a checkpoint."""

    key: Hashable
    steps_total: int
    steps_resumed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDecided:
    """What this attempt has decided so far; said before the steps that it changes.

    A later attempt must be told (EngineOrder.decisions), else it may not draw the same picture.
    """

    key: Hashable
    decisions: Decisions


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JobAdvanced:
    """Denoising goes on."""

    key: Hashable
    steps_done: int
    """Number of steps over all images, those of a checkpoint included."""
    device_s: float = 0.0
    """Seconds of the device that the job has used, as far as they are known."""
    preview_index: int = 0
    """The image that the preview shows."""
    preview: Tensor | None = None
    """uint8 [latent height, latent width, 3], where previews were asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCheckpointed:
    """The job can go on from here in another engine; replaces its earlier checkpoints."""

    key: Hashable
    steps_done: int
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ImageDrawn:
    """One image is finished. pixels: uint8 [height, width, 3]."""

    key: Hashable
    index: int
    pixels: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JobKept:
    """What a job keeps of one of its images for edits of it; said before JobFinished.

    data: safetensors, for an EngineOrder of an edit; at most rules.MAX_KEPT_LATENTS_BYTES.
    """

    key: Hashable
    index: int
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlUse:
    """A ControlNet as a job used it: in the steps [begin_step, end_step). See ControlSpec and ControlRecord."""

    name: str
    image_digest: str
    begin_step: int
    end_step: int
    scale: float = 1.0
    digest: str = ""
    waited_s: float = 0.0
    stale_steps: int = 0
    pipelined: bool = False
    servers: tuple[str, ...] = ()
    similarity: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraRecord:
    """A LoRA as a job used it. Seconds of waiting and patching, and similarities, are of all of its LoRAs together."""

    name: str
    digest: str
    scale: float
    from_step: int
    """The first step that had it in the UNet."""
    load_s: float
    """Until it was here."""
    wait_s: float
    """Seconds that the job waited for its LoRAs."""
    patch_s: float
    """Of putting them into weights; 0 where they were in already, or only ever beside them."""
    mixed_alphas: bool = False
    """See `has_mixed_alphas`; of any component."""
    rounded_otherwise: bool = False
    """Whether it was merged into half precision weights, which rounds differently from stock Diffusers."""
    stock_may_leave_out: tuple[str, ...] = ()
    """See `left_out_by_stock`; of all components."""
    similarities: tuple[float, ...] = ()
    """Where it was measured, after each step; see LatentMeter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRecord:
    """What the other worker of a pair, named `worker`, did for a job.

    steps: of all images, in which it computed rows. taken_back_steps: in which rows were offloaded that did not come
    back. waited_s: for its rows, when all others were done.
    """

    worker: str
    steps: int
    taken_back_steps: int
    waited_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedStart:
    """A cached latent from which an image started."""

    image: int
    """Index of the image in its job."""
    entry: str
    """Name of the cache entry."""
    step: int
    """Number of steps after which the latent was recorded."""
    from_step: int
    """First step that the image is made of."""
    skipped_steps: int
    """Steps that the start saved: `from_step` less the steps that the image had made when the latent came."""
    similarity: float
    """Cosine of the embeddings of the two prompts."""
    without_loras: bool = False
    """Whether the entry was recorded without the LoRAs of the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EditRecord:
    """What masked blocks were to a job.

    blocks_reused: transformer blocks that took what is not masked from a recording, of blocks_total, over all steps,
    rows and images. computed_share: of the tokens, at the finest level of attention, the largest of any step; 0 where
    all was computed. recording: what was taken from others, as MaskUse names it; empty for nothing.
    computed_all_because: why no block was reused, in words.
    recorded: whether this job has recorded what later ones can use. dilated_share: of the tokens, at the same level,
    those under the mask and its margin, whether all was computed or not. kept_latents: whether those that were kept of
    the image are put back.
    """

    blocks_reused: int = 0
    blocks_total: int = 0
    computed_share: float = 0.0
    recording: str = ""
    computed_all_because: str = ""
    recorded: bool = False
    dilated_share: float = 0.0
    kept_latents: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRecord:
    """What really happened to a job.

    seconds: by stage (encode, controlnets, loras, denoise, batch, decode); a turn that it shared counts in full.
    mean_group_requests: images in the groups that its steps ran in, on average.
    encoder_s: of the denoising steps with ControlNets, the time before the first residual was needed.
    exact: whether no add-on has approximated anything on the way to its latents.
    pair: what the other worker of a pair did for it; None where no rows were offloaded. cached_starts: of the images
    that started from cached latents. edit: of an edit that may compute masked blocks alone.
    """

    begin_step: int
    truncations: Mapping[str, str]
    seconds: Mapping[str, float]
    mean_group_requests: float
    controlnets: tuple[ControlUse, ...] = ()
    encoder_s: float = 0.0
    loras: tuple[LoraRecord, ...] = ()
    exact: bool = True
    pair: PairRecord | None = None
    cached_starts: tuple[CachedStart, ...] = ()
    edit: EditRecord | None = None
    vae_dtype: str = ""
    """The element type that its images were decoded in."""
    vae_tiled: bool = False
    """Whether one of its images was decoded in tiles."""
    decoded_as_stock: bool = True
    """Whether the VAE decoded as stock Diffusers does: in one piece, and in the same element type."""
    device_s: float = 0.0
    """Seconds of the device that it used: its part of shared turns, encoding and decoding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFinished:
    """All images of a job have been handed out."""

    key: Hashable
    record: EngineRecord
    trace: EngineTrace = field(default_factory=EngineTrace)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFailed:
    """The job has ended without its images."""

    key: Hashable
    error: BottegaError
    trace: EngineTrace = field(default_factory=EngineTrace)


Event = JobStarted | JobDecided | JobAdvanced | JobCheckpointed | ImageDrawn | JobKept | JobFinished | JobFailed
