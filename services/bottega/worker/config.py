"""A worker's configuration and its engine's. It imports no torch, so that the front can read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

from bottega.addons.cache.config import CachedStartsConfig
from bottega.addons.controlnets.config import ControlNetsConfig
from bottega.addons.edits.config import EditsConfig
from bottega.addons.loras.config import LorasConfig
from bottega.device_names import DeviceName
from bottega.errors import ConfigError
from bottega.model_files import check_model_folder, folder_of
from bottega.model_files.controlnet_folder import check_controlnet
from bottega.model_files.controlnet_layout import read_base_layout
from bottega.rpc.address import OptionalAddress
from bottega.rpc.server_config import ServerConfig
from bottega.rules import MAX_MODEL_CHARACTERS
from bottega.strict import STRICT

AtLeastOne = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class VaeConfig:
    """Settings of decoding."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    """Data type in which latents are decoded.

    auto: the choice of stock Diffusers, which is dtype, but float32 for a float16 model whose VAE has force_upcast.
    With any other the provenance of pictures says that they are not exact. Half precision is faster and is used only if
    a trial at the start shows that pictures are nearly the same.
    """
    tile_pixels: NotNegative = 0
    """Largest picture, in pixels, that is decoded in one piece.

    Larger ones are decoded in tiles: that needs less memory and blends the edges of tiles, and the provenance says that
    such pictures are not exact. 0: only pictures for which memory is short are decoded in tiles.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerConfig:
    """Settings of a pair of workers."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    address: Annotated[str, Field(pattern=r"^(.+:\d+)?$")] = ""
    """Address of the other worker of a pair, host:port; that worker names this one.

    Each computes rows of the other's requests while it has none of its own. Not together with fixed_rows, which gains
    nothing from fewer rows.
    """
    name: Annotated[str, Field(max_length=128)] = ""
    """Name of the other worker of the pair.

    With it no other worker is accepted, and with TLS its certificate must carry the name.
    """
    silence_s: Seconds = 5.0
    """Seconds of silence after which the peer counts as dead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLinksConfig:
    """Addresses for the link of a pair, and links between GPUs."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    listen: Annotated[str, Field(pattern=r"^(.+:\d+)?$")] = "127.0.0.1:0"
    """Address for the link of a peer on another host, host:port. Port 0 takes any free port. Empty: no such link."""
    socket: str | None = ""
    """Path of the unix socket for a peer on this host, in a folder that no other user can write to.

    Empty: one in the folder that systemd makes for the unit, else in a private folder of this user. null: no socket.
    This user may connect, and the group that BOTTEGA_LINKS_GROUP in the environment names.
    """
    seal: bool = True
    """Encrypt data to and from a peer on another host.

    Set false only in a trusted network; links between devices of two hosts need false.
    """
    devices: Literal["auto", "off", "gloo"] = "auto"
    """auto: link GPUs with those of other processes if both can, by shared device memory within a host, else by NCCL.

    off: move all tensors through host memory. gloo, at both ends: use Gloo's connections, which are neither encrypted
    nor authenticated; for tests.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of a worker's engine process."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    renamed_keys: ClassVar[Mapping[str, str]] = {
        "vae_dtype": "vae.dtype",
        "vae_tile_pixels": "vae.tile_pixels",
        "controlnet_budget_bytes": "controlnets.budget_bytes",
        "controlnet_silence_s": "controlnets.silence_s",
        "lora_budget_bytes": "loras.budget_bytes",
        "lora_timeout_s": "loras.timeout_s",
        "lora_silence_s": "loras.silence_s",
        "lora_pristine": "loras.pristine",
        "lora_merge_half_precision": "loras.merge_half_precision",
        "cache_timeout_s": "cache.timeout_s",
        "cache_silence_s": "cache.silence_s",
        "cache_recording_bytes": "cache.recording_bytes",
        "activations_mib": "edits.activations_mib",
        "activations_template_mib": "edits.template_mib",
        "activations_upload_mib": "edits.upload_mib",
        "activations_silence_s": "edits.silence_s",
        "mask_margin": "edits.mask_margin",
        "sparse_convolutions": "edits.sparse_convolutions",
        "peer_name": "peer.name",
        "peer_silence_s": "peer.silence_s",
        "links_listen": "links.listen",
        "links_socket": "links.socket",
        "links_seal": "links.seal",
        "device_links": "links.devices",
    }

    model: str = "miniature"
    """Folder of the model in Diffusers' layout, or "miniature" for the embedded model."""
    model_name: Annotated[str, Field(max_length=MAX_MODEL_CHARACTERS)] = ""
    """Name of the model in requests.

    Empty: the name of the repository if the folder is a snapshot in a hub's cache, else the name of the folder.
    """
    device: DeviceName = "auto"
    """auto, cpu, cuda or cuda:N."""
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    """Data type of the computation.

    auto: the data type of the files on a GPU. On a CPU float32 if the files are float32, else the faster one of
    bfloat16 and float32, as measured at the start. All workers of a model need the same: name it if their devices
    differ.
    """
    device_memory_mib: NotNegative = 0
    """Bound in MiB on what the worker keeps and computes on a GPU. 0: what is free at its start, less a reserve."""
    compile_s: Seconds = 300.0
    """Seconds that the first forward pass of a kind may take on a GPU before a silent engine counts as hung."""
    threads: NotNegative = 0
    """Threads of torch. 0: torch decides."""
    exclusive_cores: bool = False
    """The engine's cores run nothing else.

    Its threads then wait for each other actively, which is a quarter faster on a CPU, and slower if the cores are
    shared after all.
    """
    accelerations: Literal["auto", "off"] | tuple[str, ...] = "auto"
    """Faster ways of computing that the engine tries at its start.

    It keeps those that are faster on this machine and draw the same picture. auto: all on a GPU, none on a CPU. off:
    none. Else a list of names. On a CPU [channels_last.unet, channels_last.vae] are worth a try; the last bits of
    pictures differ where they are kept.
    """
    self_check_s: Seconds = 120.0
    """Seconds after which the engine stops trying accelerations and decides by what it measured."""
    max_rows: AtLeastOne = 16
    """Bound on the rows of one forward pass. A guided request has two."""
    fixed_rows: NotNegative = 0
    """Number of rows of every forward pass; smaller groups are padded.

    Images are then equal byte for byte whatever runs beside them. On a CPU use a multiple of twice the threads. 0: off.
    """
    max_wait_turns: AtLeastOne = 8
    """Turns of its tenant in which a request may be passed over.

    A request that would make others wait longer starts later.
    """
    max_pixels: NotNegative = 0
    """Bound on the pixels of one image. 0: four times the model's own size, at least 512 x 512."""
    checkpoint_interval_s: Seconds = 2.0
    """Seconds between two checkpoints of a picture's latents.

    The gateway keeps them so that another worker can go on.
    """
    progress_interval_s: Seconds = 0.2
    """Least seconds between two progress reports of a picture."""
    vae: VaeConfig = field(default_factory=VaeConfig)
    loras: LorasConfig = field(default_factory=LorasConfig)
    controlnets: ControlNetsConfig = field(default_factory=ControlNetsConfig)
    cache: CachedStartsConfig = field(default_factory=CachedStartsConfig)
    edits: EditsConfig = field(default_factory=EditsConfig)
    peer: PeerConfig = field(default_factory=PeerConfig)
    links: PeerLinksConfig = field(default_factory=PeerLinksConfig)

    def __post_init__(self) -> None:
        if self.peer.address and self.fixed_rows:
            raise ValueError(
                f"fixed_rows is {self.fixed_rows} and peer.address is {self.peer.address}: with fixed_rows a group of "
                "fewer rows takes no less time, so a pair gains nothing; set one of them only"
            )

    @property
    def group_rows(self) -> int:
        """Most rows that a group has."""
        return self.fixed_rows or self.max_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Settings of a worker."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    renamed_keys: ClassVar[Mapping[str, str]] = {"start_s": "start_stall_s"}

    name: str = ""
    """Name of this worker, unique in the fleet. Empty: "worker-", the host's name and the process id."""
    gateway: OptionalAddress = "127.0.0.1:8472"
    """Address of the gateway's fleet listener (its fleet.listen), host:port. Empty: the service joins no fleet."""
    server: ServerConfig = field(default_factory=ServerConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    codec_processes: AtLeastOne = 2
    """Processes that encode pictures and decode input images."""
    codec_deadline_s: Seconds = 20.0
    """Deadline in seconds for one image in a codec process."""
    codec_idle_s: Seconds | None = None
    """Seconds without an image after which codec processes end until the next image.

    null keeps them, and 64 MiB of memory with them.
    """
    start_stall_s: Seconds = 120.0
    """Seconds without progress of the engine's start after which the engine counts as hung and is replaced.

    Loading, hashing and warming up report progress all the time, and systemd waits as long as they do.
    """
    hang_s: Seconds = 30.0
    """Seconds without a message of a ready engine after which it is replaced."""
    stall_s: Seconds = 120.0
    """Seconds without a step, while the engine has work, after which it is replaced.

    Must be longer than the longest step, encoding and decoding of the largest picture.
    """
    result_grace_s: Seconds = 120.0
    """Seconds for which finished results are kept for a gateway that lost its connection."""
    result_bytes: AtLeastOne = 256 * 2**20
    """Bound on the bytes of these results."""
    max_attempts: AtLeastOne = 64
    """Bound on jobs that the worker holds at once."""


def check_model(config: WorkerConfig) -> None:
    """Raise ConfigError with the reason where the model, or a ControlNet that the worker runs, cannot be served.

    It takes some milliseconds, and no torch.
    """
    folder = folder_of(config.engine.model)
    if refusal := check_model_folder(folder).refusal:
        raise ConfigError(refusal)
    if config.engine.controlnets.folders:
        base = read_base_layout(folder)
        for name, net in config.engine.controlnets.folders.items():
            if refusal := check_controlnet(name, Path(net), base):
                raise ConfigError(f"engine.controlnets: {refusal}")
