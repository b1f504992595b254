"""What a base model has to put LoRAs on: its modules and their shapes, from headers alone. Loads no weights."""

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
# Matrices that are looked up by row and multiplied by nothing: nothing can be added to their product.
_TABLES = ("token_embedding", "position_embedding")


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseModule:
    """A linear layer or a convolution. shape: of its weight, [out, in] or [out, in, height, width]."""

    component: str
    path: str
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.component}.{self.path}"


class Base:
    """The modules of a base model, by the names that LoRAs call them."""

    def __init__(self, modules: Iterator[BaseModule], *, sgm: Mapping[str, str]) -> None:
        """sgm: paths of the UNet by the names that Stability's own code gives them, dots as underscores."""
        self._dotted: dict[tuple[str, str], BaseModule] = {}
        self._flat: dict[tuple[str, str], BaseModule | None] = {}
        for module in modules:
            for path in spellings(module.component, module.path):
                self._dotted[module.component, path] = module
                flat = (module.component, path.replace(".", "_"))
                # Two modules whose names differ in dots and underscores alone cannot be told apart: neither is meant.
                self._flat[flat] = module if self._flat.get(flat, module) is module else None
        for name, path in sgm.items():
            if (found := self._dotted.get((BACKBONE, path))) is not None:
                self._flat[BACKBONE, name] = found

    def find(self, component: str, path: str) -> BaseModule | None:
        """The module at a path with dots."""
        return self._dotted.get((component, path))

    def find_flat(self, component: str, name: str) -> BaseModule | None:
        """The module whose path has underscores in the place of dots."""
        return self._flat.get((component, name))


def read_base(folder: Path) -> Base:
    """The base model in a folder of Diffusers' layout. Raises ConfigError for what is none."""
    try:
        config = json.loads((folder / BACKBONE / "config.json").read_text(encoding="utf-8"))
        return Base(_modules(folder), sgm=MappingProxyType(sgm_names(config)))
    except (OSError, ValueError, KeyError, TypeError, RecursionError, BadLora) as error:
        raise ConfigError(f"base model {folder} cannot be used: {error}") from None


def _modules(folder: Path) -> Iterator[BaseModule]:
    """Each once; a component may be in several files, in parts or in several element types."""
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
