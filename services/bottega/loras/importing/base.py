"""The modules of a base model that LoRAs can change, with their shapes. Reads headers, not weights."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from bottega.errors import BadLora, ConfigError
from bottega.lora.canonical import BACKBONE, COMPONENTS, spellings
from bottega.loras.importing.sgm import sgm_names
from bottega.safetensors_header import read_header

_WEIGHT = ".weight"
# Embedding tables are looked up by row instead of multiplied, so a LoRA's product cannot be added.
_TABLES = ("token_embedding", "position_embedding")


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseModule:
    """A linear layer or a convolution."""

    component: str
    path: str
    shape: tuple[int, ...]
    """Shape of its weight, [out, in] or [out, in, height, width]."""

    @property
    def name(self) -> str:
        """Component and path, for messages."""
        return f"{self.component}.{self.path}"


class Base:
    """The modules of a base model, by the names that LoRA files use for them.

    Args:
        modules: The modules.
        sgm: Paths in the UNet by their names in Stability's code, with underscores in place of dots.
    """

    def __init__(self, modules: Iterator[BaseModule], *, sgm: Mapping[str, str]) -> None:
        self._dotted: dict[tuple[str, str], BaseModule] = {}
        self._flat: dict[tuple[str, str], BaseModule | None] = {}
        for module in modules:
            for path in spellings(module.component, module.path):
                self._dotted[module.component, path] = module
                flat = (module.component, path.replace(".", "_"))
                # If two modules have the same flat name, the name stands for neither.
                self._flat[flat] = module if self._flat.get(flat, module) is module else None
        for name, path in sgm.items():
            if (found := self._dotted.get((BACKBONE, path))) is not None:
                self._flat[BACKBONE, name] = found

    def find(self, component: str, path: str) -> BaseModule | None:
        """Return the module at a path with dots."""
        return self._dotted.get((component, path))

    def find_flat(self, component: str, name: str) -> BaseModule | None:
        """Return the module at a path with underscores in place of dots."""
        return self._flat.get((component, name))


def read_base(folder: Path) -> Base:
    """Return the base model in a folder of Diffusers' layout. Raises ConfigError if the folder is not a model."""
    try:
        config = json.loads((folder / BACKBONE / "config.json").read_text(encoding="utf-8"))
        return Base(_modules(folder), sgm=MappingProxyType(sgm_names(config)))
    except (OSError, ValueError, KeyError, TypeError, RecursionError, BadLora) as error:
        raise ConfigError(f"base model {folder} cannot be used: {error}") from None


def _modules(folder: Path) -> Iterator[BaseModule]:
    """Yield each module once. A component may be split into several files, or be there in several element types."""
    seen: set[tuple[str, str]] = set()
    for component in COMPONENTS:
        for path in sorted((folder / component).glob("*.safetensors")):
            with path.open("rb") as file:
                header = read_header(file)
            for entry in header.tensors:
                module = entry.name.removesuffix(_WEIGHT)
                if module == entry.name or len(entry.shape) not in {2, 4} or module.rpartition(".")[2] in _TABLES:
                    continue
                if any((component, path) in seen for path in spellings(component, module)):
                    continue
                seen.add((component, module))
                yield BaseModule(component=component, path=module, shape=entry.shape)
