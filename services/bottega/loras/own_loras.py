"""Checks the LoRAs that a store's configuration names, and imports those that the store does not have."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping
from pathlib import Path

from bottega import rules
from bottega.errors import BottegaError, ConfigError, LoraNotFound
from bottega.loras.catalogue import LoraCatalogue
from bottega.loras.config import LoraConfig, OwnLora
from bottega.loras.importer import ImportRequest, LoraImporter
from bottega.miniature import WEIGHTS

_log = logging.getLogger(__name__)

MINIATURE = "miniature"
# Paths that a configuration may use for the embedded model's LoRAs, wherever the model is installed.
_EMBEDDED = {f"{MINIATURE}/{name}": WEIGHTS / "loras" / name for name in ("striped", "checked", "dusk")}


def base_folders(config: LoraConfig) -> dict[str, Path]:
    """Return the folders of base models, by name. Raises ConfigError for a folder that is not a model."""
    folders = {
        name: WEIGHTS if folder == MINIATURE else Path(folder).absolute() for name, folder in config.bases.items()
    }
    for name, folder in folders.items():
        try:
            (folder / "unet" / "config.json").read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise ConfigError(f"bases.{name}: {folder} is not a model in Diffusers' layout") from None
        except OSError as error:
            raise ConfigError(f"bases.{name}: {folder} cannot be read: {error.strerror}") from None
    return folders


def check_configured(config: LoraConfig) -> None:
    """Raise ConfigError if a base model cannot be found, or a configured LoRA is wrong."""
    base_folders(config)
    check_own_loras(config)


def check_own_loras(config: LoraConfig) -> None:
    """Raise ConfigError for a LoRA whose name is invalid or whose base model is not configured."""
    for name, own in config.loras.items():
        if not rules.is_adapter_name(name):
            raise ConfigError(f"loras.{name}: the name of a LoRA must be {rules.ADAPTER_NAMES}")
        if own.base not in config.bases:
            raise ConfigError(f"loras.{name}.base: {own.base} is none of the bases: {', '.join(sorted(config.bases))}")


async def import_own_loras(
    loras: Mapping[str, OwnLora],
    *,
    importer: LoraImporter,
    catalogue: LoraCatalogue,
    at_once: int,
    lost: Collection[str],
) -> dict[str, str]:
    """Import the configured LoRAs that the store lacks; return by name why others could not be imported.

    Args:
        loras: The configured LoRAs, by name.
        importer: Imports them.
        catalogue: The store's catalogue.
        at_once: Maximum number of imports at a time. More would wait for import processes.
        lost: Digests whose files are missing.
    """
    room = asyncio.Semaphore(at_once)
    left_out: dict[str, str] = {}

    async def import_missing(name: str, own: OwnLora) -> None:
        async with room:
            if await _is_there(catalogue, name, lost):
                return
            request = ImportRequest(name=name, base=own.base, trigger_words=())
            try:
                await importer.import_own(request, _EMBEDDED.get(own.path, Path(own.path)))
            except BottegaError as error:
                facts = {"lora": name, "path": own.path, "error": error.message}
                _log.error("a LoRA of the configuration could not be imported", extra=facts)
                left_out[name] = error.message

    await asyncio.gather(*(import_missing(name, own) for name, own in loras.items()))
    return left_out


async def _is_there(catalogue: LoraCatalogue, name: str, lost: Collection[str]) -> bool:
    try:
        return (await catalogue.get(name)).digest not in lost
    except LoraNotFound:
        return False
