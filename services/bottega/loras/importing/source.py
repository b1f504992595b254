"""Finds the files of an import and reads their configurations, but not their tensors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bottega.addons.loras.wire.weights_files import PEFT_CONFIG, LoraFile, find_weights
from bottega.errors import BadLora
from bottega.loras.importing.peft_config import AdapterConfig, read_adapter_config
from bottega.storage.contained_paths import open_below

# PEFT writes the names of all modules into it, which takes some ten thousand bytes.
MAX_CONFIG_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSourceFile:
    """A safetensors file to import."""

    path: Path
    root: Path | None = None
    """A resolved folder. No file outside of it is opened, also not through links. None: no restriction."""
    config: AdapterConfig | None = None
    """PEFT's configuration, from adapter_config.json."""
    component: str | None = None
    """The only component that the file is for, if that is known."""


def sources(
    path: Path, adapter_config: bytes = b"", component: str | None = None, *, root: Path | None = None
) -> list[LoraSourceFile]:
    """Return the files at a path.

    Args:
        path: A file, or a folder.
        adapter_config: PEFT's configuration of a file, if it is not beside the file.
        component: The only component that a file is for, if that is known.
        root: A resolved folder. No file outside of it is opened, also not through links. None: no restriction.

    Raises:
        BadLora: There is no LoRA at the path, or its configuration is not supported.
        OSError: A configuration cannot be read.
    """
    if adapter_config or component:
        config = read_adapter_config(adapter_config) if adapter_config else None
        return [LoraSourceFile(path=path, root=root, config=config, component=component)]
    return [
        LoraSourceFile(path=file.path, root=root, config=_config(file, root), component=file.component)
        for file in find_weights(path)
    ]


def _config(file: LoraFile, root: Path | None) -> AdapterConfig | None:
    if file.config is None:
        return None
    with open_below(file.config, root) as opened:
        text = opened.read(MAX_CONFIG_BYTES + 1)
    if len(text) > MAX_CONFIG_BYTES:
        raise BadLora(f"{PEFT_CONFIG} is over {MAX_CONFIG_BYTES} bytes")
    return read_adapter_config(text)
