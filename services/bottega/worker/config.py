"""The configuration of a worker and of its engine. It imports no torch, so that the front process can use it."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

from bottega import kinds
from bottega.addons.cache.config import CachedStartsConfig
from bottega.addons.controlnets.config import ControlNetsConfig
from bottega.addons.edits.config import EditsConfig
from bottega.addons.loras.config import LorasConfig
from bottega.config import DeviceName
from bottega.errors import ConfigError
from bottega.model_files.control_layout import read_base_layout
from bottega.model_files.controlnet_folder import check_controlnet
from bottega.model_files.folder_check import check_model_folder, folder_of
from bottega.model_files.report import ModelReport
from bottega.model_files.single_file import is_single_file
from bottega.model_files.single_file_check import refusal_of, vae_refusal
from bottega.rpc.channel import MAX_ATTEMPT_MIB
from bottega.rpc.security.caller import Identity
from bottega.rpc.server_config import AtLeastOne, MemberConfig, NotNegative, Seconds, ServerConfig
from bottega.rules import MAX_MODEL_CHARACTERS
from bottega.strict import STRICT


@dataclass(frozen=True, slots=True, kw_only=True)
class VaeConfig:
    """Settings of the VAE, which decodes latents to images."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    folder: str = ""
    """Folder of a VAE that replaces the model's own, in Diffusers' layout. Set it alike on all workers of a model.

    A single .safetensors file is converted, as engine.model is. A model in a single file without a VAE needs one.
    """
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    """Data type in which latents are decoded.

    auto: the choice of stock Diffusers, which is engine.dtype, but float32 for a float16 model whose VAE has
    force_upcast. With any other value the provenance of images says that they are not exact. Half precision is faster
    and is used only if a trial at the start shows that images are nearly the same.
    """
    tile_pixels: NotNegative = 0
    """Largest image, in pixels, that is decoded in one piece.

    Larger images are decoded in tiles. That needs less memory and blends the edges of tiles, and the provenance says
    that such images are not exact. 0: an image is decoded in tiles only if there is too little memory for one piece.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class TextEncoderConfig:
    """Settings of one text encoder."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    """Data type in which it computes; auto: engine.dtype.

    With any other value the provenance of images says that they are not exact. All workers of a model need the same.
    """
    keep_on: Literal["device", "host"] = "device"
    """Where its weights are.

    host: in the host's memory, and each block of layers on the device only while it computes. That leaves memory of the
    device to images, and copies the weights for every prompt that is not in the cache. On a CPU both are the same.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class TextConfig:
    """Settings of the text encoders and of the cache of prompts' embeddings."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    text_encoder: TextEncoderConfig = field(default_factory=TextEncoderConfig)
    text_encoder_2: TextEncoderConfig = field(default_factory=TextEncoderConfig)
    text_encoder_3: TextEncoderConfig = field(default_factory=TextEncoderConfig)
    cache_mib: NotNegative = 64
    """MiB of the device's memory for embeddings of prompts. A tenant's equal prompts are encoded once. 0: no cache."""

    @property
    def encoders(self) -> Mapping[str, TextEncoderConfig]:
        """Settings that differ from the defaults, by the text encoder's part."""
        all_parts = {part: getattr(self, part) for part in ("text_encoder", "text_encoder_2", "text_encoder_3")}
        return {part: settings for part, settings in all_parts.items() if settings != TextEncoderConfig()}


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerConfig:
    """Settings of a pair of workers, which compute batch rows for each other."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    address: Annotated[str, Field(pattern=r"^(.+:\d+)?$")] = ""
    """Address of the other worker of the pair, host:port. That worker names this one. Empty: no pair.

    Each worker computes rows of the other's requests while it has none of its own. This cannot be combined with
    fixed_rows, where a batch of fewer rows takes no less time.
    """
    name: Annotated[str, Field(max_length=128)] = ""
    """Name of the other worker of the pair.

    If set, no other worker is accepted, and with TLS its certificate must have this name. Empty: any name.
    """
    silence_s: Seconds = 5.0
    """Seconds without a message after which the other worker of the pair counts as dead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLinksConfig:
    """Addresses for the connection of a pair, and direct transfers between GPUs."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    listen: Annotated[str, Field(pattern=r"^(.+:\d+)?$")] = "127.0.0.1:0"
    """Address where a pair's worker on another host connects, host:port. Port 0 takes any free port. Empty: none."""
    socket: str | None = ""
    """Path of the unix socket for the other worker on this host, in a folder that no other user can write to.

    Empty: a socket in the folder that systemd creates for the unit, else in a private folder of this user. null: no
    socket. This user may connect, and the group that the environment variable BOTTEGA_LINKS_GROUP names.
    """
    seal: bool = True
    """Whether to encrypt data to and from a worker on another host.

    Set false only in a trusted network. Direct transfers between GPUs of two hosts need false.
    """
    devices: Literal["auto", "off", "gloo"] = "auto"
    """How tensors move between GPUs of different processes.

    auto: directly if both GPUs can, by shared device memory within a host, else by NCCL. off: through host memory.
    gloo, on both sides: by Gloo, which neither encrypts nor authenticates; for tests.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of a worker's engine process."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    renamed_keys: ClassVar[Mapping[str, str]] = {
        "vae_dtype": "vae.dtype",
        "vae_tile_pixels": "vae.tile_pixels",
        "peer_name": "peer.name",
        "peer_silence_s": "peer.silence_s",
        "links_listen": "links.listen",
        "links_socket": "links.socket",
        "links_seal": "links.seal",
        "device_links": "links.devices",
        **ControlNetsConfig.former_engine_keys,
        **LorasConfig.former_engine_keys,
        **CachedStartsConfig.former_engine_keys,
        **EditsConfig.former_engine_keys,
    }

    model: str = "miniature"
    """Folder of the model in Diffusers' layout, or "miniature" for the small model that comes with Bottega.

    A single .safetensors file is converted to a folder in the worker's state folder at the first start.
    """
    prediction_type: Literal["", "epsilon", "v_prediction", "sample"] = ""
    """What the UNet of a single file predicts; epsilon for the base models of Stable Diffusion 2.

    Empty: what the file says, else what most models of its family predict.
    """
    model_name: Annotated[str, Field(max_length=MAX_MODEL_CHARACTERS)] = ""
    """Name of the model in requests.

    Empty: the name of the repository if the folder is a snapshot in a Hugging Face cache, else the name of the folder.
    """
    model_variant: Annotated[str, Field(pattern=r"^\w{0,32}$")] = ""
    """Variant of the model's weights, such as fp16 or bf16, in files such as model.fp16.safetensors.

    Empty: the plain weights if every part has them, else fp16 or bf16. Parts without the variant are loaded from plain
    weights. All workers of a model need the same.
    """
    roles: Annotated[tuple[Literal["encode", "denoise", "decode"], ...], Field(min_length=1)] = (
        "encode",
        "denoise",
        "decode",
    )
    """Stages of a picture that this worker computes: encode (text encoders), denoise, decode (the VAE's decoder).

    A worker without encode or decode loads no weights for it, and asks workers of the same model that have only this
    role: [encode] or [decode], each scaled by itself. Images to start from are encoded by denoise.
    """
    device: DeviceName = "auto"
    """Device of the engine: auto, cpu, cuda or cuda:N."""
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    """Data type of the computation.

    auto: on a GPU the data type of the files. On a CPU float32 if the files are float32, else the faster one of
    bfloat16 and float32, as measured at the start. All workers of a model need the same data type: set it if their
    devices differ.
    """
    device_memory_mib: NotNegative = 0
    """Upper bound in MiB on the GPU memory of the worker. 0: the memory that is free at its start, less a reserve."""
    device_memory_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Largest share of the GPU's memory for the worker, if device_memory_mib is 0: one half for one of two workers."""
    compile_s: Seconds = 300.0
    """Seconds that the first forward pass of a batch shape may take on a GPU before the engine counts as hung."""
    threads: NotNegative = 0
    """Number of torch's CPU threads. 0: torch decides."""
    exclusive_cores: bool = False
    """Whether the engine's CPU cores run nothing else.

    If so, its threads wait for each other actively. That is a quarter faster on a CPU, but slower if the cores are
    shared.
    """
    accelerations: Literal["auto", "off"] | tuple[str, ...] = "auto"
    """Faster ways of computing (accelerations) that the engine tries at its start.

    It uses those that are faster on this machine and draw the same image. auto: all on a GPU, none on a CPU. off: none.
    Otherwise a list of names. On a CPU [channels_last.unet, channels_last.vae] are worth a try; they change the last
    bits of images.
    """
    self_check_s: Seconds = 120.0
    """Seconds after which the engine stops trying accelerations and decides by its measurements so far."""
    max_rows: AtLeastOne = 16
    """Upper bound on the batch rows of one forward pass. A guided image has two."""
    fixed_rows: NotNegative = 0
    """Number of batch rows of every forward pass; smaller batches are padded.

    Images are then equal byte for byte whatever runs beside them. On a CPU use a multiple of twice the threads. 0: off.
    """
    max_wait_turns: AtLeastOne = 8
    """Number of its tenant's forward passes in which a request may be passed over.

    A request that would make others wait longer starts later.
    """
    max_pixels: NotNegative = 0
    """Upper bound on the pixels of one image. 0: four times the model's own size, but at least 512 x 512."""
    checkpoint_interval_s: Seconds = 2.0
    """Seconds between two checkpoints of a running image, from which another worker can continue it."""
    progress_interval_s: Seconds = 0.2
    """Shortest time in seconds between two progress reports of an image."""
    vae: VaeConfig = field(default_factory=VaeConfig)
    text: TextConfig = field(default_factory=TextConfig)
    loras: LorasConfig = field(default_factory=LorasConfig)
    controlnets: ControlNetsConfig = field(default_factory=ControlNetsConfig)
    cache: CachedStartsConfig = field(default_factory=CachedStartsConfig)
    edits: EditsConfig = field(default_factory=EditsConfig)
    peer: PeerConfig = field(default_factory=PeerConfig)
    links: PeerLinksConfig = field(default_factory=PeerLinksConfig)

    def __post_init__(self) -> None:
        if self.peer.address and self.fixed_rows:
            raise ValueError(
                f"fixed_rows is {self.fixed_rows} and peer.address is {self.peer.address}: with fixed_rows a batch of "
                "fewer rows takes no less time, so a pair gains nothing; set one of them only"
            )

        self._check_roles()

    @property
    def kind(self) -> str:
        """The kind of service that the worker is in the fleet: worker, or the only stage that it computes."""
        return kinds.WORKER if "denoise" in self.roles else self.roles[0]

    @property
    def asks(self) -> tuple[str, ...]:
        """Stages of its pictures that other workers compute."""
        return tuple(stage for stage in kinds.STAGES if stage not in self.roles) if "denoise" in self.roles else ()

    def _check_roles(self) -> None:
        if len(set(self.roles)) < len(self.roles):
            raise ValueError("roles must be without duplicates")
        if "denoise" not in self.roles and len(self.roles) > 1:
            raise ValueError("roles: a worker without denoise must have exactly one role: [encode] or [decode]")
        if "denoise" not in self.roles and isinstance(self.accelerations, tuple):
            raise ValueError(
                f"accelerations: a worker with the role {self.roles[0]} tries none; remove the key, or set it to off"
            )
        if self.peer.address and len(self.roles) < 3:
            raise ValueError("roles and peer.address: the workers of a pair need all roles; set one of them only")

    @property
    def group_rows(self) -> int:
        """The largest number of rows that a batch can have."""
        return self.fixed_rows or self.max_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerServerConfig(ServerConfig):
    """The listener for gateways, which add the kept latents of an edit's image to the caller's request."""

    max_message_mib: Annotated[int, Field(ge=1, le=1024)] = MAX_ATTEMPT_MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig(MemberConfig):
    """The configuration of a worker."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    renamed_keys: ClassVar[Mapping[str, str]] = {"start_s": "start_stall_s"}

    name: Annotated[str, Field(max_length=128)] = ""
    """Name of this worker, unique in the fleet. Empty: "worker-", the host name and the process ID."""
    server: WorkerServerConfig = field(default_factory=WorkerServerConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    codec_processes: AtLeastOne = 2
    """Number of processes that encode images and decode input images."""
    codec_deadline_s: Seconds = 20.0
    """Seconds after which the decoding or encoding of one image is given up."""
    codec_idle_s: Seconds | None = None
    """Seconds without an image after which the codec processes end until the next image.

    null: they never end; together they take 64 MiB of memory.
    """
    start_stall_s: Seconds = 120.0
    """Seconds without progress after which a starting engine counts as hung and is replaced.

    Loading, hashing and warming up report progress continuously, and systemd waits for them.
    """
    hang_s: Seconds = 30.0
    """Seconds without a message after which a running engine is replaced."""
    stall_s: Seconds = 120.0
    """Seconds without a completed step, while the engine has work, after which it is replaced.

    It must be longer than the longest step, and than encoding and decoding the largest image.
    """
    result_grace_s: Seconds = 120.0
    """Seconds for which finished results are kept for a gateway that lost its connection."""
    result_bytes: AtLeastOne = 256 * 2**20
    """Upper bound on the total bytes of finished results that are kept."""
    max_attempts: AtLeastOne = 64
    """Upper bound on the number of jobs that the worker runs at the same time."""

    def name_in_fleet(self, identity: Identity | None) -> str:
        """Return the name from the configuration, the certificate, or the host name and process ID."""
        # Containers have the same process ids, each in a host of its own.
        certified = identity.name if identity else ""
        return self.name or certified or f"{self.engine.kind}-{socket.gethostname()}-{os.getpid()}"


def report_on_model(config: EngineConfig) -> ModelReport:
    """Return the report on a worker's model, with the VAE that its configuration names, unless that is a file."""
    vae = Path(config.vae.folder) if config.vae.folder and single_vae(config) is None else None
    return check_model_folder(folder_of(config.model), config.model_variant, vae=vae)


def check_text_encoders(config: EngineConfig, report: ModelReport) -> None:
    """Raise ConfigError if a text encoder has settings and the model does not have it."""
    if unknown := [part for part in config.text.encoders if part not in report.parts]:
        known = ", ".join(part for part in report.parts if part.startswith("text_encoder"))
        raise ConfigError(f"engine.text.{unknown[0]} is set, but the model has only {known}; remove the setting")


def single_vae(config: EngineConfig) -> Path | None:
    """Return the single file of the VAE that a worker's configuration names; None if it names none or a folder."""
    return Path(config.vae.folder) if is_single_file(config.vae.folder) else None


def check_model(config: WorkerConfig) -> None:
    """Raise ConfigError if the model, or a ControlNet that the worker runs itself, cannot be served.

    It takes some milliseconds and does not import torch.
    """
    vae = single_vae(config.engine)
    if is_single_file(config.engine.model):
        if refusal := refusal_of(Path(config.engine.model), config.engine.prediction_type, vae):
            raise ConfigError(refusal)
        return  # the rest is checked when it has been converted
    folder, report = folder_of(config.engine.model), report_on_model(config.engine)
    if refusal := report.refusal or (vae_refusal(vae, report.family) if vae is not None else ""):
        raise ConfigError(refusal)
    check_text_encoders(config.engine, report)
    if config.engine.controlnets.folders:
        base = read_base_layout(folder)
        for name, net in config.engine.controlnets.folders.items():
            if refusal := check_controlnet(name, Path(net), base):
                raise ConfigError(f"engine.controlnets: {refusal}")
