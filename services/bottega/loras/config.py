"""The configuration of a LoRA store, and the checks of it before the store starts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from pydantic import ConfigDict

from bottega import rules
from bottega.errors import ConfigError
from bottega.miniature import WEIGHTS
from bottega.rpc.server_config import LimitedLinksConfig
from bottega.rpc.service_config import AtLeastOne, NotNegative, Seconds, StoreConfig
from bottega.strict import STRICT

_MINIATURE = "miniature"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportConfig:
    """Bounds on the import of untrusted files."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    root: str = ""
    """Folder that must contain all files and folders that callers register by path.

    Empty: callers cannot register paths.
    """
    max_bytes: AtLeastOne = 4 << 30
    """Bound on the bytes of one file, or of a folder's files."""
    upload_s: Seconds = 600.0
    """Seconds in which all bytes of an upload must arrive."""
    idle_s: Seconds = 30.0
    """Seconds in which the next 256 KiB of an upload must arrive."""
    uploads: AtLeastOne = 16
    """Bound on unfinished uploads. One host may have half of them."""
    upload_bytes: AtLeastOne = 16 << 30
    """Bound on the bytes that unfinished uploads announced. One host may have half of them."""
    at_once: AtLeastOne = 2
    """Bound on imports that run at once."""
    deadline_s: Seconds = 300.0
    """Deadline of one import in seconds."""
    cpu_s: AtLeastOne = 120
    """Bound on the processor seconds of one import. Its memory is bounded by the size of its file."""

    def __post_init__(self) -> None:
        if self.upload_bytes < self.max_bytes:
            raise ValueError(f"upload_bytes is {self.upload_bytes}; at least max_bytes, which is {self.max_bytes}")


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnLora:
    """A LoRA that the store registers by itself."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    path: str
    """File or folder of the LoRA. miniature/NAME is a LoRA of the embedded model."""
    base: str = "miniature"
    """Name of the model that the LoRA is for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig(StoreConfig):
    """Settings of a LoRA store."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    links: LimitedLinksConfig = field(default_factory=LimitedLinksConfig)
    imports: ImportConfig = field(default_factory=ImportConfig)
    bases: dict[str, str] = field(default_factory=lambda: {"miniature": "miniature"})
    """Folder, in Diffusers' layout, of each base model, by the name of the model. "miniature" is the embedded model."""
    loras: dict[str, OwnLora] = field(default_factory=dict)
    """LoRAs that the store registers at every start, by name.

    A removed one is back after the next start. A name that is registered already keeps its LoRA.
    """
    left_out: dict[str, str] = field(default_factory=dict)
    """LoRAs that are not registered, and why, by name.

    The fleet lists them. `bottega up` writes here which files beside the LoRAs of a model's folder it cannot use.
    """
    budget_bytes: AtLeastOne = 4 << 30
    """Bound on the bytes of LoRAs in memory; the least recently used one is evicted first.

    The store also keeps at most half as many LoRAs in memory as the process may have open files.
    """
    disk_bytes: AtLeastOne = 256 << 30
    """Bound on the bytes of LoRAs on disk, with quarantined files and the announced bytes of unfinished uploads."""
    min_free_bytes: NotNegative = 1 << 30
    """Bytes of disk space that uploads and imports leave free for other programs.

    A value above 5 % of the disk counts as 5 %.
    """
    loads_at_once: AtLeastOne = 4
    """Bound on LoRAs that are loaded from disk at once."""
    lease_s: Seconds = 10.0
    """Seconds for which a LoRA that a job needs is not deleted. Gateways report every 3 s which LoRAs they need."""


def check_configured(config: LoraConfig) -> dict[str, Path]:
    """Return the folders of base models, by name.

    Raises ConfigError for a folder that is not a model, and for a LoRA with an invalid name or an unknown base model.
    """
    for name, own in config.loras.items():
        if not rules.is_adapter_name(name):
            raise ConfigError(f"loras.{name}: the name of a LoRA must be {rules.ADAPTER_NAMES}")
        if own.base not in config.bases:
            raise ConfigError(f"loras.{name}.base: {own.base} is none of the bases: {', '.join(sorted(config.bases))}")
    folders = {
        name: WEIGHTS if folder == _MINIATURE else Path(folder).absolute() for name, folder in config.bases.items()
    }
    for name, folder in folders.items():
        try:
            (folder / "unet" / "config.json").read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise ConfigError(f"bases.{name}: {folder} is not a model in Diffusers' layout") from None
        except OSError as error:
            raise ConfigError(f"bases.{name}: {folder} cannot be read: {error.strerror}") from None
    return folders
