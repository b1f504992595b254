"""The configuration of a LoRA store, and its checks before the store starts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from pydantic import ConfigDict

from bottega import rules
from bottega.errors import ConfigError
from bottega.miniature import MODELS
from bottega.model_files.family_names import TRANSFORMER, UNET
from bottega.rpc.server_config import AtLeastOne, LimitedLinksConfig, NotNegative, Seconds, StoreConfig
from bottega.storage.objects import ObjectsAddress
from bottega.strict import STRICT


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportConfig:
    """Limits on the import of untrusted files."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    root: str = ""
    """Folder that must contain all files and folders that callers register by path.

    Empty: callers can only upload files.
    """
    max_bytes: AtLeastOne = 4 << 30
    """Upper bound on the bytes of one file, or of all files of a folder."""
    upload_s: Seconds = 600.0
    """Seconds in which all bytes of an upload must arrive."""
    idle_s: Seconds = 30.0
    """Seconds in which each further 256 KiB of an upload must arrive."""
    uploads: AtLeastOne = 16
    """Upper bound on the number of unfinished uploads. One host may have half of them."""
    upload_bytes: AtLeastOne = 16 << 30
    """Upper bound on the total announced bytes of unfinished uploads. One host may have half of them."""
    at_once: AtLeastOne = 2
    """Upper bound on the number of simultaneous imports."""
    deadline_s: Seconds = 300.0
    """Upper bound on the seconds of one import."""
    cpu_s: AtLeastOne = 120
    """Upper bound on the processor seconds of one import. The size of its file limits its memory."""

    def __post_init__(self) -> None:
        if self.upload_bytes < self.max_bytes:
            raise ValueError(f"upload_bytes is {self.upload_bytes}; it must be at least max_bytes, {self.max_bytes}")


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnLora:
    """A LoRA in the store's configuration."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    path: str
    """File or folder of the LoRA. miniature/NAME is a LoRA of the small model that comes with Bottega."""
    base: str = "miniature"
    """Name of the model for which the LoRA was made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig(StoreConfig):
    """The configuration of a LoRA store."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    links: LimitedLinksConfig = field(default_factory=LimitedLinksConfig)
    imports: ImportConfig = field(default_factory=ImportConfig)
    bases: dict[str, str] = field(default_factory=lambda: {"miniature": "miniature"})
    """Folder, in Diffusers' layout, of each base model, by its name. "miniature" comes with Bottega."""
    loras: dict[str, OwnLora] = field(default_factory=dict)
    """LoRAs that the store adds at every start, by name.

    One that was removed is added again at the next start. An existing LoRA of the same name stays.
    """
    left_out: dict[str, str] = field(default_factory=dict)
    """LoRAs that are not added, by name, with the reasons.

    The fleet lists them. `bottega up` writes here which files beside the LoRAs of a model's folder it cannot use.
    """
    budget_bytes: AtLeastOne = 4 << 30
    """Upper bound on the bytes of LoRAs in memory; the least recently used one is evicted first.

    The number of LoRAs in memory is also at most half of the files that the process may open.
    """
    disk_bytes: AtLeastOne = 256 << 30
    """Upper bound on the bytes of LoRAs on disk, with quarantined files and the announced bytes of uploads.

    With `objects`, the least recently used copies are deleted to make room.
    """
    objects: ObjectsAddress = ""
    """Where LoRAs are stored: s3://bucket/prefix, with copies of those last used on disk. Empty: on disk only.

    Without `database`, the prefix belongs to this store alone. Files that it has on disk are moved there at the start.
    Endpoint, region, credentials and encryption come from the environment, as for the gateway's `objects`. It needs the
    package obstore.
    """
    objects_bytes: AtLeastOne = 1 << 40
    """Upper bound on the bytes of LoRAs in `objects`."""
    database: str = ""
    """URL of a PostgreSQL database (15 or newer) with the catalogue of LoRAs, shared by all stores with this URL.

    Such as postgresql://bottega@db.example/bottega, with the password in PGPASSWORD or PGPASSFILE. They need the same
    `objects`. Empty: the catalogue is in the store's folder.
    """
    min_free_bytes: NotNegative = 1 << 30
    """Bytes of disk space that uploads and imports leave free for other programs.

    At most 5 % of the disk counts.
    """
    loads_at_once: AtLeastOne = 4
    """Upper bound on the number of simultaneous loads from disk."""
    lease_s: Seconds = 10.0
    """Seconds for which a LoRA that a job needs is not deleted. Gateways report every 3 s which LoRAs they need."""


def check_configured(config: LoraConfig) -> dict[str, Path]:
    """Return the folders of base models, by name.

    Raises ConfigError for a folder that is not a model, and for a LoRA with an invalid name or an unknown base model.
    """
    if config.database and not config.objects:
        raise ConfigError("database: stores with the same catalogue need the same files; set objects: s3://...")
    for name, own in config.loras.items():
        if not rules.is_adapter_name(name):
            raise ConfigError(f"loras.{name}: the name of a LoRA must be {rules.ADAPTER_NAMES}")
        if own.base not in config.bases:
            raise ConfigError(f"loras.{name}.base: {own.base} is not in bases: {', '.join(sorted(config.bases))}")
    folders = {name: MODELS.get(folder) or Path(folder).absolute() for name, folder in config.bases.items()}
    for name, folder in folders.items():
        try:
            denoiser = TRANSFORMER if (folder / TRANSFORMER).is_dir() else UNET
            (folder / denoiser / "config.json").read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise ConfigError(f"bases.{name}: {folder} is not a model in Diffusers' layout") from None
        except OSError as error:
            raise ConfigError(f"bases.{name}: {folder} cannot be read: {error.strerror}") from None
    return folders
