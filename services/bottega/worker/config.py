"""A worker's configuration and its engine's. It imports no torch, so that the front can read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

from bottega.device_names import DeviceName
from bottega.errors import ConfigError
from bottega.model_files import check_model_folder, folder_of
from bottega.model_files.controlnet_folder import check_controlnet
from bottega.model_files.controlnet_layout import read_base_layout
from bottega.rpc.address import OptionalAddress
from bottega.rpc.server import ServerConfig
from bottega.rules import MAX_MODEL_CHARACTERS
from bottega.strict import STRICT

AtLeastOne = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What the engine process may be told.

    model: "miniature", or a folder in Diffusers' layout. model_name: what requests call it; empty is the name of its
    repository where the folder is a snapshot in a hub's cache, else the folder's own name. device: auto, cpu, cuda or
    cuda:N. dtype: that the model computes in; auto is that of its files on a GPU, and on a CPU float32 for files in
    float32, else bfloat16 or float32, by what is measured faster there. All workers of a model need the same one:
    name it where their devices are unlike. threads: 0 leaves the number to torch.
    vae_dtype: that latents are decoded in; auto is what stock Diffusers takes: dtype, but float32 for a float16 model
    whose VAE has force_upcast. Another one makes pictures that say that they are not exact; half precision is faster,
    and taken only where a trial at the start shows that pictures are nearly the same. vae_tile_pixels: the
    largest picture, in pixels, that is decoded in one piece. Larger ones are decoded in tiles, which takes less memory
    and blends the edges of tiles; their provenance says so, and they are not exact. 0 sets no such size: then only
    pictures for which there is not enough memory are decoded in tiles.
    device_memory_mib: of a GPU, for all that this worker keeps and computes there; 0 is what is free at its start, less
    a reserve. compile_s: that the first forward of a kind may take on a GPU before a silent engine counts as hung.
    exclusive_cores: whether nothing else computes on the cores that this engine may use; its threads wait for each
    other awake then: a quarter faster on a CPU, and slower where it is not so.
    accelerations: ways to compute the same faster that the engine tries at its start, and keeps where they are faster
    there and draw the same: auto is all of them on a GPU and none on a CPU; off is none; else a list of their names.
    On a CPU [channels_last.unet, channels_last.vae] are worth a try; pictures differ in last bits where they are kept.
    self_check_s: after which it tries no more; what was measured by then decides.
    max_rows: of one group; a guided request has two. fixed_rows: runs groups of always so many rows, for images
    that are equal byte for byte whatever runs beside them; on a CPU a multiple of twice the threads; 0 is off.
    max_wait_turns: turns of its tenant in which a request may be passed over; one that would make others wait longer
    waits to begin.
    max_pixels: of one image; 0 is four times the model's own size, and 512 x 512 at least.
    sparse_convolutions: whether masked blocks of edits convolve around the mask alone: faster at small masks, for about
    as many bytes of each recording again.
    controlnets: by name, folders of ControlNets that it runs itself when no server does. controlnet_budget_bytes: most
    bytes of their weights that are loaded at once. controlnet_silence_s: after which a ControlNet server that
    says nothing is taken for dead.
    lora_budget_bytes: of LoRAs that are kept beside those that requests wait for; half as much more is kept of them as
    groups of several need them; on a GPU both have at most a quarter of what is left beside the model. lora_timeout_s:
    how long a request waits for its LoRAs. lora_silence_s: after which a LoRA store that says nothing is taken for
    dead. lora_pristine: where copies of weights that LoRAs were patched into are kept, as long again as what they
    touch.
    cache_timeout_s: how long a request waits for the cached latent that it names itself. cache_silence_s: after which a
    cache that says nothing is taken for dead. cache_recording_bytes: of recordings that wait to be sent to it; what is
    more is dropped.
    activations_mib: of what blocks put out for the images of edits, which later edits of them use again, and of what is
    loaded of activation stores of other hosts; 0 keeps none, and asks no store. activations_template_mib: that one
    image may take of it: of more, those blocks alone are recorded that save most time; 0 is as much as all.
    activations_upload_mib: of recordings that wait to be sent to a store; one that has no room there stays in this
    worker. activations_silence_s: after which an activation store that says nothing is taken for dead.
    mask_margin: tokens of the finest level of attention around a mask that masked blocks compute, too.
    peer: host:port of the worker that it forms a pair with, which names this one: each computes rows of the other one's
    requests while it has none of its own. Not together with fixed_rows, under which fewer rows take no less time.
    peer_name: of that worker; with it nobody else is taken for the peer, and with TLS its certificate must have it.
    peer_silence_s: after which a peer that says nothing is taken for dead. links_listen: host:port on which the link of
    a peer of another host comes in; port 0 is any free one, empty is none. links_socket: path of the unix socket for
    one of this host, in a folder that nobody else can write to; empty is one in the folder that systemd makes for the
    unit, else in a private one of this user; null is none. It is for this user, and for the group that
    BOTTEGA_LINKS_GROUP in the environment names.
    links_seal: whether what a peer of another host sends and gets is encrypted; false is for a network that is trusted,
    and links between devices of two hosts need it.
    device_links: auto links GPUs with those of other processes where both can, by memory that they share within a host,
    else by NCCL; off moves all tensors through memory of the host; gloo, at both ends, through Gloo's own connections,
    which are neither encrypted nor authenticated: for tests.
    checkpoint_interval_s: after which a picture's latents are sent to the gateway again, from which another worker
    could go on. progress_interval_s: at least, between two words on how far a picture is.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    model: str = "miniature"
    model_name: Annotated[str, Field(max_length=MAX_MODEL_CHARACTERS)] = ""
    device: DeviceName = "auto"
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    vae_dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    vae_tile_pixels: NotNegative = 0
    device_memory_mib: NotNegative = 0
    compile_s: Seconds = 300.0
    threads: NotNegative = 0
    exclusive_cores: bool = False
    accelerations: Literal["auto", "off"] | tuple[str, ...] = "auto"
    self_check_s: Seconds = 120.0
    max_rows: AtLeastOne = 16
    fixed_rows: NotNegative = 0
    max_wait_turns: AtLeastOne = 8
    max_pixels: NotNegative = 0
    sparse_convolutions: bool = True
    controlnets: dict[str, str] = field(default_factory=dict)
    controlnet_budget_bytes: AtLeastOne = 8 << 30
    controlnet_silence_s: Seconds = 5.0
    lora_budget_bytes: AtLeastOne = 1 << 30
    lora_timeout_s: Seconds = 60.0
    lora_silence_s: Seconds = 5.0
    lora_pristine: Literal["device", "host"] = "device"
    cache_timeout_s: Seconds = 10.0
    cache_silence_s: Seconds = 5.0
    cache_recording_bytes: NotNegative = 64 << 20
    activations_mib: NotNegative = 512
    activations_template_mib: NotNegative = 0
    activations_upload_mib: NotNegative = 512
    activations_silence_s: Seconds = 5.0
    mask_margin: Annotated[int, Field(ge=0, le=64)] = 1
    peer: Annotated[str, Field(pattern=r"^(.+:\d+)?$")] = ""
    peer_name: Annotated[str, Field(max_length=128)] = ""
    peer_silence_s: Seconds = 5.0
    links_listen: Annotated[str, Field(pattern=r"^(.+:\d+)?$")] = "127.0.0.1:0"
    links_socket: str | None = ""
    links_seal: bool = True
    device_links: Literal["auto", "off", "gloo"] = "auto"
    checkpoint_interval_s: Seconds = 2.0
    progress_interval_s: Seconds = 0.2

    def __post_init__(self) -> None:
        if self.peer and self.fixed_rows:
            raise ValueError(
                f"fixed_rows is {self.fixed_rows} and peer is {self.peer}: with fixed_rows a group of fewer rows takes "
                "no less time, so a pair gains nothing; set one of them only"
            )

    @property
    def group_rows(self) -> int:
        """Most rows that a group has."""
        return self.fixed_rows or self.max_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """What a worker may be told.

    name: unique in the fleet; empty is "worker-", the host's name and the process's id. gateway: its
    fleet.listen, host:port; empty joins no fleet.
    codec_processes: that encode pictures and decode input images. codec_deadline_s: of one image in them.
    codec_idle_s: without an image, after which they end, until the next one; null keeps them, and
    64 MiB of memory for the first image that comes.
    start_stall_s: without progress of the engine's start, after which it is taken for hung and replaced; loading,
    hashing and warming up make progress all the time, however long they take, and systemd waits as long. hang_s:
    without a word of an engine that is ready, after which the same happens. stall_s: the same without a step though
    it has work; above the longest turn of the largest picture, and the longest encoding and decoding. result_grace_s:
    for how long finished results are kept for a gateway that was cut off. result_bytes: of these results, that are
    kept at most.
    max_attempts: held at once.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    renamed_keys: ClassVar[Mapping[str, str]] = {"start_s": "start_stall_s"}

    name: str = ""
    gateway: OptionalAddress = "127.0.0.1:8472"
    server: ServerConfig = field(default_factory=ServerConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    codec_processes: AtLeastOne = 2
    codec_deadline_s: Seconds = 20.0
    codec_idle_s: Seconds | None = None
    start_stall_s: Seconds = 120.0
    hang_s: Seconds = 30.0
    stall_s: Seconds = 120.0
    result_grace_s: Seconds = 120.0
    result_bytes: AtLeastOne = 256 * 2**20
    max_attempts: AtLeastOne = 64


def check_model(config: WorkerConfig) -> None:
    """Raise ConfigError with the reason where the model, or a ControlNet that the worker runs, cannot be served.

    It takes some milliseconds, and no torch.
    """
    folder = folder_of(config.engine.model)
    if refusal := check_model_folder(folder).refusal:
        raise ConfigError(refusal)
    if config.engine.controlnets:
        base = read_base_layout(folder)
        for name, net in config.engine.controlnets.items():
            if refusal := check_controlnet(name, Path(net), base):
                raise ConfigError(f"engine.controlnets: {refusal}")
