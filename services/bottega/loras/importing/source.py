"""What is imported: one file, or the files of a folder, each with what is known of it. Reads no tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bottega.errors import BadLora
from bottega.lora.canonical import COMPONENTS
from bottega.loras.importing.alphas import AdapterConfig, read_adapter_config
from bottega.storage.contained_paths import open_below

_PEFT_WEIGHTS = "adapter_model.safetensors"
_PEFT_CONFIG = "adapter_config.json"
_DIFFUSERS_WEIGHTS = "pytorch_lora_weights.safetensors"
# PEFT writes the names of all modules into it: some ten thousand bytes.
MAX_CONFIG_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSourceFile:
    """One safetensors file. component: all of it is for that one, where that is known. root: see `sources`."""

    path: Path
    root: Path | None = None
    config: AdapterConfig | None = None
    component: str | None = None


def sources(
    path: Path, adapter_config: bytes = b"", component: str | None = None, *, root: Path | None = None
) -> list[LoraSourceFile]:
    """The files at a path. Raises BadLora, OSError.

    adapter_config, component: where the path is a file, PEFT's configuration of it and what all of it is for.
    root: outside of which no file is opened, links followed; None: wherever they are.
    """
    if not path.is_dir():
        config = read_adapter_config(adapter_config) if adapter_config else None
        return [LoraSourceFile(path=path, root=root, config=config, component=component)]
    found = list(_in_folder(path, root))
    if not found:
        wanted = f"{_PEFT_WEIGHTS} with {_PEFT_CONFIG}, {_DIFFUSERS_WEIGHTS}, or one .safetensors file"
        raise BadLora(f"the folder is no LoRA: it should hold {wanted}; pickled weights are never opened")
    return found


def _in_folder(folder: Path, root: Path | None) -> Iterator[LoraSourceFile]:
    if (folder / _PEFT_WEIGHTS).is_file():
        yield _peft(folder, root, None)
        return
    files = sorted(folder.glob("*.safetensors"))
    named = [file for file in files if file.name == _DIFFUSERS_WEIGHTS]
    if named or len(files) == 1:
        yield LoraSourceFile(path=(named or files)[0], root=root)
        return
    parts = [component for component in COMPONENTS if (folder / component).is_dir()]
    yield from (_peft(folder / component, root, component) for component in parts)


def _peft(folder: Path, root: Path | None, component: str | None) -> LoraSourceFile:
    if not (folder / _PEFT_WEIGHTS).is_file():
        raise BadLora(f"{folder.name} holds no {_PEFT_WEIGHTS}; pickled weights are never opened")
    path = folder / _PEFT_CONFIG
    try:
        with open_below(path, root) as file:
            text = file.read(MAX_CONFIG_BYTES + 1)
    except FileNotFoundError:
        raise BadLora(f"{_PEFT_WEIGHTS} has no {_PEFT_CONFIG} beside it, which says its alpha") from None
    if len(text) > MAX_CONFIG_BYTES:
        raise BadLora(f"{_PEFT_CONFIG} is over {MAX_CONFIG_BYTES} bytes")
    return LoraSourceFile(path=folder / _PEFT_WEIGHTS, root=root, config=read_adapter_config(text), component=component)
